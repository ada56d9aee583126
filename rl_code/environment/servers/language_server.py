"""A client of language servers (LSP 3.17): what they say about the files of a workspace.

Files are opened as an editor opens them, and what changed since the last question is told as an
edit, so a server checks again only what depends on it. Diagnostics are asked for
(textDocument/diagnostic) where the server offers that, and waited for (publishDiagnostics) where it
does not. The server is not trusted: it read what a model wrote.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import re
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rl_code.environment.sandbox.programs import Changes
from rl_code.environment.sandbox.snapshot import texts
from rl_code.environment.servers.stream import Stream

# Diagnostics of one file that are read, and characters of each.
_MOST = 1000
_LONGEST = 1000
# Files that are asked about before the first answer is read. More could fill the buffers in both
# directions, with both sides waiting.
_AT_ONCE = 16
# Severities of the protocol.
ERROR, WARNING, INFORMATION, HINT = 1, 2, 3, 4
# Kinds of changes of watched files.
_CREATED, _CHANGED, _DELETED = 1, 2, 3
_NO_METHOD = -32601
_NAME = re.compile(r"[\w.-]{1,40}")


@dataclasses.dataclass(frozen=True)
class LanguageServerConfig:
    """Command that starts a language server, and the files that it reads."""

    # Name under which its diagnostics are shown.
    name: str
    # The program and its arguments. Programs of ``programs`` need no path.
    command: tuple[str, ...]
    # Programs and folders of this machine that the sandbox shows below /opt/programs: an absolute
    # path, or a name that is found beside Python or on PATH. The first is the server itself.
    programs: tuple[str, ...]
    # The language's name in the protocol.
    language: str
    # Names of the files that it reads, as in a shell.
    patterns: tuple[str, ...]
    # Its initializationOptions.
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # Variables of its environment.
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (_NAME.fullmatch(self.name) and self.command and self.patterns and self.language):
            raise ValueError(
                f"{self.name=} must be a word of at most 40 characters, and {self.command=}, "
                f"{self.patterns=} and {self.language=} must not be empty"
            )

    def reads(self, path: str) -> bool:
        """True if the server reads a file of this path."""
        name = path.rpartition("/")[2]
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.patterns)


_PYTHON = ("*.py", "*.pyi")
# One thread each: many episodes share the machine.
_ONE_THREAD = {"RAYON_NUM_THREADS": "1", "TY_MAX_PARALLELISM": "1"}
LANGUAGE_SERVERS: dict[str, LanguageServerConfig] = {
    "ruff": LanguageServerConfig(
        "ruff", ("ruff", "server"), ("ruff",), "python", _PYTHON, environment=_ONE_THREAD
    ),
    "ty": LanguageServerConfig(
        "ty", ("ty", "server"), ("ty",), "python", _PYTHON, environment=_ONE_THREAD
    ),
}


class Diagnostic(NamedTuple):
    """One thing that a server says about a file."""

    path: str
    # Counted from 1.
    line: int
    column: int
    # ERROR, WARNING, INFORMATION or HINT.
    severity: int
    # The server, and its name for the kind of problem.
    source: str
    code: str
    message: str


class LanguageServer:
    """A language server that runs. Every method raises StreamEnded when it has ended or is late.

    root: the workspace's folder, as the server sees it.
    """

    def __init__(self, stream: Stream, config: LanguageServerConfig, root: str, deadline: float):
        self.config = config
        self._stream = stream
        self._root = f"file://{urllib.parse.quote(root)}"
        # The version of each open file, and its text.
        self._open: dict[str, tuple[int, str]] = {}
        # The last version of each file that was ever open.
        self._last: dict[str, int] = {}
        # Open files that are shown again although their text is the same.
        self._stale: set[str] = set()
        # True once the server has published with a version; without one it then clears a file.
        self._says_versions = False
        # Diagnostics by URI that the server published last, without being asked.
        self._published: dict[str, Any] = {}
        answer = self._ask("initialize", self._introduction(), deadline)
        capabilities = answer.get("capabilities") if isinstance(answer, dict) else None
        # A server without this one publishes diagnostics by itself.
        self._answers = isinstance(capabilities, dict) and bool(
            capabilities.get("diagnosticProvider")
        )
        stream.notify("initialized", {})

    def changed(self, changes: Changes) -> None:
        """Tells which files are others than before."""
        events = []
        for path, entry in changes.files.items():
            if isinstance(entry, str) or entry.kind == "file":
                kind = _CHANGED if path in self._open else _CREATED
                events.append({"uri": self._uri(path), "type": kind})
        events += [{"uri": self._uri(path), "type": _DELETED} for path in changes.deleted]
        # The text of an open file reaches the server from here, not from the file.
        shown = texts(changes.files)
        for path in [*changes.deleted, *changes.files]:
            if path not in shown:
                self._close(path)
            elif path in self._open:
                self._show(path, shown[path])
        if events:
            self._stream.notify("workspace/didChangeWatchedFiles", {"changes": events})
        if events and not self._answers:
            # Not every server publishes again for files that depend on these; all do for a file
            # that is opened. One without versions would seem to answer when it clears a closed one.
            for path in [*self._open] if self._says_versions else ():
                self._close(path)
            self._stale = {*self._open}

    def diagnose(self, contents: Mapping[str, str], deadline: float) -> list[Diagnostic]:
        """Diagnostics of the server on the files with these texts, by file and line."""
        for path, text in contents.items():
            self._show(path, text)
        if self._answers:
            found = [
                answer.get("items") if isinstance(answer, dict) else ()
                for paths in itertools.batched(contents, _AT_ONCE)
                for answer in self._ask_about(paths, deadline)
            ]
        else:
            found = [self._wait_for(self._uri(path), deadline) for path in contents]
        said = [
            diagnostic
            for path, items in zip(contents, found, strict=True)
            for diagnostic in _read(path, items, self.config.name)
        ]
        return sorted(set(said))

    def _introduction(self) -> dict[str, Any]:
        """The parameters of the request ``initialize``."""
        return {
            "processId": None,
            "rootUri": self._root,
            "workspaceFolders": [{"uri": self._root, "name": "workspace"}],
            "initializationOptions": dict(self.config.options),
            "capabilities": {
                "textDocument": {
                    "diagnostic": {"dynamicRegistration": False},
                    "publishDiagnostics": {"versionSupport": True},
                    "synchronization": {},
                },
                "workspace": {
                    "didChangeWatchedFiles": {"dynamicRegistration": True},
                    "workspaceFolders": True,
                },
            },
        }

    def _show(self, path: str, text: str) -> None:
        """Opens a file, or tells its new text."""
        uri = self._uri(path)
        version, before = self._open.get(path, (0, ""))
        if version and before == text and path not in self._stale:
            return
        self._stale.discard(path)
        self._published.pop(uri, None)
        number = self._last[path] = self._last.get(path, 0) + 1
        self._open[path] = (number, text)
        if version:
            self._stream.notify(
                "textDocument/didChange",
                {
                    "textDocument": {"uri": uri, "version": number},
                    "contentChanges": [{"text": text}],
                },
            )
        else:
            language = self.config.language
            document = {"uri": uri, "languageId": language, "version": number, "text": text}
            self._stream.notify("textDocument/didOpen", {"textDocument": document})

    def _close(self, path: str) -> None:
        """Closes a file if it is open."""
        if self._open.pop(path, None):
            uri = self._uri(path)
            self._stream.notify("textDocument/didClose", {"textDocument": {"uri": uri}})

    def _wait_for(self, uri: str, deadline: float) -> Any:
        """Diagnostics of a file as it stands, from a server that publishes them without being
        asked.
        """
        while uri not in self._published:
            self._next(deadline)
        return self._published[uri]

    def _ask_about(self, paths: Sequence[str], deadline: float) -> list[Any]:
        """The server's answers about some files."""
        asked = [
            self._stream.request(
                "textDocument/diagnostic", {"textDocument": {"uri": self._uri(path)}}, deadline
            )
            for path in paths
        ]
        return self._answers_to(asked, deadline)

    def _ask(self, method: str, params: Any, deadline: float) -> Any:
        """The result of a request; None where the server refused it."""
        return self._answers_to([self._stream.request(method, params, deadline)], deadline)[0]

    def _answers_to(self, numbers: Sequence[int], deadline: float) -> list[Any]:
        """The results of requests; None for what was refused."""
        answers: dict[int, Any] = {}
        while len(answers) < len(numbers):
            message = self._next(deadline)
            number = message.get("id")
            if "method" not in message and type(number) is int and number in numbers:
                answers[number] = message.get("result")
        return [answers[number] for number in numbers]

    def _next(self, deadline: float) -> dict[str, Any]:
        """The server's next message. Its own requests are answered, its news noted."""
        message = self._stream.read(deadline)
        method = message.get("method")
        params = message.get("params")
        if method == "textDocument/publishDiagnostics" and isinstance(params, dict):
            self._note(params)
        elif method is not None and "id" in message:
            self._stream.reply(message, _reply(method, params), deadline)
        return message

    def _note(self, params: dict[str, Any]) -> None:
        """Keeps what the server published, unless it is about an older text."""
        uri = params.get("uri")
        versions = [version for path, (version, _) in self._open.items() if self._uri(path) == uri]
        version = params.get("version")
        self._says_versions = self._says_versions or type(version) is int
        if version in versions or (versions and version is None and not self._says_versions):
            self._published[uri] = params.get("diagnostics")

    def _uri(self, path: str) -> str:
        return f"{self._root}/{urllib.parse.quote(path)}"


def _reply(method: Any, params: Any) -> dict[str, Any]:
    """The answer to a request of the server's."""
    match method:
        case "workspace/configuration":
            items = params.get("items") if isinstance(params, dict) else None
            return {"result": [None] * (len(items) if isinstance(items, list) else 0)}
        case "client/registerCapability" | "client/unregisterCapability":
            return {"result": None}
        case "window/workDoneProgress/create" | "workspace/diagnostic/refresh":
            return {"result": None}
    return {"error": {"code": _NO_METHOD, "message": "this client does not do that"}}


def _read(path: str, items: Any, server: str) -> Iterable[Diagnostic]:
    """The diagnostics among what a server sent about a file; what is none is left out."""
    for item in items[:_MOST] if isinstance(items, list) else ():
        match item:
            case {
                "range": {"start": {"line": int(line), "character": int(column)}},
                "message": str(message),
            }:
                severity = item.get("severity", ERROR)
                code = item.get("code", "")
                yield Diagnostic(
                    path,
                    line + 1,
                    column + 1,
                    severity if severity in (ERROR, WARNING, INFORMATION, HINT) else ERROR,
                    server,
                    code[:_LONGEST] if isinstance(code, str) else "",
                    message[:_LONGEST],
                )
