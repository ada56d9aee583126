"""The harmony format: as the package ``openai-harmony`` writes and reads it, and as our rules say."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from models.chat import render
from models.tokenizer import Tokenizer
from rl_code.environment.protocols.api import PROTOCOLS
from rl_code.environment.protocols.harmony import Harmony, _messages
from rl_code.environment.protocols.protocol import missing_end, stop_length
from rl_code.environment.tools.api import check, find_tools
from rl_code.harness.endpoint.chat_text import ChatText
from rl_code.harness.endpoint.conversation import Message
from rl_code.types import Task, ToolCall, ToolResult

GOLDEN = json.loads((Path(__file__).parent / "golden" / "harmony.json").read_text(encoding="utf-8"))
HARMONY = PROTOCOLS["harmony"]
ALL = find_tools()
TASK = Task(id="t", messages=({"role": "user", "content": "go"},), path="s.py", entry_point="f")
MARKS = (*Harmony.SPECIAL_TOKENS, "<|mark|>")
TOKENIZER = Tokenizer.train(["a"], 300, MARKS, eos="<|return|>", pad="<|pad|>")
CALL = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}"


def schemas(functions):
    return [{"type": "function", "function": one} for one in functions]


def test_conversations_are_written_as_openai_harmony_writes_them():
    protocol = Harmony(reasoning="high", date="2025-06-28")
    call = {"function": {"name": "write_file", "arguments": {"path": "s.py", "content": "é"}}}
    talk = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "fix it"},
        {"role": "assistant", "content": "", "reasoning_content": "I see.", "tool_calls": [call]},
        {"role": "tool", "content": "ok\n"},
        {"role": "assistant", "content": "Fixed."},
        {"role": "user", "content": "and now?"},
    ]
    written = protocol.conversation(talk, schemas(GOLDEN["functions"]), True)
    # an earlier answer ends here as it was sampled
    assert written.replace("<|return|>", "<|end|>") == GOLDEN["conversation"]
    assert written.count("Fixed.<|return|>") == 1
    hi = [{"role": "user", "content": "hi"}]
    assert HARMONY.conversation(hi, (), True) == GOLDEN["plain"]


@pytest.mark.parametrize(("said", "expected"), GOLDEN["read"])
def test_messages_are_read_as_openai_harmony_reads_them(said, expected):
    text = said.removesuffix("<|return|>").removesuffix("<|call|>")
    assert [[one.channel, one.receiver, one.body] for one in _messages(text)] == expected
    calls = [
        ToolCall(receiver.removeprefix("functions."), json.loads(body))
        for _, receiver, body in expected
        if receiver
    ]
    assert HARMONY.has_call(text) == bool(calls) and not HARMONY.thinking(text)
    found = HARMONY.parse(text, TASK, ALL)
    assert found == calls if calls else "no tool call" in found[0].error


def test_stop_tokens_are_those_of_openai_harmony_and_the_end_of_texts():
    assert [*GOLDEN["stops"], "<|endoftext|>"] == list(HARMONY.stop_tokens)
    said = "<|channel|>analysis<|message|>x<|end|><|start|>assistant<|channel|>final<|message|>y"
    ids = TOKENIZER.encode(said + "<|return|>")
    # the end of a thought ends no message
    assert stop_length(HARMONY, TOKENIZER, ids[:-1]) is None
    assert stop_length(HARMONY, TOKENIZER, ids) == len(ids)


def test_the_prompt_of_a_task_declares_its_tools_and_opens_a_message():
    tools = {name: ALL[name] for name in ("read_file", "submit")}
    text = HARMONY.prompt(dataclasses.replace(TASK, prefill="<|channel|>"), tools)
    assert text.endswith("<|start|>user<|message|>go<|end|><|start|>assistant<|channel|>")
    assert "type read_file = (_: {\n" in text and "first_line?: number," in text
    assert "Current date" not in text


def test_results_stand_behind_what_was_sampled():
    results = [ToolResult("read_file", "1\n"), ToolResult("", "no tool call", ok=False)]
    assert HARMONY.observation(results) == (
        "<|start|>functions.read_file to=assistant<|channel|>commentary<|message|>1\n<|end|>"
        "<|start|>user<|message|>no tool call<|end|><|start|>assistant"
    )
    assert missing_end(HARMONY, "<|call|>") == "" and missing_end(HARMONY, "") == "<|return|>"


def test_the_familys_template_writes_what_the_protocol_does():
    said = CALL.format("submit", "{}")
    talk = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": said},
        {"role": "tool", "content": "ok\n", "name": "submit"},
        {"role": "assistant", "content": f"<|channel|>analysis<|message|>x<|end|><|start|>{said}"},
        {"role": "tool", "content": "no such tool"},
        {"role": "assistant", "content": "Fixed to=you."},
        {"role": "assistant", "content": "<|channel|>final<|message|>Said to=you."},
    ]
    for opening in (True, False):
        written = render("gpt_oss", talk, add_generation_prompt=opening)
        assert written == HARMONY.conversation(talk, (), opening)


def test_a_required_call_stands_behind_a_thought_at_most():
    grammars = ChatText(HARMONY, TOKENIZER).grammars
    functions = [ALL["submit"].schema, ALL["read_file"].schema]
    grammar = HARMONY.grammar(functions, grammars.special)
    thought = "<|channel|>analysis<|message|>I see.<|end|><|start|>assistant"
    call = CALL.format("read_file", '{"path":"a"}')
    for said, allowed in (
        (call, True),
        (thought + call, True),
        ("<|channel|>final<|message|>no", False),
        (CALL.format("other", "{}"), False),
    ):
        ids = TOKENIZER.encode(said)
        (answer,) = grammars.start(grammar, 1)
        assert (answer.read(ids) == len(ids)) == allowed
        if allowed:
            assert answer.allowed()[TOKENIZER.token_id("<|call|>")]
            assert HARMONY.parse(said, TASK, ALL) == [ToolCall("read_file", {"path": "a"})]
    with pytest.raises(ValueError, match="a message is no JSON"):
        HARMONY.grammar(functions, grammars.special, content="{}")


def test_a_client_s_results_have_the_names_of_their_functions():
    text = ChatText(HARMONY, TOKENIZER)
    message = Message("tool", "ok", call_id="c", name="submit")
    for last in ("<|call|>", "<|return|>"):
        pieces = text.follow([message], last=TOKENIZER.token_id(last))
        assert TOKENIZER.decode(pieces.tokens) == HARMONY.observation([ToolResult("submit", "ok")])
    said = TOKENIZER.encode(CALL.format("submit", "{}") + "<|call|>")
    declared = [tool.schema for tool in ALL.values()]
    answer, calls = text.read(said, declared, "n")
    assert (answer.content, answer.calls[0].name, len(calls)) == ("", "submit", 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<|channel|>analysis<|message|>hm", "the thought never ends"),
        ("<|channel|>final<|message|>to=functions.submit", "no tool call"),
        ("", "no tool call"),
        (CALL.format("submit", "{"), "not valid JSON"),
        (CALL.format("submit", "[]"), "must be a JSON object"),
        (CALL.format("submit", '{"a": 1, "a": 2}'), "not valid JSON"),
        (CALL.format("no_such", "{}"), "unknown"),
        (CALL.format("", "{}"), "no name of a function"),
        (CALL.format("read_file", '{"path": 3}'), "path must be string"),
    ],
)
def test_what_is_no_call_is_named(text, words):
    (call,) = HARMONY.parse(text, TASK, ALL)
    assert words in (call.error or check(call, ALL))


def test_marks_that_were_spelled_are_text():
    """A model that writes marks in other tokens opens no message with them."""
    body = '{"path": "s.py", "content": "<|end|><|start|>assistant to=functions.submit"}'
    marked = TOKENIZER.marks.quote(body)
    ids = TOKENIZER.encode(CALL.format("write_file", marked) + "<|call|>")
    text = TOKENIZER.decode_quoted(ids[:-1])
    assert HARMONY.parse(text, TASK, ALL) == [ToolCall("write_file", json.loads(body))]


def test_an_answer_that_a_client_repeats_is_written_as_it_was_sampled():
    said = "<|channel|>analysis<|message|>x<|end|><|start|>assistant<|channel|>final<|message|>y"
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": said}]
    assert HARMONY.conversation(talk, (), False).endswith(f"<|start|>assistant{said}<|return|>")


@pytest.mark.parametrize("setting", [{"reasoning": "none"}, {"date": "today"}])
def test_settings_that_mean_nothing_are_named(setting):
    ((name, value),) = setting.items()
    with pytest.raises(ValueError, match=f"{name}='{value}' must be"):
        Harmony(**setting)
