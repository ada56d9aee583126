"""Bad input gets a clear error each, and the server goes on."""

from __future__ import annotations

import contextlib
import json
import socket
import time
import urllib.request

import pytest

from people.feedback.http import routes
from people.feedback.store import FeedbackStore
from people.realtime.dashboard import Dashboard
from rl_code.harness.endpoint import connections
from tests.people.realtime.rehearsed import Rehearsed
from tests.people.serving.scripted import PATIENCE_S, scripted

ADMIN = "a key of sixteen or more"
HEAD = "POST {path} HTTP/1.1\r\nHost: x\r\n{headers}Content-Length: {length}\r\nConnection: close\r\n\r\n"


@pytest.fixture(scope="module")
def made():
    with scripted() as made:
        yield made
        assert made.fleet.models.running == 0


def connect(made):
    return socket.create_connection(("127.0.0.1", made.endpoint.port), timeout=PATIENCE_S)


def received(connection):
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionError:
        pass
    return b"".join(parts)


def send(made, body, path="/v1/completions", headers=""):
    """(status, the body as JSON) of a request by hand."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    with connect(made) as connection:
        head = HEAD.format(path=path, headers=headers, length=len(raw))
        try:
            connection.sendall(head.encode() + raw)
        except OSError:  # refused before it was sent to its end
            pass
        answer = received(connection)
    status = int(answer.split(b" ", 2)[1])
    return status, json.loads(answer.partition(b"\r\n\r\n")[2])


def works(made):
    status, body = send(made, {"prompt": "a b", "model": "policy"})
    return status == 200 and body["choices"][0]["text"] == "one"


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"", 400, "not JSON"),
        (b'{"prompt": "a b"', 400, "not JSON"),
        (b"\xff\x00", 400, "not JSON"),
        (b'"a b"', 400, "must be an object, not str"),
        (b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}", 400, "request"),
        ({}, 400, "prompt: must be a text"),
        ({"prompt": 3}, 400, "prompt: must be a text"),
        ({"prompt": ["a", "b"]}, 400, "one prompt to a request"),
        ({"prompt": []}, 400, "prompt: must be a text"),
        ({"prompt": ""}, 400, "at least 2"),
        ({"prompt": [1, -1]}, 400, "token -1"),
        ({"prompt": [1, 10**30]}, 400, "must be below"),
        ({"prompt": [1, True]}, 400, "prompt: must be a text"),
        ({"prompt": "a b", "suffix": 3}, 400, "suffix: must be str"),
        ({"prompt": [1, 2], "suffix": "c"}, 400, "suffix: needs a prompt that is a text"),
        ({"prompt": "a b", "n": 1000}, 400, "n: 1000 must be 1 to 16"),
        ({"prompt": "a b", "n": True}, 400, "n: must be an integer"),
        ({"prompt": "a b", "max_tokens": -1}, 400, "above 0"),
        ({"prompt": "a b", "max_tokens": 1.5}, 400, "integer"),
        ({"prompt": "a b", "seed": "x"}, 400, "seed"),
        ({"prompt": "a b", "temperature": 10**400}, 400, "must be 0 to 2"),
        ({"prompt": "a b", "stop": ["a"] * 5}, 400, "up to 4 texts"),
        ({"prompt": "a b", "stop": {"a": 1}}, 400, "stop"),
        ({"prompt": "a b", "logprobs": 6}, 400, "must be 0 to 5"),
        ({"prompt": "a b", "echo": True}, 400, "echo"),
        ({"prompt": "a b", "x" * 100_000: 1}, 400, "is not known here"),
        ({"prompt": "a b", "stream_options": []}, 400, "must be an object"),
        ({"prompt": "a b", "stream_options": "x"}, 400, "must be an object"),
        ({"prompt": "a b " * 200}, 400, "the longest has 199"),
        ({"prompt": "x" * 7_000_000}, 400, "a context has 200 tokens"),
        ({"prompt": "x" * 10_000_000}, 413, "more than 8388608 bytes"),
        ({"prompt": "a b", "model": "../../etc/passwd"}, 404, "does not exist"),
        ({"prompt": "a b", "model": "policy@1/../2"}, 404, "does not exist"),
        ({"prompt": "a b", "model": "policy@\x00"}, 404, "does not exist"),
        ({"prompt": "a b", "model": "\ud800"}, 404, "does not exist"),
        ({"prompt": "a b", "model": "x" * 100_000}, 404, "does not exist"),
        ({"prompt": "a b", "model": ["policy"]}, 400, "model: must be str"),
    ],
    ids=range(37),
)
def test_a_wrong_completion_is_told_what_is_wrong(made, body, status, words):
    got, answer = send(made, body)
    assert got == status
    error = answer["error"]
    assert words in error["message"] and len(error["message"]) < 1000
    assert error["type"] == "invalid_request_error"
    assert works(made)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/completions/../../etc/passwd", 404),
        ("/v1/%2e%2e/%2e%2e/etc/passwd", 404),
        ("/clients/../v1/nothing", 404),
        ("/clients/a%2fb/v1/chat/completions", 404),
        ("/v1/models/..%2f..%2fetc%2fpasswd", 404),
        ("/v1/" + "x" * 5000, 404),
    ],
)
def test_tricks_in_paths_find_nothing(made, path, status):
    got, answer = send(made, {}, path=path)
    assert got == status and answer["error"]["message"]
    assert works(made)


def test_sessions_have_plain_names(made):
    long = f"X-Session: {'s' * 300}\r\n"
    assert send(made, {"prompt": "a b"}, headers=long)[0] == 400
    assert send(made, {"prompt": "a b"}, headers="X-Session: ../../a\r\n")[0] == 200
    assert works(made)


def test_what_is_no_http_is_refused(made):
    for raw in (
        b"\x16\x03\x01\x02\x00\x01",
        b"GET\r\n\r\n",
        b"\0" * 100,
    ):
        with connect(made) as connection:
            connection.sendall(raw)
            assert b" 400 " in received(connection)
    with connect(made) as connection:  # a head without an end
        connection.sendall(b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 50_000)
        assert b" 400 " in received(connection)
    assert works(made)


def test_half_open_connections_are_closed_in_time(made, monkeypatch):
    monkeypatch.setattr(connections, "HEAD_S", 0.3)
    monkeypatch.setattr(connections, "BODY_S", 0.3)
    body = b'{"prompt": "a b"}'
    whole = HEAD.format(path="/v1/completions", headers="", length=len(body)).encode()
    kept = whole.replace(b"Connection: close\r\n", b"")
    silent, half, later, short = (connect(made) for _ in range(4))
    half.sendall(whole[:20])
    later.sendall(kept + body + kept[:20])
    short.sendall(whole + body[:5])
    assert received(silent) == b"" and received(half) == b""
    first = received(later)
    assert first.count(b"HTTP/1.1 200 OK") == 1
    answer = received(short)
    assert b" 408 " in answer and b"did not come whole" in answer
    for connection in (silent, half, later, short):
        connection.close()
    # a request in time is not cut by the timer of its head
    assert works(made)


ROUTES = (
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/execute"),
    ("POST", "/v1/feedback"),
    ("POST", "/dashboard/acknowledge"),
    ("POST", "/dashboard/roll_back"),
)
# These answer without reading the body; the connection must end all the same.
UNREAD = (
    ("GET", "/healthz"),
    ("GET", "/metrics"),
    ("GET", "/v1/models"),
    ("GET", "/dashboard"),
    ("DELETE", "/v1/users/me"),
    ("POST", "/nowhere"),
)
BEGUN = "{} {} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {}\r\nContent-Length: {}\r\n\r\n"


@contextlib.contextmanager
def whole_server(folder):
    """A server with all routes that there are: the API, probes, feedback and the page."""
    rehearsed = Rehearsed(folder)
    board = Dashboard(rehearsed.ledger, rehearsed.parts.store, rehearsed.config, ADMIN)
    with FeedbackStore(f"sqlite:///{folder}/people.db") as store:
        feedback = routes(store, lambda key: "ann")
        with scripted(routes=[*feedback, *board.routes()]) as made:
            yield made


@pytest.mark.long
def test_a_body_that_does_not_come_whole_ends_on_every_route(tmp_path, monkeypatch):
    # long enough for an answer on a busy machine, and waited for by all of them together
    monkeypatch.setattr(connections, "BODY_S", 3.0)
    monkeypatch.setattr(connections, "GRACE_S", 3.0)
    with whole_server(tmp_path) as made, contextlib.ExitStack() as stack:
        begun = {}
        for method, path in (*ROUTES, *UNREAD):
            begun[method, path] = connection = stack.enter_context(connect(made))
            connection.sendall(BEGUN.format(method, path, ADMIN, 1_000).encode() + b'{"a')
        for (method, path), connection in begun.items():
            answer = received(connection)  # returns when the server has closed it
            if (method, path) in ROUTES:
                assert b" 408 " in answer and b"did not come whole" in answer, path
            else:
                assert answer.count(b"HTTP/1.1 ") == 1 and b" 408 " not in answer, path
        assert works(made)


@pytest.mark.long
def test_bodies_of_all_routes_share_what_may_be_read_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(connections, "_MOST_READ", 200_000)
    with whole_server(tmp_path) as made:
        first = connect(made)
        first.sendall(BEGUN.format("POST", "/v1/completions", "k", 400_000).encode())
        first.sendall(b" " * 190_000)
        while made.endpoint.bodies.being_read < 190_000:
            time.sleep(0.01)
        with connect(made) as second:
            second.sendall(BEGUN.format("POST", "/v1/feedback", "k", 100_000).encode())
            second.sendall(b" " * 90_000)
            answer = received(second)
        assert b" 429 " in answer and b"Retry-After" in answer.title()
        first.close()
        while made.endpoint.bodies.being_read:
            time.sleep(0.01)
        assert works(made)


def test_a_key_that_sends_much_does_not_keep_others_waiting(made, monkeypatch):
    monkeypatch.setattr(connections, "_MOST_READ", 200_000)
    monkeypatch.setattr(connections, "_MOST_OF_KEY", 100_000)
    head = "POST {} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 400000\r\n\r\n"
    keys = "/clients/a/v1/completions", "/clients/b/v1/completions", "/clients/c/v1/completions"
    holding = [connect(made) for _ in keys]
    # two keys have their share, and a third one finds the room of all taken
    for connection, path, size in zip(holding, keys, (95_000, 95_000, 70_000), strict=True):
        connection.sendall(head.format(path).encode() + b" " * size)
    assert b" 429 " in received(holding[2])
    with connect(made) as more:
        more.sendall(head.format(keys[0]).encode() + b" " * 10_000)
        assert b" 429 " in received(more)
    # who has sent little so far is read
    status, _ = send(made, {"prompt": "a b"}, headers="Authorization: Bearer d\r\n")
    assert status == 200 and works(made)
    for connection in holding:
        connection.close()


@pytest.mark.parametrize(
    ("path", "header"),
    [
        ("/v1/completions", "Bearer a"),
        ("/v1/completions", "bearer a"),
        ("/v1/completions", "BEARER   a "),
        ("/clients/a/v1/completions", None),
        ("/clients/a/v1/completions", "Bearer b"),
        ("/clients/a/v1/chat/completions", "Basic a"),
    ],
)
def test_a_key_has_one_share_however_it_is_sent(path, header):
    headers = [] if header is None else [(b"authorization", header.encode())]
    assert connections.key_of({"path": path, "headers": [(b"host", b"x"), *headers]}) == "a"


@pytest.mark.parametrize("header", [None, "Basic a", "Bearer", "Bearer ", "a"])
def test_all_without_a_key_have_one_share(header):
    headers = [] if header is None else [(b"authorization", header.encode())]
    assert connections.key_of({"path": "/v1/completions", "headers": headers}) == ""


def test_a_hundred_connections_that_say_nothing_stop_nobody(made):
    silent = [connect(made) for _ in range(100)]
    assert works(made)
    for connection in silent:
        connection.close()
    url = f"{made.endpoint.url}/healthz"
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
        assert answer.read() == b"alive\n"
