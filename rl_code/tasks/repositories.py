"""Generated repositories: small modules that import each other, one of which has a fault.

The tests call one function, the symptom. It calls a function of another module, which calls one of
a third, and so on: a chain. Each function of the chain adds one or two operations to what the next
one returns, and one operation of the chain is wrong: another constant, or one that is easily taken
for it. Or, where a source has such faults, one of these functions calls the next one by a name that
is nowhere defined, which diagnostics show at once. The level is the number of files between the
symptom and the cause: at level 0 the fault is in the function that the tests call, at level 3 three
imports away. The other modules and functions are distractors of the same kind, which import each
other.

The message says what the symptom should do, and shows two calls. Its operations stand there as one
meets them from the symptom along its imports: the last one first, each with a letter, which makes
it easier to say which of them a line should do. The message names no file and shows none:
the function has to be searched for, and its imports followed. All constants are stated, so the
description and the files together tell which line is wrong.

A repository may have a past: one of its last commits made the fault, and others changed lines that
are right (``repository_past``).

Hidden tests call the symptom with other inputs, and the function with the fault itself: a change
elsewhere that makes up for the fault does not pass.

The composition of the chain, without regard to order, constants and files, belongs to exactly one
split, as for ``generated``.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

from rl_code.tasks.operations import NUMBERS, OPERATIONS, Failure
from rl_code.tasks.programs import (
    Program,
    Step,
    body,
    confusable,
    describe_inward,
    evaluate,
    names_of,
    split_of,
)
from rl_code.tasks.repository_past import Changed, draw
from rl_code.tasks.stream import check_split
from rl_code.text.lines import split_lines
from rl_code.types import Case, Task, Tests

# What may be wrong: an operation of a line, or the name in a call.
FAULTS = ("operation", "name")
# Levels: how many files lie between the symptom and the cause.
LEVELS = (0, 1, 2, 3)
FEWEST_FILES, MOST_FILES = 5, 160
# Commits behind the first one.
MOST_CHANGES = 5
VISIBLE_CASES = 2
HIDDEN_CASES = 6
# Hidden cases that call the function with the fault, where that is not the symptom.
_OF_CAUSE = 2
_POOL = 14  # inputs drawn per program, of which the cases are chosen
_LONGEST_CHAIN = 5
# Files of the largest repository whose names are single words.
_SMALL = 40
_MODULES = tuple(
    "apple bank cart dock east farm gate hall iron jar kite lake mill nest oak park quay road ship "
    "tent urn vale well yard zone arch barn cave desk edge fort grid hut inn jet key lamp mast net "
    "owl".split()
)
_FUNCTIONS = tuple(
    "bend carve drop fold grind join knead lift mix press roll splice trim turn weigh bake chop "
    "dip fry grate heat ice keep load melt note oil peel rinse salt toast use vary wash yoke "
    "adorn blend cool dry eat fill glaze hold inject juice kick limit mash nudge order pack "
    "quote rank serve taste unite view wrap boil clean dust even fetch gain halve issue jolt "
    "knit link mark nip own pour quell rub shake tie".split()
)
_INNER = tuple(operation for operation in NUMBERS if operation.gives == "ints")


@dataclasses.dataclass(frozen=True)
class Function:
    """A function of a module: what it calls first, and its own steps."""

    name: str
    steps: Program
    # The module (without .py) and the function that are called with the argument; None for none.
    calls: tuple[str, str] | None = None
    # Wrong name in the call in place of that function's name; "" for the right name.
    misnamed: str = ""

    def text(self) -> str:
        """Its source."""
        call = f"{self.misnamed or self.calls[1]}(xs)" if self.calls else ""
        return f"def {self.name}(xs):\n{body(self.steps, 'ints', call=call)}"


@dataclasses.dataclass(frozen=True)
class Place:
    """Place of the fault: a step of a function of the chain."""

    # Number of the function in the chain, the symptom being 0; this is the level.
    link: int
    # Index of the step in the function's steps.
    step: int


def generate(
    split: str,
    seed: int,
    index: int,
    levels: Sequence[int] = LEVELS,
    files: tuple[int, int] = (FEWEST_FILES, 12),
    alone: bool = False,
    faults: Sequence[str] = FAULTS[:1],
    changes: tuple[int, int] = (0, 0),
) -> Task:
    """Task ``index`` of a split's endless stream; the same arguments give the same task on every
    machine.

    levels: of which one is drawn. files: the fewest and the most files of a repository. alone:
    whether each function of the chain has its module for itself. faults: of which one is drawn.
    changes: the fewest and the most commits behind the first one, or none for no past. Raises
    ValueError for an unknown split, level or fault, and for numbers of files or changes that are
    too small or too large.
    """
    check_split(split)
    check_settings(levels, files, faults, changes)
    rng = random.Random(f"repositories/{split}/{seed}/{index}")
    level = rng.choice(levels)
    name = f"repositories/{split}/{seed}/{index}/L{level}"
    fault = rng.choice(faults) if len(faults) > 1 else faults[0]
    while (
        task := _attempt(rng, split, level, rng.randint(*files), alone, fault, changes, name)
    ) is None:
        pass
    task.meta["names_may_be_wrong"] = "name" in faults
    return task


def check_settings(
    levels: Sequence[int],
    files: tuple[int, int],
    faults: Sequence[str],
    changes: tuple[int, int] = (0, 0),
) -> None:
    """Raises ValueError for what ``generate`` does not take."""
    if not faults or not set(faults) <= set(FAULTS):
        raise ValueError(f"{faults=} must be a non-empty choice of {FAULTS}")
    if not levels or not set(levels) <= set(LEVELS):
        raise ValueError(f"{levels=} must be a non-empty choice of {LEVELS}")
    if len(files) != 2 or not FEWEST_FILES <= files[0] <= files[1] <= MOST_FILES:
        raise ValueError(
            f"{files=} must be the fewest and the most files, between {FEWEST_FILES} and "
            f"{MOST_FILES}"
        )
    few = len(changes) != 2 or not 1 <= changes[0] <= changes[1] <= MOST_CHANGES
    if few and tuple(changes) != (0, 0):
        raise ValueError(
            f"{changes=} must be the fewest and the most commits behind the first one, between 1 "
            f"and {MOST_CHANGES}, or (0, 0) for no past"
        )
    # the cause calls another function, and one module is beyond the chain
    least = max(levels) + 3
    if "name" in faults and files[1] < least:
        raise ValueError(
            f"{files=} must reach {least}: at level {max(levels)} a wrong name needs {least} files"
        )


def _attempt(
    rng: random.Random,
    split: str,
    level: int,
    files: int,
    alone: bool,
    fault: str,
    changes: tuple[int, int],
    name: str,
) -> Task | None:
    """A task, or None when the draw belongs to another split, no cases tell the fault, its line
    cannot be named, or the function calls none.
    """
    modules = rng.sample(_names(_MODULES, files), files)
    functions = _names(_FUNCTIONS, files)
    functions = list(rng.sample(functions, len(functions)))
    chain = _draw_chain(rng, level, modules, functions)
    program = program_of(chain)
    if split_of(names_of(program)) != split:
        return None
    place = Place(level, rng.randrange(len(chain[level].steps)))
    right = chain[level].steps[place.step]
    wrong = rng.choice(alternatives(right))
    broken = with_step(chain, place, wrong)
    cases = _cases(rng, chain, place, wrong)
    if cases is None:
        return None
    if fault == "name":
        if chain[level].calls is None:
            return None
        broken = _misnamed(chain, level, functions.pop())
    layout = _draw_layout(rng, modules, functions, len(chain), alone)
    texts = _texts(layout, modules, broken)
    cause = f"{modules[level]}.py"
    lines = [line_of(chain[level], place.step, step) for step in (right, *alternatives(right))]
    stands = right if fault == "name" else wrong
    old = line_of(chain[level], place.step, stands)
    # the fault's line must occur once, and so must what any attempt puts in its place
    if any(texts[cause].count(line) != (line == old) for line in lines):
        return None
    if fault == "name":
        misnamed = (broken[level].misnamed, chain[level].calls[1])
        # one name may be the end of another
        mended = texts[cause].replace(*(f" {one}(" for one in misnamed))
    else:
        misnamed = None
        mended = texts[cause].replace(old, lines[0])
    past: tuple[Changed, ...] = ()
    if changes != (0, 0):
        (was,) = _differences(cause, mended, texts[cause])
        inside = [*zip(modules, ([one] for one in broken), strict=False), *layout.items()]
        past = draw(rng, was, _other_steps(rng, inside, texts), rng.randint(*changes))
    visible, hidden = cases
    symptom = chain[0].name
    return Task(
        id=name,
        messages=({"role": "user", "content": _message(symptom, program, visible)},),
        files=texts,
        path=f"{modules[0]}.py",
        entry_point=symptom,
        visible_tests=Tests(cases=visible),
        hidden_tests=Tests(cases=hidden),
        reference={cause: mended},
        meta={
            "source": "repositories",
            "split": split,
            "level": level,
            "repository": name,
            "template": "+".join(names_of(program)),
            "program": program,
            "broken": program_of(broken),
            # the functions of the chain, the symptom first, and their paths
            "functions": tuple(one.name for one in chain),
            "chain": tuple(f"{module}.py" for module in modules[: len(chain)]),
            "cause": cause,
            # of each function of the chain, where its steps lie in ``program``
            "spans": tuple(_span(chain, link) for link in range(len(chain))),
            # index of the wrong step in ``program``; None where a name is wrong
            "fault": None if fault == "name" else _offset(chain, place),
            # the name that is wrong in a call of ``cause``, and what should stand there; or None
            "misnamed": misnamed,
            # of each step of ``program``, its file and the number of its line
            "places": _places(broken, modules, texts),
            # what the commits behind the first one changed, the oldest first
            "past": tuple(map(tuple, past)),
        },
    )


def _names(words: Sequence[str], files: int) -> Sequence[str]:
    """Names for the modules or the functions of a repository: words, and for a large repository
    pairs of words too.
    """
    if files <= _SMALL:
        return words
    return (*words, *(f"{one}_{other}" for one in words[:4] for other in words[4:]))


# --- The chain ------------------------------------------------------------------------------------


def _draw_chain(
    rng: random.Random, level: int, modules: Sequence[str], functions: list[str]
) -> list[Function]:
    """The functions of a chain, the symptom first; one for each of the first modules. Takes their
    names from ``functions``.
    """
    length = rng.randint(max(2, level + 1), min(_LONGEST_CHAIN, level + 2, len(modules) - 1))
    names = [functions.pop() for _ in range(length)]
    chain = []
    for i, name in enumerate(names):
        # what the symptom returns may be a number, all others return lists
        steps = _draw_steps(rng, rng.choice((1, 1, 2)), last=NUMBERS if i == 0 else _INNER)
        calls = (modules[i + 1], names[i + 1]) if i + 1 < length else None
        chain.append(Function(name, steps, calls))
    return chain


def _draw_steps(rng: random.Random, count: int, last: Sequence[Any] = _INNER) -> Program:
    """So many steps, no operation twice in a row."""
    steps: list[Step] = []
    for i in range(count):
        before = steps[-1][0] if steps else ""
        choice = [o for o in (last if i + 1 == count else _INNER) if o.name != before]
        operation = rng.choice(choice)
        constant = rng.choice(operation.constants) if operation.constants else None
        steps.append((operation.name, constant))
    return tuple(steps)


def program_of(chain: Sequence[Function]) -> Program:
    """The steps of a chain in the order in which they are applied: the innermost function's
    first.
    """
    return tuple(itertools.chain.from_iterable(one.steps for one in reversed(chain)))


def _span(chain: Sequence[Function], link: int) -> tuple[int, int]:
    """Begin and end of a function's steps in ``program_of(chain)``."""
    start = sum(len(one.steps) for one in chain[link + 1 :])
    return start, start + len(chain[link].steps)


def _offset(chain: Sequence[Function], place: Place) -> int:
    """Index in ``program_of(chain)`` of a place."""
    return _span(chain, place.link)[0] + place.step


def _places(
    chain: Sequence[Function], modules: Sequence[str], texts: Mapping[str, str]
) -> tuple[tuple[str, int], ...]:
    """The file of each step of ``program_of(chain)``, and the number of its line."""
    places: list[tuple[str, int]] = []
    for one, module in reversed(list(zip(chain, modules, strict=False))):
        path = f"{module}.py"
        first = _first_line(one, texts[path])
        places += [(path, first + at) for at in range(len(one.steps))]
    return tuple(places)


def _first_line(one: Function, text: str) -> int:
    """The number of the line of a function's first step."""
    return split_lines(text).index(f"def {one.name}(xs):") + 2 + bool(one.calls)


def with_step(chain: Sequence[Function], place: Place, step: Step) -> list[Function]:
    """The chain with another step at a place."""
    changed = chain[place.link]
    steps = (*changed.steps[: place.step], step, *changed.steps[place.step + 1 :])
    return [
        dataclasses.replace(one, steps=steps) if i == place.link else one
        for i, one in enumerate(chain)
    ]


def _misnamed(chain: Sequence[Function], link: int, name: str) -> list[Function]:
    """The chain with another name in the call of one of its functions."""
    wrong = dataclasses.replace(chain[link], misnamed=name)
    return [wrong if i == link else one for i, one in enumerate(chain)]


def alternatives(step: Step) -> list[Step]:
    """The mistakes that can stand in a step's place: other constants, and operations that are
    easily taken for it, with its constant where they can have it.
    """
    name, k = step
    found: list[Step] = [(name, other) for other in OPERATIONS[name].constants if other != k]
    for operation in confusable(name):
        if not operation.constants:
            found.append((operation.name, None))
        elif k in operation.constants:
            found.append((operation.name, k))
        else:
            found.append((operation.name, operation.constants[0]))
    return found


def line_of(function: Function, at: int, step: Step) -> str:
    """The line of a function's step, without indentation, with ``step`` in its place."""
    steps = (*function.steps[:at], step, *function.steps[at + 1 :])
    changed = dataclasses.replace(function, steps=steps)
    lines = split_lines(changed.text())[1:]
    return lines[at + bool(function.calls)].strip()


# --- The files ------------------------------------------------------------------------------------


def _draw_layout(
    rng: random.Random, modules: Sequence[str], functions: list[str], length: int, alone: bool
) -> dict[str, list[Function]]:
    """The distractors of each module. Takes names from ``functions``.

    Modules beyond the chain have one or two, those of the chain at most one, or none where their
    functions are ``alone``. A distractor may call one of a later module beyond the chain. So
    imports have no cycle, and no shorter way leads to the cause than the chain.
    """
    layout: dict[str, list[Function]] = {}
    others: list[tuple[str, str]] = []
    for i in reversed(range(len(modules))):
        if i >= length:
            count = rng.choice((1, 1, 2))
        else:
            count = 0 if alone else rng.choice((0, 1))
        found = []
        for _ in range(min(count, len(functions))):
            calls = rng.choice(others) if others and rng.random() < 0.5 else None
            steps = _draw_steps(rng, rng.choice((1, 1, 2)))
            found.append(Function(functions.pop(), steps, calls))
        layout[modules[i]] = found
        if i >= length:
            others += [(modules[i], one.name) for one in found]
    return layout


def _texts(
    layout: dict[str, list[Function]], modules: Sequence[str], chain: Sequence[Function]
) -> dict[str, str]:
    """Path -> text of every module, in the order of the alphabet. A function of the chain stands
    first or last in its module, by the length of its name.
    """
    texts = {}
    for i, module in enumerate(modules):
        inside = list(layout[module])
        if i < len(chain):
            inside.insert(len(chain[i].name) % 2 * len(inside), chain[i])
        imports = sorted({one.calls for one in inside if one.calls})
        heading = "".join(f"from {name} import {function}\n" for name, function in imports)
        parts = [heading] if heading else []
        texts[f"{module}.py"] = "\n\n".join([*parts, *(one.text() for one in inside)])
    return dict(sorted(texts.items()))


def _differences(path: str, before: str, after: str) -> list[Changed]:
    """The lines in which two texts of a file differ."""
    lines = zip(split_lines(before), split_lines(after), strict=True)
    return [Changed(path, i, old) for i, (old, new) in enumerate(lines, start=1) if old != new]


def _other_steps(
    rng: random.Random,
    inside: Sequence[tuple[str, Sequence[Function]]],
    texts: Mapping[str, str],
) -> list[Changed]:
    """For each step of the functions of modules, another step that may have stood there before."""
    found = []
    for module, functions in inside:
        path = f"{module}.py"
        for one in functions:
            first = _first_line(one, texts[path])
            for at, step in enumerate(one.steps):
                line = line_of(one, at, rng.choice(alternatives(step)))
                found.append(Changed(path, first + at, f"    {line}"))
    return found


# --- The tests ------------------------------------------------------------------------------------


def _cases(
    rng: random.Random, chain: Sequence[Function], place: Place, wrong: Step
) -> tuple[tuple[Case, ...], tuple[Case, ...]] | None:
    """Visible and hidden cases. Each set excludes the fault, and every other mistake in its place
    that any case drawn excludes. None where that does not come out.
    """
    program = program_of(chain)
    at = _offset(chain, place)
    right = program[at]
    pool = _candidates(rng, program, at, alternatives(right))
    if len(pool) < VISIBLE_CASES + HIDDEN_CASES:
        return None
    needed = frozenset().union(*(told for _, told in pool))
    visible, hidden = pool[:VISIBLE_CASES], pool[VISIBLE_CASES:]
    own = _OF_CAUSE if place.link else 0
    hidden = hidden[: HIDDEN_CASES - own]
    for cases in (visible, hidden):
        if wrong not in needed or frozenset().union(*(told for _, told in cases)) != needed:
            return None
        if len({repr(case.expected) for case, _ in cases}) < 2:
            return None  # a constant would do
    found = [case for case, _ in hidden]
    if own:
        more = _of_cause(rng, chain, place, wrong, own)
        if more is None:
            return None
        found += more
    return tuple(case for case, _ in visible), tuple(found)


def _candidates(
    rng: random.Random, program: Program, at: int, rivals: Sequence[Step]
) -> list[tuple[Case, frozenset[Step]]]:
    """Distinct cases on which the program does not fail, and which mistakes each tells. Those that
    tell most stand first, of these the shorter ones.
    """
    drawn = {}
    for _ in range(_POOL):
        value = rng.choices(range(10), k=rng.choice((2, 3, 3, 4)))
        reached = evaluate(program[:at], value)
        expected = evaluate(program[at:], reached)
        if isinstance(expected, Failure):
            continue
        told = frozenset(
            step for step in rivals if evaluate((step, *program[at + 1 :]), reached) != expected
        )
        drawn[repr(value)] = (Case((value,), expected), told)
    return [drawn[text] for text in sorted(drawn, key=lambda x: (-len(drawn[x][1]), len(x)))]


def _of_cause(
    rng: random.Random, chain: Sequence[Function], place: Place, wrong: Step, count: int
) -> list[Case] | None:
    """Cases of the function with the fault; None where the first draws do not show it."""
    program = program_of(chain[place.link :])
    broken = program_of(with_step(chain, place, wrong)[place.link :])
    target = f"{chain[place.link - 1].calls[0]}.py:{chain[place.link].name}"
    cases = {}
    for _ in range(_POOL):
        value = rng.choices(range(10), k=3)
        expected = evaluate(program, value)
        if not isinstance(expected, Failure) and evaluate(broken, value) != expected:
            cases[repr(value)] = Case((value,), expected, target=target)
    return list(cases.values())[:count] if len(cases) >= count else None


def _message(name: str, program: Program, visible: Sequence[Case]) -> str:
    """Message of the user: the task of the function with the symptom, and the visible cases."""
    calls = "\n".join(f"{name}({case.args[0]!r}) == {case.expected!r}" for case in visible)
    return f"{name}: {', '.join(describe_inward(program))}\n{calls}"
