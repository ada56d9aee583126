"""Generated tasks: a file with a function to write or to repair, described by a few words and two
examples.

A task is a composition of elementary operations with constants. Its description states the
constants, or the agent has to find them from the examples and from runs of the tests.

Each composition, without regard to order and constants, belongs to exactly one split. Every
elementary operation occurs in training. So held-out tasks ask for new combinations of known parts.

A rival is a version of the program with other constants or a missing step. The visible cases
exclude every rival that any case could exclude, and so do the hidden cases.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.tasks.operations import NUMBERS, OPERATIONS, STRUCTURES, Failure, Operation
from rl_code.tasks.programs import (
    Layout,
    Program,
    describe,
    evaluate,
    names_of,
    near_rivals,
    outcomes,
    split_of,
    wrong_version,
)
from rl_code.tasks.source import Source
from rl_code.tasks.stream import Stream, check_split
from rl_code.types import Case, Task, Tests

VISIBLE_CASES = 2
HIDDEN_CASES = 6
_POOL = 16  # inputs drawn per program, of which the cases are chosen
_TRIES = 8  # draws of cases, and of a mistake, for the beginning of a program
_WORDS = (
    "an",
    "bee",
    "cat",
    "do",
    "eagle",
    "fig",
    "go",
    "ham",
    "it",
    "jazz",
    "kiwi",
    "lemon",
    "me",
    "noon",
    "owl",
)


@dataclasses.dataclass(frozen=True)
class Level:
    """A level of difficulty."""

    # Numbers of operations of a task; one of them is drawn.
    steps: tuple[int, ...]
    # Operations to draw from.
    operations: tuple[Operation, ...]
    # Ways to spread the operations over functions and files (``programs.Layout``).
    layouts: tuple[str, ...]
    # True if the message names the files; it does not where tokens are scarce.
    named: bool
    # Share of the tasks whose description states the constants.
    stated: float


LEVELS = {
    1: Level((1,), NUMBERS, ("plain",), named=False, stated=0.8),
    2: Level((2,), NUMBERS, ("plain",), named=False, stated=0.8),
    3: Level((3,), NUMBERS, ("plain", "helper"), named=True, stated=0.5),
    4: Level((2, 3), STRUCTURES, ("plain", "helper"), named=True, stated=0.5),
    5: Level((3, 4), NUMBERS + STRUCTURES, ("module",), named=True, stated=0.5),
    6: Level((4,), NUMBERS, ("plain",), named=False, stated=0.8),
}


def generate(split: str, seed: int, index: int, levels: Sequence[int] = (1, 2)) -> Task:
    """Task ``index`` of a split's endless stream; the same arguments give the same task on every
    machine.

    levels: keys of LEVELS. One is drawn for each task; a level that stands here twice is drawn
    twice as often. Raises ValueError for an unknown split or level.
    """
    check_split(split)
    if not levels or not set(levels) <= LEVELS.keys():
        raise ValueError(f"{levels=} must be a non-empty choice of {sorted(LEVELS)}")
    rng = random.Random(f"{split}/{seed}/{index}")
    level = rng.choice(levels)
    while (task := _attempt(rng, split, level, f"generated/{split}/{seed}/{index}")) is None:
        pass
    return task


def _attempt(rng: random.Random, split: str, level: int, name: str) -> Task | None:
    """A task, or None when the operations drawn belong to another split or no cases tell them
    apart.
    """
    program = _draw_program(rng, LEVELS[level])
    if program is None or split_of(names_of(program)) != split:
        return None
    cases = _cases(rng, program, OPERATIONS[program[0][0]].takes)
    if cases is None:
        return None
    visible, hidden = cases
    layout = _draw_layout(rng, program, LEVELS[level].layouts)
    kind = rng.choice(("write", "repair"))
    broken = None
    if kind == "repair":
        broken = wrong_version(program, rng)
        if not (_fails(broken, visible) and _fails(broken, hidden)):
            return None
    stated = rng.random() < LEVELS[level].stated
    about = {"source": "generated", "split": split, "level": level}
    way = {"kind": kind, "stated": stated}
    return _task(f"{name}/L{level}", about, way, program, broken, cases, layout)


def beginning(task: Task, steps: int) -> Task | None:
    """The task of writing, or repairing, what the first steps of a generated task's program do.

    It has tests of its own, and is the same for the same arguments. None where the composition of
    these steps belongs to another split, or where no cases tell it from its rivals.
    """
    program = task.meta["program"][:steps]
    if split_of(names_of(program)) != task.meta["split"]:
        return None
    takes = OPERATIONS[program[0][0]].takes
    about = {name: task.meta[name] for name in ("source", "split", "level")}
    way = {name: task.meta[name] for name in ("kind", "stated")}
    id = f"{task.id}/first_{steps}"
    rng = random.Random(id)
    for _ in range(_TRIES):
        cases = _cases(rng, program, takes)
        if cases is None:
            continue
        broken = wrong_version(program, rng) if way["kind"] == "repair" else None
        if broken is None or all(_fails(broken, some) for some in cases):
            layout = Layout("plain", takes, takes, 0)
            return _task(id, about, way, program, broken, cases, layout)
    return None


def _task(
    id: str,
    about: Mapping[str, Any],
    way: Mapping[str, Any],
    program: Program,
    broken: Program | None,
    cases: tuple[tuple[Case, ...], tuple[Case, ...]],
    layout: Layout,
) -> Task:
    """about: where it comes from, for its meta. way: whether it is to write or to repair, and
    whether its constants are stated. cases: visible and hidden ones.
    """
    visible, hidden = cases
    files = layout.files(broken or program, stub=way["kind"] == "write")
    described = describe(program, stated=way["stated"])
    message = _message(described, files, visible, named=LEVELS[about["level"]].named)
    return Task(
        id=id,
        messages=({"role": "user", "content": message},),
        files=files,
        path="f.py",
        entry_point="f",
        visible_tests=Tests(cases=visible),
        hidden_tests=Tests(cases=hidden),
        reference=layout.files(program),
        meta={
            **about,
            "template": "+".join(names_of(program)),
            **way,
            "layout": layout.kind,
            "program": program,
            "broken": broken,
        },
    )


def _draw_program(rng: random.Random, level: Level) -> Program | None:
    """Operations whose types fit together, with constants; None when the draw ran into a dead
    end.
    """
    steps = []
    previous = None
    for _ in range(rng.choice(level.steps)):
        fitting = [
            o
            for o in level.operations
            if previous is None or (o.takes == previous.gives and o is not previous)
        ]
        if not fitting:
            return None
        previous = rng.choice(fitting)
        steps.append(
            (previous.name, rng.choice(previous.constants) if previous.constants else None)
        )
    return tuple(steps)


def _draw_layout(rng: random.Random, program: Program, kinds: Sequence[str]) -> Layout:
    takes = OPERATIONS[program[0][0]].takes
    kind = rng.choice(kinds)
    cut = rng.randrange(1, len(program)) if kind != "plain" else 0
    return Layout(kind, takes, OPERATIONS[program[cut - 1][0]].gives if cut else takes, cut)


@dataclasses.dataclass(frozen=True)
class _Candidate:
    """A case that could be used. told: bit i is set when rival i of the program has another value
    here.
    """

    case: Case
    told: int


def _cases(
    rng: random.Random, program: Program, takes: str
) -> tuple[tuple[Case, ...], tuple[Case, ...]] | None:
    """Visible and hidden cases. Each of the two sets excludes all rivals that can be excluded. None
    if a near rival remains.

    Of all pairs of cases that exclude enough rivals, one with short inputs becomes visible.
    """
    pool = _candidates(rng, program, takes)
    needed = functools.reduce(operator.or_, (candidate.told for candidate in pool), 0)
    if len(pool) < VISIBLE_CASES + HIDDEN_CASES or near_rivals(program) & ~needed:
        return None
    pair = next(
        ((a, b) for b in pool for a in pool if a is not b and a.told | b.told == needed), None
    )
    if pair is None:
        return None
    rest = [
        candidate for candidate in pool if candidate is not pair[0] and candidate is not pair[1]
    ]
    rng.shuffle(rest)
    hidden = _covering(rest, needed)
    return hidden and (tuple(candidate.case for candidate in pair), hidden)


def _candidates(rng: random.Random, program: Program, takes: str) -> list[_Candidate]:
    """Up to _POOL distinct cases on which the program does not fail, short inputs first."""
    drawn: dict[str, _Candidate] = {}
    for _ in range(_POOL):
        value = _draw_value(rng, takes)
        expected, *rivals = outcomes(program, value)
        if expected.__class__ is not Failure:
            told = sum([2 << i for i, rival in enumerate(rivals) if rival != expected])
            drawn[repr(value)] = _Candidate(Case((value,), expected), told)
    return [drawn[text] for text in sorted(drawn, key=len)]


def _covering(candidates: Sequence[_Candidate], needed: int) -> tuple[Case, ...] | None:
    """HIDDEN_CASES of the candidates that together tell all of ``needed``; None when the greedy
    choice does not.
    """
    chosen = []
    spare = []
    told = 0
    for candidate in candidates:
        (chosen if candidate.told & ~told else spare).append(candidate.case)
        told |= candidate.told
    cases = (*chosen, *spare)[:HIDDEN_CASES]
    return cases if told == needed and len(chosen) <= HIDDEN_CASES else None


def _draw_value(rng: random.Random, takes: str) -> Any:
    if takes == "ints":
        return rng.choices(range(10), k=rng.choice((2, 3, 3, 4, 4)))
    if takes == "words":
        return rng.choices(_WORDS, k=rng.choice((2, 3, 4)))
    if takes == "text":
        return " ".join(rng.choices(_WORDS, k=rng.choice((1, 2, 3))))
    return {rng.choice(_WORDS): rng.randrange(6) for _ in range(rng.choice((2, 3, 4)))}


def _fails(program: Program, cases: Sequence[Case]) -> bool:
    return any(evaluate(program, case.args[0]) != case.expected for case in cases)


def _message(
    description: str, files: Mapping[str, str], visible: Sequence[Case], *, named: bool
) -> str:
    """Message of the user: the description, the text of the files, the visible cases."""
    texts = [f"# {path}\n{text}" if named else text for path, text in files.items()]
    examples = "\n".join(f"f({case.args[0]!r}) == {case.expected!r}" for case in visible)
    return f"{description}\n{''.join(texts)}{examples}"


@dataclasses.dataclass(frozen=True)
class Generated(Source):
    """An endless stream of small functions to write or repair."""

    # "train", "validation" or "test".
    split: str
    # Levels of difficulty, each drawn with equal probability; one that stands here twice is drawn
    # twice as often.
    levels: tuple[int, ...]
    # Another seed gives another stream of tasks.
    seed: int = 0

    endless: ClassVar[bool] = True
    demonstrated: ClassVar[tuple[str, ...]] = ("generated",)

    def __post_init__(self) -> None:
        check_split(self.split)
        if not self.levels or not set(self.levels) <= LEVELS.keys():
            raise ValueError(f"{self.levels=} must be some of {sorted(LEVELS)}")

    def load(self, pool: SandboxPool | None, workdir: Path | None) -> Sequence[Task]:
        return Stream(lambda i: generate(self.split, self.seed, i, self.levels))
