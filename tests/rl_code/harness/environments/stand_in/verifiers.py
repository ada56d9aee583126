"""As much of the package verifiers as the driver calls, for tests where it is not installed.

Its one taskset asks for a sum, and its environment says after each wrong number whether the sum is
more or less.
"""

import asyncio
import contextlib
import json
import os
import socket
import sys
import time
import types
import urllib.error
import urllib.parse
import urllib.request
from types import SimpleNamespace as Thing
from typing import ClassVar

__version__ = "0.4.0"
PARTS = (".v1", ".v1.types", ".v1.rollout", ".v1.agent", ".v1.mcp", ".v1.runtimes.subprocess")
for name in ("", *PARTS):
    sys.modules[f"verifiers{name}"] = sys.modules[__name__]
sys.modules["episode_sandbox"] = types.ModuleType("episode_sandbox")
sys.modules["episode_sandbox"].EpisodeSandbox = None
make_runtime = provision_runtime = None


class SubprocessConfig:
    pass


class AgentConfig:
    """A role."""

    harness = client = max_turns = None
    model_fields_set = ()

    def __init__(self, runtime=None, harness=None, **settings):
        self.runtime = SubprocessConfig()
        self.harness = harness


class EnvConfig:
    def __init__(self, taskset, agent, retries):
        assert agent["retries"] == retries == {"max_retries": 0}
        assert agent["runtime"] == {"type": "subprocess"}
        self.taskset = Thing(**{"does": "play", "rows": 3, **taskset})
        self.agent = AgentConfig(**agent)

    model_fields: ClassVar = {"taskset": Thing(default=None), "agent": Thing(default=AgentConfig())}

    def __iter__(self):
        return iter(vars(self).items())


def env_config_type(taskset, id):
    if taskset != "sums":
        raise ModuleNotFoundError(f"taskset {taskset!r} not found")
    return EnvConfig


def default_harness_id(taskset):
    return "bash"


def default_agent_harness(taskset):
    return {"id": "bash"}


def load_harness(config):
    code = config["id"] == "bash"
    return Thing(config=Thing(**config), EXECUTES_CODE=code, NEEDS_CONTAINER=False)


def resolve_env_config(block):
    return EnvConfig(**block)


def load_environment(config):
    return Sums(config)


class SelectConfig:
    def __init__(self, skip=0):
        self.skip = skip


class EvalClientConfig:
    def __init__(self, base_url, api_key_var):
        self.url, self.key_variable = base_url, api_key_var


class ModelContext:
    def __init__(self, model, client):
        self.model, self.client = model, client


def content_text(content):
    return content


class SharedToolServer:
    def __init__(self, url, local=True, external=False, runtime=None, state_secret=""):
        self.url, self.local, self.external, self.state_secret = url, local, external, state_secret


class Taskset(list):
    bounded = True
    config = None
    shared = ()

    def toolsets(self, config):
        return list(self.shared)

    def select(self, config):
        chosen = Taskset(self[config.skip :])
        chosen.bounded = self.bounded
        return chosen


class Sums:
    def __init__(self, config):
        self.config = config
        rows = config.taskset.rows
        self.taskset = Taskset(
            Thing(
                data=Thing(
                    id=f"row-{n}", prompt=f"{n} + {n + 1} = ?", system_prompt=None, answer=2 * n + 1
                )
            )
            for n in range(max(rows, 0))
        )
        self.taskset.bounded = rows >= 0
        if config.taskset.does.startswith("share"):
            self.taskset.shared = [Thing(config=Thing(runtime=SubprocessConfig()))]

    @contextlib.asynccontextmanager
    async def shared_tools(self):
        """A server that tells in which process it runs."""
        if self.config.taskset.does == "share nothing":
            raise OSError("no port is free")

        def told(reader, writer):
            writer.write(str(os.getpid()).encode())
            writer.close()

        async with await asyncio.start_server(told, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            yield {"tool": SharedToolServer(f"http://127.0.0.1:{port}/mcp")}

    @contextlib.asynccontextmanager
    async def serving(self):
        self.servers = {}
        if not self.taskset.shared:
            yield
            return
        async with self.shared_tools() as self.servers:
            yield

    async def setup(self, agents):
        agents.agent.trainable = self.config.taskset.does != "judge"

    async def run_episode(self, task, context):
        agent = Thing(trainable=True)
        try:
            await self.setup(Thing(agent=agent))
        except Exception as error:
            said = Thing(type="EnvError", message=f"setup: {error}", status_code=None)
            return Thing(ok=False, errors=[said], traces=[])
        does = self.config.taskset.does
        trace = await asyncio.to_thread(self.play, task.data, context, does)
        trace.agent = agent
        for server in self.servers.values():
            place = urllib.parse.urlsplit(server.url)
            with socket.create_connection((place.hostname, place.port)) as connection:
                trace.metrics["server"] = float(connection.recv(32))
        kind, _, status = does.partition(" ")
        if kind.endswith("Error"):
            error = Thing(type=kind, message="its words", status_code=int(status or 0) or None)
            trace.errors = [error]
        return Thing(ok=not trace.errors, errors=[], traces=[trace])

    def play(self, row, context, does):
        messages = [{"role": "user", "content": row.prompt}]
        print("a line that is none of the driver's", flush=True)
        client = context.client
        said = ""
        while said != str(row.answer):
            body = json.dumps({"model": context.model, "messages": messages}).encode()
            headers = {"Content-Type": "application/json"}
            headers["Authorization"] = f"Bearer {os.environ[client.key_variable]}"
            request = urllib.request.Request(f"{client.url}/chat/completions", body, headers)
            try:
                with urllib.request.urlopen(request, timeout=600) as answer:
                    said = json.load(answer)["choices"][0]["message"]["content"]
            except urllib.error.HTTPError as error:
                if json.load(error)["error"]["code"] != "context_length_exceeded":
                    raise
                break
            if does == "exit":
                os._exit(1)
            if does == "raise":
                raise KeyError("its own bug")
            if does == "hang":
                time.sleep(600)
            said = said.strip()
            messages.append({"role": "assistant", "content": said})
            if does != "play":
                break
            less = said.isdecimal() and int(said) < row.answer
            messages.append({"role": "user", "content": "more" if less else "less"})
        found = said.split() if does == "search" else [said]
        right = float(str(row.answer) in found)
        reward = float("nan") if does == "no number" else max(right, 0.25)
        return Thing(
            rewards={"right": Thing(score=right)},
            metrics={"guesses": float(len(messages) // 2), "unscored": None},
            reward=reward,
            num_turns=len(messages) // 2,
            errors=[],
        )
