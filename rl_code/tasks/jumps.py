"""Moments at which a programmer who edits several files is about to go to another place.

A small repository is made up, and a change of it (``jump_changes``) that was begun in one file. The
programmer has carried it on at none or some of the places that need it, in an order of their own;
``meta["remaining"]`` lists the others, the next one first. There may be none: the change needs
nothing else, or all is done. The other files have lines that look alike and need nothing: functions
of their own with the same name, parameters that hide it, comments, strings, methods.

The model reads a page (``jump_page``) and answers with a place, or with nothing. The page is a file
with a hole at its end, so that tool, protocol and served request are those of holes (``infill``).
There are no tests: what a place is worth is decided by a person (``people.simulated.jumper``).
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.tasks import jump_page
from rl_code.tasks.jump_changes import HELD_OUT, NEEDLESS, TRAINED, Change, Draw, Use
from rl_code.tasks.jump_page import EDITS, Edit, Place
from rl_code.tasks.source import Source
from rl_code.tasks.stream import Stream, check_split
from rl_code.text.lines import split_lines
from rl_code.types import Task, Tests

SOURCE = "jumps"
# The file with the page.
PAGE = "page.txt"
# Share of the demonstrations that suggest nothing, so that doing so is never out of reach.
P_NOTHING = 0.1

_MODULES = (
    "store",
    "views",
    "tasks",
    "forms",
    "cache",
    "model",
    "admin",
    "query",
    "tools",
    "hooks",
)
_CALLERS = ("main", "run", "show", "test", "work", "call", "start", "tick", "build", "check")
# Lines that a function without any use may have.
_FILLERS = ("return None", "print('ok')", "return 0")
# How often a kind of change that needs nothing else is drawn, beside 1 for the others.
_P_NEEDLESS = 0.5
# Chance that nothing is done yet.
_P_FRESH = 0.5


@dataclasses.dataclass
class _Line:
    """A line of a file that is being made."""

    text: str
    # Text after the change; None where it needs none.
    after: str | None = None


@dataclasses.dataclass
class _File:
    path: str
    lines: list[_Line] = dataclasses.field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(f"{line.text}\n" for line in self.lines)

    def add(self, *texts: str) -> None:
        """Lines that the change leaves as they are."""
        self.lines += [_Line(text) for text in texts]

    def use(self, use: Use, indent: str = "") -> None:
        """A line that uses the definition."""
        after = None if use.after is None else indent + use.after
        self.lines.append(_Line(indent + use.before, after))

    def places(self) -> list[Place]:
        """The lines that the change needs."""
        return [
            Place(self.path, number)
            for number, line in enumerate(self.lines, start=1)
            if line.after is not None
        ]


@dataclasses.dataclass(frozen=True)
class Moment:
    """A change that was begun, and the places at which it still has to be carried on."""

    # Path -> text of each file as it is now, in the order of the page.
    files: Mapping[str, str]
    # The edits so far, the oldest first.
    edits: tuple[Edit, ...]
    # The places that are left, the next one first, each with the text that its line becomes.
    remaining: tuple[tuple[Place, str], ...]
    # The kind of change, the order of the person, and how many places were done at first.
    about: Mapping[str, Any]

    @property
    def left(self) -> list[str]:
        """The places that are left, such as views.py:4, the next one first."""
        return [str(place) for place, _ in self.remaining]

    def page(self, longest: int = 1 << 16) -> str:
        """The page that a model reads. longest: the most characters (``jump_page.write``)."""
        return jump_page.write(self.edits, self.files, longest)

    def edited(self, place: Place) -> Moment:
        """The moment after the person has edited a place that is left. Raises KeyError for a place
        that is not.
        """
        after = dict(self.remaining)[place]
        lines = split_lines(self.files[place.path])
        edit = Edit(place.path, place.line, (lines[place.line - 1],), (after,))
        lines[place.line - 1] = after
        text = "".join(f"{line}\n" for line in lines)
        return dataclasses.replace(
            self,
            files={**self.files, place.path: text},
            edits=(*self.edits, edit),
            remaining=tuple(one for one in self.remaining if one[0] != place),
        )


def _here_first(places: Sequence[Place], files: Sequence[_File]) -> list[Place]:
    """The file of the change, then the others as they were opened: the order of the files."""
    return list(places)


def _imports_first(places: Sequence[Place], files: Sequence[_File]) -> list[Place]:
    """Imports, which stand at the top, then all else."""
    return sorted(places, key=lambda place: place.line > 1)


def _last_first(places: Sequence[Place], files: Sequence[_File]) -> list[Place]:
    """The file that was opened last, then the one before it."""
    order = [file.path for file in files]
    return sorted(places, key=lambda place: -order.index(place.path))


# Orders in which people carry a change on.
ORDERS = {
    "here_first": _here_first,
    "imports_first": _imports_first,
    "last_first": _last_first,
}


def kinds_of(split: str) -> tuple[str, ...]:
    """Names of a split's kinds of change: those of "test" are in no other split."""
    check_split(split)
    return tuple(HELD_OUT if split == "test" else TRAINED)


def generate(split: str, seed: int, index: int) -> Task:
    """Task ``index`` of a split's endless stream; the same arguments give the same task.

    meta: "kind" of change, "order" of the person, "remaining" places in that order, "done" places,
    and "repository", the path and text of each file as it is now. Raises ValueError for an unknown
    split.
    """
    found = moment(split, seed, index)
    about = {"source": SOURCE, "split": split, **found.about}
    page = found.page()
    return Task(
        id=f"jumps/{split}/{seed}/{index}",
        messages=({"role": "user", "content": "Say where the next edit is."},),
        files={PAGE: page},
        path=PAGE,
        visible_tests=Tests(),
        hidden_tests=Tests(),
        meta={
            **about,
            "hole": len(page),
            "repository": dict(found.files),
            "remaining": found.left,
            "outline": [str(place) for place, _ in jump_page.outline(found.edits, found.files)],
            # the file in which the last edit is
            "here": found.edits[-1].path,
        },
    )


def moment(split: str, seed: int, index: int) -> Moment:
    """The moment of a task of ``generate``, from which a person can go on; it raises the same."""
    names = kinds_of(split)
    rng = random.Random(f"jumps/{split}/{seed}/{index}")
    weights = [_P_NEEDLESS if name in NEEDLESS else 1.0 for name in names]
    kind = rng.choices(names, weights)[0]
    modules = rng.sample(_MODULES, 4)
    draw = Draw.of(rng, modules[0], modules[-1])
    change = {**TRAINED, **HELD_OUT}[kind](draw)
    callers = list(_CALLERS)
    rng.shuffle(callers)
    files = _files(rng, change, modules, callers)
    edits = _definition(change, files, modules[-1])
    order = rng.choice(tuple(ORDERS))
    places = ORDERS[order]([place for file in files for place in file.places()], files)
    most = min(len(places), EDITS - len(edits))
    done = 0 if rng.random() < _P_FRESH else rng.randint(0, most)
    by_path = {file.path: file for file in files}
    afters = [(place, by_path[place.path].lines[place.line - 1].after or "") for place in places]
    texts = {file.path: file.text for file in files}
    about = {"kind": kind, "order": order, "done": done}
    found = Moment(texts, tuple(edits), tuple(afters), about)
    for place in places[:done]:
        found = found.edited(place)
    return found


def _files(
    rng: random.Random, change: Change, modules: Sequence[str], callers: list[str]
) -> list[_File]:
    """The files before the change: that of the definition, then others as they were opened."""
    home = _File(f"{modules[0]}.py")
    _filler(rng, home, callers)
    home.add(*change.before)
    # a function may be used where it is defined; a constant that leaves would need an import
    if change.calls and not change.moved and rng.random() < 0.4:
        _caller(home, rng.choice(change.uses), change, callers)
    others = [_File(f"{name}.py") for name in modules[1:]]
    roles = [_user, rng.choice((_user, _own, _hidden)), _mention]
    if change.imported is None:
        roles = [_own, rng.choice((_own, _hidden)), _mention]
    if change.moved:
        # what the definition goes to has no other use of its name
        roles = [*rng.sample(roles[:2], 2), _mention]
    else:
        rng.shuffle(roles)
    for file, role in zip(others, roles, strict=True):
        role(rng, file, change, callers)
    if not change.moved and rng.random() < 0.5:
        others.pop(rng.randrange(len(others)))
    return [home, *others]


def _definition(change: Change, files: Sequence[_File], other: str) -> list[Edit]:
    """Makes the change where the thing is defined, and returns its edits."""
    home = files[0]
    texts = [line.text for line in home.lines]
    at = next(
        i for i in range(len(texts)) if tuple(texts[i : i + len(change.before)]) == change.before
    )
    before = home.text
    home.lines[at : at + len(change.before)] = [_Line(text) for text in change.after]
    edits = [jump_page.edit_between(home.path, before, home.text)]
    for file in files:
        if change.moved and file.path == f"{other}.py":
            before = file.text
            file.lines += [_Line(text) for text in change.moved]
            edits.append(jump_page.edit_between(file.path, before, file.text))
    return [edit for edit in edits if edit is not None]


def _filler(rng: random.Random, file: _File, callers: list[str]) -> None:
    """Functions that have nothing to do with the change, so that line numbers vary."""
    for _ in range(rng.randrange(3)):
        file.add(f"def {_next(callers)}():", f"    {rng.choice(_FILLERS)}", "")


def _next(names: list[str]) -> str:
    """A name for a function: each of them once before any comes again."""
    names.append(names.pop(0))
    return names[-1]


def _caller(file: _File, use: Use, change: Change, callers: list[str]) -> None:
    """A function that uses the definition."""
    file.add(f"def {_next(callers)}({change.argument}):")
    file.use(use, "    ")


def _user(rng: random.Random, file: _File, change: Change, callers: list[str]) -> None:
    """A file that imports the definition, and uses it once or twice."""
    assert change.imported is not None
    file.use(change.imported)
    for _ in range(rng.choice((1, 1, 2))):
        _caller(file, rng.choice(change.uses), change, callers)


def _own(rng: random.Random, file: _File, change: Change, callers: list[str]) -> None:
    """A file with a definition of its own that has the same name."""
    _filler(rng, file, callers)
    file.add(*change.before)
    use = rng.choice(change.uses)
    _caller(file, Use(use.before), change, callers)


def _hidden(rng: random.Random, file: _File, change: Change, callers: list[str]) -> None:
    """A function whose parameter has the same name."""
    _filler(rng, file, callers)
    file.add(f"def {_next(callers)}({change.name}, {change.argument}):")
    file.use(Use(rng.choice(change.uses).before), "    ")


def _mention(rng: random.Random, file: _File, change: Change, callers: list[str]) -> None:
    """The name in a comment, in a string, or as that of a method or field of another object."""
    mark = f"({change.argument})" if change.calls else ""
    field = f"    return box.{change.name}{mark}"
    text = rng.choice((f"    # {change.name} is slow", f"    print('{change.name}')", field))
    _filler(rng, file, callers)
    file.add(f"def {_next(callers)}(box):", text, *(() if text == field else ("    return box",)))


def demonstrate(task: Task, rng: random.Random, p_right: float) -> str:
    """Demonstrated answer: a place that still has to be edited, with this probability and where
    there is one; else any line of the page, or nothing.
    """
    if rng.random() < P_NOTHING:
        return ""
    remaining, lines = task.meta["remaining"], task.meta["outline"]
    if rng.random() < p_right:
        return rng.choice(remaining) if remaining else ""
    return rng.choice(lines) if lines else ""


def place_of(task: Task, answer: str) -> Place | None:
    """The place that an answer to a task names; None for one that names no line of its files."""
    return jump_page.read(answer, task.meta["repository"])


@dataclasses.dataclass(frozen=True)
class Jumps(Source):
    """An endless stream of moments in small repositories, without tests."""

    # "train", "validation" or "test", whose kinds of change are in no other split.
    split: str
    # Another seed gives another stream of tasks.
    seed: int = 0

    endless: ClassVar[bool] = True
    demonstrated: ClassVar[tuple[str, ...]] = (SOURCE,)

    def __post_init__(self) -> None:
        check_split(self.split)

    def load(self, pool: SandboxPool | None, workdir: Path | None) -> Sequence[Task]:
        return Stream(lambda i: generate(self.split, self.seed, i))
