"""The elementary operations that generated tasks are composed of.

An operation is one expression over one variable. Its value for a constant k is computed from the
same text that a solution contains, so texts and expected values cannot differ. Variables are named
by type: ``xs`` a list, ``s`` a text, ``d`` a dictionary, ``n`` a number.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

VARIABLES = {"ints": "xs", "words": "xs", "text": "s", "dict": "d", "int": "n"}


@dataclasses.dataclass(frozen=True)
class Operation:
    """One elementary operation."""

    # A name of its own.
    name: str
    # The description for the agent, with ``k`` for the constant.
    words: str
    # The expression, with ``{k}`` for the constant.
    code: str
    # Operations of one family are easily taken for one another.
    family: str
    # The values that k may have; () if there is no constant.
    constants: tuple[int, ...] = ()
    # The types of the argument and of the result: keys of VARIABLES.
    takes: str = "ints"
    gives: str = "ints"


@dataclasses.dataclass(frozen=True)
class Failure:
    """Error that a step raised, in the words of the sandbox."""

    error: str


def _map(name, words, code, family, constants=()):
    return Operation(name, words, f"[{code} for x in xs]", family, constants)


def _filter(name, words, condition, constants):
    return Operation(name, words, f"[x for x in xs if {condition}]", "filter", constants)


def _reduce(name, words, code, family="reduce", constants=()):
    return Operation(name, words, code, family, constants, gives="int")


NUMBERS = (
    _map("add", "add k", "x + {k}", "arithmetic", (1, 2, 3, 4, 5)),
    _map("subtract", "subtract k", "x - {k}", "arithmetic", (1, 2, 3, 4, 5)),
    _map("times", "times k", "x * {k}", "arithmetic", (2, 3, 4, 5)),
    _map("modulo", "modulo k", "x % {k}", "arithmetic", (2, 3, 4, 5)),
    _map("divide", "divide by k", "x // {k}", "arithmetic", (2, 3, 4)),
    _map("cap", "cap at k", "min(x, {k})", "bound", (3, 4, 5, 6)),
    _map("raise", "raise to k", "max(x, {k})", "bound", (3, 4, 5, 6)),
    _map("square", "square", "x * x", "sign"),
    _map("negate", "negate", "-x", "sign"),
    _filter("above", "keep above k", "x > {k}", (2, 3, 4, 5, 6)),
    _filter("below", "keep below k", "x < {k}", (3, 4, 5, 6, 7)),
    _filter("multiples", "keep multiples of k", "x % {k} == 0", (2, 3, 4)),
    _filter("others", "drop multiples of k", "x % {k} != 0", (2, 3, 4)),
    _filter("without", "drop k", "x != {k}", (1, 2, 3, 4, 5)),
    Operation("first", "first k", "xs[:{k}]", "ends", (1, 2, 3)),
    Operation("skip", "skip k", "xs[{k}:]", "ends", (1, 2, 3)),
    Operation("last", "last k", "xs[-{k}:]", "ends", (1, 2, 3)),
    Operation("rotate", "rotate k", "xs[{k}:] + xs[:{k}]", "ends", (1, 2, 3)),
    Operation("append", "append k", "xs + [{k}]", "join", (1, 2, 3, 4, 5)),
    Operation("prepend", "prepend k", "[{k}] + xs", "join", (1, 2, 3, 4, 5)),
    Operation("sort", "sort", "sorted(xs)", "order"),
    Operation("reverse", "reverse", "xs[::-1]", "order"),
    Operation("unique", "sort unique", "sorted(set(xs))", "order"),
    _reduce("sum", "sum", "sum(xs)"),
    _reduce("max", "max", "max(xs)"),
    _reduce("min", "min", "min(xs)"),
    _reduce("length", "length", "len(xs)"),
    _reduce("count", "count k", "xs.count({k})", "pick", (1, 2, 3, 4, 5)),
    _reduce("item", "item k", "xs[{k}]", "pick", (0, 1, 2)),
)


def _text(name, words, code, family, constants=(), *, takes="text", gives="text"):
    return Operation(name, words, code, family, constants, takes, gives)


STRUCTURES = (
    _text("upper", "upper case", "s.upper()", "case"),
    _text("title", "title case", "s.title()", "case"),
    _text("mirror", "reverse text", "s[::-1]", "case"),
    _text("letters", "first k letters", "s[:{k}]", "part", (2, 3, 4, 5)),
    _text("tail", "skip k letters", "s[{k}:]", "part", (1, 2, 3)),
    _text("split", "split words", "s.split()", "split", gives="words"),
    _text("initials", "split letters", "list(s)", "split", gives="words"),
    _text("tally", "count letters", "{c: s.count(c) for c in s}", "tally", gives="dict"),
    _text("join", "join with space", "' '.join(xs)", "join_words", takes="words"),
    _text("glue", "join with dash", "'-'.join(xs)", "join_words", takes="words"),
    _text(
        "longer",
        "keep longer than k",
        "[x for x in xs if len(x) > {k}]",
        "size",
        (1, 2, 3),
        takes="words",
        gives="words",
    ),
    _text(
        "shorter",
        "keep shorter than k",
        "[x for x in xs if len(x) < {k}]",
        "size",
        (3, 4, 5),
        takes="words",
        gives="words",
    ),
    _text(
        "clip",
        "clip words to k",
        "[x[:{k}] for x in xs]",
        "trim",
        (1, 2, 3),
        takes="words",
        gives="words",
    ),
    _text(
        "trim",
        "trim k from words",
        "[x[{k}:] for x in xs]",
        "trim",
        (1, 2),
        takes="words",
        gives="words",
    ),
    _text("alphabetic", "sort words", "sorted(xs)", "word_order", takes="words", gives="words"),
    _text(
        "by_size",
        "sort by length",
        "sorted(xs, key=len)",
        "word_order",
        takes="words",
        gives="words",
    ),
    _text("sizes", "word lengths", "[len(x) for x in xs]", "measure", takes="words", gives="ints"),
    _text(
        "lengths",
        "map word to length",
        "{x: len(x) for x in xs}",
        "tally",
        takes="words",
        gives="dict",
    ),
    _text(
        "counts",
        "map word to count",
        "{x: xs.count(x) for x in xs}",
        "tally",
        takes="words",
        gives="dict",
    ),
    _text(
        "at_least",
        "keep values from k",
        "{a: b for a, b in d.items() if b >= {k}}",
        "values",
        (2, 3, 4),
        takes="dict",
        gives="dict",
    ),
    _text(
        "at_most",
        "keep values to k",
        "{a: b for a, b in d.items() if b <= {k}}",
        "values",
        (1, 2, 3),
        takes="dict",
        gives="dict",
    ),
    _text(
        "bump",
        "add k to values",
        "{a: b + {k} for a, b in d.items()}",
        "change",
        (1, 2, 3, 4),
        takes="dict",
        gives="dict",
    ),
    _text(
        "scale",
        "times k to values",
        "{a: b * {k} for a, b in d.items()}",
        "change",
        (2, 3, 4),
        takes="dict",
        gives="dict",
    ),
    _text("names", "sorted keys", "sorted(d)", "listing", takes="dict", gives="words"),
    _text("amounts", "sorted values", "sorted(d.values())", "measure", takes="dict", gives="ints"),
    _text("total", "sum of values", "sum(d.values())", "summary", takes="dict", gives="int"),
    _text("largest", "largest value", "max(d.values())", "summary", takes="dict", gives="int"),
)

OPERATIONS = {operation.name: operation for operation in (*NUMBERS, *STRUCTURES)}


def expression(name: str, k: int | None) -> str:
    """The operation's code under the constant k (None for an operation without constants)."""
    code = OPERATIONS[name].code
    return code if k is None else code.replace("{k}", str(k))


@functools.cache
def function(name: str, k: int | None) -> Callable[[Any], Any]:
    """The operation as a function of one value; what it raises becomes a Failure, and a Failure
    passes through.
    """
    compute = eval(f"lambda {VARIABLES[OPERATIONS[name].takes]}: {expression(name, k)}")

    def run(value: Any) -> Any:
        if value.__class__ is Failure:
            return value
        try:
            return compute(value)
        except (TypeError, ValueError, IndexError, AttributeError) as error:
            return Failure(f"{type(error).__name__}: {error}")

    return run
