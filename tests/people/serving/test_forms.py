"""Answers that must be calls: what their grammars allow, and that it is read as these calls."""

from __future__ import annotations

import dataclasses
import json
import random

import numpy as np
import pytest

from models.own_template import OwnTemplate
from models.tokenizer import Tokenizer
from people.serving.forms import start_forms
from rl_code.environment.protocols.api import PROTOCOLS
from rl_code.harness.endpoint.chat_text import ChatText, is_json
from rl_code.harness.endpoint.conversation import Message
from rl_code.harness.endpoint.fields import ApiError
from rl_code.harness.endpoint.requests import ChatRequest
from rl_code.harness.endpoint.stops import stopping
from tests.rl_code.harness.chats import SPECIAL, chat_tokenizer

MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
# The same words with and without tokens of their own for the marks.
TOKENIZERS = {
    "spelled": chat_tokenizer(),
    "special": Tokenizer.train(["a"], 330, (*SPECIAL, *MARKS), eos="<|im_end|>", pad="<|pad|>"),
}
PATH = {"type": "string"}
WRITE = {
    "name": "write",
    "parameters": {
        "properties": {
            "path": PATH,
            "mode": {"enum": ["new", "old\nor so"]},
            "lines": {"$ref": "#/$defs/lines"},
            "sure": {"type": ["boolean", "null"]},
        },
        "required": ["path", "lines"],
        "$defs": {"lines": {"type": "array", "items": {"type": "integer"}}},
    },
}
NOW = {"name": "now"}
ODD = {"name": "odd", "parameters": {"properties": {"n": {"type": ["integer", "int"]}}}}
TOOLS = (WRITE, NOW, ODD)
NASTY = 'a "</tool_call>" <parameter=path>\n\\ </think> <tool_call>\n<function=now>\n<|im_end|>'


def text_of(protocol: str, marks: str = "spelled", **changes) -> ChatText:
    own = PROTOCOLS[protocol]
    chat = type(own)(own.family, own.calls)  # with the stop tokens of ChatML
    return ChatText(dataclasses.replace(chat, **changes), TOKENIZERS[marks])


def asked(*, forced=("write", "now", "odd"), tools=TOOLS, **options) -> ChatRequest:
    messages = (Message("user", "go"),)
    return ChatRequest(messages=messages, tools=tools, forced=forced, **options)


def fits(text: ChatText, request: ChatRequest, said: str) -> bool:
    """True if a message may say this and end there."""
    (answer,) = start_forms(request, text.protocol, text.grammars)
    tokens = text._tokenizer.encode(said)
    if answer.read(tokens) < len(tokens):
        return False
    return bool(answer.allowed()[[*text.stop_ids]].any())


def written(form: str, name: str, **arguments) -> str:
    """A call as its protocol writes it."""
    if form in ("qwen3_coder", "glm"):
        values = {
            key: value if isinstance(value, str) else json.dumps(value)
            for key, value in arguments.items()
        }
        if form == "glm":
            pairs = (
                f"<arg_key>{key}</arg_key>\n<arg_value>{each}</arg_value>\n"
                for key, each in values.items()
            )
            return f"<tool_call>{name}\n{''.join(pairs)}</tool_call>"
        body = "".join(f"<parameter={key}>\n{each}\n</parameter>\n" for key, each in values.items())
        return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"
    key = "arguments" if form == "hermes" else "parameters"
    body = json.dumps({"name": name, key: arguments})
    return f"<tool_call>\n{body}\n</tool_call>" if form == "hermes" else body


@pytest.mark.quick(each=True)
@pytest.mark.parametrize("marks", TOKENIZERS)
@pytest.mark.parametrize("form", ["hermes", "qwen3_coder", "glm", "llama3"])
def test_calls_of_the_tools_are_allowed_and_nothing_else(form, marks):
    text, request = text_of(form, marks), asked()
    whole = dict(path=NASTY.replace("<|im_end|>", ""), mode="old\nor so", lines=[1, 2], sure=None)
    good = written(form, "write", **whole)
    # where a mark is one token, no argument may hold it
    assert fits(text, request, good) == (marks == "spelled")
    if marks == "spelled":
        # with the token that ends a whole answer: without it nobody knows which mark is the last
        sampled = [*text._tokenizer.encode(good), min(text.stop_ids)]
        _, (call,) = text.read(sampled, TOOLS, "n")
        assert (call.name, call.arguments, call.error) == ("write", whole, "")
    short = written(form, "write", path="a", lines=[])
    thought = "<think>hm {x}\n</think>\n\n"
    for said in (short, written(form, "now"), written(form, "odd", n=3), thought + short):
        assert fits(text, request, said)
        message, calls = text.read(text._tokenizer.encode(said), TOOLS, "n")
        assert message.calls and not any(call.error for call in calls)
    for said in (
        *("", "hello", f"hello {short}", thought, short[:-1], "{}"),
        written(form, "write", path="a"),
        written(form, "write", path="a", lines=["b"]),
        written(form, "write", path="a", mode="newer", lines=[]),
        written(form, "write", path="a", lines=[], sure=3),
        written(form, "read", path="a"),
        *([] if form != "llama3" else [f"{short}\n{short}"]),
    ):
        assert not fits(text, request, said)
    if form != "llama3":
        two = f"{short}\n{written(form, 'now')}"
        assert fits(text, request, two)
        assert not fits(text, asked(parallel=False), two)
    assert not fits(text, asked(forced=("now",)), short)


@pytest.mark.parametrize("form", ["hermes", "qwen3_coder", "glm", "llama3"])
def test_every_message_that_the_grammar_allows_is_read_as_calls(form):
    flags = {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}
    values = {"kind": {"enum": ["x", "</parameter>"]}, "flags": flags, "sure": {"type": "boolean"}}
    tools = (
        {"name": "one", "parameters": {"type": "object", "properties": values}},
        {"name": "two", "parameters": {"type": "object", "properties": {}}, "strict": True},
    )
    tools[1]["parameters"]["additionalProperties"] = False
    tools[0]["parameters"]["additionalProperties"] = False
    text = text_of(form)
    request = asked(forced=("one", "two"), tools=tools)
    seen = set()
    for seed in range(8):
        rng = random.Random(seed)
        (answer,) = start_forms(request, text.protocol, text.grammars)
        tokens: list[int] = []
        while not tokens or tokens[-1] not in text.stop_ids:
            allowed = np.flatnonzero(answer.allowed()).tolist()
            # no thought, which would be long, and as little white space as can be
            rare = ("h", " ", "\t", "\r", *(["<"] if form == "llama3" and not tokens else []))
            likely = [one for one in allowed if text.raw(one)[:1] not in rare]
            tokens.append(rng.choice(likely or allowed))
            assert answer.read(tokens[-1:]) == 1
        message, calls = text.read(tokens, tools, "n")
        assert message.calls and all(call.error == "" for call in calls)
        seen |= {call.name for call in calls}
    assert seen == {"one", "two"}


def test_a_prompt_that_begins_a_thought_has_it_ended_before_the_call():
    own = OwnTemplate("{{ messages[0].content }}<|im_end|>\n<think>\n", "<|im_end|>")
    text = text_of("hermes", own=own)
    call = written("hermes", "now")
    assert not fits(text, asked(), call)
    assert fits(text, asked(), f"hm, {call}?</think>{call}")
    with pytest.raises(ApiError, match="thinks before it answers"):
        start_forms(asked(forced=(), json_schema="{}"), text.protocol, text.grammars)


@pytest.mark.parametrize("form", ["hermes", "qwen3_coder"])
def test_with_tools_and_a_schema_an_answer_is_calls_or_json(form):
    text = text_of(form)
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    request = asked(forced=(), json_schema=json.dumps(schema), parallel=False)
    call = written(form, "now")
    content = json.dumps({"a": call})
    assert fits(text, request, call) and fits(text, request, content)
    assert not fits(text, request, "{}") and not fits(text, request, "hello")
    assert is_json(content) and not is_json(call)
    message, calls = text.read(text._tokenizer.encode(content), TOOLS, "n", may_be_json=True)
    assert message == Message("assistant", content) and calls == ()
    ends = stopping(text.protocol, request)
    assert ends.stopped(call) and not ends.stopped('{"a": "' + call + '", ')


def test_what_no_grammar_can_hold_is_refused_by_its_name():
    for request, form, param in (
        (asked(forced=(), json_schema="{}"), "llama3", "response_format"),
        (asked(tools=({**ODD, "strict": True},), forced=("odd",)), "hermes", "tools[0]"),
        (asked(tools=(_long(),), forced=("long",)), "hermes", "tool_choice"),
        (asked(tools=(_unwritable(),), forced=("bad",)), "qwen3_coder", "tool_choice"),
    ):
        text = text_of(form)
        with pytest.raises(ApiError) as caught:
            start_forms(request, text.protocol, text.grammars)
        assert caught.value.body["error"]["param"].startswith(param)
    hermes = text_of("hermes")
    with pytest.raises(ApiError, match="the protocol Compact has no grammar of calls"):
        start_forms(asked(), PROTOCOLS["compact"], hermes.grammars)


def _long() -> dict:
    names = {f"{number}{'x' * 1000}": PATH for number in range(200)}
    return {"name": "long", "parameters": {"properties": names}}


def _unwritable() -> dict:
    return {"name": "bad", "parameters": {"properties": {"a>b": PATH}, "required": ["a>b"]}}
