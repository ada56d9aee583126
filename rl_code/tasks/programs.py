"""Compositions of operations: their value, their text, their neighbours, and the split a composition belongs to."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

from rl_code.tasks.operations import OPERATIONS, VARIABLES, Operation, expression, function

Step = tuple[str, int | None]
"""Name of an operation and its constant (None for an operation without constants)."""

Program = tuple[Step | None, ...]
"""Steps in the order in which they are applied; None marks a step that is missing."""

SPLITS = ("train", "validation", "test")
_STUB = "    pass\n"
_HELD_OUT_PERCENT = 15  # of all compositions, for validation and for test each
_SALT = "1"  # gives validation and test four or five of the single operations each, from at least four families


@functools.cache
def split_of(names: tuple[str, ...]) -> str:
    """The split of a composition; the order of its operations plays no part, so reorderings stay together."""
    digest = hashlib.sha256("+".join((_SALT, *sorted(names))).encode()).digest()
    percent = int.from_bytes(digest[:8], "big") % 100
    return SPLITS[1 + percent // _HELD_OUT_PERCENT] if percent < 2 * _HELD_OUT_PERCENT else "train"


def names_of(program: Program) -> tuple[str, ...]:
    return tuple(step[0] for step in program if step)


def evaluate(program: Program, value: Any) -> Any:
    """The program's value, or a Failure with what it raises."""
    for step in program:
        if step:
            value = function(*step)(value)
    return value


def _identity(value: Any) -> Any:
    return value


@functools.cache
def _choices(step: Step, last: bool) -> tuple[tuple[Step | None, ...], tuple[Callable[[Any], Any], ...]]:
    """The step itself, then what could stand in its place: other constants, or (where types allow) nothing."""
    operation = OPERATIONS[step[0]]
    steps = [step, *((step[0], k) for k in operation.constants if k != step[1])]
    functions = [function(*choice) for choice in steps]
    if last or operation.takes == operation.gives:
        return (*steps, None), (*functions, _identity)
    return tuple(steps), tuple(functions)


def choices(program: Program) -> list[tuple[Step | None, ...]]:
    """For each step, the step and its alternatives: another constant, or no step at all."""
    return [_choices(step, i == len(program) - 1)[0] for i, step in enumerate(program)]


def outcomes(program: Program, value: Any) -> list[Any]:
    """Values of the program (first) and of all its rivals, the other combinations of ``choices(program)``."""
    values = [value]
    for i, step in enumerate(program):
        functions = _choices(step, i == len(program) - 1)[1]
        values = [run(value) for value in values for run in functions]
    return values


def near_rivals(program: Program) -> int:
    """Bit i is set when rival i, numbered as in ``outcomes``, differs from the program in exactly one step."""
    sizes = tuple(len(alternatives) for alternatives in choices(program))
    return _near_rivals(sizes)


@functools.cache
def _near_rivals(sizes: tuple[int, ...]) -> int:
    combinations = itertools.product(*map(range, sizes))
    return sum(1 << i for i, picks in enumerate(combinations) if sum(map(bool, picks)) == 1)


@functools.cache
def _confusable(name: str) -> tuple[Operation, ...]:
    operation = OPERATIONS[name]
    alike = (operation.family, operation.takes, operation.gives)
    return tuple(o for o in OPERATIONS.values() if (o.family, o.takes, o.gives) == alike and o.name != name)


def wrong_version(program: Program, rng: random.Random) -> Program:
    """The program with one plausible mistake: another constant, a confusable operation, a missing or swapped step."""
    i = rng.randrange(len(program))
    name, k = program[i]
    options = [step for step in choices(program)[i] if step and step != program[i]]
    kind = rng.random()
    if kind < 0.5 and options:
        step = rng.choice(options)
    elif kind < 0.85 and (alike := _confusable(name)):
        other = rng.choice(alike)
        if k in other.constants or not other.constants:
            step = (other.name, k if other.constants else None)
        else:
            step = (other.name, rng.choice(other.constants))
    elif kind < 0.93 and len(program) > 1 and None in choices(program)[i]:
        step = None
    elif len(program) > 1 and (j := (i + 1) % len(program)) != i:
        return _swapped(program, min(i, j), max(i, j))
    else:
        step = rng.choice(options) if options else None
    return (*program[:i], step, *program[i + 1 :])


def _swapped(program: Program, i: int, j: int) -> Program:
    """The program with two steps exchanged, or without the first of them where the types do not allow that."""
    a, b = OPERATIONS[program[i][0]], OPERATIONS[program[j][0]]
    steps = list(program)
    if a.takes == a.gives == b.takes == b.gives:
        steps[i], steps[j] = steps[j], steps[i]
    elif a.takes == a.gives:
        steps[i] = None
    return tuple(steps)


def describe(program: Program, *, stated: bool) -> str:
    """The program in a few words; constants as digits, or as the letter k."""
    return ", ".join(
        OPERATIONS[name].words
        if k is None or not stated
        else f" {OPERATIONS[name].words} ".replace(" k ", f" {k} ").strip()
        for name, k in program
    )


def body(steps: Sequence[Step | None], takes: str, call: str = "") -> str:
    """Lines of a function: an assignment per step, the last one a return. ``call`` is computed before the steps."""
    computed = [(VARIABLES[takes], call)] if call else []
    for step in steps:
        if step:
            computed.append((VARIABLES[OPERATIONS[step[0]].gives], expression(*step)))
    if not computed:
        return f"    return {VARIABLES[takes]}\n"
    lines = [f"    {variable} = {code}\n" for variable, code in computed[:-1]]
    return "".join([*lines, f"    return {computed[-1][1]}\n"])


def source(steps: Sequence[Step | None], takes: str) -> str:
    """A file whose function f is the program, one line per step."""
    return f"def f({VARIABLES[takes]}):\n{body(steps, takes)}"


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a program's steps are spread over functions and files.

    kind: "plain" has all steps in f; "helper" has the first ``cut`` in a function g of the same file, "module" in a
    function g of h.py. takes, middle: types (keys of VARIABLES) of f's argument and of what g returns.
    """

    kind: str
    takes: str
    middle: str
    cut: int

    def files(self, program: Program, *, stub: bool = False) -> dict[str, str]:
        """Path -> text of the program, whose steps may be changed or missing; a stub leaves out the body of f."""
        variable = VARIABLES[self.takes]
        if self.kind == "plain":
            inside = body(program, self.takes)
        else:
            inside = body(program[self.cut :], self.middle, call=f"g({variable})")
        main = f"def f({variable}):\n{_STUB if stub else inside}"
        helper = f"def g({variable}):\n{body(program[: self.cut], self.takes)}"
        if self.kind == "module":
            return {"f.py": f"from h import g\n\n\n{main}", "h.py": helper}
        return {"f.py": main if self.kind == "plain" else f"{helper}\n\n{main}"}
