"""The endpoint speaks the OpenAI chat API: answers, streams, sessions and errors."""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import socket
import threading
import urllib.error
import urllib.request

import numpy as np
import pytest

from rl_code.harness.endpoint.fields import MOST_BYTES
from tests.rl_code.harness.chats import chat_tokenizer

PATIENCE_S = 300.0
HELLO = [{"role": "user", "content": "hello"}]
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}


def send(url, body, key=None, raw=None):
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    data = json.dumps(body).encode() if raw is None else raw
    request = urllib.request.Request(f"{url}/v1/chat/completions", data, headers)
    with urllib.request.urlopen(request) as answer:
        return answer.read()


def ask(served, messages=HELLO, key=None, **options):
    options = {"max_tokens": 12} | options
    return json.loads(send(served[0].url, {"messages": messages, **options}, key))


def refused(served, body=None, raw=None, path="/v1/chat/completions", method="POST"):
    """(status, the error) of a request that is refused."""
    data = json.dumps(body).encode() if raw is None else raw
    request = urllib.request.Request(f"{served[0].url}{path}", data, method=method)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request)
    return caught.value.code, json.loads(caught.value.read())["error"]


def test_models_are_listed(served):
    with urllib.request.urlopen(f"{served[0].url}/v1/models") as answer:
        body = json.loads(answer.read())
    assert [model["id"] for model in body["data"]] == ["tiny", "tiny@7"]


def test_an_answer_has_the_shape_of_the_api_and_is_recorded(served):
    body = ask(served, model="tiny", seed=3, logprobs=True)
    record = served[2][-1]
    assert record.id == body["id"] and body["object"] == "chat.completion"
    (choice,) = body["choices"]
    assert choice["message"]["role"] == "assistant" and choice["finish_reason"] in (
        "stop",
        "length",
    )
    tokens = record.tokens
    given = chat_tokenizer().encode("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
    assert record.given == tuple(given) and set(record.versions) == {7}
    assert body["system_fingerprint"] == "version_7"
    usage = body["usage"]
    assert usage["prompt_tokens"] == len(given) and usage["completion_tokens"] == len(tokens)
    assert usage["total_tokens"] == len(given) + len(tokens)
    ends = {chat_tokenizer().token_id(token) for token in ("<|im_end|>", "<|endoftext|>")}
    shown = [(i, p) for i, p in zip(tokens, record.logprobs, strict=True) if i not in ends]
    assert choice["message"]["content"] == chat_tokenizer().decode(i for i, _ in shown)
    said = choice["logprobs"]["content"]
    np.testing.assert_allclose([each["logprob"] for each in said], [p for _, p in shown])
    assert np.isfinite(record.logprobs).all()


def test_a_seed_gives_the_same_answer_and_no_seed_another(served):
    texts = [ask(served, seed=11)["choices"][0]["message"]["content"] for _ in range(2)]
    assert texts[0] == texts[1]
    others = {ask(served, max_tokens=30)["choices"][0]["message"]["content"] for _ in range(3)}
    assert len(others) > 1


def test_a_stream_is_the_same_answer_in_pieces(served, monkeypatch):
    options = {"messages": HELLO, "seed": 5, "max_tokens": 40}
    whole = json.loads(send(served[0].url, options))
    shown, dispatches = threading.Event(), itertools.count()

    def wait(rows):
        # until the first piece is read: whoever gets no time meanwhile would find one piece
        if next(dispatches) > 3:
            shown.wait(PATIENCE_S)

    scheduler = served[1].models.services[0]._scheduler
    monkeypatch.setattr(scheduler, "before_dispatch", wait)
    options |= {"stream": True, "stream_options": {"include_usage": True}}
    request = urllib.request.Request(
        f"{served[0].url}/v1/chat/completions", json.dumps(options).encode()
    )
    lines = ""
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        for line in answer:
            lines += line.decode()
            if b'"content":' in line and b'"content":""' not in line.replace(b" ", b""):
                shown.set()
    events = [line.removeprefix("data: ") for line in lines.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    *chunks, last = [json.loads(event) for event in events[:-1]]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant"
    text = "".join(delta.get("content", "") for delta in deltas)
    assert text == whole["choices"][0]["message"]["content"]
    assert len([delta for delta in deltas if delta.get("content")]) > 1
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert last["usage"] == whole["usage"] and last["choices"] == []


def test_a_text_that_ends_the_message_is_not_shown(served):
    whole = ask(served, seed=21, max_tokens=40)["choices"][0]["message"]["content"]
    assert len(whole) > 12
    stop = whole[5:8]
    at = whole.index(stop)
    body = ask(served, seed=21, max_tokens=40, stop=[stop, "never"])
    assert body["choices"][0]["message"]["content"] == whole[:at]
    assert body["choices"][0]["finish_reason"] == "stop"
    # the record has the tokens up to the end of that text
    record = served[2][-1]
    assert stop in chat_tokenizer().decode(record.tokens)
    assert stop not in chat_tokenizer().decode(record.tokens[:-1])
    streamed = send(
        served[0].url,
        {"messages": HELLO, "seed": 21, "max_tokens": 40, "stop": stop, "stream": True},
    ).decode()
    events = [json.loads(e.removeprefix("data: ")) for e in streamed.split("\n\n")[:-2]]
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert text == whole[:at]


def test_requests_of_one_key_keep_what_was_sampled(served):
    first = ask(served, key="mine", seed=1)
    record = served[2][-1]
    sampled = record.given + record.tokens
    messages = [*HELLO, first["choices"][0]["message"], {"role": "user", "content": "go on"}]
    second = ask(served, messages, key="mine", seed=2)
    later = served[2][-1]
    assert (later.context, later.kept) == (0, len(sampled))
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == len(sampled)
    # without the key the same words are tokenised as a whole
    ask(served, messages, seed=2)
    assert served[2][-1].kept == 0
    # another history behind an answer keeps the messages that it shares
    ask(served, [*messages[:-1], {"role": "user", "content": "else"}], key="mine")
    other = served[2][-1]
    assert (other.context, other.parent, other.session) == (1, 0, record.session)
    assert other.kept == len(sampled)
    # one that shares no answer is another session
    ask(served, [*messages[:1], {"role": "user", "content": "else"}], key="mine")
    other = served[2][-1]
    assert (other.context, other.parent) == (0, -1) and other.session != record.session


def test_many_clients_are_answered_at_once(served):
    def one(number):
        body = ask(served, [{"role": "user", "content": f"{number}"}], key=f"k{number % 3}", seed=1)
        return body["usage"]["completion_tokens"]

    with concurrent.futures.ThreadPoolExecutor(8) as executor:
        assert all(count > 0 for count in executor.map(one, range(16)))


@pytest.mark.parametrize(
    ("change", "status", "code", "word"),
    [
        ({"messages": []}, 400, "invalid_value", "at least one message"),
        ({"messages": "hello"}, 400, "invalid_value", "must be a list"),
        ({"messages": [{"role": "king", "content": "a"}]}, 400, "invalid_value", "king"),
        ({"messages": [{"role": "user", "content": 3}]}, 400, "invalid_value", "content"),
        (
            {"messages": [*HELLO, {"role": "system", "content": "x"}]},
            400,
            "invalid_value",
            "only the first message",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "invalid_value",
            "types text",
        ),
        ({"model": "gpt"}, 404, "model_not_found", "there is 'tiny'"),
        ({"max_tokens": 0}, 400, "invalid_value", "above 0"),
        ({"max_completion_tokens": "many"}, 400, "invalid_value", "integer"),
        ({"stop": [""]}, 400, "invalid_value", "none of them empty"),
        ({"n": 0}, 400, "invalid_value", "1 to 16"),
        ({"n": "2"}, 400, "invalid_value", "integer"),
        ({"top_logprobs": 3}, 400, "invalid_value", "needs logprobs=true"),
        ({"tool_choice": "required"}, 400, "invalid_value", "no tools"),
        ({"tool_choice": "any"}, 400, "unsupported_value", "'auto'"),
        ({"temperature": 2.3}, 400, "invalid_value", "2.3 must be 0 to 2"),
        ({"temperature": "hot"}, 400, "invalid_value", "number"),
        ({"tempurature": 1}, 400, "unknown_parameter", "tempurature"),
        ({"tools": [{"type": "function"}]}, 400, "invalid_value", "tools[0]"),
        ({"stream": 1}, 400, "invalid_value", "bool"),
        (
            {"messages": [{"role": "user", "content": "x" * 3000}]},
            400,
            "context_length_exceeded",
            "longest",
        ),
    ],
)
def test_a_wrong_request_is_told_what_is_wrong(served, change, status, code, word):
    got, error = refused(served, {"messages": HELLO, "max_tokens": 4} | change)
    assert (got, error["code"]) == (status, code) and word in error["message"]
    assert ask(served)["choices"]  # and the server goes on


def test_what_is_no_request_is_refused(served):
    deep = b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    for raw, status in (
        (b"{", 400),
        (b"\xff\xfe", 400),
        (b"[]", 400),
        (deep, 400),
        (json.dumps({"messages": [[[[[]]]]], "metadata": {"a": {}}}).encode(), 400),
    ):
        assert refused(served, raw=raw)[0] == status
    assert refused(served, {}, path="/v1/none")[0] == 404
    assert refused(served, {}, path="/v1/models")[0] == 405
    assert refused(served, {"command": "ls"}, path="/v1/execute")[0] == 404
    # a body that is too long is not read to its end
    with socket.create_connection(("127.0.0.1", served[0].port)) as connection:
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        connection.sendall(head.encode())
        part = b"x" * 2**20
        try:
            for _ in range(MOST_BYTES // len(part) + 1):
                connection.sendall(b"%x\r\n%s\r\n" % (len(part), part))
        except OSError:  # it may have been closed meanwhile
            pass
        answer = connection.recv(4096)
    assert b" 413 " in answer
    assert ask(served)["choices"]


def test_a_client_that_leaves_does_not_stop_the_server(served):
    body = json.dumps({"messages": HELLO, "stream": True, "max_tokens": 200}).encode()
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", served[0].port)) as connection:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            assert connection.recv(16)
    assert ask(served)["choices"]


def test_tools_are_declared_to_the_model(served):
    ask(served, tools=[BASH], key="tools")
    text = chat_tokenizer().decode(served[2][-1].given)
    assert json.dumps(BASH) in text
