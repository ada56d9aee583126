"""Linked pairs of tasks on one repository each.

The first task of a pair shows a module with a few constants, and asks for one of them, ``key``. The
second one asks for another, ``rate``, and the module is gone: a note of the first one tells the
value, or it is guessed among ``len(VALUES)``. Nothing in the first task says what the second one
will ask for, and a note of another constant is of no use. So the first task pays nothing for
storing; what to store is told by the second one alone.

The stream has blocks: the first tasks of some pairs, then their second ones. Drawn in this order
(``train.shuffled=False``), a pair is as many tasks apart as a block has pairs.

Demonstrations of the first task store any constant, or none; those of the second recall ``rate``,
and write what the note says, or else a guess. Most of them find the note, whatever was stored, so
that reading is learned before the first update of the policy, and storing is not.

A note is the line of its constant, as the module shows it: a small model copies a line sooner than
it finds a value by its name. Drills, of which warm starts may have some, ask for notes of all
constants. First tasks may ask for that too: then a rule of memory chooses what is kept, and not the
agent.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from rl_code.config.named import Named
from rl_code.config.read_config import at_least, shares
from rl_code.environment.protocols.compact import Compact
from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.environment.tools.api import find_tools
from rl_code.environment.tools.memory import MemoryRecall
from rl_code.environment.tools.read_file import shown
from rl_code.tasks.demonstrations import PLAYED
from rl_code.tasks.source import Source
from rl_code.tasks.stream import Stream, check_split
from rl_code.types import Case, Task, Tests, ToolCall, ToolResult

# What a constant may be: one token. Of two digits a small model mixes up one.
VALUES = range(10)
PATH, MODULE = "f.py", "shop.py"
# What the first and the second task of a pair ask for.
KEY, WANTED = "key", "rate"
FIRST, SECOND = "first", "second"
# What drills ask for beside it.
ALL = "\nnote all"
_NAMES = tuple("base cost drop edge fee gain high item lift mean note part size tax unit".split())
_PROTOCOL = Compact()
_TOOLS = find_tools(
    tuple(map(Named, ("read_file", "write_file", "memory_store", "memory_recall", "submit")))
)

# A part of a demonstration: (text, whether the agent writes it).
type Part = tuple[str, bool]


def constants_of(split: str, seed: int, pair: int, count: int) -> dict[str, int]:
    """The constants of a pair's module, in order: ``key``, ``rate`` and others."""
    rng = random.Random(f"pairs/{split}/{seed}/{pair}")
    names = [KEY, WANTED, *_NAMES[: count - 2]]
    rng.shuffle(names)
    return {name: rng.choice(VALUES) for name in names}


def generate(
    split: str, seed: int, pair: int, kind: str, count: int, *, ask_all: bool = False
) -> Task:
    """A task of a pair, the same for the same arguments.

    kind: FIRST or SECOND. ask_all: ask for notes of all constants.
    """
    constants = constants_of(split, seed, pair, count)
    asked = KEY if kind == FIRST else WANTED
    files = {PATH: "def f():\n    return 0\n"}
    if kind == FIRST:
        files[MODULE] = module_text(constants)
    own = ("read_file", "memory_store") if kind == FIRST else ("memory_recall",)
    repository = f"pairs/{split}/{seed}/{pair}"
    return Task(
        id=f"{repository}/{kind}",
        messages=({"role": "user", "content": f"f gives the {asked} of shop{ALL * ask_all}"},),
        files=files,
        path=PATH,
        entry_point="f",
        hidden_tests=Tests(cases=(Case((), constants[asked]),)),
        reference={PATH: written(constants[asked])},
        tools=(*own, "write_file", "submit"),
        meta={"source": "pairs", "split": split, "repository": repository, "kind": kind},
    )


def module_text(constants: Mapping[str, int]) -> str:
    """The module with these constants."""
    return "".join(f"{noted(name, value)}\n" for name, value in constants.items())


def noted(name: str, value: int) -> str:
    """The line of a constant, which is also the text of its note."""
    return f"{name} = {value}"


def written(value: int) -> str:
    """The file that gives a value."""
    return f"def f():\n    return {value}\n"


def first(constants: Mapping[str, int], store: Sequence[str]) -> list[Part]:
    """Demonstration of the first task behind its prompt. store: constants, stored in one turn."""
    text = shown(MODULE, module_text(constants), verbose=False)
    parts = [*_exchange((ToolCall("read_file", {"path": MODULE}),), (text,))]
    calls = [
        ToolCall("memory_store", {"name": one, "text": noted(one, constants[one])}) for one in store
    ]
    if calls:
        parts += _exchange(calls, ["stored"] * len(calls))
    return [*parts, _handed_in(constants[KEY])]


def second(notes: Mapping[str, str], guess: int) -> list[Part]:
    """Demonstration of the second task behind its prompt. notes: those that are there."""
    recall = ToolCall("memory_recall", {"question": WANTED})
    told = MemoryRecall().told(WANTED, notes, verbose=False)
    value = int(notes[WANTED].split()[-1]) if WANTED in notes else guess
    return [*_exchange((recall,), (told,)), _handed_in(value)]


def _exchange(calls: Sequence[ToolCall], results: Sequence[str]) -> list[Part]:
    pairs = zip(calls, results, strict=True)
    told = _PROTOCOL.observation([ToolResult(call.name, result) for call, result in pairs])
    return [(_PROTOCOL.message(tuple(calls), _TOOLS), True), (told, False)]


def _handed_in(value: int) -> Part:
    write = ToolCall("write_file", {"path": PATH, "content": written(value)})
    return _PROTOCOL.message((write, ToolCall("submit", {})), _TOOLS), True


@dataclasses.dataclass(frozen=True)
class Pairs(Source):
    """An endless stream of pairs, each task with a demonstration."""

    # "train", "validation" or "test".
    split: str
    # Another seed gives other pairs.
    seed: int = 0
    # Constants of a module.
    constants: int = 4
    # Pairs of a block, which is how many tasks lie between the two of a pair. At least
    # (staleness + 2) x ``train.tasks_per_step``: notes of later steps are not read.
    apart: int = 32
    # Probability that a demonstration of the first task stores something.
    stores: float = 0.5
    # Probability that a demonstration of the second task finds the note that it asks for.
    finds: float = 0.75
    # Share of the pairs that are two drills instead, on a module each.
    drills: float = 0.0
    # Whether every first task asks for notes of all constants, as a drill does.
    asks_for_all: bool = False

    endless: ClassVar[bool] = True
    demonstrated: ClassVar[tuple[str, ...]] = ("played",)

    def __post_init__(self) -> None:
        check_split(self.split)
        if not 2 <= self.constants <= len(_NAMES) + 2:
            raise ValueError(f"constants={self.constants} must be 2 to {len(_NAMES) + 2}")
        at_least(self, apart=1)
        shares(self, "stores", "finds", "drills")

    def load(self, pool: SandboxPool | None, workdir: Path | None) -> Stream:
        return Stream(self.task)

    def task(self, index: int) -> Task:
        """Task ``index``; the same for the same settings."""
        block, at = divmod(index, 2 * self.apart)
        pair = block * self.apart + at % self.apart
        kind = FIRST if at < self.apart else SECOND
        drill = random.Random(f"drill/{self.split}/{self.seed}/{pair}").random() < self.drills
        if drill and kind == SECOND:
            kind, pair = FIRST, -1 - pair  # the number of no pair
        ask_all = drill or (self.asks_for_all and kind == FIRST)
        task = generate(self.split, self.seed, pair, kind, self.constants, ask_all=ask_all)
        constants = constants_of(self.split, self.seed, pair, self.constants)
        rng = random.Random(f"played/{task.id}")
        if kind == FIRST:
            count = len(constants) if ask_all else int(rng.random() < self.stores)
            stored = rng.sample(list(constants), count)
            played = first(constants, stored)
        else:
            stored = WANTED if rng.random() < self.finds else rng.choice((KEY, ""))
            notes = {stored: noted(stored, constants[stored])} if stored else {}
            played = second(notes, rng.choice(VALUES))
        return dataclasses.replace(task, meta={**task.meta, PLAYED: tuple(played)})
