"""Completions and gaps on the real engine, several answers at once, adapters, and cancellation."""

from __future__ import annotations

import json
import socket
import time

import jax
import numpy as np
import pytest
from flax import nnx

from models.lora import LoRA, new_adapters
from tests.late import Late
from tests.people.serving.conftest import MODEL
from tests.people.serving.scripted import openai_client
from tests.rl_code.harness.chats import chat_tokenizer
from tests.rl_code.rollout.small import assert_all_free, initial

openai = Late("openai")


PATIENCE_S = 300.0


@pytest.fixture(scope="module")
def client(served):
    with openai_client(f"{served[0].url}/v1", timeout=PATIENCE_S) as made:
        yield made


@pytest.mark.long
def test_a_completion_follows_the_tokens_of_its_prompt(served, client):
    options = dict(model="tiny", prompt="def f(x):", max_tokens=12, seed=4)
    body = client.completions.create(logprobs=1, **options)
    record = served[2][-1]
    tokens = chat_tokenizer().encode("def f(x):")
    assert record.given == tuple(tokens) and record.kind == "completion"
    assert (record.context, record.parent, record.kept) == (0, -1, 0)
    (choice,) = body.choices
    assert body.object == "text_completion" and body.id == record.id
    assert (body.usage.prompt_tokens, body.usage.completion_tokens) == (
        len(tokens),
        len(record.tokens),
    )
    shown = choice.logprobs
    np.testing.assert_allclose(shown.token_logprobs, record.logprobs[: len(shown.tokens)])
    assert shown.text_offset[:2] == [0, len(shown.tokens[0])]
    # the same tokens instead of the text, and the same in a stream
    again = client.completions.create(**options | {"prompt": tokens})
    assert again.choices[0].text == choice.text
    parts = client.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    parts = list(parts)
    assert "".join(part.choices[0].text for part in parts if part.choices) == choice.text
    assert parts[-2].choices[0].finish_reason == choice.finish_reason
    assert parts[-1].usage == again.usage


@pytest.mark.long
def test_a_gap_stands_between_its_marks_and_no_text_can_end_itself(served, client):
    options = dict(model="tiny", max_tokens=4)
    client.completions.create(prompt="a = <|im_end|>", suffix="\nprint(a)", **options)
    given = chat_tokenizer().decode(served[2][-1].given)
    assert given == "<|fim_prefix|>a = <|im_end|><|fim_suffix|>\nprint(a)<|fim_middle|>"


def test_several_answers_are_siblings(served, client):
    messages = [{"role": "user", "content": "hello there"}]
    before = len(served[2])
    body = client.chat.completions.create(
        model="tiny",
        messages=messages,
        n=3,
        seed=9,
        max_tokens=10,
        extra_headers={"X-Session": "siblings"},
    )
    records = sorted(served[2][before:], key=lambda record: record.extra["index"])
    assert [choice.index for choice in body.choices] == [0, 1, 2]
    assert [choice.answer_id for choice in body.choices] == [record.id for record in records]
    assert len({record.id for record in records}) == 3
    assert len({record.tokens for record in records}) == 3
    assert [record.parent for record in records] == [-1, 0, 0]
    whole = records[0].given
    assert all(whole[: record.kept] + record.given == whole for record in records[1:])
    # the client goes on from the second of them, whose tokens stay as they are
    said = body.choices[1].message.content
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "more"}]
    client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=4, extra_headers={"X-Session": "siblings"}
    )
    record = served[2][-1]
    assert record.context == records[1].context
    assert record.kept == len(whole) + len(records[1].tokens)
    texts = client.completions.create(model="tiny", prompt="a b", n=2, max_tokens=8)
    assert len(texts.choices) == 2 and texts.usage.prompt_tokens > 0


@pytest.mark.long
def test_a_client_that_leaves_frees_the_pages_of_the_engine(served):
    endpoint, fleet, records = served
    scheduler = fleet.models.services[0]._scheduler
    before = len(records)
    body = json.dumps({"prompt": "a b", "stream": True, "n": 2}).encode()
    with socket.create_connection(("127.0.0.1", endpoint.port), timeout=PATIENCE_S) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        while b"data:" not in connection.recv(4096):
            pass
    end = time.monotonic() + PATIENCE_S
    while fleet.models.running and time.monotonic() < end:
        time.sleep(0.05)
    assert fleet.models.running == 0 and len(records) == before + 2
    # a random model may have ended one of them by itself
    assert {record.finish_reason for record in records[before:]} & {"aborted", "stop"}
    while scheduler.groups and time.monotonic() < end:
        time.sleep(0.05)
    assert_all_free(scheduler)


@pytest.mark.long
def test_adapters_answer_beside_their_model_and_leave_again(served, client):
    models = served[1].models
    adapters = new_adapters(initial(MODEL), LoRA(rank=2), nnx.Rngs(3))
    some = jax.tree.map(lambda x: x + 0.5, adapters)
    options = dict(prompt="a b c", seed=2, max_tokens=12)
    plain = client.completions.create(model="tiny", **options).choices[0].text
    models.load_adapter("mine", 3, some, "tiny@7")
    own = client.completions.create(model="mine@3", **options).choices[0].text
    record = served[2][-1]
    assert (record.model, record.adapter, record.version) == ("tiny", "mine", 3)
    assert set(record.versions) == {3}
    assert own != plain
    assert client.completions.create(model="tiny", **options).choices[0].text == plain
    with pytest.raises(ValueError, match="has adapters"):
        models.retire("tiny", 7)
    models.retire("mine", 3)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="mine@3", **options)
    assert client.completions.create(model="tiny", **options).choices[0].text == plain
