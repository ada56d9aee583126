"""Repositories on which many changes are asked for, one after the other.

A repository is a handful of modules with one function each. A function calls one of an earlier
module, or none, and adds one or two operations to what that returns. So several functions share the
ones that they call. A task asks for a change: it says what a function should do, operation by
operation from the result inward, and one operation in it or in what it calls does something else.
Every task of a repository begins with the same files, so what was noted of them stays true.

Hidden tests call the function that the task names, and the one in which the change belongs: a
change elsewhere that makes up for it does not pass. The composition that is asked for belongs to
exactly one split, as for ``rl_code.tasks.generated``.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Sequence

from rl_code.tasks.operations import NUMBERS, Failure
from rl_code.tasks.programs import (
    Program,
    Step,
    body,
    describe_inward,
    evaluate,
    names_of,
    split_of,
    words_of,
)
from rl_code.tasks.repositories import Function, Place, alternatives, program_of, with_step
from rl_code.text.lines import split_lines
from rl_code.types import Case, Task, Tests

# A function that tasks ask about calls through at least so many functions, itself included, and no
# function through more than so many.
_SHORTEST, _LONGEST = 3, 4
# So many functions of a repository can be asked about, and so many changes be asked for, at least.
_ASKED, _CHANGES = 3, 16
_HIDDEN, _OF_CAUSE = 5, 2
_POOL = 24  # inputs drawn per task, of which the cases are chosen
_MODULES = tuple(
    "apple bank cart dock east farm gate hall iron jar kite lake mill nest oak park quay road ship "
    "tent urn vale well yard zone".split()
)
_FUNCTIONS = tuple(
    "bend carve fold grind join knead lift mix press roll splice trim turn weigh bake chop dip fry "
    "grate heat load melt peel rinse salt toast vary wash".split()
)
_OPERATIONS = tuple(one for one in NUMBERS if one.gives == "ints")


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of a repository that does an operation."""

    path: str
    # Counted from 1.
    number: int
    step: Step
    # Whether it is the last one of its function.
    returns: bool

    @property
    def words(self) -> str:
        """Description in words."""
        return words_of(self.step)

    def text(self, step: Step) -> str:
        """The line with another step in it."""
        first, last = split_lines(body((step, step), "ints"))
        return last if self.returns else first


@dataclasses.dataclass(frozen=True)
class Repository:
    """Modules that import each other."""

    split: str
    name: str
    # One for each module; each calls one that stands before it, or none.
    functions: tuple[Function, ...]
    modules: tuple[str, ...]

    @functools.cached_property
    def paths(self) -> tuple[str, ...]:
        """The path of each module, in the order of ``functions``."""
        return tuple(f"{module}.py" for module in self.modules)

    @functools.cached_property
    def files(self) -> dict[str, str]:
        """Path -> text, in the order of the alphabet."""
        pairs = zip(self.paths, map(_file, self.functions), strict=True)
        return dict(sorted(pairs))

    def chain(self, at: int) -> list[int]:
        """Numbers of the functions that function ``at`` calls through, itself first."""
        calls = self.functions[at].calls
        return [at, *(self.chain(self.modules.index(calls[0])) if calls else ())]

    def lines(self, at: int) -> list[Line]:
        """The lines of function ``at`` that do an operation, the last one first."""
        function = self.functions[at]
        heading = 1 + (3 if function.calls else 0)
        first = heading + 1 + bool(function.calls)
        found = [
            Line(self.paths[at], first + i, step, i + 1 == len(function.steps))
            for i, step in enumerate(function.steps)
        ]
        return found[::-1]

    @functools.cached_property
    def asked(self) -> tuple[int, ...]:
        """Numbers of the functions that tasks may ask about."""
        numbers = range(len(self.functions))
        return tuple(at for at in numbers if len(self.chain(at)) >= _SHORTEST)

    @functools.cached_property
    def changes(self) -> list[tuple[int, Place, Step]]:
        """A question: the function that is asked about, the place in its chain, and what
        is wanted there, where the composition then belongs to the split.
        """
        found = []
        for at in self.asked:
            chain = [self.functions[number] for number in self.chain(at)]
            for link, function in enumerate(chain):
                for i, stands in enumerate(function.steps):
                    for wanted in alternatives(stands):
                        program = program_of(with_step(chain, Place(link, i), wanted))
                        if split_of(names_of(program)) == self.split:
                            found.append((at, Place(link, i), wanted))
        return found


def _file(function: Function) -> str:
    """The text of a function's module."""
    heading = "from {} import {}\n\n\n".format(*function.calls) if function.calls else ""
    return heading + function.text()


def generate(split: str, seed: int, number: int, files: int) -> Repository:
    """Repository ``number`` of a split's endless stream. files: how many modules it has.

    Raises ValueError for a number of files that has no such repository or no names.
    """
    if not _LONGEST < files <= min(len(_MODULES), len(_FUNCTIONS)):
        raise ValueError(f"{files=} must be between {_LONGEST + 1} and {len(_MODULES)}")
    name = f"notes/{split}/{seed}/{number}"
    rng = random.Random(name)
    while True:
        modules = tuple(rng.sample(_MODULES, files))
        names = rng.sample(_FUNCTIONS, files)
        functions: list[Function] = []
        depths: list[int] = []
        for at in range(files):
            below = [i for i in range(at) if depths[i] < _LONGEST]
            called = rng.choice(below) if below and rng.random() < 0.9 else None
            depths.append(1 if called is None else 1 + depths[called])
            calls = None if called is None else (modules[called], names[called])
            functions.append(Function(names[at], _draw_steps(rng), calls))
        found = Repository(split, name, tuple(functions), modules)
        if len(found.asked) >= _ASKED and len(found.changes) >= _CHANGES:
            return found


def _draw_steps(rng: random.Random) -> Program:
    """One operation, or two different ones."""
    chosen = rng.sample(_OPERATIONS, rng.choice((1, 1, 2)))
    return tuple((one.name, rng.choice(one.constants or (None,))) for one in chosen)


# --- Tasks ----------------------------------------------------------------------------------------


class NoChange(ValueError):
    """None of the changes of a repository that were drawn can be told by its inputs."""


def request(repository: Repository, number: int) -> Task:
    """Task ``number`` of a repository: a change of one line. The same for the same arguments.

    Raises NoChange for a repository of which no inputs drawn tell any change.
    """
    rng = random.Random(f"{repository.name}/{number}")
    changes = list(repository.changes)
    while changes:
        at, place, wanted = changes.pop(rng.randrange(len(changes)))
        numbers = repository.chain(at)
        chain = [repository.functions[each] for each in numbers]
        link = place.link
        stands = chain[link].steps[place.step]
        asked = with_step(chain, place, wanted)
        cases = _cases(rng, asked, place, [stands, *alternatives(stands)], repository, numbers)
        if cases is None:
            continue
        lines = [line for at in numbers for line in repository.lines(at)]
        path = repository.paths[numbers[link]]
        (changed,) = (
            i
            for i, line in enumerate(lines)
            if line.path == path and line == repository.lines(numbers[link])[-1 - place.step]
        )
        text = split_lines(repository.files[path], keepends=True)
        text[lines[changed].number - 1] = lines[changed].text(wanted) + "\n"
        return Task(
            id=f"{repository.name}/{number}",
            messages=(_said(f"{chain[0].name}: {', '.join(describe_inward(program_of(asked)))}"),),
            files=repository.files,
            path=repository.paths[numbers[0]],
            entry_point=chain[0].name,
            hidden_tests=Tests(cases=cases),
            reference={path: "".join(text)},
            tools=("grep", "read_file", "think", "replace_lines", "submit"),
            meta={
                "source": "notes",
                "kind": "request",
                "split": repository.split,
                "repository": repository.name,
                "level": link,
                "symptom": numbers[0],
                # of the lines along the chain, the number of the one that is to be changed
                "changed": changed,
                "wanted": wanted,
            },
        )
    raise NoChange(f"no change of {repository.name} is told by the inputs drawn")


def idle(repository: Repository) -> Task:
    """The task of idle time: to note what each function does. The files are named in an order in
    which each stands behind the one that it imports, as a list of imports tells.
    """
    return Task(
        id=f"{repository.name}/idle",
        messages=(_said("\n".join(("note", *repository.paths))),),
        files=repository.files,
        path=repository.paths[0],
        entry_point=repository.functions[0].name,
        tools=("read_file", "memory_store", "submit"),
        meta={
            "source": "notes",
            "kind": "idle",
            "split": repository.split,
            "repository": repository.name,
        },
    )


def reminded(task: Task) -> Task:
    """The same task for an agent that is told that there are notes, and may read them."""
    (message,) = task.messages
    return dataclasses.replace(
        task,
        messages=(_said(f"{message['content']}\nnotes"),),
        tools=(*(task.tools or ()), "memory_recall"),
        meta={**task.meta, "kind": "reminded"},
    )


def _said(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def note(repository: Repository, at: int) -> str:
    """Text of a right note about function ``at``: each of its lines, the last one first, and the
    function that it calls before them.
    """
    told = [f"{line.path} {line.number} {line.words}" for line in repository.lines(at)]
    calls = repository.functions[at].calls
    return "\n".join([*told, f"then {calls[1]}"] if calls else told)


def _cases(
    rng: random.Random,
    asked: Sequence[Function],
    place: Place,
    rivals: Sequence[Step],
    repository: Repository,
    numbers: Sequence[int],
) -> tuple[Case, ...] | None:
    """Cases of the function that is asked about and of the changed one, which tell what is wanted
    from what stands there and from all else that could stand there; None where the inputs drawn do
    not.
    """
    wanted = asked[place.link].steps[place.step]
    others = [step for step in rivals if step != wanted]
    cases: list[Case] = []
    for link in sorted({0, place.link}):
        right = program_of(asked[link:])
        wrong = [program_of(with_step(asked, place, step)[link:]) for step in others]
        drawn = [rng.choices(range(10), k=rng.choice((2, 3, 3, 4))) for _ in range(_POOL)]
        told = {}
        for value in drawn:
            expected = evaluate(right, value)
            if not isinstance(expected, Failure):
                differing = {i for i, one in enumerate(wrong) if evaluate(one, value) != expected}
                told[repr(value)] = (value, expected, differing)
        chosen = _chosen(list(told.values()), _HIDDEN if link == 0 else _OF_CAUSE)
        if not chosen or set().union(*(one[2] for one in chosen)) != set(range(len(others))):
            return None
        at = numbers[link]
        target = "" if link == 0 else f"{repository.paths[at]}:{repository.functions[at].name}"
        cases += [Case((value,), expected, target=target) for value, expected, _ in chosen]
    return tuple(cases)


def _chosen(found: list[tuple], count: int) -> list[tuple]:
    """So many of the inputs, each the one that tells most mistakes which those before it do not."""
    chosen: list[tuple] = []
    known: set[int] = set()
    while found and len(chosen) < count:
        best = max(found, key=lambda one: (len(one[2] - known), len(one[2])))
        found.remove(best)
        chosen.append(best)
        known |= best[2]
    return chosen
