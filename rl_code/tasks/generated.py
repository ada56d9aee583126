"""Generated tasks: a file with a function to write or to repair, described in a few words and two examples.

A task is a composition of elementary operations with constants. Its description states the constants, or leaves them
to be found from the examples and from runs of the tests. Compositions, taken without order and constants, belong to
exactly one split, while every elementary operation occurs in training: held-out tasks ask for new combinations of
known parts. Visible cases tell the program from every version of it with other constants or a missing step that any
case could tell it from; so do the hidden cases.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from typing import Any

from rl_code.tasks.operations import NUMBERS, OPERATIONS, STRUCTURES, VARIABLES, Failure
from rl_code.tasks.programs import (
    SPLITS,
    Program,
    describe,
    evaluate,
    layout_files,
    names_of,
    near_rivals,
    outcomes,
    source,
    split_of,
    wrong_version,
)
from rl_code.types import Case, Task, Tests

VISIBLE_CASES = 2
HIDDEN_CASES = 6
TOOLS = ("write_file", "edit_file", "read_file", "terminal", "run_tests", "submit")
_POOL = 16  # inputs drawn per program, of which the cases are chosen
_WORDS = ("an", "bee", "cat", "do", "eagle", "fig", "go", "ham", "it", "jazz", "kiwi", "lemon", "me", "noon", "owl")


@dataclasses.dataclass(frozen=True)
class Level:
    """steps: how many operations. operations: what they are drawn from. layouts: how they are spread over functions."""

    steps: tuple[int, ...]
    operations: tuple
    layouts: tuple[str, ...]


LEVELS = {
    1: Level((1,), NUMBERS, ("plain",)),
    2: Level((2,), NUMBERS, ("plain",)),
    3: Level((3,), NUMBERS, ("plain", "helper")),
    4: Level((2, 3), STRUCTURES, ("plain", "helper")),
    5: Level((3, 4), NUMBERS + STRUCTURES, ("module",)),
}


def generate(split: str, seed: int, index: int, levels: Sequence[int] = (1, 2)) -> Task:
    """Task ``index`` of a split's endless stream; the same arguments give the same task on every machine.

    levels: keys of LEVELS, of which one is drawn per task; a level that occurs twice is drawn twice as often. Raises
    ValueError for an unknown split or level.
    """
    if split not in SPLITS:
        raise ValueError(f"{split=} must be one of {SPLITS}")
    if not levels or not set(levels) <= LEVELS.keys():
        raise ValueError(f"{levels=} must be a non-empty choice of {sorted(LEVELS)}")
    rng = random.Random(f"{split}/{seed}/{index}")
    level = rng.choice(levels)
    while (task := _attempt(rng, split, level, f"generated/{split}/{seed}/{index}")) is None:
        pass
    return task


def corpus(seed: int, size: int, levels: Sequence[int] = (1, 2)) -> Iterator[str]:
    """Texts for a tokeniser: messages and solutions of ``size`` training tasks."""
    for index in range(size):
        task = generate("train", seed, index, levels)
        yield task.messages[0]["content"]
        yield from task.reference.values()


def _attempt(rng: random.Random, split: str, level: int, name: str) -> Task | None:
    """A task, or None when the operations drawn belong to another split or no cases tell them apart."""
    program = _draw_program(rng, LEVELS[level])
    if program is None or split_of(names_of(program)) != split:
        return None
    takes = OPERATIONS[program[0][0]].takes
    cases = _cases(rng, program, takes)
    if cases is None:
        return None
    visible, hidden = cases
    layout = rng.choice(LEVELS[level].layouts)
    cut = rng.randrange(1, len(program)) if layout != "plain" else 0
    middle = OPERATIONS[program[cut - 1][0]].gives if cut else takes
    kind, broken = rng.choice(("write", "repair")), None
    if kind == "write":
        files = {**layout_files(program, takes, middle, layout, cut=cut), "f.py": _stub(takes, layout)}
    else:
        broken = wrong_version(program, rng)
        if not (_fails(broken, visible) and _fails(broken, hidden)):
            return None
        files = layout_files(broken, takes, middle, layout, cut=cut)
    stated = rng.random() < 0.5
    return Task(
        id=f"{name}/L{level}",
        messages=({"role": "user", "content": _message(describe(program, stated=stated), files, visible)},),
        files=files,
        path="f.py",
        entry_point="f",
        tools=TOOLS,
        visible_tests=Tests(cases=visible),
        hidden_tests=Tests(cases=hidden),
        reference={"f.py": source(program, takes)},
        meta={
            "source": "generated",
            "split": split,
            "level": level,
            "template": "+".join(names_of(program)),
            "kind": kind,
            "stated": stated,
            "layout": layout,
            "program": program,
            "broken": broken,
        },
    )


def _draw_program(rng: random.Random, level: Level) -> Program | None:
    """Operations whose types fit together, with constants; None when the draw ran into a dead end."""
    steps, previous = [], None
    for _ in range(rng.choice(level.steps)):
        fitting = [o for o in level.operations if previous is None or (o.takes == previous.gives and o is not previous)]
        if not fitting:
            return None
        previous = rng.choice(fitting)
        steps.append((previous.name, rng.choice(previous.constants) if previous.constants else None))
    return tuple(steps)


def _cases(rng: random.Random, program: Program, takes: str) -> tuple[tuple[Case, ...], tuple[Case, ...]] | None:
    """Visible and hidden cases that tell the program from its rivals; None when not all near rivals can be told."""
    drawn: dict[str, tuple[Any, Any, int]] = {}
    for _ in range(_POOL):
        value = _draw_value(rng, takes)
        expected, *rivals = outcomes(program, value)
        if expected.__class__ is not Failure:
            told = sum(2 << i for i, rival in enumerate(rivals) if rival != expected)
            drawn[repr(value)] = (value, expected, told)
    pool = sorted(drawn.values(), key=lambda entry: len(repr(entry[0])))
    if len(pool) < VISIBLE_CASES + HIDDEN_CASES:
        return None
    needed = 0
    for _, _, told in pool:
        needed |= told
    near = near_rivals(program)
    if near & ~needed:
        return None
    for i, first in enumerate(pool):
        for second in pool[:i]:
            if first[2] | second[2] == needed:
                hidden = [entry for entry in pool if entry is not first and entry is not second]
                rng.shuffle(hidden)
                hidden = _covering(hidden, needed)
                if hidden is None:
                    return None
                visible = rng.sample((first, second), 2)
                return tuple(Case((v,), e) for v, e, _ in visible), tuple(Case((v,), e) for v, e, _ in hidden)
    return None


def _covering(entries: list[tuple[Any, Any, int]], needed: int) -> list[tuple[Any, Any, int]] | None:
    """HIDDEN_CASES of the entries that together tell all of ``needed``, or None."""
    chosen, told = [], 0
    for entry in entries:
        if entry[2] & ~told & needed and len(chosen) < HIDDEN_CASES:
            chosen.append(entry)
            told |= entry[2]
    rest = [entry for entry in entries if not any(entry is c for c in chosen)]
    chosen += rest[: HIDDEN_CASES - len(chosen)]
    return chosen if told == needed else None


def _draw_value(rng: random.Random, takes: str) -> Any:
    if takes == "ints":
        return [rng.randrange(10) for _ in range(rng.choice((2, 3, 3, 4, 4)))]
    if takes == "words":
        return [rng.choice(_WORDS) for _ in range(rng.choice((2, 3, 4)))]
    if takes == "text":
        return " ".join(rng.choice(_WORDS) for _ in range(rng.choice((1, 2, 3))))
    return {rng.choice(_WORDS): rng.randrange(6) for _ in range(rng.choice((2, 3, 4)))}


def _fails(program: Program, cases: Sequence[Case]) -> bool:
    return any(evaluate(program, case.args[0]) != case.expected for case in cases)


def _stub(takes: str, layout: str) -> str:
    start = "from h import g\n\n\n" if layout == "module" else ""
    return f"{start}def f({VARIABLES[takes]}):\n    pass\n"


def _message(description: str, files: dict[str, str], visible: Sequence[Case]) -> str:
    """What the user says: the description, the text of the files (with names when there are several), examples."""
    texts = [text if len(files) == 1 else f"# {path}\n{text}" for path, text in files.items()]
    examples = "\n".join(f"f({case.args[0]!r}) == {case.expected!r}" for case in visible)
    return f"{description}\n{''.join(texts)}{examples}"
