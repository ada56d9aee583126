"""The format of DeepSeek-V3.1: as published templates write it, and as this project's rules say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from models.tokenizer import Tokenizer
from rl_code.environment.protocols.api import PROTOCOLS
from rl_code.environment.protocols.deepseek_v3_1 import DeepSeek31
from rl_code.environment.tools.api import find_tools
from rl_code.harness.endpoint.chat_text import ChatText
from rl_code.harness.endpoint.conversation import Message
from rl_code.types import Task, ToolCall, ToolResult
from tests.rl_code.environment.required import check_required

GOLDEN = json.loads(
    (Path(__file__).parent / "golden" / "deepseek_v3_1.json").read_text(encoding="utf-8")
)
PLAIN, THINKING = PROTOCOLS["deepseek_v3_1"], DeepSeek31(thoughts=True)
ALL = find_tools()
TASK = Task(id="t", messages=({"role": "user", "content": "go"},), path="s.py", entry_point="f")
END = "<｜end▁of▁sentence｜>"
TOKENIZER = Tokenizer.train(
    ["a"], 300, DeepSeek31.SPECIAL_TOKENS, eos=END, pad=DeepSeek31.SPECIAL_TOKENS[0]
)
BEGIN, CLOSED = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
ASKED = {"role": "user", "content": "a"}


def call(name, arguments):
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


SUBMIT = f"{BEGIN}{call('submit', '{}')}{CLOSED}"


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_conversations_are_written_as_published(name):
    talk, thinking, written = GOLDEN[name]
    protocol = THINKING if thinking else PLAIN
    assert protocol.conversation(talk, (), True) == written


def test_calls_are_read_as_they_are_written():
    said = (
        f"Two.{BEGIN}{call('read_file', json.dumps({'path': 'a'}))}{call('submit', '{}')}{CLOSED}"
    )
    expected = [ToolCall("read_file", {"path": "a"}), ToolCall("submit", {})]
    assert PLAIN.parse(said, TASK, ALL) == expected
    assert THINKING.parse(f"hm{SUBMIT}</think>{said}", TASK, ALL) == expected
    assert THINKING.thinking(said) and not PLAIN.thinking(said)
    (wrong,) = PLAIN.parse(f"{BEGIN}{call('submit', '[]')}{CLOSED}", TASK, ALL)
    assert "must be a JSON object" in wrong.error and "NAME<｜tool▁sep｜>" in wrong.error


def test_earlier_thoughts_stay_as_they_were_sampled():
    said = f"I see.</think>Two.{SUBMIT}"
    prompt = THINKING.conversation([ASKED], (), True)
    results = THINKING.observation([ToolResult("submit", "ok"), ToolResult("", "b", ok=False)])
    behind = [{"role": "tool", "content": "ok"}, {"role": "user", "content": "b"}]
    for own in ({"content": said}, {"reasoning_content": "I see.", "content": f"Two.{SUBMIT}"}):
        talk = [ASKED, {"role": "assistant", **own}, *behind]
        assert THINKING.conversation(talk, (), True) == prompt + said + END + results
    assert prompt.endswith("<｜Assistant｜><think>") and results.endswith("<｜Assistant｜><think>")
    # with thoughts a message behind results begins in one too
    results = [ToolResult("submit", "ok")]
    written = "<｜tool▁output▁begin｜>ok<｜tool▁output▁end｜>"
    assert PLAIN.observation(results) == written
    assert THINKING.observation(results) == f"{written}<think>"
    talk = [ASKED, {"role": "assistant", "content": said}, behind[0]]
    again = [*talk, {"role": "assistant", "content": said}]
    assert THINKING.conversation(again, (), False) == (
        THINKING.conversation(talk, (), True) + said + END
    )


def test_results_stand_behind_what_was_sampled():
    text = ChatText(PLAIN, TOKENIZER)
    messages = [Message("tool", "a"), Message("tool", "b"), Message("user", "c")]
    pieces = text.follow(messages, last=TOKENIZER.token_id(END))
    known = [{"role": one.role, "content": one.content} for one in messages]
    assert TOKENIZER.decode(pieces.tokens) == PLAIN._turns(known, True)


@pytest.mark.parametrize("protocol", [PLAIN, THINKING])
def test_required_calls_stand_behind_a_thought_at_most(protocol):
    thought = "I see.</think>" if protocol is THINKING else ""
    made = call("read_file", '{"path": "a```", "first_line": 7}')
    submit = call("submit", "{}")
    cases = (
        (f"{BEGIN}{made}{CLOSED}", True, True),
        (f"{BEGIN}{made}{submit}{CLOSED}", True, False),
        (f"{BEGIN}{call('other', '{}')}{CLOSED}", False, False),
        (f"{BEGIN}{made}\n{submit}{CLOSED}", False, False),
        ("Hello.", False, False),
    )
    cases = [(thought + said, *allowed) for said, *allowed in cases]
    check_required(protocol, TOKENIZER, ALL, TASK, cases, END)


def test_the_prompt_of_a_task_declares_its_tools():
    text = PLAIN.prompt(TASK, {"submit": ALL["submit"]})
    assert text.startswith("<｜begin▁of▁sentence｜>## Tools\n")
    schema = json.dumps(ALL["submit"].schema, ensure_ascii=False)
    assert text.endswith(f"\n{schema}<｜User｜>go<｜Assistant｜></think>")
    with pytest.raises(ValueError, match="role 'judge'"):
        PLAIN.conversation([{"role": "judge", "content": ""}], (), True)
