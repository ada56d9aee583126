"""The format of DeepSeek-V3 and R1: as the published template and the package ``renderers`` write and
read it, and as this project's rules say.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from models.chat import render
from models.families import FAMILIES
from models.tokenizer import Tokenizer
from rl_code.environment.protocols.api import PROTOCOLS
from rl_code.environment.protocols.deepseek import DeepSeek
from rl_code.environment.protocols.protocol import stop_length
from rl_code.environment.tools.api import check, find_tools
from rl_code.harness.endpoint.chat_text import ChatText
from rl_code.harness.endpoint.conversation import Message
from rl_code.types import Task, ToolCall, ToolResult
from tests.rl_code.environment.required import check_required

GOLDEN = json.loads(
    (Path(__file__).parent / "golden" / "deepseek.json").read_text(encoding="utf-8")
)
V3, R1 = PROTOCOLS["deepseek_v3"], DeepSeek(thoughts=True)
ALL = find_tools()
TASK = Task(id="t", messages=({"role": "user", "content": "go"},), path="s.py", entry_point="f")
END = "<｜end▁of▁sentence｜>"
TOKENIZER = Tokenizer.train(
    ["a"], 300, DeepSeek.SPECIAL_TOKENS, eos=END, pad=DeepSeek.SPECIAL_TOKENS[0]
)
NEW_LINE = "\n"
BEGIN, CLOSED, CALLED = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁end｜>"


def call(name, arguments):
    head = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}"
    return f"{head}\n```json\n{arguments}\n```{CALLED}"


def short(name, arguments):
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}{CALLED}"


def section(*calls):
    return f"{BEGIN}{NEW_LINE.join(calls)}{CLOSED}"


SUBMIT = section(call("submit", "{}"))


@pytest.mark.parametrize(("protocol", "key"), [(V3, "plain"), (R1, "thinking")])
@pytest.mark.parametrize("name", ["results", "answer"])
def test_conversations_are_written_as_published(name, protocol, key):
    talk, written = GOLDEN[key][name]
    assert protocol.conversation(talk, (), True) == written


@pytest.mark.parametrize(("said", "expected"), GOLDEN["read"])
def test_messages_are_read_as_renderers_reads_them(said, expected):
    found = V3.parse(said, TASK, ALL)
    assert V3.has_call(said) == bool(expected)
    if expected:
        assert found == [ToolCall(name, value) for name, value in expected]
        assert R1.parse(f"hm</think>\n\n{said}", TASK, ALL) == found
    else:
        assert "no tool call; end the message with <｜tool▁calls▁begin｜>" in found[0].error


def test_calls_as_v3_1_writes_them_are_read():
    said = section(short("read_file", '{"path": "a"}'), short("submit", "{}"))
    assert V3.parse(said, TASK, ALL) == [
        ToolCall("read_file", {"path": "a"}),
        ToolCall("submit", {}),
    ]


def test_earlier_thoughts_stay_as_they_were_sampled():
    said = f"I see.\n</think>\n\nTwo.{SUBMIT}"
    asked = {"role": "user", "content": "a"}
    prompt = R1.conversation([asked], (), True)
    results = R1.observation([ToolResult("submit", "ok"), ToolResult("", "b", ok=False)])
    behind = [{"role": "tool", "content": "ok"}, {"role": "user", "content": "b"}]
    for own in ({"content": said}, {"reasoning_content": "I see.", "content": f"Two.{SUBMIT}"}):
        talk = [asked, {"role": "assistant", **own}, *behind]
        assert R1.conversation(talk, (), True) == prompt + said + END + results
    assert prompt.endswith("<｜Assistant｜><think>\n") and results.endswith(
        "<｜Assistant｜><think>\n"
    )
    assert R1.thinking("") and R1.thinking(SUBMIT) and not R1.has_call(SUBMIT)


def test_results_stand_behind_what_was_sampled():
    results = [ToolResult("terminal", "1"), ToolResult("", "broken"), ToolResult("f", "")]
    text = V3.observation(results)
    assert text.count("<｜tool▁output▁begin｜>") == 3 and text.endswith("<｜tool▁outputs▁end｜>")
    assert V3.observation(results[1:2]) == "<｜User｜>broken<｜Assistant｜>"
    text = ChatText(V3, TOKENIZER)
    messages = [Message("tool", "a"), Message("tool", "b"), Message("user", "c")]
    pieces = text.follow(messages, last=TOKENIZER.token_id(END))
    known = [{"role": one.role, "content": one.content} for one in messages]
    assert TOKENIZER.decode(pieces.tokens) == V3._turns(known, True)
    two = len(TOKENIZER.encode(V3._turns(known[:2], False)))
    assert pieces.ends[1:] == [two, len(pieces.tokens) - 1]


def test_the_familys_template_writes_what_the_protocol_does():
    assert FAMILIES["deepseek_v3"].protocol == "deepseek_v3"
    assert FAMILIES["deepseek_v3"].ends == V3.stop_tokens == tuple(GOLDEN["stops"])
    talk = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": SUBMIT},
        {"role": "tool", "content": "ok\n"},
        {"role": "tool", "content": "12"},
        {"role": "assistant", "content": SUBMIT},
        {"role": "tool", "content": "no"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "Fixed."},
    ]
    for count in range(2, len(talk) + 1):
        for opening in (True, False):
            written = render("deepseek_v3", talk[:count], add_generation_prompt=opening)
            assert written == V3.conversation(talk[:count], (), opening)


def test_the_prompt_of_a_task_declares_its_tools():
    text = V3.prompt(TASK, {"submit": ALL["submit"]})
    assert text.startswith("<｜begin▁of▁sentence｜>## Tools\n")
    schema = json.dumps(ALL["submit"].schema, ensure_ascii=False)
    assert text.endswith(f"\n{schema}<｜User｜>go<｜Assistant｜>")
    own = DeepSeek(declaration="A{functions}B").prompt(TASK, {"submit": ALL["submit"]})
    assert own == f"<｜begin▁of▁sentence｜>A{schema}B<｜User｜>go<｜Assistant｜>"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("<think>hm", "the thought never ends"),
        (f"<think>{SUBMIT}</think>", "no tool call"),
        (call("submit", "{}"), f"{BEGIN} is missing"),
        (section(), "no call stands in the section"),
        (SUBMIT.removesuffix(CLOSED), f"{CLOSED} is missing"),
        (f"{SUBMIT} Done.", "'Done.' stands behind the calls"),
        (section("submit"), "stands where a call must begin"),
        (section(call("a b", "{}")), "stands where a call must begin"),
        (section(short("submit", "```json\n{}\n```")), "not valid JSON"),
        (section(call("submit", "{")), "not valid JSON"),
        (section(call("submit", "[]")), "must be a JSON object"),
        (section(call("submit", "{} {}")), f"{CALLED} is missing"),
        (section(call("no_such", "{}")), "unknown"),
        (section(call("read_file", '{"path": 3}')), "path must be string"),
    ],
)
def test_what_is_no_call_is_named(said, words):
    (one,) = V3.parse(said, TASK, ALL)
    assert words in (one.error or check(one, ALL)) and len(one.error) < 500


def test_arguments_hold_any_text():
    for content in (SUBMIT, f"```{CALLED}", "<think>", "```", END):
        marked = TOKENIZER.marks.quote(json.dumps({"path": "s.py", "content": content}))
        ids = TOKENIZER.encode(section(call("write_file", marked)) + END)
        assert stop_length(V3, TOKENIZER, ids) == len(ids)
        (one,) = V3.parse(TOKENIZER.decode_quoted(ids[:-1]), TASK, ALL)
        assert one == ToolCall("write_file", {"path": "s.py", "content": content})
    ids = TOKENIZER.encode(f"It says: {TOKENIZER.marks.quote(SUBMIT)}")
    assert not V3.has_call(TOKENIZER.decode_quoted(ids))


@pytest.mark.parametrize("protocol", [V3, R1])
@pytest.mark.parametrize("marks", [DeepSeek.SPECIAL_TOKENS, (END, "<｜▁pad▁｜>")])
def test_required_calls_stand_behind_a_thought_at_most(protocol, marks):
    tokenizer = Tokenizer.train(["a"], 300, marks, eos=END, pad="<｜▁pad▁｜>")
    thought = "I see.\n</think>\n\n" if protocol is R1 else ""
    made = call("read_file", '{"path": "a```", "first_line": 7}')
    cases = (
        (section(made), True, True),
        (section(made, call("submit", "{}")), True, False),
        (section(call("other", "{}")), False, False),
        (section(call("read_file", "{}")), False, False),
        ("Hello.", False, False),
    )
    cases = [(thought + said, *allowed) for said, *allowed in cases]
    check_required(protocol, tokenizer, ALL, TASK, cases, END)
    if protocol is R1:
        with pytest.raises(ValueError, match="no message is JSON"):
            protocol.grammar([], lambda mark: "", content="{}")


def test_what_cannot_be_written_is_named():
    with pytest.raises(ValueError, match="at least one message"):
        V3.conversation([], (), True)
    with pytest.raises(ValueError, match="role 'judge'"):
        V3.conversation([{"role": "judge", "content": ""}], (), True)
    with pytest.raises(ValueError, match="it once, where the schemas"):
        DeepSeek(declaration="x")
