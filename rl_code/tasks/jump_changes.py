"""Kinds of change that a programmer begins in one file, and where each has to be carried on.

A kind says how a definition changes, and the forms in which other lines use it: each form with the
text that the change makes of it, or None where it stays as it is. So a use is no place to go to by
its name alone: after a new parameter calls have to be edited and imports have not, after a move it
is the other way round.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

FUNCTIONS = (
    *("load", "save", "scan", "merge", "clean", "count", "fetch", "parse"),
    *("draw", "send", "trim", "sort", "pack", "join", "find", "mark"),
)
CONSTANTS = ("LIMIT", "WIDTH", "DEPTH", "RATE", "STEP", "EDGE", "SPAN", "BASE")
ARGUMENTS = ("path", "mode", "size", "name", "key", "rows", "text", "user")
# Numbers of definitions, and names that take a result.
_NUMBERS = range(2, 10)
_RESULTS = ("out", "got", "new", "left")


@dataclasses.dataclass(frozen=True)
class Use:
    """One form in which a line uses what is defined."""

    before: str
    # Text after the change; None where it needs none.
    after: str | None = None


@dataclasses.dataclass(frozen=True)
class Change:
    """One change of a definition, and its uses."""

    # Name that the old definition has.
    name: str
    # The lines of the definition, and those that they become; () where they go to another file.
    before: tuple[str, ...]
    after: tuple[str, ...]
    # The lines that another file gets; () for a change of one file.
    moved: tuple[str, ...]
    # Lines inside of functions.
    uses: tuple[Use, ...]
    # The import in another file; None where nobody can import it.
    imported: Use | None
    # An argument that is at hand where it is used.
    argument: str

    @property
    def calls(self) -> bool:
        """True if a function is defined, False for a constant."""
        return self.name.strip("_").islower()


@dataclasses.dataclass(frozen=True)
class Draw:
    """Names that a change is about."""

    home: str
    other: str
    # A function and a constant, and what they may be called afterwards.
    function: str
    new_function: str
    constant: str
    new_constant: str
    # Arguments.
    a: str
    b: str
    # What takes a result.
    out: str
    number: int

    @classmethod
    def of(cls, rng: random.Random, home: str, other: str) -> Draw:
        """Draw names of a change between two modules."""
        function, new_function = rng.sample(FUNCTIONS, 2)
        constant, new_constant = rng.sample(CONSTANTS, 2)
        a, b = rng.sample(ARGUMENTS, 2)
        out, number = rng.choice(_RESULTS), rng.choice(_NUMBERS)
        return cls(home, other, function, new_function, constant, new_constant, a, b, out, number)

    def imported(self, name: str, *, new: str = "", moved: bool = False) -> Use:
        """The import of a name. new: another name afterwards. moved: it comes from elsewhere."""
        before = f"from {self.home} import {name}"
        if not (new or moved):
            return Use(before)
        return Use(before, f"from {self.other if moved else self.home} import {new or name}")

    def function_change(
        self, head: tuple[str, str], body: tuple[str, ...] = (), new_body: tuple[str, ...] = (),
        uses: tuple[Use, ...] = (), imported: Use | None = None,
    ) -> Change:  # fmt: skip
        """A change of the function. head: its first line before and after. body: other lines."""
        body = body or (f"return {self.a}",)
        lines = [f"    {line}" for line in body]
        new_lines = [f"    {line}" for line in new_body or body]
        before, after = (head[0], *lines), (head[1], *new_lines)
        found = imported or self.imported(self.function)
        return Change(self.function, before, after, (), uses, found, self.a)

    def head(self, *arguments: str, name: str = "") -> str:
        """The first line of the function."""
        return f"def {name or self.function}({', '.join(arguments)}):"

    def call(self, *arguments: str, name: str = "") -> str:
        """A call of the function."""
        return f"{name or self.function}({', '.join(arguments)})"


def _both(d: Draw, before: str, after: str | None) -> tuple[Use, Use]:
    """A call whose value is returned, and one whose value is kept."""
    returned = Use(f"return {before}", after and f"return {after}")
    return returned, Use(f"{d.out} = {before}", after and f"{d.out} = {after}")


def renamed_function(d: Draw) -> Change:
    """Another name: imports and calls follow."""
    head = d.head(d.a), d.head(d.a, name=d.new_function)
    uses = _both(d, d.call(d.a), d.call(d.a, name=d.new_function))
    imported = d.imported(d.function, new=d.new_function)
    return d.function_change(head, uses=uses, imported=imported)


def new_parameter(d: Draw) -> Change:
    """One more parameter: calls follow, imports do not."""
    uses = _both(d, d.call(d.a), d.call(d.a, d.b))
    return d.function_change((d.head(d.a), d.head(d.a, d.b)), uses=uses)


def reordered_parameters(d: Draw) -> Change:
    """The order of two parameters: calls follow, unless they name them."""
    uses = _both(d, d.call(d.a, d.b), d.call(d.b, d.a))
    named = Use(f"return {d.call(f'{d.a}={d.a}', f'{d.b}={d.b}')}")
    return d.function_change((d.head(d.a, d.b), d.head(d.b, d.a)), uses=(*uses, named))


def changed_return(d: Draw) -> Change:
    """Two values are returned: calls whose value is kept follow."""
    kept = Use(f"{d.out} = {d.call(d.a)}", f"{d.out}, _ = {d.call(d.a)}")
    body, new_body = (f"return {d.a}",), (f"return {d.a}, {d.number}",)
    head = d.head(d.a), d.head(d.a)
    return d.function_change(head, body, new_body, (kept, kept, Use(d.call(d.a))))


def moved_constant(d: Draw) -> Change:
    """A constant that goes to another file: imports follow, uses do not."""
    line = f"{d.constant} = {d.number}"
    imported = d.imported(d.constant, moved=True)
    return Change(d.constant, (line,), (), (line,), _uses_of_constant(d, None), imported, d.a)


def _uses_of_constant(d: Draw, new: str | None) -> tuple[Use, ...]:
    before = f"{d.a} + {d.constant}"
    return _both(d, before, new and f"{d.a} + {new}")


def private(d: Draw) -> Change:
    """Another name for a helper that no other file uses."""
    old, new = f"_{d.function}", f"_{d.new_function}"
    use = Use(f"return {d.call(d.a, name=old)}", f"return {d.call(d.a, name=new)}")
    lines = [(d.head(d.a, name=name), f"    return {d.a}") for name in (old, new)]
    return Change(old, lines[0], lines[1], (), (use,), None, d.a)


def comment(d: Draw) -> Change:
    """Another comment: nothing follows."""
    old, new = (f"# by {d.a}", f"return {d.a}"), (f"# by {d.b}", f"return {d.a}")
    head = d.head(d.a), d.head(d.a)
    return d.function_change(head, old, new, _both(d, d.call(d.a), None))


def body(d: Draw) -> Change:
    """Another value of the same kind: nothing follows."""
    old, new = (f"return {d.a} + {d.number}",), (f"return {d.a} + {d.number + 1}",)
    head = d.head(d.a), d.head(d.a)
    return d.function_change(head, old, new, _both(d, d.call(d.a), None))


def changed_default(d: Draw) -> Change:
    """Another default of a parameter: nothing follows."""
    head = (d.head(d.a, f"{d.b}={number}") for number in (d.number, d.number + 1))
    return d.function_change((next(head), next(head)), uses=_both(d, d.call(d.a), None))


def renamed_constant(d: Draw) -> Change:
    """Another name for a constant: imports and uses follow."""
    before, after = f"{d.constant} = {d.number}", f"{d.new_constant} = {d.number}"
    imported = d.imported(d.constant, new=d.new_constant)
    uses = _uses_of_constant(d, d.new_constant)
    return Change(d.constant, (before,), (after,), (), uses, imported, d.a)


def moved_function(d: Draw) -> Change:
    """A function that goes to another file: imports follow, calls do not."""
    lines = d.head(d.a), f"    return {d.a}"
    imported = d.imported(d.function, moved=True)
    return Change(
        d.function, lines, (), lines, _both(d, d.call(d.a), None), imported, d.a
    )  # fmt: skip


def dropped_parameter(d: Draw) -> Change:
    """One parameter less: calls follow, imports do not."""
    uses = _both(d, d.call(d.a, d.b), d.call(d.a))
    return d.function_change((d.head(d.a, d.b), d.head(d.a)), uses=uses)


def new_default(d: Draw) -> Change:
    """One more parameter that has a default: nothing follows."""
    head = d.head(d.a), d.head(d.a, f"{d.b}={d.number}")
    return d.function_change(head, uses=_both(d, d.call(d.a), None))


type Kind = Callable[[Draw], Change]

# Kinds by name; those of tests are never trained on, and each asks for what others taught, of
# another kind of thing.
TRAINED: dict[str, Kind] = {
    one.__name__: one
    for one in (
        renamed_function,
        new_parameter,
        reordered_parameters,
        changed_return,
        moved_constant,
        private,
        comment,
        body,
        changed_default,
    )
}
HELD_OUT: dict[str, Kind] = {
    one.__name__: one for one in (renamed_constant, moved_function, dropped_parameter, new_default)
}
# Kinds after which nothing has to be edited.
NEEDLESS = frozenset({"comment", "body", "changed_default", "new_default"})
