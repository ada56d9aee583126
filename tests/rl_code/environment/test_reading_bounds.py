"""What sandboxes, servers and suites write is read up to bounds in bytes, depth and time.

``docs/environment.md`` lists every place where bytes of others are read. Those that have no file of
tests of their own are here.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from types import SimpleNamespace

import pytest

from rl_code.environment.sandbox.inside import wire
from rl_code.environment.servers import stream
from rl_code.environment.servers.stream import Stream, StreamEnded
from rl_code.environment.suites import runner
from rl_code.environment.tools import api
from rl_code.environment.tools.memory import MemoryRecall, MemoryStore
from rl_code.environment.tools.tool import Result
from rl_code.types import ToolCall


@pytest.fixture
def ends():
    here, there = socket.socketpair()
    with contextlib.closing(here), contextlib.closing(there):
        yield here, there


@pytest.mark.parametrize(
    ("form", "written", "why"),
    [
        ("headers", b"x" * 5000, "more than 4096 bytes without an end"),
        ("headers", b"Content-Length: 3000\r\n\r\n", "no head of a message"),
        ("headers", b"Content-Length: %d\r\n\r\n" % (1 << 40), "no head of a message"),
        ("headers", b"Content-Length: 2\r\n\r\n[]", "no message"),
        ("lines", b"{" * 3000, "more than 2000 bytes without an end"),
        ("lines", b'{"a": 1', "did not answer in time"),
        ("headers", b"Content-Length: 10\r\n\r\n{", "did not answer in time"),
    ],
)
def test_messages_of_servers_are_bounded(ends, monkeypatch, form, written, why):
    monkeypatch.setattr(stream, "MESSAGE_BYTES", 2000)
    here, there = ends
    there.sendall(written)
    seconds = 0.2 if why == "did not answer in time" else 60
    with pytest.raises(StreamEnded, match=why):
        Stream(here, form).read(time.monotonic() + seconds)


def test_a_message_that_is_nested_too_deeply_is_none(ends):
    here, there = ends
    deep = b'{"a": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"
    there.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    there.sendall(b"Content-Length: %d\r\n\r\n%b" % (len(deep), deep))
    with pytest.raises(StreamEnded, match="no message"):
        Stream(here, "headers").read(time.monotonic() + 60)


def test_answers_of_sandboxes_are_bounded(ends):
    here, there = ends
    there.sendall((1000).to_bytes(4, "little"))
    with pytest.raises(wire.WireError, match="a frame of 1000 bytes; at most 999 are taken"):
        wire.read_frame(here, 999)


@pytest.mark.parametrize(("line", "all_bytes"), [(100, 10_000), (10_000, 150)])
def test_what_the_run_of_a_suite_says_is_bounded(ends, monkeypatch, line, all_bytes):
    monkeypatch.setattr(runner, "_LINE_BYTES", line)
    monkeypatch.setattr(runner, "_ALL_BYTES", all_bytes)
    here, there = ends
    there.sendall(b"x" * 200)
    conversation = runner._Conversation(here, [], time.monotonic() + 60)
    with pytest.raises(runner._Forged, match="too much"):
        conversation._line()


def test_the_answer_of_a_tool_is_cut_before_it_is_tokenised():
    tool = SimpleNamespace(run=lambda arguments, workspace: Result("x" * 1_000_000))
    result = api.execute(ToolCall("long", {}), {"long": tool}, None)
    assert len(result.content) < (1 << 16) + 100 and "characters cut" in result.content


def test_notes_are_bounded_in_number_and_length():
    notes: dict[str, str] = {}
    store = MemoryStore(most=3, longest=10)
    assert not store.note({"name": "a", "text": "x" * 11}, notes).ok
    assert not store.note({"name": "a" * 1000, "text": "x"}, notes).ok
    for number in range(5):
        assert store.note({"name": f"n{number}", "text": "x"}, notes).ok
    assert list(notes) == ["n2", "n3", "n4"]
    workspace = SimpleNamespace(notes=notes, verbose=False)
    found = MemoryRecall(most=2).run({"question": "x"}, workspace).content
    assert json.dumps(found).count("x") == 2
