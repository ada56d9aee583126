"""Episodes for drills: played for a config, in a real sandbox, by a script instead of a model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from configs import quickstart
from models.tokenizer import Tokenizer
from rl_code.config.read_config import build
from rl_code.environment.asked import Asked
from rl_code.environment.episode import Episode
from rl_code.environment.protocols.api import find_protocol
from rl_code.environment.protocols.compact import Compact
from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.environment.tools.api import find_tools
from rl_code.rewards.combine import find_reward
from rl_code.run.config import RunConfig
from rl_code.types import Case, Limits, Task, Tests, Trajectory

LIMITS = Limits(turns=6, tokens=6000, turn_tokens=1000, test_runs=3, command_s=20.0)
SUBMIT = "<|call|>submit<|end|>"
SPECIAL = (*Compact.SPECIAL_TOKENS, "<|im_start|>", "<|im_end|>", "<|endoftext|>")
TASK = Task(
    id="double",
    messages=({"role": "user", "content": "f doubles a number"},),
    files={"solution.py": "def f(x):\n    return x\n", "notes.txt": "one\ntwo\n"},
    path="solution.py",
    entry_point="f",
    visible_tests=Tests((Case((1,), 2),)),
    hidden_tests=Tests((Case((3,), 6),)),
    reference={},
)


def configured(**changes: Any) -> RunConfig:
    """The quickstart's config with other sections, without its warm start."""
    return build(RunConfig, quickstart.get_config("smoke").to_dict() | {"sft": None} | changes)


@contextlib.contextmanager
def player(config: RunConfig) -> Iterator[Any]:
    """A function that plays messages, given without their stop token, on a task."""
    tools = find_tools(config.tools)
    protocol = find_protocol(config.protocol, tools, "config.protocol")
    tokenizer = Tokenizer.train(["def f(x):\n    return 2 * x\n"] * 2, 300, SPECIAL)

    def play(task: Task, *messages: str) -> Trajectory:
        episode = Episode(
            task,
            group=0,
            index=0,
            protocol=protocol,
            tools=tools,
            tokenizer=tokenizer,
            pool=pool,
            limits=LIMITS,
            reward=find_reward(config.reward),
            asked=Asked(documents=config.documents),
        )
        episode.start()
        for message in messages:
            tokens = tokenizer.encode(message + protocol.stop_tokens[0])
            episode.step(tokens, [0.0] * len(tokens), [0] * len(tokens))
        return episode.finish()

    with SandboxPool(config.sandbox) as pool:
        yield play


def answers(trajectory: Trajectory) -> list[str]:
    """What the tools said, call by call."""
    return [result.content for turn in trajectory.turns for result in turn.results]


def write(text: str) -> str:
    """A call of the compact protocol that writes the task's file."""
    return f"<|call|>write\n{text}<|end|>"
