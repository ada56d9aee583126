"""Compositions of operations: their value, their text, their neighbours, and the split a
composition belongs to.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import random
import string
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
# With this salt, validation and test each get four or five of the compositions that are a single
# operation, from at least four families.
_SALT = "1"


@functools.cache
def split_of(names: tuple[str, ...]) -> str:
    """The split of a composition; the order of its operations plays no part, so reorderings stay
    together.
    """
    digest = hashlib.sha256("+".join((_SALT, *sorted(names))).encode()).digest()
    percent = int.from_bytes(digest[:8], "big") % 100
    return SPLITS[1 + percent // _HELD_OUT_PERCENT] if percent < 2 * _HELD_OUT_PERCENT else "train"


def names_of(program: Program) -> tuple[str, ...]:
    """The names of a program's operations, in their order."""
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
def _choices(
    step: Step, last: bool
) -> tuple[tuple[Step | None, ...], tuple[Callable[[Any], Any], ...]]:
    """The step itself, then what could stand in its place: other constants, or (where types allow)
    nothing.
    """
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
    """Values of the program (first) and of all its rivals, the other combinations of
    ``choices(program)``.
    """
    values = [value]
    for i, step in enumerate(program):
        functions = _choices(step, i == len(program) - 1)[1]
        values = [run(value) for value in values for run in functions]
    return values


def near_rivals(program: Program) -> int:
    """Bit i is set when rival i, numbered as in ``outcomes``, differs from the program in exactly
    one step.
    """
    sizes = tuple(len(alternatives) for alternatives in choices(program))
    return _near_rivals(sizes)


@functools.cache
def _near_rivals(sizes: tuple[int, ...]) -> int:
    combinations = itertools.product(*map(range, sizes))
    return sum(1 << i for i, picks in enumerate(combinations) if sum(map(bool, picks)) == 1)


@functools.cache
def confusable(name: str) -> tuple[Operation, ...]:
    operation = OPERATIONS[name]
    alike = (operation.family, operation.takes, operation.gives)
    return tuple(
        o for o in OPERATIONS.values() if (o.family, o.takes, o.gives) == alike and o.name != name
    )


def wrong_version(program: Program, rng: random.Random) -> Program:
    """The program with one plausible mistake: another constant, a confusable operation, a missing
    or swapped step.
    """
    while (wrong := _mistake(program, rng)) == program:
        pass
    return wrong


def _mistake(program: Program, rng: random.Random) -> Program:
    """A version with a mistake at a random step; the program itself when the kind drawn is not
    possible there.
    """
    i = rng.randrange(len(program))
    step, *others = choices(program)[i]
    kind = rng.choices(("constant", "operation", "missing", "swapped"), (50, 35, 8, 7))[0]
    if kind == "swapped":
        return _swapped(program, i)
    if kind == "constant":
        step = rng.choice([other for other in others if other] or [step])
    elif kind == "operation" and (alike := confusable(step[0])):
        operation = rng.choice(alike)
        k = (
            step[1]
            if step[1] in operation.constants
            else rng.choice(operation.constants or (None,))
        )
        step = (operation.name, k)
    elif kind == "missing" and None in others:
        step = None
    return (*program[:i], step, *program[i + 1 :])


def _swapped(program: Program, i: int) -> Program:
    """The program with step i and the next one exchanged, where there is a next one and the types
    allow it.
    """
    pair = program[i : i + 2]
    types = {kind for name, _ in pair for kind in (OPERATIONS[name].takes, OPERATIONS[name].gives)}
    return (*program[:i], *reversed(pair), *program[i + 2 :]) if len(types) == 1 else program


def describe(program: Program, *, stated: bool) -> str:
    """The program in a few words; constants as digits, or as the letter k."""
    return ", ".join(_words(step, stated=stated) for step in program)


def describe_inward(program: Program) -> list[str]:
    """Describe each step in a few words, from the result inward: the last step first, as in
    "a max", "b times 3". Constants are stated, and letters say which step it is.
    """
    letters = string.ascii_lowercase
    return [
        f"{letter} {words_of(step)}"
        for letter, step in zip(letters, reversed(program), strict=False)
    ]


def words_of(step: Step) -> str:
    """A step in a few words, its constant stated."""
    return _words(step, stated=True)


def _words(step: Step, *, stated: bool) -> str:
    name, k = step
    words = OPERATIONS[name].words.split()
    return " ".join(str(k) if word == "k" and stated else word for word in words)


def body(steps: Sequence[Step | None], takes: str, call: str = "") -> str:
    """Lines of a function: an assignment per step, the last one a return. ``call`` is computed
    before the steps.
    """
    computed = [(VARIABLES[takes], call)] if call else []
    computed += [
        (VARIABLES[OPERATIONS[step[0]].gives], expression(*step)) for step in steps if step
    ]
    computed = computed or [("", VARIABLES[takes])]
    lines = [f"    {variable} = {code}\n" for variable, code in computed[:-1]]
    return "".join([*lines, f"    return {computed[-1][1]}\n"])


def source(steps: Sequence[Step | None], takes: str) -> str:
    """A file whose function f is the program, one line per step."""
    return f"def f({VARIABLES[takes]}):\n{body(steps, takes)}"


@dataclasses.dataclass(frozen=True)
class Layout:
    """Distribution of a program's steps over functions and files."""

    # "plain": all steps are in f. "helper": the first ``cut`` steps are in a function g of the same
    # file. "module": they are in a function g of h.py.
    kind: str
    # The type of f's argument: a key of VARIABLES.
    takes: str
    # The type of what g returns: a key of VARIABLES.
    middle: str
    # Number of steps in g.
    cut: int

    def files(self, program: Program, *, stub: bool = False) -> dict[str, str]:
        """Path -> text of the program, whose steps may be changed or missing; a stub leaves out the
        body of f.
        """
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
