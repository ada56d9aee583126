"""The text of a task, made from what the package and its tests say of what was changed."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping

from rl_code.tasks.makers.candidate import Candidate
from rl_code.tasks.makers.package import Pin
from rl_code.tasks.makers.survey import TestFunction

# Names of tests that are told as words, at most.
_NAMES = 12


def deletion(
    pin: Pin, candidate: Candidate, tests: Iterable[TestFunction], visible: Iterable[TestFunction]
) -> str:
    """Asks for what was taken out.

    tests: all that the task has. visible: those that the agent finds in its workspace.
    """
    (function,) = candidate.functions
    (kind,) = candidate.operators
    where = f"`{function.qualname}` is missing from `{function.path}`"
    if candidate.kind == "emptied":
        where = f"`{function.qualname}` in `{function.path}` has no code any more"
    parts = [
        f"{_package(pin)} Its {kind} {where}. Write it again, as the rest of the package, its "
        "documentation and its tests expect it.",
        "Its signature:\n\n" + _quoted(candidate.told["signature"]),
    ]
    if candidate.told["documentation"]:
        parts.append("Its documentation:\n\n" + _quoted(candidate.told["documentation"]))
    names = dict.fromkeys(_as_words(test.name) for test in tests)
    names.pop("", None)
    parts.append(f"It is tested for: {', '.join(list(names)[:_NAMES])}." if names else "")
    shown = [f"`{name}`" for test in visible for name in test.ids[:1]]
    there = f"The workspace has {_listed(shown)}. " if shown else ""
    parts.append(f"{there}Other tests decide whether it is right.")
    return "\n\n".join(part for part in parts if part)


def bug(pin: Pin, candidate: Candidate, said: Mapping[str, str]) -> str:
    """Asks for a fault to be found and mended. said: id of a visible test -> how it failed."""
    several = len(candidate.functions) > 1
    failing = "\n".join(f"    {test}\n        {text}" for test, text in said.items())
    return "\n\n".join(
        [
            f"{_package(pin)} It was correct until {'some changes' if several else 'a change'} of "
            "its code. Now this fails:",
            failing,
            (
                "There is a fault in more than one file. Find and mend them all."
                if several
                else "Find the fault and mend it."
            )
            + " The tests are right. Other tests decide whether all is well.",
        ]
    )


def _package(pin: Pin) -> str:
    return f"The workspace holds the Python package {pin.name} {pin.version}."


def _quoted(text: str) -> str:
    return textwrap.indent(text.strip("\n"), "    ")


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _as_words(name: str) -> str:
    """Name of a test function as plain words."""
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.removeprefix("test"))
    return " ".join(spaced.strip("_").split("_")).lower()
