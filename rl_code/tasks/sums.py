"""Sums with the answer in one line: short answers, to stand beside code.

A task is an addition, a subtraction, or the larger or the smaller of two numbers, and the file
gives the result as a literal. There is nothing to run and nothing to read: visible tests there are
none, so an episode is one message.

A demonstration hands in the right result with a probability that the source says, and else one that
is off by a digit. So does what is warmed up on them, which makes its pass rate a setting.

Each pair of numbers belongs to exactly one split.
"""

from __future__ import annotations

import dataclasses
import operator
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

from rl_code.config.read_config import at_least, shares
from rl_code.environment.protocols.compact import Compact
from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.environment.tools.api import find_tools
from rl_code.tasks.demonstrations import PLAYED
from rl_code.tasks.programs import split_of
from rl_code.tasks.source import Source
from rl_code.tasks.stream import Stream, check_split
from rl_code.types import Case, Task, Tests, ToolCall

PATH = "f.py"
_PROTOCOL = Compact()
_TOOLS = find_tools()
# How far a wrong result is from the right one.
_WRONG = (-10, -2, -1, 1, 2, 10)
# Sign -> result of two numbers, of which the first is not the smaller one.
SIGNS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "max": max,
    "min": min,
}


def generate(
    split: str, seed: int, index: int, most: int, right: float, signs: Sequence[str] = ("+", "-")
) -> Task:
    """Task ``index`` of a split's endless stream, with its demonstration; the same for the same
    arguments.
    """
    rng = random.Random(f"sums/{split}/{seed}/{index}")
    while True:
        sign = rng.choice(signs)
        one, other = sorted(rng.choices(range(most + 1), k=2), reverse=True)
        compared = sign in ("max", "min")
        if split_of((str(one), str(other))) == split and (one > other or not compared):
            break
    result = SIGNS[sign](one, other)
    told = result if rng.random() < right else result + rng.choice(_WRONG)
    if compared and rng.random() < 0.5:  # the place says nothing
        one, other = other, one
    write = ToolCall("write_file", {"path": PATH, "content": written(told)})
    played = _PROTOCOL.message((write, ToolCall("submit", {})), _TOOLS)
    return Task(
        id=f"sums/{split}/{seed}/{index}",
        messages=({"role": "user", "content": f"{one} {sign} {other}"},),
        files={PATH: written(0)},
        path=PATH,
        entry_point="f",
        hidden_tests=Tests(cases=(Case((), result),)),
        reference={PATH: written(result)},
        meta={"source": "sums", "split": split, PLAYED: ((played, True),)},
    )


def written(value: int) -> str:
    """The file that gives a value."""
    return f"f = lambda: {value}\n"


@dataclasses.dataclass(frozen=True)
class Sums(Source):
    """An endless stream of sums, each with a demonstration."""

    # "train", "validation" or "test".
    split: str
    # Another seed gives other sums.
    seed: int = 0
    # The largest number of a sum.
    most: int = 49
    # Probability that a demonstration is right.
    right: float = 0.5
    # Any of "+", "-", "max" and "min".
    signs: tuple[str, ...] = ("+", "-")

    endless: ClassVar[bool] = True
    demonstrated: ClassVar[tuple[str, ...]] = ("played",)

    def __post_init__(self) -> None:
        check_split(self.split)
        at_least(self, most=9)
        shares(self, "right")
        if not self.signs or set(self.signs) - set(SIGNS):
            raise ValueError(f"signs={self.signs} must be some of {', '.join(SIGNS)}")

    def load(self, pool: SandboxPool | None, workdir: Path | None) -> Sequence[Task]:
        settings = self.most, self.right, self.signs
        return Stream(lambda i: generate(self.split, self.seed, i, *settings))
