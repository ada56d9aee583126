"""Sampled messages as the API writes them: thoughts, calls, and the same in a stream."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import pytest

from models.own_template import OwnTemplate
from people.serving.forms import start_forms
from rl_code.environment.protocols.api import PROTOCOLS
from rl_code.harness.endpoint.answers import Accepted, Answer, Mailbox, Pending
from rl_code.harness.endpoint.bodies import stream, whole_body
from rl_code.harness.endpoint.chat_text import ChatText
from rl_code.harness.endpoint.conversation import Message
from rl_code.harness.endpoint.fields import ApiError
from rl_code.harness.endpoint.requests import ChatRequest, read_request
from tests.rl_code.harness.chats import chat_tokenizer

TOKENIZER = chat_tokenizer()
TOOLS = ({"name": "bash", "parameters": {"properties": {"command": {"type": "string"}}}},)
CODE = 'print("<tool_call></tool_call></think>")'
CALLS = {
    "hermes": "<tool_call>\n"
    + json.dumps({"name": "bash", "arguments": {"command": CODE}})
    + "\n</tool_call>",
    "qwen3_coder": "<tool_call>\n<function=bash>\n<parameter=command>\n"
    + CODE
    + "\n</parameter>\n</function>\n</tool_call>",
    "llama3": json.dumps({"name": "bash", "parameters": {"command": CODE}}),
}


def text_of(protocol: str) -> ChatText:
    own = PROTOCOLS[protocol]
    return ChatText(type(own)(own.family, own.calls), TOKENIZER)  # with the stop tokens of ChatML


@pytest.mark.parametrize("protocol", CALLS)
def test_a_call_inside_a_thought_that_never_ends_is_text(protocol):
    text = f"maybe {CALLS[protocol]}\nbut no"
    opened = text_of(protocol)
    own = OwnTemplate("{{ messages[0].content }}<|im_end|>\n<think>\n", "<|im_end|>")
    opened.protocol = dataclasses.replace(opened.protocol, own=own)
    for chat, said in ((text_of(protocol), f"<think>\n{text}"), (opened, text)):
        read = chat.read(TOKENIZER.encode(said), TOOLS, "n")
        assert read == (Message("assistant", said), ())


@pytest.mark.parametrize("protocol", CALLS)
def test_text_in_front_of_a_call_is_the_content(protocol):
    thought = "<think>\n<tool_call> or not?</think>"
    text = f"{thought}\n{CALLS[protocol]}"
    message, calls = text_of(protocol).read(TOKENIZER.encode(text), TOOLS, "n")
    assert message.content == thought and [call.error for call in calls] == [""]
    assert json.loads(message.calls[0].arguments) == {"command": CODE}


def answer_of(text: ChatText, tokens: list[int], request: ChatRequest) -> Answer:
    message, _ = text.read(tokens, request.tools, "n", request.stop)
    return Answer("id", "m", message, "stop", tokens, [-0.5] * len(tokens), 1, 0, 0)


async def said(text: ChatText, tokens: list[int], request: ChatRequest) -> tuple[dict, dict]:
    """The message of an answer in one body, and that of a stream with a piece for every token."""
    accepted = Accepted("id", "m")
    whole = Pending(request, Mailbox())
    whole.answer(answer_of(text, tokens, request))
    message = (await whole_body(whole, text, accepted))["choices"][0]["message"]
    pending = Pending(request, Mailbox())
    streamed: dict = {"role": "assistant", "content": ""}
    events = stream(pending, text, accepted)
    found = [await anext(events)]
    for end in range(1, len(tokens)):
        pending.sampled(tokens[:end])
        await asyncio.sleep(0)
    pending.answer(answer_of(text, tokens, request))
    found += [event async for event in events]
    for line in "".join(found).split("\n\n"):
        if line and not line.endswith("[DONE]"):
            delta = json.loads(line.removeprefix("data: "))["choices"][0]["delta"]
            streamed["content"] += delta.get("content", "")
            for call in delta.get("tool_calls", ()):
                assert call.pop("index") == len(streamed.setdefault("tool_calls", []))
                streamed["tool_calls"].append(call)
    return message, streamed


@pytest.mark.parametrize("protocol", CALLS)
def test_a_stream_says_what_the_whole_answer_says_wherever_it_is_cut(protocol):
    text = text_of(protocol)
    tokens = TOKENIZER.encode(f"<think>é</think>\n{CALLS[protocol]}")

    async def compare():
        for end in range(1, len(tokens) + 1):
            for request in (
                ChatRequest((), stream=True, tools=TOOLS),
                ChatRequest((), stream=True, stop=("command", "</tool_call>")),
            ):
                message, streamed = await said(text, tokens[:end], request)
                assert message | {"content": message["content"] or ""} == streamed
                # nothing is called before the call is whole
                assert "tool_calls" not in message or end >= len(tokens) - 1

    asyncio.run(compare())


def test_a_call_that_the_limit_cuts_inside_of_an_argument_is_not_served():
    inner = (
        "<tool_call>\n<function=read>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>"
    )
    said = inner.replace("x", f"Write:\n{inner}", 1)
    said = said[: said.index("</tool_call>") + len("</tool_call>")]
    message, (call,) = text_of("qwen3_coder").read(TOKENIZER.encode(said), TOOLS, "n")
    assert message.content == said and not message.calls and "was cut" in call.error


@pytest.mark.parametrize("depth", [29, 31, 33, 200])
def test_a_served_call_can_be_sent_back(depth):
    arguments = '{"a": ' + "[" * depth + "]" * depth + "}"
    said = f'<tool_call>{{"name": "bash", "arguments": {arguments}}}</tool_call>'
    message, (call,) = text_of("hermes").read(TOKENIZER.encode(said), TOOLS, "n")
    assert bool(message.calls) == (depth < 32) and ("too deeply" in call.error) == (depth > 31)
    history = {
        "role": "assistant",
        "content": message.content,
        "tool_calls": [
            {"id": each.id, "function": {"name": each.name, "arguments": each.arguments}}
            for each in message.calls
        ],
    }
    messages = [{"role": "user", "content": "go"}, history]
    assert read_request(json.dumps({"messages": messages}).encode()).messages[1] == message


def test_calls_of_a_strict_tool_have_its_schema():
    parameters = {
        "type": "object",
        "properties": {"command": {"type": "string"}},
        "required": ["command"],
        "additionalProperties": False,
    }
    tools = ({"name": "bash", "strict": True, "parameters": parameters},)
    text = text_of("hermes")
    request = ChatRequest(messages=(Message("user", "go"),), tools=tools)
    assert start_forms(request, text.protocol, text.grammars) == [None]
    for arguments, fits in (({"command": "ls"}, True), ({}, False), ({"command": 3}, False)):
        call = json.dumps({"name": "bash", "arguments": arguments})
        said = TOKENIZER.encode(f"<tool_call>\n{call}\n</tool_call>")
        message, calls = text.read(said, tools, "n")
        assert bool(message.calls) == fits and ("schema" in calls[0].error) != fits
    loose = ({**tools[0], "strict": None},)
    assert text.read(said, loose, "n")[0].calls
    wrong = ({**tools[0], "parameters": {"type": "int"}},)
    with pytest.raises(ApiError, match="cannot be followed"):
        asked = ChatRequest(messages=request.messages, tools=wrong)
        start_forms(asked, text.protocol, text.grammars)


def test_a_long_conversation_is_rendered_a_bounded_number_of_times(monkeypatch):
    chat = text_of("hermes")
    long = [Message(("user", "assistant")[at % 2], f"message {at}") for at in range(600)]
    before = chat.begin(long[:100], ())
    rendered = []
    render = chat._render

    def counted(messages, *rest):
        rendered.append(len(messages))
        return render(messages, *rest)

    monkeypatch.setattr(chat, "_render", counted)
    pieces = chat.begin(long, ())
    assert len(rendered) < 300 and None not in pieces.ends[-256:]
    assert TOKENIZER.decode(pieces.tokens).count("message ") == 600
    behind = chat.begin(long, (), kept=100)
    assert before.tokens[: before.ends[-1]] + behind.tokens == pieces.tokens
    assert behind.ends[-1] + before.ends[-1] == pieces.ends[-1]
