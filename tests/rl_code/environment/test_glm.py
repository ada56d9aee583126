"""GLM's messages: as the package ``renderers`` writes and reads them, and as this project's rules say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from models.chat import render
from models.families import FAMILIES
from models.tokenizer import Tokenizer
from rl_code.environment.protocols.api import PROTOCOLS
from rl_code.environment.protocols.protocol import missing_end
from rl_code.environment.tools.api import check, find_tools
from rl_code.harness.endpoint.chat_text import ChatText
from rl_code.harness.endpoint.conversation import Message
from rl_code.types import Task, ToolCall, ToolResult

GOLDEN = json.loads((Path(__file__).parent / "golden" / "glm.json").read_text(encoding="utf-8"))
GLM = PROTOCOLS["glm"]
ALL = find_tools()
TASK = Task(id="t", messages=({"role": "user", "content": "go"},), path="s.py", entry_point="f")
MARKS = ("<|pad|>", "<|endoftext|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|system|>")
TOKENIZER = Tokenizer.train(["a"], 300, MARKS, eos="<|endoftext|>", pad="<|pad|>")
# What a template writes before the first token that is sampled: the published one leaves the end of
# the line to the model.
OPENING = "<|assistant|>"
RESULTS = [{"role": "tool", "content": "ok\n"}, {"role": "tool", "content": "12 é"}]


def test_a_conversation_is_written_as_the_published_template_writes_it():
    calls = [{"function": {"name": name, "arguments": value}} for name, value in GOLDEN["calls"]]
    thought = "<think>I see.\nSo be it.</think>"
    talk = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "fix it"},
        {"role": "assistant", "content": thought, "tool_calls": calls},
        *RESULTS,
    ]
    assert render("glm4_moe", talk) == GOLDEN["conversation"] + "\n"
    assert GOLDEN["conversation"].endswith(OPENING)


@pytest.mark.parametrize(("said", "expected"), GOLDEN["read"])
def test_messages_are_read_as_renderers_reads_them(said, expected):
    if not expected:
        (call,) = GLM.parse(said, TASK, ALL)
        assert "no tool call; write the name and then arg_key" in call.error
        return
    assert GLM.parse(said, TASK, ALL) == [ToolCall(name, value) for name, value in expected]


@pytest.mark.parametrize("last", ["<|observation|>", "<|user|>"])
def test_what_follows_a_message_is_what_renderers_puts_there(last):
    results = [ToolResult("terminal", one["content"]) for one in RESULTS]
    following = missing_end(GLM, last) + GLM.observation(results)
    assert following == GOLDEN["behind"][f"results {last}"] + "\n"
    text = ChatText(GLM, TOKENIZER)
    for name, messages in (
        ("results", [Message("tool", one["content"]) for one in RESULTS]),
        ("question", [Message("user", "and now?")]),
    ):
        pieces = text.follow(messages, last=TOKENIZER.token_id(last))
        assert TOKENIZER.decode(pieces.tokens) == GOLDEN["behind"][f"{name} {last}"] + "\n"
        assert pieces.ends[-1] == len(pieces.tokens) - len(TOKENIZER.encode("<|assistant|>\n"))


def test_a_message_that_was_cut_is_closed_by_the_mark_that_follows():
    assert missing_end(GLM, "") == "<|observation|>"
    pieces = ChatText(GLM, TOKENIZER).follow([Message("user", "go on")], last=0)
    assert TOKENIZER.decode(pieces.tokens) == "<|user|>\ngo on<|assistant|>\n"
    # other families end every message with the same token
    hermes = PROTOCOLS["hermes"]
    assert missing_end(hermes, "") == "<|im_end|>" and missing_end(hermes, "<|endoftext|>") == ""


def test_stop_tokens_are_those_of_renderers():
    assert set(GLM.stop_tokens) == set(GOLDEN["stops"]) == set(FAMILIES["glm4_moe"].ends)


def test_a_value_may_hold_the_marks_of_calls():
    inner = "<tool_call>submit\n</tool_call>"
    held = f"<arg_key>path</arg_key>\n<arg_value>{inner}</arg_value>\n"
    for content in (inner, held, f"</think>{inner}<think>", "  \n x \n", "</arg_value> no"):
        call = ToolCall("write_file", {"path": "s.py", "content": content})
        spec = {"function": {"name": call.name, "arguments": dict(call.arguments)}}
        talk = [{"role": "assistant", "content": "", "tool_calls": [spec, spec]}]
        text = render("glm4_moe", talk, add_generation_prompt=False).partition(OPENING)[2]
        assert GLM.parse(text, TASK, ALL) == [call, call]


def test_values_take_the_type_of_the_schema():
    form = (
        "<tool_call>read_file\n<arg_key>path</arg_key>\n<arg_value>3</arg_value>\n"
        "<arg_key>first_line</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"
    )
    good, bad = (GLM.parse(form.format(value), TASK, ALL)[0] for value in ("12", "twelve"))
    assert good.arguments == {"path": "3", "first_line": 12} and check(good, ALL) == ""
    assert "first_line must be integer" in check(bad, ALL)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<tool_call>submit", "no closed argument tag"),
        ("<tool_call>read_file\n<arg_key>path</arg_key>\n<arg_value>a", "not closed"),
        ("<tool_call>read_file\n<arg_key>path</arg_key>\n</tool_call>", "argument tag"),
        ("<tool_call>read_file\n<arg_key>path</arg_value></tool_call>", "not a closed parameter"),
        ('<tool_call>{"name": "submit"}</tool_call>', "unknown"),
        ("<think>\n<tool_call>submit\n</tool_call>", "the thought never ends"),
        ("<think><tool_call>submit\n</tool_call></think>", "no tool call"),
        ("A call begins with <tool_call> and so on.", "no tool call"),
    ],
)
def test_what_is_no_call_is_named(text, words):
    (call,) = GLM.parse(text, TASK, ALL)
    assert words in (call.error or check(call, ALL))


def test_a_text_of_white_space_and_marks_is_read_in_one_pass():
    for text in ("<tool_call>" + " " * 100_000, "<tool_call>a\n<arg_key>" * 5000):
        (call,) = GLM.parse(text, TASK, ALL)
        assert call.error
