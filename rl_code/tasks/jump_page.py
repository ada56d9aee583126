"""The page that a model reads to say where the next edit is: recent edits, and the lines of the
open files that they may concern.

    edit store.py:3
    -def load(path):
    +def load(path, mode):
    open
    views.py:1 from store import load
    views.py:4 main> return load(path)

Behind "open" stands each line with a name that the edits are about, as a search prints it, with the
function or class that it stands in. The answer is a place such as ``views.py:4``, or nothing. A
page is the text before a hole and nothing stands behind it, so that ``/v1/completions`` puts it to
a model as it puts a hole of a file. Editors write the same pages (``people.editor.jumps``).
"""

from __future__ import annotations

import dataclasses
import itertools
import keyword
import re
from collections.abc import Iterator, Mapping, Sequence

from rl_code.text.lines import split_lines

# Edits of a page: the latest ones.
EDITS = 3
# The most lines of a page behind "open", the most changed lines of an edit, and the most characters
# of a line that are shown.
_LINES, _CHANGED, _WIDTH = 40, 6, 80
_NAME = re.compile(r"[^\W\d]\w*")
_DEFINED = re.compile(r"\s*(?:async\s+def|def|class)\s+(\w+)|(\w+)\s*(?::[^=]+)?=(?!=)")
_HEAD = re.compile(r"\s*(?:async\s+def|def|class)\s+(\w+)")
_ANSWER = re.compile(r"\s*(\S.*):([0-9]{1,7})\s*")


@dataclasses.dataclass(frozen=True)
class Edit:
    """One edit: whole lines of a file that were replaced by others."""

    path: str
    # The first line that is another one now, from 1.
    line: int
    removed: tuple[str, ...]
    added: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Place:
    """A line of a file, from 1."""

    path: str
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


def edit_between(path: str, before: str, after: str) -> Edit | None:
    """The lines in which two texts of a file differ, as one edit; None where no line differs."""
    old, new = split_lines(before), split_lines(after)
    same = 0
    while same < min(len(old), len(new)) and old[same] == new[same]:
        same += 1
    tail = 0
    while tail < min(len(old), len(new)) - same and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    removed, added = old[same : len(old) - tail], new[same : len(new) - tail]
    if not removed and not added:
        return None
    return Edit(path, same + 1, tuple(removed), tuple(added))


def write(edits: Sequence[Edit], files: Mapping[str, str], longest: int = 1 << 16) -> str:
    """The page of the latest edits.

    files: path -> text of each open file, as it is now. The order is that of the page; the file of
    the last edit comes first. longest: the most characters; the last lines are left out for it.
    """
    latest = edits[-EDITS:]
    parts = []
    for edit in latest:
        parts.append(f"edit {edit.path}:{edit.line}")
        parts += [f"-{line[:_WIDTH]}" for line in edit.removed[:_CHANGED]]
        parts += [f"+{line[:_WIDTH]}" for line in edit.added[:_CHANGED]]
    parts.append("open")
    size = sum(len(part) + 1 for part in parts)
    for place, text in itertools.islice(outline(latest, files), _LINES):
        line = f"{place} {text}"
        size += len(line) + 1
        if size > longest:
            break
        parts.append(line)
    return "\n".join([*parts, ""])


def outline(edits: Sequence[Edit], files: Mapping[str, str]) -> Iterator[tuple[Place, str]]:
    """Each line of the files that has a name which the edits are about, as it is shown. Lines that
    the edits themselves wrote are left out.
    """
    about = frozenset[str]().union(*(_about(edit, files.get(edit.path, "")) for edit in edits))
    written = {Place(edit.path, edit.line + i) for edit in edits for i in range(len(edit.added))}
    first = edits[-1].path if edits else ""
    for path in sorted(files, key=lambda path: path != first):
        for number, (line, scope) in enumerate(_scoped(files[path]), start=1):
            place = Place(path, number)
            if place not in written and about.intersection(_NAME.findall(line)):
                inside = f"{scope}> " if scope else ""
                yield place, f"{inside}{line.strip()[:_WIDTH]}"


def read(answer: str, files: Mapping[str, str]) -> Place | None:
    """The place that an answer names; None for one that names no line of an open file."""
    found = _ANSWER.fullmatch(answer)
    if found is None or found[1] not in files:
        return None
    place = Place(found[1], int(found[2]))
    return place if 1 <= place.line <= len(split_lines(files[place.path])) else None


def _about(edit: Edit, text: str) -> frozenset[str]:
    """Names that an edit is about: those that its lines define, or else that of the function or
    class around it; and names that only one side of it has.
    """
    changed = (*edit.removed, *edit.added)
    defined = {name for line in changed if (name := _defines(line))}
    if not defined:
        scopes = [scope for _, scope in _scoped(text)][: edit.line]
        defined = {scopes[-1]} if scopes and scopes[-1] else set()
    old, new = (
        {n for line in side for n in _code_names(line)} for side in (edit.removed, edit.added)
    )
    return frozenset(defined | (old ^ new))


def _defines(line: str) -> str:
    """The function, class or name of the module that a line defines; "" for none."""
    found = _DEFINED.match(line)
    return (found[1] or found[2]) if found else ""


def _code_names(lines: Sequence[str]) -> set[str]:
    """Names of lines that may stand in other files; those of a comment tell nothing."""
    code = " ".join(line.partition("#")[0] for line in lines)
    return {n for n in _NAME.findall(code) if len(n) > 1 and not keyword.iskeyword(n)}


def _scoped(text: str) -> Iterator[tuple[str, str]]:
    """Each line of a file, with the name of the innermost function or class that it stands in; ""
    at the top. Told by the indentation, so that a file whose syntax is broken has scopes, too.
    """
    around: list[tuple[int, str]] = []
    for line in split_lines(text):
        code = line.strip()
        indent = len(line) - len(line.lstrip())
        if code:
            while around and around[-1][0] >= indent:
                around.pop()
        yield line, around[-1][1] if around else ""
        if head := _HEAD.match(line):
            around.append((indent, head[1]))
