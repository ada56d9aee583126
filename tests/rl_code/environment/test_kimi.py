"""Kimi K2's format: as the package ``renderers`` writes and reads it, and as this project's rules say."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from models.chat import render
from models.families import FAMILIES
from models.tokenizer import Tokenizer
from rl_code.environment.frames import Frame
from rl_code.environment.messages import checked
from rl_code.environment.protocols.api import PROTOCOLS
from rl_code.environment.protocols.kimi import Kimi
from rl_code.environment.protocols.protocol import missing_end, stop_length
from rl_code.environment.tools.api import check, execute, find_tools
from rl_code.environment.tools.tool import Result
from rl_code.harness.endpoint.chat_text import ChatText
from rl_code.harness.endpoint.conversation import Message
from rl_code.types import Task, ToolCall, ToolResult
from tests.rl_code.environment.required import check_required

GOLDEN = json.loads((Path(__file__).parent / "golden" / "kimi.json").read_text(encoding="utf-8"))
KIMI = PROTOCOLS["kimi_k2"]
ALL = find_tools()
TASK = Task(id="t", messages=({"role": "user", "content": "go"},), path="s.py", entry_point="f")
TOKENIZER = Tokenizer.train(["a"], 300, Kimi.SPECIAL_TOKENS, eos="[EOS]", pad="[PAD]")
BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
DEFAULT = KIMI.conversation([{"role": "user", "content": ""}], (), False).partition("<|im_user|>")[
    0
]


def call(id, arguments):
    return f"<|tool_call_begin|>{id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def section(*calls):
    return f"{BEGIN}{''.join(calls)}{END}"


SUBMIT = section(call("functions.submit:3", "{}"))


def without_ids(talk):
    """A conversation as this project has them."""
    dropped = [{k: v for k, v in message.items() if k != "tool_call_id"} for message in talk]
    for message in dropped:
        for one in message.get("tool_calls", ()):
            one.pop("id")
    return dropped


@pytest.mark.parametrize("name", GOLDEN["talks"])
def test_conversations_are_written_as_renderers_writes_them(name):
    talk = json.loads(json.dumps(GOLDEN["talks"][name]["messages"]))
    assert (
        KIMI.conversation(without_ids(talk), GOLDEN["tools"], True) == GOLDEN["talks"][name]["text"]
    )
    # content may hold the calls as they were sampled
    sampled = []
    for message in talk:
        made = message.get("tool_calls", ())
        said = [
            call(f"functions.{f['name']}:{at}", json.dumps(f["arguments"], ensure_ascii=False))
            for at, f in enumerate(
                (one["function"] for one in made), start=0 if len(made) > 1 else 3
            )
        ]
        own = {k: v for k, v in message.items() if k not in ("tool_calls", "tool_call_id", "name")}
        sampled.append(own | ({"content": own["content"] + section(*said)} if said else {}))
    written = KIMI.conversation(sampled, GOLDEN["tools"], True)
    assert written == GOLDEN["talks"][name]["text"]


def test_thoughts_are_written_as_renderers_writes_them():
    talk, written = json.loads(json.dumps(GOLDEN["thoughts"])).values()
    talk = without_ids(talk)
    thinking = Kimi(thoughts=True)
    assert thinking.conversation(talk, (), True) == written
    # as they were sampled, they stay in the content, and calls are found behind them
    for message in talk:
        if "reasoning_content" in message:
            message["content"] = f"<think>{message.pop('reasoning_content')}</think>I see."
    assert thinking.conversation(talk, (), True) == written
    said = f"<think>{SUBMIT}</think>{SUBMIT}"
    assert thinking.parse(said, TASK, ALL) == KIMI.parse(SUBMIT, TASK, ALL)
    assert thinking.observation([ToolResult("", "fix it")]) == GOLDEN["behind"]["question"]
    # Kimi-K2-Instruct has no thoughts
    plain = KIMI.conversation(talk, (), True)
    assert plain == written.replace("<think></think>", "")


@pytest.mark.parametrize(("said", "expected"), GOLDEN["read"])
def test_messages_are_read_as_renderers_reads_them(said, expected):
    found = KIMI.parse(said, TASK, ALL)
    assert KIMI.has_call(said) == bool(expected) and not KIMI.thinking(said)
    if not expected:
        assert "no tool call; end the message with <|tool_calls_section_begin|>" in found[0].error
        return
    assert [[one.name, one.arguments] for one in found] == expected
    assert all(one.id and one.id in said and not one.error for one in found)


def test_results_repeat_the_names_that_the_model_gave_its_calls():
    said = section(call("functions.submit:3", "{}"), call("no_such:12", "{}"))
    frame = Frame(0, TASK, ALL, None, 1, 1)
    calls = checked(KIMI.parse(said, TASK, ALL), frame, SimpleNamespace(calls=2))
    assert [one.id for one in calls] == ["functions.submit:3", "no_such:12"]
    results = [ToolResult(one.name, one.error, ok=False, id=one.id) for one in calls]
    text = KIMI.observation(results)
    assert text.startswith("<|im_system|>submit<|im_middle|>## Return of functions.submit:3\n")
    assert "<|im_system|>no_such<|im_middle|>## Return of no_such:12\n" in text
    tool = SimpleNamespace(run=lambda arguments, workspace: Result("ok"))
    assert execute(ToolCall("f", {}, id="f:1"), {"f": tool}, None).id == "f:1"


def test_what_follows_a_message_is_what_renderers_puts_there():
    results = [
        ToolResult(name, content, id=f"functions.{name}:{at}")
        for at, (name, content) in enumerate((("write_file", "ok\n"), ("read_file", "12 é")))
    ]
    assert KIMI.observation(results) == GOLDEN["behind"]["results"]
    assert KIMI.observation([ToolResult("", "fix it")]) == GOLDEN["behind"]["question"]
    assert missing_end(KIMI, "") == "<|im_end|>" and missing_end(KIMI, "[EOS]") == ""
    assert set(GOLDEN["stops"]) < {*KIMI.stop_tokens} == {*FAMILIES["kimi_k2"].ends}
    text = ChatText(KIMI, TOKENIZER)
    messages = [
        Message("tool", one.content, call_id=f"call_{at}", name=one.name)
        for at, one in enumerate(results)
    ]
    pieces = text.follow(messages, last=TOKENIZER.token_id("<|im_end|>"))
    assert TOKENIZER.decode(pieces.tokens) == GOLDEN["behind"]["results"]
    assert None not in pieces.ends


def test_a_client_s_ids_end_in_the_numbers_of_the_calls():
    said = section(call("functions.submit:3", "{}"), call("functions.read_file:4", '{"path": "a"}'))
    ids = TOKENIZER.encode(f"Two.{said}<|im_end|>")
    declared = [tool.schema for tool in ALL.values()]
    answer, calls = ChatText(KIMI, TOKENIZER).read(ids, declared, "n")
    assert (answer.content, [one.id for one in answer.calls]) == ("Two.", ["n_3", "n_4"])
    assert [one.id for one in calls] == ["functions.submit:3", "functions.read_file:4"]
    twice = TOKENIZER.encode(section(call("submit:3", "{}"), call("submit:3", "{}")) + "<|im_end|>")
    answer, _ = ChatText(KIMI, TOKENIZER).read(twice, declared, "n")
    assert [one.id for one in answer.calls] == ["n_0", "n_1"]


def test_the_familys_template_writes_what_the_protocol_does():
    assert FAMILIES["kimi_k2"].protocol == "kimi_k2"
    talk = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": SUBMIT},
        {"role": "tool", "content": "ok", "name": "submit", "tool_call_id": "functions.submit:3"},
        {"role": "assistant", "content": "So."},
        {"role": "tool", "content": "no such tool"},
    ]
    for given in (talk, talk[1:]):
        for opening in (True, False):
            written = render("kimi_k2", given, add_generation_prompt=opening)
            assert written == KIMI.conversation(given, (), opening)


def test_the_prompt_of_a_task_declares_its_tools():
    tools = {name: ALL[name] for name in ("submit",)}
    text = KIMI.prompt(TASK, tools)
    told = text.removeprefix("<|im_system|>tool_declare<|im_middle|>").partition("<|im_end|>")[0]
    assert json.loads(told) == [{"type": "function", "function": ALL["submit"].schema}]
    assert text.endswith(
        "<|im_user|>user<|im_middle|>go<|im_end|><|im_assistant|>assistant<|im_middle|>"
    )
    assert DEFAULT in text and DEFAULT not in KIMI.conversation(
        [{"role": "system", "content": ""}], (), True
    )


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("<think>hm", "the thought never ends"),
        (f"<think>{SUBMIT}", "the thought never ends"),
        (f"<think>{SUBMIT}</think>", "no tool call"),
        (f"It writes `{BEGIN}` there.", "no tool call"),
        (call("functions.submit:0", "{}"), f"{BEGIN} is missing"),
        (section(), "no call stands in the section"),
        (SUBMIT.removesuffix(END), f"{END} is missing"),
        (f"{SUBMIT} Done.", "'Done.' stands behind the calls"),
        (section("submit"), "stands where a call must begin"),
        (section(call("functions.submit", "{}")), "stands where a call must begin"),
        (section(call("functions.a b:0", "{}")), "stands where a call must begin"),
        (section(call("submit:0", "{")), "not valid JSON"),
        (section(call("submit:0", "[]")), "must be a JSON object"),
        (section(call("submit:0", '{"a": 1, "a": 2}')), "not valid JSON"),
        (section(call("submit:0", "{} {}")), "<|tool_call_end|> is missing"),
        (section(call("submit:0", "[" * 100_000)), "not valid JSON"),
        (section(call("no_such:0", "{}")), "unknown"),
        (section(call("read_file:0", '{"path": 3}')), "path must be string"),
    ],
)
def test_what_is_no_call_is_named(said, words):
    (one,) = KIMI.parse(said, TASK, ALL)
    assert words in (one.error or check(one, ALL)) and len(one.error) < 500


def test_nothing_behind_a_broken_call_is_carried_out():
    good, bad = call("submit:0", "{}"), call("terminal:1", '{"command": "a "b""}')
    found = KIMI.parse(section(good, bad, good), TASK, ALL)
    assert [bool(one.error) for one in found] == [False, True]


def test_arguments_hold_any_text():
    for content in (SUBMIT, f"</think>{END}", "<think>", "<|im_end|>"):
        marked = TOKENIZER.marks.quote(json.dumps({"path": "s.py", "content": content}))
        ids = TOKENIZER.encode(section(call("functions.write_file:0", marked)) + "<|im_end|>")
        assert stop_length(KIMI, TOKENIZER, ids) == len(ids)
        (one,) = KIMI.parse(TOKENIZER.decode_quoted(ids[:-1]), TASK, ALL)
        assert one.arguments == {"path": "s.py", "content": content} and not one.error
    # what a model spells in other tokens calls nothing
    ids = TOKENIZER.encode(f"It says: {TOKENIZER.marks.quote(SUBMIT)}")
    assert not KIMI.has_call(TOKENIZER.decode_quoted(ids))


@pytest.mark.parametrize("marks", [Kimi.SPECIAL_TOKENS, ("<|im_end|>", "[EOS]", "[PAD]")])
def test_required_calls_stand_behind_a_thought_at_most(marks):
    tokenizer = Tokenizer.train(["a"], 300, marks, eos="[EOS]", pad="[PAD]")
    made = call("functions.read_file:11", '{"path": "a </b>", "first_line": 7}')
    cases = (
        (section(made), True, True),
        (f"<think>I see.</think>\n{section(made)}", True, True),
        (section(made, call("functions.submit:12", "{}")), True, False),
        (section(call("functions.other:0", "{}")), False, False),
        (section(call("functions.read_file:0", "{}")), False, False),
        (f"Hello. {section(made)}", False, False),
    )
    check_required(KIMI, tokenizer, ALL, TASK, cases, "[EOS]", ('{"type": "array"}', "[]"))


def test_roles_without_a_place_are_named():
    for messages, words in (
        ([], "at least one message"),
        ([{"role": "judge", "content": ""}], "role 'judge'"),
    ):
        with pytest.raises(ValueError, match=words):
            KIMI.conversation(messages, (), True)
