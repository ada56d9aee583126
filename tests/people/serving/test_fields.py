"""Every field of requests is carried out or refused by name; none is ignored without a word."""

from __future__ import annotations

import json
import typing

import pytest

from rl_code.environment.protocols.api import PROTOCOLS
from rl_code.harness.endpoint.completions import read_completion
from rl_code.harness.endpoint.fields import ApiError
from rl_code.harness.endpoint.requests import read_request
from rl_code.harness.endpoint.stops import stopping
from tests.late import Late

completions = Late("openai.types.completion_create_params")
chats = Late("openai.types.chat.completion_create_params")


HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "read", "parameters": SCHEMA}}


def tool(**more):
    return {"type": "function", "function": {"name": "read"} | more}


def form(**more):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA} | more}


def allowed(mode, *tools):
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*tools]}}


def chat(**options):
    return read_request(json.dumps({"messages": HELLO, **options}).encode())


def refused(read, body):
    with pytest.raises(ApiError) as caught:
        read(body if isinstance(body, bytes) else json.dumps(body).encode())
    assert caught.value.status == 400
    return caught.value.body["error"]


def keys_of(*kinds) -> list[str]:
    """The keys that the published client can send."""
    return sorted({key for kind in kinds for key in typing.get_type_hints(kind)})


def test_a_wrong_value_of_every_field_of_the_client_is_refused_by_its_name():
    found = keys_of(chats.CompletionCreateParamsNonStreaming, chats.CompletionCreateParamsStreaming)
    assert {"reasoning_effort", "response_format", "prediction"} <= {*found}
    for key in found:
        error = refused(read_request, {"messages": HELLO, "stream": True, key: [3]})
        assert error["param"].startswith(key), error
    for key in keys_of(
        completions.CompletionCreateParamsNonStreaming, completions.CompletionCreateParamsStreaming
    ):
        wrong = {"odd": 1} if key == "prompt" else [[3]]
        error = refused(read_completion, {"prompt": "a", "stream": True, key: wrong})
        assert error["param"].startswith(key), error


def test_what_usual_clients_send_is_read():
    request = chat(
        temperature=0,
        top_p=1,
        logprobs=True,
        top_logprobs=20,
        parallel_tool_calls=False,
        tools=[TOOL],
        tool_choice="auto",
        response_format={"type": "text"},
        n=2,
        seed=-3,
        stop=None,
        logit_bias={"5": -100, "6": 2.5},
        presence_penalty=0.5,
        frequency_penalty=-2,
        user="ann",
        metadata={"a": "b"},
        store=False,
        stream=True,
        stream_options={"include_usage": True, "include_obfuscation": False},
        max_completion_tokens=5,
        modalities=["text"],
        reasoning_effort="high",
        verbosity="low",
        service_tier="auto",
        prompt_cache_key="k",
        prediction={"type": "content", "content": "x"},
    )
    assert (request.temperature, request.alternatives, request.max_tokens) == (0.0, 20, 5)
    assert request.logit_bias == ((5, -100.0), (6, 2.5)) and not request.parallel
    assert (request.presence_penalty, request.frequency_penalty) == (0.5, -2.0)
    assert (request.metadata, request.end_user, request.store) == ({"a": "b"}, "ann", False)
    assert request.unheeded == (
        *("reasoning_effort", "verbosity", "service_tier", "prompt_cache_key", "prediction"),
    )
    given = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    assert json.loads(chat(response_format=given).json_schema) == SCHEMA
    assert json.loads(chat(response_format={"type": "json_object"}).json_schema)
    assert chat(tools=[TOOL], tool_choice="none").tools == ()
    one, two = {"type": "function", "function": {"name": "read"}}, tool(name="write")
    for choice, forced, parallel in (
        ("required", ("read", "write"), True),
        (one, ("read",), False),
        (allowed("required", one), ("read",), True),
        ("auto", (), True),
    ):
        request = chat(tools=[TOOL, two], tool_choice=choice, response_format=form())
        assert (request.forced, request.parallel) == (forced, parallel)
        assert len(request.tools) == 2 and bool(request.json_schema) == (not forced)
    assert read_completion(b'{"prompt": "a", "logprobs": 3}').alternatives == 3


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"²": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {"a": "b" * 513}}, "metadata"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"odd": 1}}, "stream_options.odd"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"messages": [{**HELLO[0], "odd": 1}]}, "messages[0].odd"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "odd": 1}]}]}, "messages[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "any", "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": tool(name="write"), "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": [TOOL]}, "tool_choice.function"),
        ({"tool_choice": {**tool(), "odd": 1}, "tools": [TOOL]}, "tool_choice.odd"),
        ({"tool_choice": allowed("auto"), "tools": [TOOL]}, "tool_choice.allowed_tools.mode"),
        ({"tool_choice": allowed("required"), "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "custom"}, "tools": [TOOL]}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"stop": 0}, "stop"),
        ({"stop": False}, "stop"),
        ({"logit_bias": {"5": None}}, "logit_bias"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"tools": [tool(name="a b")]}, "tools[0].function.name"),
        ({"tools": [tool(name="<|im_end|>")]}, "tools[0].function.name"),
        ({"tools": [tool(parameters={"type": "array"})]}, "tools[0].function.parameters"),
        ({"tools": [tool(description=5)]}, "tools[0].function.description"),
        ({"tools": [{**TOOL, "odd": 5}]}, "tools[0].odd"),
        ({"response_format": form(strict="yes")}, "response_format.json_schema.strict"),
        ({"response_format": form(description=5)}, "response_format.json_schema.description"),
        ({"response_format": form(name="")}, "response_format.json_schema"),
    ],
)
def test_a_value_that_is_not_carried_out_is_refused(change, param):
    assert refused(read_request, {"messages": HELLO} | change)["param"].startswith(param)


def test_keys_that_say_nothing_are_read():
    nothing = dict.fromkeys(("functions", "audio", "stop", "tools", "metadata", "logit_bias"))
    assert chat(**nothing) == chat()
    assert chat(tools=[tool(name="files/read.all:v-1", description=None)]).tools


def test_numbers_that_json_does_not_have_are_no_request():
    for value in (b"NaN", b"Infinity", b"-Infinity"):
        body = b'{"messages": [{"role": "user", "content": "a"}], "temperature": %s}' % value
        assert refused(read_request, body)["code"] == "invalid_json"


def call(id, arguments="{}"):
    return {"id": id, "type": "function", "function": {"name": "read", "arguments": arguments}}


def history(calls, *results):
    said = {"role": "assistant", "content": None, "tool_calls": calls}
    answers = [{"role": "tool", "tool_call_id": id, "content": text} for id, text in results]
    return [*HELLO, said, *answers, {"role": "user", "content": "go on"}]


def test_results_are_bound_to_calls_by_their_ids():
    messages = history([call("a"), call("b")], ("b", "two"), ("a", "one"))
    assert [message.content for message in chat(messages=messages).messages[2:4]] == ["one", "two"]
    for results, param in (
        ([("a", "one")], "messages[3]"),
        ([("a", "one"), ("c", "two")], "messages[3].tool_call_id"),
        ([("a", "one"), ("a", "two")], "messages[3].tool_call_id"),
    ):
        error = refused(read_request, {"messages": history([call("a"), call("b")], *results)})
        assert error["param"] == param
    alone = [*HELLO, {"role": "tool", "tool_call_id": "a", "content": "x"}]
    assert refused(read_request, {"messages": alone})["param"] == "messages[1].tool_call_id"
    first = [{"role": "tool", "tool_call_id": "a", "content": "x"}, *HELLO]
    assert refused(read_request, {"messages": first})["param"] == "messages[0].tool_call_id"
    # one result of two would stand for the first call
    half = history([call("a"), call("b")], ("b", "two"))[:-1]
    assert "'a' has no result" in refused(read_request, {"messages": half})["message"]
    assert chat(messages=half[:-1]).messages[-1].calls
    twice = history([call("a"), call("a")], ("a", "x"))
    assert "same id" in refused(read_request, {"messages": twice})["message"]


def test_calls_that_clients_put_together_from_a_stream_are_read():
    assert chat(messages=history([call("a") | {"index": 0}], ("a", "x"))).messages[1].calls
    for change, param in (({"type": "custom"}, "type"), ({"odd": 1}, "odd")):
        messages = history([call("a") | change], ("a", "x"))
        error = refused(read_request, {"messages": messages})
        assert error["param"] == f"messages[1].tool_calls[0].{param}"


def test_arguments_of_a_call_are_an_object_and_may_be_left_empty():
    empty = chat(messages=history([call("a", "")], ("a", "x"))).messages[1]
    assert empty.calls[0].arguments == "{}"
    deep = "[" * 100_000
    for wrong in ("[]", "{", '{"a": NaN}', deep, '{"a": ' + deep):
        error = refused(read_request, {"messages": history([call("a", wrong)], ("a", "x"))})
        assert error["param"] == "messages[1].tool_calls[0].function.arguments"


def test_a_message_ends_behind_its_first_call_where_only_one_is_wanted():
    protocol = PROTOCOLS["hermes"]
    one = '<tool_call>\n{"name": "read", "arguments": {"a": 1}}\n</tool_call>'
    assert stopping(protocol, chat(tools=[TOOL])) is protocol
    ends = stopping(protocol, chat(tools=[TOOL], parallel_tool_calls=False))
    assert ends.stopped(one) and ends.stopped(f"text {one} more")
    assert not ends.stopped(one[:-1]) and not ends.stopped("text </tool_call>")


def test_calls_written_in_an_argument_do_not_end_the_only_call():
    inner = (
        "<tool_call>\n<function=read>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    )
    value = f"Write:\n{inner}\nand\n{inner}\nthen stop"
    whole = inner.replace("1", value, 1)
    protocol = PROTOCOLS["qwen3_coder"]
    ends = stopping(protocol, chat(tools=[TOOL], parallel_tool_calls=False))
    assert [n for n in range(len(whole) + 1) if ends.stopped(whole[:n])] == [len(whole)]
    (call,) = protocol.parse(whole, None, {})
    assert call.arguments == {"a": value} and protocol.settled(whole)
    assert not protocol.settled(whole[: whole.index("\nand")])
