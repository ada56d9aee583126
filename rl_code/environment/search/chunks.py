"""Files in pieces that a search can find: functions and classes where there is a grammar, and
windows of lines elsewhere.

The parser runs in a sandbox of the pool's own (``parse.py``), one for all episodes. A file that it
cannot read, for which it takes too long, or which brings it down, is cut into windows. What it
answers is checked: at worst a file is cut in the wrong places.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from models.marks import encodable
from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.environment.sandbox.programs import ProgramsLost
from rl_code.environment.search import parse
from rl_code.environment.servers.companion import Companion, CompanionConfig
from rl_code.environment.servers.stream import Stream, StreamEnded
from rl_code.text.lines import split_lines

# Characters of the longest file that is parsed. Seconds that a parser may take for one, and to
# start.
PARSED = 200_000
_PARSE_S = 2.0
_START_S = 20.0
_WINDOW = 40
# Most pieces of a file, and how often its characters may stand in them on average.
_PIECES = 2500
_REPEATED = 2
_COMMAND = ("python3", "-I", "-B", "-c")
_PROGRAM = (
    "import sys; sys.path.insert(0, '/opt/programs'); sys.dont_write_bytecode = True; "
    "import parse; parse.main()"
)
_LIMITS = CompanionConfig(memory_mb=512, processes=8, cpu_s=3600, workspace_mb=1)


class Piece(NamedTuple):
    """Some lines of a file."""

    # Counted from 1, both included.
    first: int
    last: int
    # Name of the function or class, with dots; "" for none.
    name: str


def windows(text: str) -> list[Piece]:
    """The text in windows of lines."""
    count = max(len(split_lines(text)), 1)
    return [
        Piece(first, min(first + _WINDOW - 1, count), "") for first in range(1, count + 1, _WINDOW)
    ]


class Parser:
    """Cuts files; from any thread.

    grammars: the package of the grammar for each ending of a file's name, as {".py":
    "tree_sitter_python"}. Raises ValueError for a package that is not there.
    """

    def __init__(self, pool: SandboxPool, grammars: Mapping[str, str]):
        self._grammars = dict(grammars)
        packages = [package_folder(name) for name in ("tree_sitter", *grammars.values())]
        programs = [parse.__file__, *dict.fromkeys(packages)]
        self._pool = pool.beside(**_LIMITS.settings(programs))
        self._lock = threading.Lock()
        self._companion: Companion | None = None
        self._stream: Stream | None = None

    def pieces(self, path: str, text: str) -> list[Piece]:
        """The pieces of a file, in its order. Raises SandboxFault."""
        grammar = self._grammars.get(os.path.splitext(path)[1])
        if grammar is None or not text or len(text) > PARSED:
            return windows(text)
        with self._lock:
            try:
                return self._ask(grammar, text)
            except (StreamEnded, ProgramsLost):
                self._end()
                return windows(text)

    def close(self) -> None:
        """Ends the parser. May be called twice."""
        with self._lock:
            self._end()

    def _ask(self, grammar: str, text: str) -> list[Piece]:
        """The parser's pieces. Raises StreamEnded or ProgramsLost, and SandboxFault."""
        seconds = _PARSE_S
        if self._stream is None:
            self._companion = Companion(self._pool, {})
            start = time.monotonic() + _START_S
            _, self._stream = self._companion.start((*_COMMAND, _PROGRAM), "lines", start)
            seconds += _START_S
        self._stream.write({"grammar": grammar, "text": encodable(text)})
        answer = self._stream.read(time.monotonic() + seconds)
        return _checked(answer.get("pieces"), text)

    def _end(self) -> None:
        self._stream = None
        if self._companion is not None:
            self._companion.close()
            self._companion = None


def package_folder(name: str) -> str:
    """The folder of an installed package, which is not imported. Raises ValueError where there is
    none.
    """
    if not name.isidentifier():  # its parent would be imported
        raise ValueError(f"{name!r} must be the name of a package")
    found = importlib.util.find_spec(name)
    if found is None or not found.origin:
        raise ValueError(f"there is no package {name!r}; pip install {name.replace('_', '-')}")
    return str(Path(found.origin).parent)


def _checked(found: Any, text: str) -> list[Piece]:
    """The pieces that a parser found, if they are some of this text, one behind the other. Else its
    windows.
    """
    plain = windows(text)
    last_line = plain[-1].last
    pieces = []
    before = 0
    for one in found if isinstance(found, list) else ():
        match one:
            case [int(first), int(last), str(name)] if before <= first <= last <= last_line:
                pieces.append(Piece(first, last, name[:200]))
                before = first
            case _:
                return plain
    return plain if _is_too_much(pieces, text) else pieces or plain


def _is_too_much(pieces: list[Piece], text: str) -> bool:
    """True for more pieces, or more text in them, than a file should come to: of many definitions
    on one line each would have the whole line.
    """
    lines = split_lines(text, keepends=True) or [""]
    ends = [0, *itertools.accumulate(map(len, lines))]
    size = sum(ends[piece.last] - ends[piece.first - 1] for piece in pieces)
    return len(pieces) > _PIECES or size > _REPEATED * ends[-1]
