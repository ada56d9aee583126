"""The language server, started as a program and spoken with over its standard input and output."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import programs
from tests.late import Late
from tests.people.simulated.fake_server import FakeServer

clock = Late("people.editor.clock")
editor = Late("people.editor.server")
types = Late("lsprotocol.types")
lsp_client = Late("pygls.lsp.client")


ROOT = Path(__file__).resolve().parents[3]
URI = "file:///nowhere/a.py"
# A form feed and a line separator end no line of the protocol.
TEXT = "# ü😀\f\u2028\ndef f(x):\n    return \n"
CURSOR = (2, 11)
# Generous: the machine may be busy with other things.
PATIENCE_S = 240.0


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    server = FakeServer()
    yield server
    server.close()


def command(url: str) -> list[str]:
    return [sys.executable, "-m", "launch.lsp", f"--served_at={url}", "--clock=manual"]


@contextlib.contextmanager
def within(url: str, **settings: str) -> Iterator[int]:
    """The port of a language server in a thread of this process: its program takes a second to
    start. It ends with its only client. settings: others of its config.
    """

    def serve() -> None:
        connection, _ = listener.accept()
        with connection, connection.makefile("rb") as given, connection.makefile("wb") as said:
            config = editor.EditorConfig(url, "key-7", **settings)
            made = editor.EditorServer(config, clock.ManualClock())
            made.start_io(given, said)
            made.flush()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def talk(url: str, conversation, port: int | None = None) -> None:
    """Runs a conversation with a language server, from its start to its exit.

    port: where the server listens; None to start its program.
    """

    async def run() -> None:
        client = lsp_client.LanguageClient("test", "1")
        program, *arguments = command(url)
        environment = {**os.environ, "RL_CODE_KEY": "key-7"}
        if port is None:
            await client.start_io(program, *arguments, cwd=ROOT, env=environment)
        else:
            await client.start_tcp("127.0.0.1", port)
        answer = await client.initialize_async(
            types.InitializeParams(capabilities=types.ClientCapabilities(), process_id=os.getpid())
        )
        client.initialized(types.InitializedParams())
        client.text_document_did_open(
            types.DidOpenTextDocumentParams(types.TextDocumentItem(URI, "python", 1, TEXT))
        )
        await conversation(client, answer.capabilities)
        await client.shutdown_async(None)
        client.exit(None)
        await client.stop()

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


async def ask(client, position=CURSOR):
    params = types.InlineCompletionParams(
        types.InlineCompletionContext(types.InlineCompletionTriggerKind.Automatic),
        types.TextDocumentIdentifier(URI),
        types.Position(*position),
    )
    return (await client.text_document_inline_completion_async(params)).items


def change(client, version: int, text: str, start=CURSOR, end=CURSOR, uri=URI) -> None:
    part = types.TextDocumentContentChangePartial(
        types.Range(types.Position(*start), types.Position(*end)), text
    )
    document = types.VersionedTextDocumentIdentifier(version, uri)
    client.text_document_did_change(types.DidChangeTextDocumentParams(document, [part]))


async def execute(client, name: str, *arguments):
    params = types.ExecuteCommandParams(name, list(arguments))
    return await client.workspace_execute_command_async(params)


def test_an_accepted_suggestion_is_reported_with_its_survival(server):
    async def conversation(client, capabilities):
        assert capabilities.inline_completion_provider is not None
        (item,) = await ask(client)
        assert item.insert_text == "x + 1"
        (path, body, headers), *_ = server.requests
        assert path == "/v1/completions" and headers["Authorization"] == "Bearer key-7"
        assert body["prompt"].endswith("    return ") and body["suffix"] == "\n"
        assert body["prompt"].startswith("# ü😀\f\u2028\n")
        await execute(client, "rlCode.moveClock", 3.0)
        change(client, 2, item.insert_text)
        # the command that the editor runs after the insertion is no second acceptance
        assert await execute(client, item.command.command, *item.command.arguments) is False
        await execute(client, "rlCode.moveClock", 30.0)
        change(client, 3, "2", (2, 15), (2, 16))
        await execute(client, "rlCode.moveClock", 3600.0)

    talk(server.url, conversation)
    (shown,), (accepted,) = server.of_kind("shown"), server.of_kind("accepted")
    assert shown["answer"] == accepted["answer"] == "cmpl-1"
    assert accepted["value"] == 3.0
    alive = {one["horizon_s"]: one["value"] for one in server.of_kind("retained")}
    assert alive == {30.0: 1.0, 300.0: pytest.approx(2 / 3), 3600.0: pytest.approx(2 / 3)}
    assert not server.of_kind("rejected")


def test_rejections_and_faults_of_the_endpoint_are_reported_once_it_is_back(server):
    async def conversation(client, capabilities):
        await ask(client)
        server.faults = ["drop", 503, "lose"]
        change(client, 2, "y")
        await asyncio.to_thread(server.wait_for, "rejected", 1, PATIENCE_S)
        # nothing is shown where the server has nothing, or refuses
        server.complete = lambda prefix, suffix: ""
        assert not await ask(client, (2, 12))
        server.complete = lambda prefix, suffix: None
        assert not await ask(client, (2, 12))

    with within(server.url) as port:
        talk(server.url, conversation, port)
    (rejected,) = server.of_kind("rejected")
    assert rejected["extra"] == {"why": "typed_past"}
    assert len(server.of_kind("shown")) == 1


def test_what_is_suggested_in_a_document_until_it_is_closed_is_a_session(server):
    async def conversation(client, capabilities):
        opened = types.TextDocumentItem(URI, "python", 1, TEXT)
        for _ in range(2):
            await ask(client)
            await ask(client)
            client.text_document_did_close(
                types.DidCloseTextDocumentParams(types.TextDocumentIdentifier(URI))
            )
            client.text_document_did_open(types.DidOpenTextDocumentParams(opened))

    with within(server.url) as port:
        talk(server.url, conversation, port)
    asked = [headers for path, _, headers in server.requests if path == "/v1/completions"]
    first, second, third, fourth = (headers["X-Session"] for headers in asked)
    assert first == second != third == fourth


def test_the_next_edit_after_a_rename_is_filled_in_by_the_model(server):
    async def conversation(client, capabilities):
        assert "rlCode.nextEdit" in capabilities.execute_command_provider.commands
        change(client, 2, "x + x")
        server.complete = lambda prefix, suffix: "total"
        # the parameter is renamed letter by letter; its uses are not yet
        for version, (letter, at) in enumerate(zip("tot", (6, 7, 8), strict=True), start=3):
            end = at + 1 if at == 6 else at
            change(client, version, letter, (1, at), (1, end))
        found = await execute(client, "rlCode.nextEdit", URI, {"line": 1, "character": 9})
        assert (found["newText"], found["uri"]) == ("total", URI)
        assert found["range"]["start"] == {"line": 2, "character": 11}
        assert found["range"]["end"] == {"line": 2, "character": 12}
        _, body, _ = [one for one in server.requests if one[0] == "/v1/completions"][-1]
        assert body["prompt"].endswith("return ") and body["suffix"] == " + x\n"
        change(client, 6, "total", (2, 11), (2, 12))
        await execute(client, "rlCode.moveClock", 0.0)

    with within(server.url) as port:
        talk(server.url, conversation, port)
    assert len(server.of_kind("accepted")) == 1


def test_the_next_edit_may_be_in_another_file_and_another_model_says_where(server):
    other = "file:///nowhere/b.py"
    uses = "from a import f\ndef g(x):\n    return f(x)\n"
    asked = FakeServer(lambda prefix, suffix: "b.py:3")

    async def conversation(client, capabilities):
        opened = types.TextDocumentItem(other, "python", 1, uses)
        client.text_document_did_open(types.DidOpenTextDocumentParams(opened))
        cursor = {"line": 1, "character": 9}
        # without an edit there is nothing to carry on
        assert await execute(client, "rlCode.nextEdit", URI, cursor) is None
        change(client, 2, ", y", (1, 7), (1, 7))
        found = await execute(client, "rlCode.nextEdit", URI, cursor)
        assert (found["uri"], found["newText"], found["answer"]) == (other, None, "cmpl-1")
        assert found["range"]["start"] == {"line": 2, "character": 0}
        await execute(client, "rlCode.moveClock", 2.0)
        change(client, 2, ", 1", (2, 14), (2, 14), other)
        found = await execute(client, "rlCode.nextEdit", URI, cursor)
        assert await execute(client, "rlCode.accepted", other, found["answer"]) is True
        assert await execute(client, "rlCode.accepted", other, found["answer"]) is False
        await execute(client, "rlCode.nextEdit", URI, cursor)
        await execute(client, "rlCode.dismissed", URI)

    try:
        with within(server.url, jumps_at=asked.url) as port:
            talk(server.url, conversation, port)
    finally:
        asked.close()
    pages = [body["prompt"] for path, body, _ in asked.requests if path == "/v1/completions"]
    assert pages[0] == (
        "edit a.py:2\n-def f(x):\n+def f(x, y):\nopen\nb.py:1 from a import f\n"
        "b.py:3 g> return f(x)\n"
    )
    assert "edit b.py:3\n-    return f(x)\n+    return f(x, 1)\n" in pages[1]
    assert len(asked.of_kind("shown")) == 3
    assert [one["value"] for one in asked.of_kind("accepted")] == [2.0, 0.0]
    assert [one["extra"] for one in asked.of_kind("rejected")] == [{"why": "dismissed"}]
    # the other model was not asked, and hears nothing of it
    assert not server.requests


def test_a_wrong_endpoint_is_said(server):
    settings = dict(stdin=subprocess.DEVNULL, timeout=PATIENCE_S)
    found = programs.run("launch.lsp", "--served_at=localhost:8000", **settings)
    assert found.returncode == 2
    assert "must be like http://127.0.0.1:8000/v1" in found.stderr
    assert "--served_at" in found.stderr
    config = editor.EditorConfig(server.url, "key-7", jumps_at="localhost:8001")
    with pytest.raises(ValueError, match="url='localhost:8001' must be like"):
        editor.EditorServer(config)


NEOVIM = """
vim.cmd('edit ' .. vim.env.TEST_FILE)
local failed = function(what) io.stderr:write(what .. '\\n') vim.cmd('cquit 1') end
local number = vim.lsp.start_client({ name = 'rl-code', cmd = vim.fn.json_decode(vim.env.TEST_CMD),
  cmd_cwd = vim.env.TEST_ROOT, root_dir = vim.fn.getcwd() })
local buffer = vim.api.nvim_get_current_buf()
local patience = 200000
if not vim.wait(patience, function()
  local client = vim.lsp.get_client_by_id(number)
  return client ~= nil and client.initialized
end) then failed('the server did not start') end
vim.lsp.buf_attach_client(buffer, number)
local client = vim.lsp.get_client_by_id(number)
local request = function(method, parameters)
  local answer
  client.request(method, parameters, function(error, result)
    answer = { error = error, result = result } end, buffer)
  if not vim.wait(patience, function() return answer ~= nil end) then failed(method .. ': late') end
  if answer.error then failed(vim.inspect(answer.error)) end
  return answer.result
end
local found = request('textDocument/inlineCompletion', {
  textDocument = vim.lsp.util.make_text_document_params(buffer),
  position = { line = 1, character = 11 }, context = { triggerKind = 2 } })
local text = found.items[1].insertText
vim.api.nvim_buf_set_text(buffer, 1, 11, 1, 11, { text })
request('workspace/executeCommand', { command = 'rlCode.moveClock', arguments = { 31 } })
client.stop()
vim.wait(patience, function() return client.is_stopped() end)
vim.cmd('qall!')
"""


@pytest.mark.skipif(shutil.which("nvim") is None, reason="nvim, an editor, is not installed")
def test_neovim_is_a_client(server, tmp_path):
    file, script = tmp_path / "a.py", tmp_path / "script.lua"
    file.write_text("def f(x):\n    return \n")
    script.write_text(NEOVIM)
    environment = {
        **os.environ,
        "RL_CODE_KEY": "key-7",
        "TEST_FILE": str(file),
        "TEST_CMD": json.dumps(command(server.url)),
        "TEST_ROOT": str(ROOT),
        "HOME": str(tmp_path),
        "XDG_STATE_HOME": str(tmp_path),
    }
    found = subprocess.run(
        ["nvim", "--headless", "--clean", "-c", f"luafile {script}"],
        cwd=tmp_path, env=environment, capture_output=True, text=True,
        stdin=subprocess.DEVNULL, timeout=PATIENCE_S,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    (shown,), (accepted,) = server.of_kind("shown"), server.of_kind("accepted")
    assert shown["answer"] == accepted["answer"]
    assert [(one["horizon_s"], one["value"]) for one in server.of_kind("retained")] == [(30.0, 1.0)]


def test_a_request_behind_shutdown_is_answered_with_an_error():
    server = editor.EditorServer(editor.EditorConfig("http://127.0.0.1:1/v1", "key-7"))
    sent = []
    server.protocol._send_data = sent.append
    server.protocol._shutdown = True
    server.protocol.handle_message(types.ShutdownRequest(id=7))
    server.protocol.handle_message(types.DidCloseTextDocumentNotification(params=None))
    (answer,) = sent
    assert (answer.id, answer.error.code) == (7, -32600) and "shutdown" in answer.error.message


def test_other_open_files_are_sent_as_documents(server):
    async def run():
        made = editor.EditorServer(
            editor.EditorConfig(server.url, "key-7", open_files=2, prefix=20)
        )
        # ``Late`` imports no name that begins with an underscore
        made.protocol._workspace = sys.modules[type(made).__module__]._Workspace(None)
        for name in "abcd":
            item = types.TextDocumentItem(f"file:///{name}.py", "python", 1, f"{name} = 1\n" * 4)
            made.workspace.put_text_document(item)
        document = made.workspace.get_text_document("file:///c.py")
        await made.suggest(document, 0, 0)
        made.flush()

    asyncio.run(run())
    (_, body, _), *_ = server.requests
    assert body["documents"] == [("b = 1\n" * 4)[:20], ("d = 1\n" * 4)[:20]]
