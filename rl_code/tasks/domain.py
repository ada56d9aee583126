"""Check whether an input lies in the domain that a task's own asserts exercise.

A task says in one sentence and a few asserts what is asked. A reference also answers inputs about
which these say nothing: for instance, it has a branch for the empty list, a message for what is not
found, or a loop that is never entered. What it answers there is its author's choice, or an
accident. A correct solution may answer otherwise. So an input counts as meant only if

  - the reference takes no branch on it that it takes on none of the asserts' inputs, and
  - its answer is of a kind that the asserts expect: the types at every depth, signs of numbers,
    emptiness, and for a text that several asserts expect as it is, that very text.

Other solutions that pass the asserts are asked too, if there are any: the references of tasks whose
descriptions are nearly the same. An input on which they disagree is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rl_code.tasks.deduplicate import words_of
from rl_code.types import Task

# Share of the words of two descriptions from which their tasks may ask for the same function.
_SIMILAR = 0.6
_MOST_NEIGHBOURS = 4

# The name of the function that ``traced`` adds.
BRANCHES = "_branches_taken"
_TRACED = """

import sys as _sys
_taken = set()
def _note(code, offset, destination):
    if code.co_filename == __file__ and code.co_name not in ("_note", "{branches}"):
        _taken.add(f"{{code.co_name}}/{{code.co_firstlineno}}: {{offset}} to {{destination}}")
_watch = _sys.monitoring
_watch.use_tool_id(_watch.PROFILER_ID, "domain")
_watch.register_callback(_watch.PROFILER_ID, _watch.events.BRANCH, _note)
def {branches}(*arguments):
    _taken.clear()
    _watch.set_events(_watch.PROFILER_ID, _watch.events.BRANCH)
    try:
        {function}(*arguments)
    finally:
        _watch.set_events(_watch.PROFILER_ID, 0)
    return sorted(_taken)
"""


def traced(source: str, entry_point: str) -> str:
    """The module with one more function, BRANCHES. It calls the entry point and returns the names
    of the branches taken. Branches are jumps in the bytecode, so that conditions within a line
    count, too.
    """
    return source + _TRACED.format(branches=BRANCHES, function=entry_point)


def kinds(value: Any, place: str = "") -> set[tuple[str, str, str]]:
    """Properties of a value: its type, sign and emptiness, and those of its elements, by place."""
    kind = type(value).__name__
    if isinstance(value, bool) or value is None:
        return {(place, kind, "")}
    if isinstance(value, int | float):
        return {(place, "number", "negative" if value < 0 else "positive" if value else "zero")}
    found = {(place, kind, "" if not hasattr(value, "__len__") else "filled" if value else "empty")}
    parts: Iterable[tuple[str, Any]] = ()
    if isinstance(value, list | tuple | set | frozenset):
        parts = [("item", item) for item in value]
    elif isinstance(value, dict):
        parts = [("key", key) for key in value] + [("value", item) for item in value.values()]
    for name, part in parts:
        found |= kinds(part, f"{place}/{name}")
    return found


def expects(known: Sequence[Any], value: Any) -> bool:
    """True if ``value`` is of a kind that the known answers show."""
    messages = {answer for answer in known if isinstance(answer, str)}
    if isinstance(value, str) and len(messages) < len(known) and messages:
        return value in messages  # one of a few texts, as in "Valid" and "Invalid"
    shown: set[tuple[str, str, str]] = set().union(*map(kinds, known))
    return kinds(value) <= shown


def neighbours(task: Task, others: Sequence[Task]) -> list[Task]:
    """The tasks whose descriptions are most similar, whose references may solve this task too."""
    words = words_of(task.meta.get("description", ""))
    found = []
    for other in others:
        theirs = words_of(other.meta.get("description", ""))
        shared = len(words & theirs)
        share = shared / max(len(words | theirs), 1)
        if other.id != task.id and other.reference and shared > 1 and share >= _SIMILAR:
            found.append((-share, other.id, other))
    return [other for _, _, other in sorted(found, key=lambda one: one[:2])[:_MOST_NEIGHBOURS]]
