"""grep: the lines of the workspace that match a regular expression.

The search runs inside the sandbox, so an expression that would never end costs the time of one
call, and links that lead out of the workspace lead nowhere. Only an expression that stands for
itself, or one of our own, is looked for here, while the files are in memory: that always ends, and
starts nothing.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from rl_code.environment.tools.text import cut_middle, one_line
from rl_code.environment.tools.tool import Result, Tool, Words, function_schema
from rl_code.environment.tools.workspace import RefusedPath, Workspace
from rl_code.text.lines import split_lines

_WIDTH = 60
_VERBOSE_WIDTH = 200
_LONGEST = 400
# Characters of a line that leave the sandbox, and of all lines together. The sandbox keeps no more
# than ``SandboxConfig.output_bytes``, 4,000 by default.
_KEPT = 240
_ROOM = 3600
# The exit code where there is no such program, as in a world whose image has no Python.
_NO_PROGRAM = 127

# Expressions that match themselves and nothing else.
_LITERAL = re.compile(r"[\w ,:;=/<>@\"'-]+")
_LEFT_OUT = {".git", "__pycache__"}

# Reads what to search for from its standard input, as JSON, and prints what it found as JSON. Its
# lines are those of ``split_lines``.
_PROGRAM = """
import io, json, os, re, sys
asked = json.load(sys.stdin)
root = os.path.realpath(".")
start = os.path.realpath(asked["path"])
try:
    search = re.compile(asked["pattern"]).search
except (re.error, RecursionError, OverflowError) as error:
    sys.exit(print(json.dumps({"error": "no regular expression: %s" % error})))
if not os.path.exists(start) or os.path.commonpath([root, start]) != root:
    sys.exit(print(json.dumps({"error": "there is no such file or folder"})))
def files():
    if os.path.isfile(start):
        yield start
    for folder, folders, names in os.walk(start):
        folders[:] = sorted(name for name in folders if name not in (".git", "__pycache__"))
        for name in sorted(names):
            yield os.path.join(folder, name)
found, total, room = [], 0, asked["room"]
for path in files():
    if os.path.islink(path) or not os.path.isfile(path):
        continue
    try:
        with open(path, "rb") as file:
            data = file.read(1 << 20)
    except OSError:
        continue
    if b"\\0" in data:
        continue
    for number, line in enumerate(io.StringIO(data.decode("utf-8", "replace"), newline=""), 1):
        line = line.rstrip("\\r\\n")
        if search(line):
            total += 1
            match = (os.path.relpath(path, root), number, line[:asked["kept"]])
            room -= len(json.dumps(match)) + 2 if room > 0 else 0
            if len(found) < asked["most"] and room > 0:
                found.append(match)
print(json.dumps({"found": found, "total": total}))
"""


class Match(NamedTuple):
    """A line that matches."""

    path: str
    # Counted from 1.
    line: int
    text: str


class Found(NamedTuple):
    """Result of a search."""

    # The first ones; a folder's files stand before those of the folders in it.
    matches: Sequence[Match]
    # Number of lines that match.
    total: int
    # Reason why there was no search, in words for the model; "" if there was one.
    error: str = ""


def search(
    workspace: Workspace,
    pattern: str,
    *,
    most: int,
    seconds: float,
    path: str = "",
    bounded: bool = False,
) -> Found:
    """Searches the text files of the workspace, or those below ``path``, in the sandbox.

    bounded: whether the expression takes time in proportion to the text, whatever that is. most:
    how many matches are returned; fewer where they are long. seconds: wall-clock, less where
    the episode has less left. Files are read up to 1 MiB; folders of git and of bytecode are left
    out. Raises RefusedPath for a path that leads out of the workspace, and SandboxFault.
    """
    path = workspace.resolve(path) if path not in ("", ".") else "."
    if (texts := workspace.texts) is not None:
        if _LITERAL.fullmatch(pattern):
            return _in_memory(texts, lambda line: pattern in line, path, most)
        if bounded:
            return _in_memory(texts, re.compile(pattern).search, path, most)
    asked = {"pattern": pattern, "path": path, "most": most, "kept": _KEPT, "room": _ROOM}
    timeout_s = min(seconds, workspace.timeout_s)
    argv = ["python3", "-I", "-S", "-c", _PROGRAM]
    done = workspace.sandbox.run(argv, stdin=json.dumps(asked), timeout_s=timeout_s)
    if done.timed_out:
        return Found((), 0, f"stopped after {timeout_s:g} s; use a simpler expression")
    if done.exit_code == _NO_PROGRAM:
        return Found((), 0, "the search needs python3, which this sandbox has not")
    try:
        answer = json.loads(done.stdout)
        if "error" in answer:
            return Found((), 0, str(answer["error"]))
        return Found([Match(*match) for match in answer["found"]], answer["total"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return Found((), 0, f"the search ended with exit code {done.exit_code}")


def _in_memory(
    texts: Mapping[str, str], matches_line: Callable[[str], object], path: str, most: int
) -> Found:
    """Result of a search in texts in memory: the same as that of the program in the sandbox."""
    if path == ".":
        below = {one: one.split("/") for one in texts}
    else:
        below = {one: [path] for one in texts if one == path}
        inside = [one for one in texts if one.startswith(f"{path}/")]
        below |= {one: one.removeprefix(f"{path}/").split("/") for one in inside}
    if not below and path != ".":
        return Found((), 0, "there is no such file or folder")
    matches = []
    total, room = 0, _ROOM
    # as a walk comes to them: a folder's files before those of the folders in it
    for one, parts in sorted(
        below.items(), key=lambda item: [*((1, name) for name in item[1][:-1]), (0, item[1][-1])]
    ):
        data = texts[one].encode(errors="replace")[: 1 << 20]
        if _LEFT_OUT.intersection(parts[:-1]) or b"\0" in data:
            continue
        for number, line in enumerate(split_lines(data.decode(errors="replace")), 1):
            if matches_line(line):
                total += 1
                match = Match(one, number, line[:_KEPT])
                room -= len(json.dumps(match)) + 2 if room > 0 else 0
                if len(matches) < most and room > 0:
                    matches.append(match)
    return Found(matches, total)


def describe(found: Found, *, verbose: bool) -> str:
    """The matches in words, one a line, and how many more there are."""
    width = _VERBOSE_WIDTH if verbose else _WIDTH
    lines = [f"{path}:{line}: {one_line(text, width)}" for path, line, text in found.matches]
    if not lines:
        return "no line matches" if verbose else "none"
    if found.total > len(lines):
        more = found.total - len(lines)
        lines.append(f"{more} more lines match" if verbose else f"+{more}")
    text = "\n".join(lines)
    return text if verbose else cut_middle(text, _LONGEST)


@dataclasses.dataclass(frozen=True)
class Grep(Tool):
    """The lines of the workspace that match a regular expression."""

    # Most lines that are shown.
    most: int = 12
    # Wall-clock seconds of one search.
    seconds: float = 4.0

    schema: ClassVar[Mapping[str, Any]] = function_schema(
        "grep",
        "Find the lines that match a regular expression of Python, in all text files of the "
        "workspace or below a path. Shows the first ones with file and line, and how many more "
        "there are.",
        {
            "pattern": {"type": "string", "description": "The regular expression."},
            "path": {
                "type": "string",
                "description": "File or folder to search in; all if left out.",
            },
        },
        ("pattern",),
    )
    documents: ClassVar[bool] = True
    words: ClassVar[Words | None] = Words(
        "grep", line={"path": "a path"}, below={"pattern": "a pattern"}
    )

    def __post_init__(self) -> None:
        if not (1 <= self.most <= 200 and 0 < self.seconds <= 60):
            raise ValueError(
                f"{self.most=} must be between 1 and 200, {self.seconds=} above 0 and at most 60"
            )

    def run(self, arguments: Mapping[str, Any], workspace: Workspace) -> Result:
        try:
            found = search(
                workspace,
                arguments["pattern"],
                most=self.most,
                seconds=self.seconds,
                path=arguments.get("path", ""),
            )
        except RefusedPath as error:
            return Result(str(error), ok=False)
        if found.error:
            return Result(one_line(found.error, _VERBOSE_WIDTH), ok=False)
        return Result(describe(found, verbose=workspace.verbose))
