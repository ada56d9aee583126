"""Values to gather from files, of which no context holds all.

A repository is a handful of modules, each with a few constants. The task names the modules and asks
for the constant ``key`` of each, in order. All have to be read; a value cannot be guessed, since
there are ``len(VALUES)`` of them. Where a context has no room for all modules, what was read has to
stand in the summary with which the next one begins.

Demonstrations are parts of episodes: what stands before a summary, between two, or behind the last.
With some probability a summary forgets a module or takes another constant of it. That is shown and
learned: to summarise well is left to reinforcement learning. No part begins with such a summary.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from rl_code.config.read_config import shares
from rl_code.environment.protocols.compact import Compact
from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.environment.tools.api import find_tools
from rl_code.environment.tools.read_file import shown
from rl_code.tasks.demonstrations import PLAYED
from rl_code.tasks.source import Source
from rl_code.tasks.stream import Stream, check_split
from rl_code.types import Case, Task, Tests, ToolCall, ToolResult

# What a constant may be.
VALUES = range(10, 100)
PATH = "f.py"
KEY = "key"
# Texts of the section ``summaries`` that demonstrations have.
REQUEST, GO_ON = "sum up", "go on"
_MODULES = tuple(
    "apple bread cheese date egg flour grape honey ice jam kale lemon mint nut oil pear".split()
)
_NAMES = tuple(
    "base cost drop edge fee gain high item lift mean note part rate size tax unit".split()
)
_PROTOCOL = Compact()
_TOOLS = find_tools()

# Probability that the last summary stands behind the last module: all that is left is to write.
_SUMMARISED = 0.3

# A part of a demonstration: (text, whether the agent writes it).
type Part = tuple[str, bool]


def generate(split: str, seed: int, index: int, files: tuple[int, int], constants: int) -> Task:
    """Task ``index`` of a split's endless stream, the same for the same arguments.

    files: the fewest and the most modules. constants: of a module, ``key`` among them.
    """
    rng = random.Random(f"gather/{split}/{seed}/{index}")
    modules = rng.sample(_MODULES, rng.randint(*files))
    texts: dict[str, str] = {}
    values: list[int] = []
    others: list[int] = []
    for module in modules:
        drawn = [rng.choice(VALUES) for _ in range(constants)]
        names = rng.sample(_NAMES, constants - 1)
        at = rng.randrange(constants)
        names.insert(at, KEY)
        lines = zip(names, drawn, strict=True)
        texts[f"{module}.py"] = "".join(f"{name} = {value}\n" for name, value in lines)
        values.append(drawn[at])
        others.append(drawn[at - 1])
    asked = "\n".join(["f gives the key of", *modules])
    return Task(
        id=f"gather/{split}/{seed}/{index}",
        messages=({"role": "user", "content": asked},),
        files={**texts, PATH: "def f():\n    return []\n"},
        path=PATH,
        entry_point="f",
        hidden_tests=Tests(cases=(Case((), values),)),
        reference={PATH: written(values)},
        tools=("read_file", "write_file", "submit"),
        meta={
            "source": "gather",
            "split": split,
            "modules": tuple(modules),
            "values": tuple(values),
            "others": tuple(others),
        },
    )


def written(values: Sequence[int]) -> str:
    """The file with these values."""
    return f"def f():\n    return {list(values)}\n"


def summary_of(told: Mapping[str, int]) -> str:
    """The text of a summary: each module with its value."""
    return "\n".join(f"{module} {value}" for module, value in told.items())


def part(task: Task, rng: random.Random, wrong: float, between: tuple[int, int]) -> list[Part]:
    """A part of an episode behind the prompt of its task.

    wrong: probability that a summary at its end is. between: the fewest and the most modules that
    are read in one context.
    """
    modules, values = task.meta["modules"], task.meta["values"]
    ends = [0]
    while ends[-1] < len(modules):
        ends.append(min(ends[-1] + rng.randint(*between), len(modules)))
    if rng.random() < _SUMMARISED:
        ends.append(len(modules))
    at = rng.randrange(len(ends) - 1)
    start, end = ends[at], ends[at + 1]
    last = at == len(ends) - 2
    known = dict(zip(modules[:start], values[:start], strict=True))
    texts: list[Part] = []
    if start:
        texts += [(f"{summary_of(known)}<|eot|>", False), (_told([GO_ON]), False)]
    for number in range(start, end):
        path = f"{modules[number]}.py"
        call = ToolCall("read_file", {"path": path})
        text = shown(path, task.files[path], verbose=False)
        more = [] if last or number + 1 < end else [REQUEST]
        texts += [(_PROTOCOL.message((call,), _TOOLS), True), (_told([text, *more]), False)]
    if last:
        write = ToolCall("write_file", {"path": PATH, "content": written(values)})
        submit = ToolCall("submit", {})
        return [*texts, (_PROTOCOL.message((write, submit), _TOOLS), True)]
    known |= dict(zip(modules[start:end], values[start:end], strict=True))
    if rng.random() < wrong:
        known = mistaken(known, task, rng)
    return [*texts, (f"{summary_of(known)}<|eot|>", True)]


def mistaken(known: Mapping[str, int], task: Task, rng: random.Random) -> dict[str, int]:
    """Contents of a summary that forgets a module, or takes another constant of it."""
    module = rng.choice(list(known))
    if rng.random() < 0.5:
        return {name: value for name, value in known.items() if name != module}
    other = task.meta["others"][task.meta["modules"].index(module)]
    return {**known, module: other}


def _told(texts: Sequence[str]) -> str:
    return _PROTOCOL.observation([ToolResult("", text) for text in texts])


@dataclasses.dataclass(frozen=True)
class Gather(Source):
    """An endless stream of tasks, each with a part of an episode as its demonstration."""

    # "train", "validation" or "test".
    split: str
    # Another seed gives other tasks.
    seed: int = 0
    # The fewest and the most modules of a task.
    files: tuple[int, int] = (5, 8)
    # Constants of a module.
    constants: int = 6
    # Probability that a summary of a demonstration is wrong.
    wrong: float = 0.3
    # The fewest and the most modules that demonstrations read in one context.
    between: tuple[int, int] = (2, 4)

    endless: ClassVar[bool] = True
    demonstrated: ClassVar[tuple[str, ...]] = ("played",)

    def __post_init__(self) -> None:
        check_split(self.split)
        if not 2 <= self.files[0] <= self.files[1] <= len(_MODULES):
            raise ValueError(
                f"files={self.files} must be the fewest and the most modules, 2 to {len(_MODULES)}"
            )
        if not 1 <= self.between[0] <= self.between[1]:
            raise ValueError(f"between={self.between} must be the fewest and the most modules")
        if not 2 <= self.constants <= len(_NAMES):
            raise ValueError(f"constants={self.constants} must be 2 to {len(_NAMES)}")
        shares(self, "wrong")

    def load(self, pool: SandboxPool | None, workdir: Path | None) -> Stream:
        return Stream(self.task)

    def task(self, index: int) -> Task:
        """Task ``index``; the same for the same settings."""
        task = generate(self.split, self.seed, index, self.files, self.constants)
        rng = random.Random(f"part/{task.id}")
        played = tuple(part(task, rng, self.wrong, self.between))
        return dataclasses.replace(task, meta={**task.meta, PLAYED: played})
