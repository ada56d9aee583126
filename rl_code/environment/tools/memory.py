"""memory_store, memory_recall, memory_forget: notes for later episodes on the same repository.

The notes are in ``Workspace.notes``; ``rl_code.environment.notes`` says which ones these are.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from rl_code.environment.tools.text import cut_middle, one_line
from rl_code.environment.tools.tool import Result, Tool, Words, function_schema
from rl_code.environment.tools.workspace import Workspace

# The most characters of a note's name.
NAME_LENGTH = 60
_WIDTH = 400
_VERBOSE_WIDTH = 4000
_WORD = re.compile(r"\w+")


@dataclasses.dataclass(frozen=True)
class MemoryStore(Tool):
    """Keeps a text under a name. Where there are too many, the oldest is forgotten."""

    # Most notes of a repository, and most characters of one.
    most: int = 32
    longest: int = 400

    schema: ClassVar[Mapping[str, Any]] = function_schema(
        "memory_store",
        "Keep a note for later work on this repository. A note of the same name is replaced.",
        {
            "name": {"type": "string", "description": "A short name without spaces."},
            "text": {"type": "string", "description": "What to remember."},
        },
        ("name", "text"),
    )
    notes: ClassVar[bool] = True
    words: ClassVar[Words | None] = Words(
        "store", line={"name": "a name"}, below={"text": "what to remember"}
    )

    def __post_init__(self) -> None:
        if min(self.most, self.longest) < 1:
            raise ValueError(f"{self.most=} and {self.longest=} must be at least 1")

    def run(self, arguments: Mapping[str, Any], workspace: Workspace) -> Result:
        return self.note(arguments, workspace.notes)

    def note(self, arguments: Mapping[str, Any], notes: dict[str, str]) -> Result:
        """Stores a note. A name is one word, so that every protocol can write it."""
        name, text = arguments["name"], arguments["text"]
        if not name or len(name) > NAME_LENGTH or name.split() != [name]:
            return Result(f"a name has 1 to {NAME_LENGTH} characters and no space", ok=False)
        if len(text) > self.longest:
            return Result(f"{len(text)} characters; at most {self.longest}", ok=False)
        notes.pop(name, None)  # what is stored again is the newest
        notes[name] = text
        while len(notes) > self.most:
            del notes[next(iter(notes))]
        return Result("stored")


@dataclasses.dataclass(frozen=True)
class MemoryRecall(Tool):
    """The notes that a question names or has most words in common with, or the names of all."""

    # Most notes that are shown.
    most: int = 3

    schema: ClassVar[Mapping[str, Any]] = function_schema(
        "memory_recall",
        "Read the notes that earlier work on this repository left: those with most words of the "
        "question, or the names of all where nothing is asked.",
        {"question": {"type": "string", "description": "A name or a few words."}},
        (),
    )
    words: ClassVar[Words | None] = Words("recall", line={"question": "a word"})

    def __post_init__(self) -> None:
        if self.most < 1:
            raise ValueError(f"{self.most=} must be at least 1")

    def run(self, arguments: Mapping[str, Any], workspace: Workspace) -> Result:
        question = arguments.get("question", "")
        return Result(self.told(question, workspace.notes, verbose=workspace.verbose))

    def told(self, question: str, notes: Mapping[str, str], *, verbose: bool) -> str:
        """Text that answers a question about notes."""
        width = _VERBOSE_WIDTH if verbose else _WIDTH
        asked = set(_WORD.findall(question.lower()))
        if not notes:
            return "no notes"
        if not asked:
            return cut_middle(", ".join(reversed(list(notes))), width)
        scored = []
        for age, (name, text) in enumerate(reversed(list(notes.items()))):
            shared = len(asked & set(_WORD.findall(f"{name} {text}".lower())))
            other_name = not set(_WORD.findall(name.lower())) <= asked
            if shared:
                scored.append((other_name, -shared, age, f"{name}: {text}"))
        # those whose name is asked for before those that mention it; then most words in common
        # first, of equals the newest
        found = [text for *_, text in sorted(scored)[: self.most]]
        return cut_middle("\n".join(found), width) if found else "no such note"


def recalled(content: str, names: Iterable[str]) -> list[str]:
    """Names of the notes that a result of ``memory_recall`` shows, in the given order."""
    begun = {line.partition(": ")[0] for line in content.split("\n") if ": " in line}
    return [name for name in names if name in begun]


@dataclasses.dataclass(frozen=True)
class MemoryForget(Tool):
    """Drops a note."""

    schema: ClassVar[Mapping[str, Any]] = function_schema(
        "memory_forget",
        "Drop a note that is wrong or of no use any more.",
        {"name": {"type": "string", "description": "The name of the note."}},
        ("name",),
    )
    notes: ClassVar[bool] = True
    words: ClassVar[Words | None] = Words("forget", line={"name": "a name"})

    def run(self, arguments: Mapping[str, Any], workspace: Workspace) -> Result:
        return self.note(arguments, workspace.notes)

    def note(self, arguments: Mapping[str, Any], notes: dict[str, str]) -> Result:
        """Drops a note."""
        if notes.pop(arguments["name"], None) is None:
            return Result(f"no note {one_line(arguments['name'], 40)!r}", ok=False)
        return Result("forgotten")
