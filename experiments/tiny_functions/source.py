"""Generated functions, whose demonstrations are in one piece or split into two functions.

Both are right as often. So nothing but the reward says which of them to learn.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from rl_code.config.read_config import shares
from rl_code.environment.protocols.compact import Compact
from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.environment.tools.api import find_tools
from rl_code.tasks.demonstrations import PLAYED
from rl_code.tasks.generated import generate
from rl_code.tasks.operations import OPERATIONS
from rl_code.tasks.programs import Layout, Program, wrong_version
from rl_code.tasks.source import Source
from rl_code.tasks.stream import Stream, check_split
from rl_code.types import Task, ToolCall

_PROTOCOL = Compact()
_TOOLS = find_tools()
# Of two operations each, described without the names of files.
_LEVELS = (2,)


def text_of(task: Task, program: Program, split: bool) -> str:
    """The file of a program for a task: one function, or two of which one calls the other.

    program: the task's, or one of which steps are changed or missing.
    """
    first = OPERATIONS[task.meta["program"][0][0]]
    layout = Layout("plain", first.takes, first.takes, 0)
    if split:
        layout = Layout("helper", first.takes, first.gives, 1)
    return layout.files(program)["f.py"]


@dataclasses.dataclass(frozen=True)
class Functions(Source):
    """An endless stream of functions of two operations, each with a demonstration."""

    # "train", "validation" or "test".
    split: str
    # Another seed gives other tasks.
    seed: int = 0
    # Probability that a demonstration is split, and that it is right.
    tiny: float = 0.3
    right: float = 0.65

    endless: ClassVar[bool] = True
    demonstrated: ClassVar[tuple[str, ...]] = ("played",)

    def __post_init__(self) -> None:
        check_split(self.split)
        shares(self, "tiny", "right")

    def load(self, pool: SandboxPool | None, workdir: Path | None) -> Sequence[Task]:
        return Stream(self.task)

    def task(self, index: int) -> Task:
        """Task ``index``; the same for the same settings."""
        task = generate(self.split, self.seed, index, _LEVELS)
        rng = random.Random(f"tiny/{task.id}")
        program = task.meta["program"]
        if rng.random() >= self.right:
            program = wrong_version(program, rng)
        text = text_of(task, program, rng.random() < self.tiny)
        write = ToolCall("write_file", {"path": task.path, "content": text})
        said = _PROTOCOL.message((write, ToolCall("submit", {})), _TOOLS)
        return dataclasses.replace(task, meta={**task.meta, PLAYED: ((said, True),)})
