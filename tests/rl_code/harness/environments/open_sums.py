"""An environment of the package openenv for tests, served on a port that it prints: sums to guess."""

import socket

import uvicorn
from openenv.core.env_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Number(Action):
    number: int


class Hint(Observation):
    text: str


class Sums(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **rest):
        self._answer = 2 * (seed or 0) + 1
        self._state = State(episode_id=episode_id)
        return Hint(text=f"{seed or 0} + {(seed or 0) + 1} = ?")

    def step(self, action, timeout_s=None, **rest):
        self._state.step_count += 1
        if action.number == self._answer:
            return Hint(text="right", reward=1.0, done=True)
        return Hint(text="less" if action.number > self._answer else "more", reward=-0.25)

    @property
    def state(self):
        return self._state


if __name__ == "__main__":
    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    app = create_app(Sums, Number, Hint, max_concurrent_envs=4)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])
