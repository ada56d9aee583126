"""The language server: inline completions, jumps to the next edit, and reports of what became of
them.

    textDocument/inlineCompletion        the model's text at the cursor (LSP 3.18)
    workspace/executeCommand
      rlCode.nextEdit [uri, position]    {uri, range, newText, answer}, or null; newText is null for
                                         a jump to a line of any open file
      rlCode.accepted [uri, answer]      run by the editor after it inserted a suggestion, or went
                                         where a jump leads
      rlCode.dismissed [uri]             the person sent a suggestion or a jump away
      rlCode.moveClock [seconds]         with a manual clock alone, for tests
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lsprotocol import types
from pygls.exceptions import JsonRpcInvalidRequest
from pygls.lsp.server import LanguageServer
from pygls.protocol import LanguageServerProtocol
from pygls.protocol.json_rpc import RPCMessage, RPCRequest
from pygls.workspace import TextDocument, Workspace

from people.editor.clock import Clock, LoopClock, ManualClock
from people.editor.jumps import Jump, Jumps
from people.editor.next_edit import Rename, next_place, rename
from people.editor.outbox import Outbox
from people.editor.reporter import Reporter
from people.editor.tracker import Tracker
from people.simulated.client import Client, ServerRefused, Suggestion
from rl_code.text.lines import ending, split_lines

# Seconds that the end of the editor may take for events that are not acknowledged yet.
_FLUSH_S = 10.0
# Seconds for which a report is tried again before a warning.
_PATIENCE_S = 600.0


@dataclasses.dataclass(frozen=True)
class EditorConfig:
    """Settings of the requests for suggestions."""

    url: str
    key: str
    model: str = "auto"
    # The most tokens of a suggestion.
    max_tokens: int = 64
    # The most characters before and after the cursor that are sent; the former of a page, too.
    prefix: int = 6000
    suffix: int = 2000
    # The most other open files of which the first ``prefix`` characters are sent with a request, as
    # documents; the one opened last comes last. Only for a model that was trained with documents.
    open_files: int = 0
    # Folder for events that are not acknowledged yet; None for none: they end with this process.
    outbox: Path | None = None
    # Seconds after which a suggestion would come too late to be of use.
    timeout_s: float = 10.0
    # The endpoint that is asked for jumps to other files; "" for none. It may be another one, since
    # what says where to go next is trained apart (configs/tab_jumps.py), and has an outbox of its
    # own.
    jumps_at: str = ""
    jumps_outbox: Path | None = None

    def client(self, patience_s: float, url: str = "") -> Client:
        """Each thread needs its own. url: another endpoint. Raises ValueError for a wrong url."""
        return Client(url or self.url, self.key, timeout_s=self.timeout_s, patience_s=patience_s)

    def reporter(self) -> Reporter:
        """Reporter of events about suggestions. Raises OSError for a wrong outbox."""
        return Reporter(self.client(_PATIENCE_S), Outbox(self.outbox) if self.outbox else None)

    def reporter_of_jumps(self) -> Reporter:
        """Reporter of events about jumps, to the endpoint that answered them. Raises OSError."""
        outbox = Outbox(self.jumps_outbox) if self.jumps_outbox else None
        return Reporter(self.client(_PATIENCE_S, self.jumps_at), outbox)


class _Protocol(LanguageServerProtocol):
    """Answers every request, those behind ``shutdown`` with an error; the library says nothing to
    them, and their client would wait.
    """

    def handle_message(self, message: RPCMessage) -> None:
        if self._shutdown and isinstance(message, RPCRequest):
            error = JsonRpcInvalidRequest(f"{message.method} came after shutdown")
            self._send_response(message.id, error=error.to_response_error())
            return
        super().handle_message(message)


class EditorServer(LanguageServer):
    """One editor's server."""

    def __init__(self, config: EditorConfig, clock: Clock | None = None):
        super().__init__("rl-code", "1", protocol_cls=_Protocol)
        self.config = config
        self.clock = LoopClock() if clock is None else clock
        self.reporters = [config.reporter()]
        self.tracker = Tracker(self.clock, self.reporters[0].report)
        self.jumps: Jumps | None = None
        if config.jumps_at:
            self.reporters.append(config.reporter_of_jumps())
            client = config.client(patience_s=0.0, url=config.jumps_at)
            report = self.reporters[1].report
            self.jumps = Jumps(client, config.model, self.clock, report, config.prefix)
        # The session of each open document: what a person does in one file from opening to closing
        # it is one task, as far as an editor tells.
        self.sessions: dict[str, str] = {}
        # The last change of a name in each document.
        self.renamed: dict[str, Rename] = {}
        self._client = config.client(patience_s=0.0)
        self._one_at_a_time = asyncio.Lock()
        _add_documents(self)
        _add_commands(self)

    async def suggest(self, document: TextDocument, start: int, end: int) -> Suggestion | None:
        """Asks for the text that replaces characters ``start`` to ``end``. None where the server
        has none, or the document changed in the meantime.
        """
        source, version = document.source, document.version
        prefix = source[max(0, start - self.config.prefix) : start]
        suffix = source[end : end + self.config.suffix]
        async with self._one_at_a_time:
            if document.version != version:
                return None
            try:
                found = await asyncio.to_thread(
                    self._client.suggest,
                    prefix,
                    suffix,
                    self.config.model,
                    session=self.sessions.get(document.uri, ""),
                    max_tokens=self.config.max_tokens,
                    **self._open_files(document),
                )
            except ServerRefused as error:
                logging.warning("no suggestion: %s", error)
                return None
        if not found.text or document.version != version:
            return None
        self.tracker.shown(document.uri, found.id, start, end, found.text, found.seconds)
        return found

    def _open_files(self, document: TextDocument) -> dict[str, list[str]]:
        """The field of a request with the other files that are open; empty where none is sent."""
        if not self.config.open_files:
            return {}
        others = [one for one in self.workspace.text_documents.values() if one is not document]
        newest = others[-self.config.open_files :]
        return {"documents": [one.source[: self.config.prefix] for one in newest]}

    async def jump(self, document: TextDocument, line: int) -> Jump | None:
        """Asks where to go from a line, counted from 0; None for nowhere."""
        if self.jumps is None:
            return None
        opened = self.workspace.text_documents
        paths = {uri: one.path for uri, one in opened.items()}
        texts = {uri: one.source for uri, one in opened.items()}
        session = self.sessions.get(document.uri, "")
        return await self.jumps.ask(paths, texts, (document.uri, line + 1), session)

    def flush(self) -> None:
        """Reports what is not acknowledged yet; called at the end."""
        if not all([one.close(_FLUSH_S) for one in self.reporters]):
            logging.warning("some events were not acknowledged within %g s", _FLUSH_S)


def _add_documents(server: EditorServer) -> None:
    """Registers the handlers of what the protocol itself says of documents."""

    @server.feature(types.INITIALIZE)
    def initialize(params: types.InitializeParams) -> None:
        made = server.workspace
        folders = list(made.folders.values())
        server.protocol._workspace = _Workspace(
            made.root_uri, made._sync_kind, folders, made.position_encoding
        )

    @server.feature(types.TEXT_DOCUMENT_DID_OPEN)
    def did_open(params: types.DidOpenTextDocumentParams) -> None:
        opened = params.text_document
        server.sessions[opened.uri] = uuid.uuid4().hex
        server.tracker.opened(opened.uri, opened.text, opened.language_id)

    @server.feature(types.TEXT_DOCUMENT_DID_CHANGE)
    def did_change(params: types.DidChangeTextDocumentParams) -> None:
        uri = params.text_document.uri
        after = server.workspace.get_text_document(uri).source
        if server.jumps is not None:
            server.jumps.changed(uri, server.tracker.text(uri), after)
        if changed := rename(server.tracker.text(uri), after):
            # letter by letter: what was renamed before goes on being renamed
            before = server.renamed.get(uri)
            old = before.old if before and before.new == changed.old else changed.old
            server.renamed[uri] = Rename(old, changed.new)
        server.tracker.changed(uri, after)

    @server.feature(types.TEXT_DOCUMENT_DID_CLOSE)
    def did_close(params: types.DidCloseTextDocumentParams) -> None:
        server.tracker.closed(params.text_document.uri)
        if server.jumps is not None:
            server.jumps.closed(params.text_document.uri)
        server.renamed.pop(params.text_document.uri, None)
        server.sessions.pop(params.text_document.uri, None)

    # the capability is announced only where there are options
    @server.feature(types.TEXT_DOCUMENT_INLINE_COMPLETION, types.InlineCompletionOptions())
    async def inline_completion(
        params: types.InlineCompletionParams,
    ) -> types.InlineCompletionList:
        document = server.workspace.get_text_document(params.text_document.uri)
        at = document.offset_at_position(params.position)
        server.tracker.reject(document.uri, "asked_again")
        found = await server.suggest(document, at, at)
        if found is None:
            return types.InlineCompletionList([])
        told = types.Command("Accepted", "rlCode.accepted", arguments=[document.uri, found.id])
        here = types.Range(params.position, params.position)
        return types.InlineCompletionList(
            [types.InlineCompletionItem(found.text, range=here, command=told)]
        )

    @server.feature(types.SHUTDOWN)
    def shutdown(params: None) -> None:
        server.flush()


def _add_commands(server: EditorServer) -> None:
    """Registers the commands that an editor may carry out beside the protocol."""

    @server.command("rlCode.nextEdit")
    async def next_edit(uri: str, position: Any) -> dict[str, Any] | None:
        document = server.workspace.get_text_document(uri)
        line, character = (int(_part(position, name)) for name in ("line", "character"))
        cursor = document.offset_at_position(types.Position(line, character))
        place = next_place(document.source, cursor, server.renamed.get(uri))
        if place is None:
            return _shown(await server.jump(document, line))
        found = await server.suggest(document, place.start, place.end)
        if found is None:
            return None
        ends = [_position(document, offset) for offset in (place.start, place.end)]
        return {
            "uri": uri,
            "range": {"start": ends[0], "end": ends[1]},
            "newText": found.text,
            "answer": found.id,
        }

    @server.command("rlCode.accepted")
    def accepted(uri: str, answer: str) -> bool:
        if server.jumps is not None and server.jumps.accepted(answer):
            return True
        return server.tracker.accepted(uri, answer)

    @server.command("rlCode.dismissed")
    def dismissed(uri: str) -> None:
        server.tracker.reject(uri, "dismissed")
        if server.jumps is not None:
            server.jumps.reject("dismissed")

    if isinstance(server.clock, ManualClock):
        clock = server.clock

        @server.command("rlCode.moveClock")
        def move_clock(seconds: float) -> None:
            clock.move(float(seconds))


def _shown(jump: Jump | None) -> dict[str, Any] | None:
    """A jump as the editor reads it: the beginning of a line, and no text."""
    if jump is None:
        return None
    start = {"line": jump.line - 1, "character": 0}
    ends = {"start": start, "end": start}
    return {"uri": jump.uri, "range": ends, "newText": None, "answer": jump.answer}


def _part(position: Any, name: str) -> Any:
    """An argument of a command may have been read as a dictionary or as an object."""
    return position[name] if isinstance(position, dict) else getattr(position, name)


def _position(document: TextDocument, offset: int) -> dict[str, int]:
    """The place of a character as the editor counts."""
    before = document.source[:offset]
    *lines, column = [*split_lines(before, keepends=True), ""]
    if lines and not ending(lines[-1]):
        column = lines.pop()
    units = document.position_codec.client_num_units(column)
    return {"line": len(lines), "character": units}


class _Document(TextDocument):
    """A document whose lines end where the protocol says; those of pygls also end elsewhere."""

    @property
    def lines(self) -> Sequence[str]:
        return split_lines(self.source, keepends=True)


class _Workspace(Workspace):
    """The documents that an editor has open."""

    def _create_text_document(
        self,
        doc_uri: str,
        source: str | None = None,
        version: int | None = None,
        language_id: str | None = None,
    ) -> TextDocument:
        return _Document(
            doc_uri,
            source=source,
            version=version,
            language_id=language_id,
            sync_kind=self._sync_kind,
            position_codec=self._position_codec,
        )
