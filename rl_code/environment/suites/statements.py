"""Canaries of tests written as code (``Tests.code``): the same statement, asking for another value.

A statement runs out of the candidate's reach, so its canary need not hide: it runs behind the
statements, in a process of its own. What passes both, each by itself, has not been tested, such as
an object that answers every method of its own with "yes".
"""

from __future__ import annotations

import ast
import random
import textwrap

from rl_code.environment.suites.sites import sites, usable
from rl_code.environment.suites.source import SuiteFile, source_of

# Characters of the longest statement that is copied.
LONGEST = 50_000
_NAME = "test_statement"
_INDENT = "    "


def canary_of(statement: str, rng: random.Random) -> str | None:
    """The statement with another expected value. Code that gives the same value each time it is
    asked in the same state passes one of the two at most. None where nothing can be changed.
    """
    if len(statement) > LONGEST:
        return None
    try:
        return _canary_of(statement, rng)
    except RecursionError:  # of a tree that is too deep to be walked
        return None


def _canary_of(statement: str, rng: random.Random) -> str | None:
    source = source_of(statement)
    if source is None:
        return None
    if (name := _called_last(source)) is not None:
        return _changed(source, name, rng)
    whole = source_of(f"def {_NAME}():\n{textwrap.indent(statement, _INDENT)}")
    node = whole and whole.function((_NAME,))
    # a text of several lines would be another one
    if (
        not whole
        or not node
        or list(map(ast.dump, node.body)) != list(map(ast.dump, source.tree.body))
    ):
        return None
    changed = _changed(whole, _NAME, rng)
    if changed is None:
        return None
    lines = changed.splitlines(keepends=True)[1:]
    return "".join(line.removeprefix(_INDENT) for line in lines)


def _called_last(source: SuiteFile) -> str | None:
    """Name of the function that a statement defines and calls at its end, as ``check(candidate)``
    of HumanEval, and nowhere else; None for another statement.
    """
    match source.tree.body:
        case [*before, ast.Expr(ast.Call(ast.Name(name)))]:
            defined = [one for one in before if isinstance(one, ast.FunctionDef)]
            uses = [n for n in ast.walk(source.tree) if isinstance(n, ast.Name) and n.id == name]
            if len(uses) == 1 and any(one.name == name for one in defined):
                return name
    return None


def _changed(source: SuiteFile, name: str, rng: random.Random) -> str | None:
    """A text with another expected value in one of its functions; None where none can be."""
    node = source.function((name,))
    if node is None or not usable(source, node):
        return None
    # an exception may be of the class of another one
    found = [site for site in sites(source, node, rng) if site.kind != "exception"]
    found = [site for site in found if not site.told] or found
    if not found:
        return None
    site = rng.choice(found)
    return source.edited([(site.start, site.end, rng.choice(site.others).encode())])
