"""The Responses API and the Messages API in front of a scripted engine: the published clients read
what is sent, and what they send back keeps its tokens.
"""

from __future__ import annotations

import json
import os
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.late import Late
from tests.people.serving.scripted import openai_client, scripted

openai = Late("openai")


CLIENT = Path(__file__).parents[2] / "rl_code/harness/endpoint/anthropic_client.py"
PYTHON = os.environ.get("ANTHROPIC_PYTHON", "")
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
THOUGHT = "<think>\nI will look.\n</think>\n\n"
ACTS = f"{THOUGHT}First ls.\n{CALL}"
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}
TOOL = {
    "type": "function",
    "name": "bash",
    "description": "",
    "parameters": SCHEMA,
    "strict": False,
}
BLOCKS = {"name": "bash", "description": "", "input_schema": SCHEMA}
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def served():
    with scripted() as made:
        made.services[1].length, made.services[1].pages = 2000, 1000
        yield made


def says(served, text):
    served.services[1].weights = text


def kept(served):
    """Of each answer on record the tokens that were kept, and those that were new."""
    return [(record.kept, len(record.given)) for record in served.records]


def responses(served):
    return openai_client(f"{served.endpoint.url}/v1", "key").responses


def post(served, path, body):
    """Status and body of an answer, as text."""
    request = urllib.request.Request(
        f"{served.endpoint.url}/v1/{path}", json.dumps(body).encode(), {"x-api-key": "key"}
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def message(served, **changes):
    body = {"model": "policy", "max_tokens": 99, "messages": HI, **changes}
    status, text = post(served, "messages", body)
    return status, json.loads(text)


@pytest.mark.parametrize("keeps", ["sealed", "words", "nothing"])
def test_a_response_that_comes_back_keeps_all_its_tokens(served, keeps):
    """keeps: what the client sends back of the thought."""
    says(served, ACTS)
    asked = dict(model="policy", tools=[TOOL], instructions="be short")
    first = responses(served).create(input=HI, **asked)
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    thought, _, call = first.output
    assert thought.content[0].text == "I will look." and first.output_text == "First ls."
    assert json.loads(call.arguments) == {"command": "ls"}
    assert 0 < first.usage.output_tokens_details.reasoning_tokens < first.usage.output_tokens
    items = [item.model_dump(exclude_none=True) for item in first.output]
    if keeps == "words":
        del items[0]["encrypted_content"]
    history = [*HI, *items[keeps == "nothing" :]]
    history.append({"type": "function_call_output", "call_id": call.call_id, "output": "a.py"})
    says(served, "Done.")
    second = responses(served).create(input=history, **asked)
    assert (second.status, second.output_text) == ("completed", "Done.")
    assert second.usage.input_tokens_details.cached_tokens == first.usage.total_tokens
    assert kept(served)[1][0] == first.usage.total_tokens


def test_a_streamed_response_is_the_whole_one(served):
    for text, tools in ((ACTS, [TOOL]), (f"{THOUGHT}All done.", []), ("Done", [])):
        says(served, text)
        with responses(served).stream(model="policy", input=HI, tools=tools) as stream:
            kinds = [event.type for event in stream]
            streamed = stream.get_final_response()
        whole = responses(served).create(model="policy", input=HI, tools=tools)
        assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
        for one, other in zip(streamed.output, whole.output, strict=True):
            ids = {"id", "call_id", "parsed", "parsed_arguments"}
            fields = one.model_dump(exclude=ids), other.model_dump(exclude=ids)
            for item in fields:
                for part in item.get("content") or []:
                    part.pop("parsed", None)
            assert fields[0] == fields[1]
        assert streamed.usage == whole.usage


def test_tools_in_groups_and_of_free_text_are_called_by_their_own_names(served):
    says(served, CALL.replace('"bash"', '"agents.run"'))
    inner = TOOL | {"name": "run"}
    group = {"type": "namespace", "name": "agents", "description": "", "tools": [inner]}
    (call,) = responses(served).create(model="policy", input=HI, tools=[group]).output
    assert (call.namespace, call.name) == ("agents", "run")
    says(served, '<tool_call>\n{"name": "patch", "arguments": {"input": "+a"}}\n</tool_call>')
    free = {"type": "custom", "name": "patch", "description": "changes a file"}
    first = responses(served).create(model="policy", input=HI, tools=[free])
    (call,) = first.output
    assert (call.type, call.input) == ("custom_tool_call", "+a")
    result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "ok"}
    history = [*HI, call.model_dump(exclude_none=True), result]
    says(served, "Done.")
    responses(served).create(model="policy", input=history, tools=[free])
    assert kept(served)[-1][0] == first.usage.total_tokens


def test_messages_that_come_back_keep_all_their_tokens(served):
    says(served, ACTS)
    asked = dict(tools=[BLOCKS], system=[{"type": "text", "text": "be short"}])
    status, first = message(served, **asked)
    assert status == 200 and first["stop_reason"] == "tool_use"
    assert [block["type"] for block in first["content"]] == ["thinking", "text", "tool_use"]
    result = {"type": "tool_result", "tool_use_id": first["content"][2]["id"], "content": "a.py"}
    more = {"role": "user", "content": [result, {"type": "text", "text": "go on"}]}
    says(served, "Done. stop here")
    history = [*HI, {"role": "assistant", "content": first["content"]}, more]
    _, second = message(served, messages=history, stop_sequences=[" stop"], **asked)
    assert (second["stop_reason"], second["stop_sequence"]) == ("stop_sequence", " stop")
    total = first["usage"]["input_tokens"] + first["usage"]["output_tokens"]
    assert second["usage"]["cache_read_input_tokens"] == kept(served)[1][0] == total


def test_a_streamed_message_is_the_whole_one(served):
    says(served, ACTS)
    body = {"model": "policy", "max_tokens": 99, "messages": HI, "tools": [BLOCKS], "stream": True}
    _, text = post(served, "messages", body)
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    names = [line[7:] for line in text.splitlines() if line.startswith("event: ")]
    assert names == [event["type"] for event in events]
    assert (names[0], names[-1]) == ("message_start", "message_stop")
    blocks = [event["content_block"] for event in events if "content_block" in event]
    for event in events:
        if event["type"] == "content_block_delta":
            block, delta = blocks[event["index"]], event["delta"]
            key = {"input_json_delta": "partial_json"}.get(delta["type"], delta["type"][:-6])
            name = "json" if key == "partial_json" else key
            block[name] = block.get(name, "") + delta[key]
    blocks[2] |= {"input": json.loads(blocks[2].pop("json"))}
    _, whole = message(served, tools=[BLOCKS])
    ids = [blocks[2].pop("id"), whole["content"][2].pop("id")]
    assert blocks == whole["content"] and len(set(ids)) == 2
    (last,) = [event for event in events if event["type"] == "message_delta"]
    assert last["delta"]["stop_reason"] == "tool_use" and last["usage"] == whole["usage"]


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        (dict(max_tokens=None), 400, "max_tokens: must be an integer above 0"),
        (dict(model="other"), 404, "the model 'other' does not exist"),
        (dict(messages=[{"role": "user", "content": [{"type": "image"}]}]), 400, "messages.0.con"),
        (dict(tools=[{"type": "bash_20250124", "name": "bash"}]), 400, "tools[0].type"),
        (dict(tool_choice={"type": "some"}), 400, "tool_choice.type: 'some' must be auto"),
        (dict(top_k=3), 400, "top_k: is not known here"),
        (
            dict(messages=[{"role": "user", "content": [{"type": "tool_result"}]}]),
            400,
            "messages.0.tool_call_id",
        ),
        (dict(messages=[{"role": "user", "content": "hi " * 4000}]), 400, "prompt is too long"),
    ],
)
def test_errors_of_messages_have_their_own_form(served, changes, status, words):
    kinds = {400: "invalid_request_error", 404: "not_found_error"}
    code, body = message(served, **changes)
    assert code == status and body["type"] == "error"
    assert body["error"]["type"] == kinds[status] and words in body["error"]["message"]
    # a stream that fails before it begins is an error as well
    assert message(served, stream=True, **changes)[0] == status


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        (dict(previous_response_id="resp_1"), "previous_response_id"),
        (dict(input=[{"role": "user", "content": [{"type": "input_image"}]}]), "input[0].content"),
        (dict(input=[*HI, {"role": "judge", "content": ""}]), "input[1].role"),
        (dict(input=[{"type": "function_call_output", "output": "a"}]), "input[0].tool_call_id"),
        (dict(tools=[{"type": "web_search"}]), "tools[0].type"),
        (dict(max_output_tokens=0), "max_output_tokens"),
        (dict(input=[]), "input"),
    ],
)
def test_errors_of_responses_name_the_clients_own_fields(served, changes, param):
    status, text = post(served, "responses", {"model": "policy", "input": HI, **changes})
    error = json.loads(text)["error"]
    assert status == 400 and error["param"].startswith(param) and param in error["message"]


@pytest.mark.skipif(
    not PYTHON,
    reason="no Python with anthropic: python -m venv a; a/bin/pip install anthropic; "
    "ANTHROPIC_PYTHON=a/bin/python",
)
def test_the_published_client_of_messages_reads_all(served):
    says(served, ACTS)
    line = [PYTHON, str(CLIENT), served.endpoint.url]
    said = json.loads(subprocess.run(line, check=True, capture_output=True).stdout)
    kinds = [block["type"] for block in said["whole"]["content"]]
    assert kinds == ["thinking", "text", "tool_use"]
    assert said["kinds"][0] == "message_start" and said["kinds"][-1] == "message_stop"
    first, second = said["whole"]["usage"], said["streamed"]["usage"]
    assert second["cache_read_input_tokens"] == first["input_tokens"] + first["output_tokens"]
    assert said["count"] > 0 and said["error"]["error"]["type"] == "not_found_error"
