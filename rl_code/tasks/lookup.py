"""Lookup tasks: several files stand in the prompt, and the constants of a function must be found in
a few of them.

Every file is a small module of constants and functions. Behind them stands the file to complete: a
function of a few steps, and below it a constant for each step that is not filled in (``ba = ...``).
One edit fills them in, so an answer is short and says nothing but what was looked up. Each of
these constants is defined once, in another module than the others while there are enough modules.
All other definitions are distractors of the same kind. The modules are text only: they do not lie
in the sandbox, so a solution cannot import them.

No test can be run, so feedback gives no constant away. The hidden tests fail for every other value
of one constant. A policy that does not read the modules has to guess each one among
``len(VALUES)``.

In a run with documents each module is one.

A drill teaches to look up, and nothing else: it gives names, and only their values are learned. So
most of its gradient comes from look-ups, where a whole task has one for every forty tokens.

The composition of a function, without regard to order and constants, belongs to exactly one split,
as for ``generated``.
"""

from __future__ import annotations

import dataclasses
import itertools
import keyword
import operator
import random
import re
from collections.abc import Iterator, Mapping, Sequence

from rl_code.tasks.operations import expression
from rl_code.tasks.programs import Program, evaluate, names_of, split_of
from rl_code.tasks.stream import check_split
from rl_code.types import Case, Task, Tests, ToolCall

# What a constant may be.
VALUES = range(10, 100)
# The operations of a function; each has one constant. "count" gives a number and can only be last.
STEPS = (
    "add",
    "subtract",
    "times",
    "modulo",
    "cap",
    "raise",
    "above",
    "below",
    "without",
    "append",
    "prepend",
    "count",
)
# Further steps than these append their constants.
MOST_KINDS = 3
HIDDEN_CASES = 6
PATH = "f.py"
_INPUTS = range(200)
_LEAST_FILE = 40  # tokens
_CONSONANTS = "bcdfghjklmnprstvz"
_VOWELS = "aeiou"
_PAIRS = [a + b for a in _CONSONANTS for b in _VOWELS]
# Names of constants, each used once in a task. Two letters become one token of a small vocabulary.
NAMES = tuple(
    name
    for name in (*_PAIRS, *(pair[::-1] for pair in _PAIRS))
    if name not in keyword.kwlist and name != "xs"
)
# Names of modules and of their functions.
_MODULES = tuple(
    "apple bread cheese date egg flour grape honey ice jam kale lemon mint nut oil pear".split()
)
_FUNCTIONS = tuple(
    "bend carve drop fold grind join knead lift mix press roll slice trim turn weigh".split()
)
# What a tokenizer that is trained on these texts makes one token of, nearly always.
_PIECES = re.compile(r"\n[ \t]*| ?\d| ?[A-Za-z_]+| ?[^\sA-Za-z\d_]+|\s")


@dataclasses.dataclass(frozen=True)
class Size:
    """Size of the tasks."""

    # Approximate number of tokens of all modules together, for a tokenizer that is trained on them.
    tokens: int
    # The most modules; there are fewer where each would have less than 40 tokens.
    files: int
    # Number of constants that the function needs. Each stands in another module; where there are
    # fewer modules than constants, in each module as many as in the others, or one more.
    matter: int
    # Tokens of a module for each constant that it defines.
    spacing: int

    def __post_init__(self) -> None:
        if not 1 <= self.files <= len(_MODULES):
            raise ValueError(f"files={self.files} must be at least 1 and at most {len(_MODULES)}")
        if self.spacing < 1 or self.tokens < 1:
            raise ValueError(f"tokens={self.tokens} and spacing={self.spacing} must be at least 1")
        # each module has a constant for every so many tokens, and at least one
        defined = max(self.files, self.tokens // self.spacing)
        if not 1 <= self.matter <= defined:
            raise ValueError(
                f"matter={self.matter} must be at least 1 and at most {defined}, the constants "
                f"that files={self.files} of together tokens={self.tokens} define with "
                f"spacing={self.spacing}"
            )
        # each module has at least one constant, and may begin with one more than its share
        most = self.spacing * (len(NAMES) - 2 * self.files)
        if self.tokens > most:
            raise ValueError(
                f"tokens={self.tokens} must be at most {most}: with spacing={self.spacing} there "
                f"are more constants than the {len(NAMES)} names"
            )


@dataclasses.dataclass(frozen=True)
class _Module:
    """A module of a task."""

    path: str
    text: str
    # The constants that it defines, by name.
    constants: Mapping[str, int]


def generate(split: str, seed: int, index: int, size: Size) -> Task:
    """Task ``index`` of a split's endless stream; the same arguments give the same task on every
    machine.

    Raises ValueError for an unknown split.
    """
    check_split(split)
    rng = random.Random(f"lookup/{split}/{seed}/{index}")
    while (drawn := _draw(rng, split, size.matter)) is None:
        pass
    program, hidden = drawn
    values = [k for _, k in program]
    modules, names = _modules(rng, values, size)
    files = {PATH: file_text(program, names, filled=False)}
    asked = {"type": "text", "text": f"# {PATH}, to complete\n{files[PATH]}"}
    known = {name: k for module in modules for name, k in module.constants.items()}
    return Task(
        id=f"lookup/{split}/{seed}/{index}",
        messages=({"role": "user", "content": (*_shown(modules), asked)},),
        files=files,
        path=PATH,
        entry_point="f",
        visible_tests=Tests(),
        hidden_tests=Tests(cases=hidden),
        reference={PATH: file_text(program, names)},
        meta={
            "source": "lookup",
            "split": split,
            "template": "+".join(names_of(program)),
            "program": program,
            # there is no broken version to repair
            "broken": None,
            "names": names,
            # every constant that the modules define, in order
            "known": known,
        },
    )


def drill(split: str, seed: int, index: int, size: Size) -> Task:
    """Drill ``index`` of a split's endless stream: ``matter`` of the constants that the modules
    define are asked for, in another order. It has no tests, so it can only be demonstrated.

    Raises ValueError for an unknown split.
    """
    check_split(split)
    rng = random.Random(f"lookup/drill/{split}/{seed}/{index}")
    values = [rng.choice(VALUES) for _ in range(size.matter)]
    modules, names = _modules(rng, values, size)
    asked = list(zip(names, values, strict=True))
    rng.shuffle(asked)
    return Task(
        id=f"lookup/drill/{split}/{seed}/{index}",
        messages=({"role": "user", "content": _shown(modules)},),
        files={PATH: ""},
        path=PATH,
        entry_point="f",
        visible_tests=Tests(),
        hidden_tests=Tests(),
        reference={PATH: ""},
        meta={"source": "lookup", "split": split, "drill": tuple(asked)},
    )


def _shown(modules: Sequence[_Module]) -> tuple[dict[str, str], ...]:
    """The modules as parts of a message."""
    return tuple(
        {"type": "document", "text": f"# {module.path}\n{module.text}"} for module in modules
    )


def file_text(program: Program, names: Sequence[str], *, filled: bool = True) -> str:
    """The file that a task asks for: its function, and below it the constants.

    filled: with the constants' values, or ``...`` for each.
    """
    values = [k if filled else "..." for _, k in program]
    return _function("f", names_of(program), names) + constants_text(names, values)


def constants_text(names: Sequence[str], values: Sequence[object]) -> str:
    """The lines that define constants."""
    return "".join(f"{name} = {value}\n" for name, value in zip(names, values, strict=True))


def fill_in(task: Task, attempt: Program) -> ToolCall:
    """The call that fills a program's constants in."""
    names = task.meta["names"]
    old, new = (
        constants_text(names, values).removesuffix("\n")
        for values in (["..."] * len(names), [k for _, k in attempt])
    )
    return ToolCall("edit_file", {"path": task.path, "old": old, "new": new})


def _function(name: str, operations: Sequence[str], constants: Sequence[str]) -> str:
    """A function that applies operations whose constants are named. Neighbours that append become
    one step.
    """
    steps = []
    pairs = zip(operations, constants, strict=True)
    for operation, group in itertools.groupby(pairs, key=operator.itemgetter(0)):
        names = [name for _, name in group]
        if operation == "append":
            names = [", ".join(names)]
        steps += [expression(operation, name) for name in names]
    lines = [f"    xs = {step}\n" for step in steps[:-1]]
    return "".join((f"def {name}(xs):\n", *lines, f"    return {steps[-1]}\n"))


def token_count(text: str) -> int:
    """About how many tokens a text has, for a tokenizer that is trained on such texts."""
    return len(_PIECES.findall(text))


# --- The function and its tests -------------------------------------------------------------------


def _draw(rng: random.Random, split: str, steps: int) -> tuple[Program, tuple[Case, ...]] | None:
    """A function of a split and its hidden tests; None when the draw belongs to another split, or
    when no tests tell its constants from all others.
    """
    operations = rng.sample(STEPS, min(steps, MOST_KINDS))
    if steps > MOST_KINDS:
        operations = [o for o in operations if o != "count"]
    # What is appended after these stands in every result, so any case tells it from other values.
    in_doubt = len(operations)
    operations += ["append"] * (steps - in_doubt)
    if "count" in operations[:-1] or split_of(tuple(operations)) != split:
        return None
    program = tuple((operation, rng.choice(VALUES)) for operation in operations)
    near = _inputs_near(program[:in_doubt])
    cases = []
    for _ in range(HIDDEN_CASES):
        # some inputs that come near a constant, which tell it from its neighbours, and some others
        values = rng.choices(near, k=4) + rng.choices(_INPUTS, k=2)
        rng.shuffle(values)
        cases.append(Case((values,), evaluate(program, values)))
    if any(_passes(rival, cases) for rival in one_wrong(program, in_doubt)):
        return None
    return program, tuple(cases)


def one_wrong(program: Program, first: int | None = None) -> Iterator[Program]:
    """The program with another value in place of one constant, for all values and the ``first``
    constants; None for all.
    """
    for i, (operation, k) in enumerate(program[:first]):
        for other in VALUES:
            if other != k:
                yield (*program[:i], (operation, other), *program[i + 1 :])


def _inputs_near(program: Program) -> list[int]:
    """Inputs whose value, where a step reads it, differs by at most 1 from the step's constant; all
    inputs where there are none.
    """
    found = []
    for i, (_, k) in enumerate(program):
        for value in _INPUTS:
            reached = evaluate(program[:i], [value])
            if any(abs(one - k) <= 1 for one in reached):
                found.append(value)
    return found or list(_INPUTS)


def _passes(program: Program, cases: Sequence[Case]) -> bool:
    return all(evaluate(program, case.args[0]) == case.expected for case in cases)


# --- The modules ----------------------------------------------------------------------------------


def most_files(tokens: int, files: int) -> int:
    """Number of modules, at most ``files``, that share these tokens without being too short."""
    return max(1, min(files, tokens // _LEAST_FILE))


def _modules(
    rng: random.Random, values: Sequence[int], size: Size
) -> tuple[list[_Module], tuple[str, ...]]:
    """The modules in the order of the prompt, and the names of the constants that have ``values``,
    spread over the modules as evenly as can be.
    """
    count = max(min(size.matter, size.files), most_files(size.tokens, size.files))
    free = rng.sample(NAMES, len(NAMES))
    modules = []
    least = -(-size.matter // count)
    for word in rng.sample(_MODULES, count):
        path = f"{word}.py"
        modules.append(_module(rng, path, size.tokens / count, size.spacing, least, free))
    chosen: list[str] = []
    # again and again through the modules in one order
    places = itertools.cycle(rng.sample(range(count), count))
    for value in values:
        at = next(at for at in places if not modules[at].constants.keys() <= set(chosen))
        module = modules[at]
        name = rng.choice([name for name in module.constants if name not in chosen])
        chosen.append(name)
        line = f"{name} = {module.constants[name]}\n"
        modules[at] = _Module(
            module.path,
            module.text.replace(line, f"{name} = {value}\n"),
            {**module.constants, name: value},
        )
    return modules, tuple(chosen)


def _module(
    rng: random.Random, path: str, budget: float, spacing: int, least: int, free: list[str]
) -> _Module:
    """A module of about ``budget`` tokens: constants, one for ``spacing`` tokens and not fewer than
    ``least``, and between them functions that use them. Takes the constants' names from ``free``.
    """
    constants: dict[str, int] = {}
    parts: list[str] = []
    used = token_count(f"# {path}\n")
    functions: list[str] = []
    while used < budget or len(constants) < least:
        # a constant for every so many tokens
        if used >= spacing * len(constants):
            name = free.pop()
            constants[name] = rng.choice(VALUES)
            part = f"{name} = {constants[name]}\n"
        else:
            functions = functions or rng.sample(_FUNCTIONS, len(_FUNCTIONS))
            steps = rng.sample(STEPS[:-1], rng.choice((1, 2)))
            names = rng.choices(list(constants), k=len(steps))
            part = _function(functions.pop(), steps, names)
        parts.append(part)
        used += token_count(part)
    return _Module(path, "".join(parts), constants)


def wrong_lookup(task: Task, rng: random.Random) -> Program:
    """The task's function with one constant mistaken for another one of its modules."""
    program = task.meta["program"]
    at = rng.randrange(len(program))
    operation, k = program[at]
    others = [value for value in task.meta["known"].values() if value != k]
    # small modules may define no other value
    others = others or [value for value in VALUES if value != k]
    return (*program[:at], (operation, rng.choice(others)), *program[at + 1 :])
