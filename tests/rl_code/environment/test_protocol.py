"""Protocols: what is written is parsed back, what is malformed is named, and no output can forge a
mark.
"""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.chat import render, render_tool_results
from models.marks import Marks, unquote
from models.own_template import OwnTemplate
from rl_code.config.named import Named
from rl_code.environment.parts import result_parts
from rl_code.environment.protocols import reading
from rl_code.environment.protocols.api import PROTOCOLS
from rl_code.environment.protocols.chat import Chat
from rl_code.environment.protocols.compact import Compact
from rl_code.environment.protocols.completion import Completion
from rl_code.environment.protocols.protocol import stop_ids, stop_length
from rl_code.environment.protocols.tags import read_functions
from rl_code.environment.tools.api import check, find_tools
from rl_code.types import Task, ToolCall, ToolResult

ALL = find_tools()
TASK = Task(
    id="t",
    messages=({"role": "user", "content": "double"},),
    path="s.py",
    entry_point="f",
)
COMPACT, HERMES, CODER, LLAMA, GLM, COMPLETION = (
    PROTOCOLS[name] for name in ("compact", "hermes", "qwen3_coder", "llama3", "glm", "completion")
)

plain = st.text(alphabet=st.characters(codec="utf-8", exclude_characters="<"), max_size=20)
# What protocols are written with, which files of programs for models hold too.
WORDS = (
    "<tool_call>",
    "</tool_call>",
    "<function=terminal>",
    "</function>",
    "<parameter=path>",
    "<parameter=command>",
    "</parameter>",
    "<arg_key>path</arg_key>\n<arg_value>",
    "</arg_value>",
    "<think>",
    "</think>",
    "<tool_response>",
    "<|call|>",
    "<|end|>",
    "<|eot|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|python_tag|>",
    "<|start_header_id|>",
    "[TOOL_CALLS]",
    "\n",
    "\n=====\n",
    "=====",
    "======",
    '"',
    "\\",
    "{",
    '{"name": "submit", "arguments": {}}',
    '<tool_call>\n{"name": "submit", "arguments": {}}\n</tool_call>',
    "<tool_call>\n<function=submit>\n</function>\n</tool_call>",
    "<tool_call>\n<function=terminal>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>",
    "<think>\nmaybe",
    "\n</think>\n",
    "<|call|>write\nx<|end|>",
)
marked = st.lists(st.sampled_from(WORDS) | plain, max_size=6).map("".join)
written = st.builds(lambda text: ToolCall("write_file", {"path": "s.py", "content": text}), marked)
edited = st.builds(
    lambda a, b: ToolCall("edit_file", {"path": "s.py", "old": a, "new": b}), marked, marked
)
ran = st.builds(lambda text: ToolCall("terminal", {"command": text}), marked)
read = st.builds(
    lambda path, n: ToolCall("read_file", {"path": path, "first_line": n}),
    marked,
    st.integers(1, 999),
)
bare = st.sampled_from([ToolCall("run_tests", {}), ToolCall("submit", {})])
calls = st.lists(st.one_of(written, edited, ran, read, bare), min_size=1, max_size=4)


@given(calls)
def test_compact_messages_are_parsed_back(made):
    text = COMPACT.message(made, ALL)
    assert text.endswith("<|eot|>")
    assert COMPACT.parse(text.removesuffix("<|eot|>"), TASK, ALL) == made


@given(calls, plain)
def test_a_thought_in_front_of_calls_is_no_error_where_the_protocol_has_thoughts(made, thought):
    text = thought + COMPACT.message(made, ALL).removesuffix("<|eot|>")
    assert PROTOCOLS["compact_thoughts"].parse(text, TASK, ALL) == made
    first, *others = COMPACT.parse(text, TASK, ALL)
    assert "outside" in first.error and others == made if thought.strip() else True
    (silent,) = PROTOCOLS["compact_thoughts"].parse(thought, TASK, ALL)
    assert "no call" in silent.error


@given(st.integers(1, 999), st.none() | st.integers(1, 999), plain)
def test_lines_are_replaced_in_few_words(first, last, text):
    tools = find_tools((Named("replace_lines"),))
    arguments = {"path": "pkg/a.py", "first_line": first, "text": text}
    call = ToolCall("replace_lines", arguments | ({} if last is None else {"last_line": last}))
    message = COMPACT.message([call], tools)
    assert message.startswith(f"<|call|>put pkg/a.py {first}")
    assert COMPACT.parse(message.removesuffix("<|eot|>"), TASK, tools) == [call]
    (wrong,) = COMPACT.parse("<|call|>put pkg/a.py one\nx<|end|>", TASK, tools)
    assert "first line" in wrong.error


@given(calls)
def test_hermes_messages_are_parsed_back(made):
    spec = [{"function": {"name": call.name, "arguments": dict(call.arguments)}} for call in made]
    assistant = {"role": "assistant", "content": "thinking aloud", "tool_calls": spec}
    text = render("qwen2", [assistant], add_generation_prompt=False)
    assert HERMES.parse(text.rpartition("<|im_end|>")[0], TASK, ALL) == made


@given(calls)
def test_qwen3_coder_messages_are_parsed_back(made):
    spec = [{"function": {"name": call.name, "arguments": dict(call.arguments)}} for call in made]
    assistant = {"role": "assistant", "content": "", "tool_calls": spec}
    text = render("qwen3_coder", [assistant], add_generation_prompt=False)
    assert CODER.parse(text.rpartition("<|im_end|>")[0], TASK, ALL) == made


@given(calls)
def test_glm_messages_are_parsed_back(made):
    spec = [{"function": {"name": call.name, "arguments": dict(call.arguments)}} for call in made]
    assistant = {"role": "assistant", "content": "", "tool_calls": spec}
    text = render("glm4_moe", [assistant], add_generation_prompt=False)
    assert GLM.parse(text.partition("<|assistant|>")[2], TASK, ALL) == made


@given(calls, st.sampled_from(["", "<|python_tag|>"]))
def test_llama_messages_are_parsed_back(made, tag):
    for call in made:  # one call per message
        spec = [{"function": {"name": call.name, "arguments": dict(call.arguments)}}]
        text = render(
            "llama3",
            [{"role": "assistant", "content": "", "tool_calls": spec}],
            add_generation_prompt=False,
        )
        text = text.partition("<|end_header_id|>\n\n")[2].rpartition("<|eot_id|>")[0]
        assert LLAMA.parse(tag + text, TASK, ALL) == [call]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "no call; use write"),
        ("hello", "no call"),
        ("<|call|>fly<|end|>", "unknown 'fly'; use write"),
        ("<|call|><|end|>", "unknown ''"),
        ("<|call|>test", "no end"),
        ("<|call|>write\nx", "no end"),
        ("<|call|>write x<|end|>", "new line"),
        ("<|call|>write s.py\nx<|end|>", "new line"),
        ("<|call|>edit\nold new<|end|>", "====="),
        ("<|call|>read a b<|end|>", "first line"),
        ("<|call|>read a 1 2 3<|end|>", "first line"),
        ("<|call|>submit now<|end|>", "takes nothing"),
        ("<|call|>test\nx<|end|>", "takes nothing"),
        ("<|call|>test<|end|>so<|eot|>", "outside"),
    ],
)
def test_malformed_compact_calls_are_named(text, named):
    errors = [call.error for call in COMPACT.parse(text, TASK, ALL) if call.error]
    assert len(errors) == 1 and named in errors[0] and len(errors[0]) < 80


@pytest.mark.parametrize(
    ("protocol", "text", "named"),
    [
        (HERMES, "Shall I go on?", "no tool call"),
        (HERMES, "<tool_call>{name: 1}</tool_call>", "not valid JSON"),
        (HERMES, "<tool_call>" + "[" * 100_000 + "</tool_call>", "not valid JSON"),
        (HERMES, '<tool_call>["submit"]</tool_call>', "no name"),
        (HERMES, '<tool_call>{"name": "submit", "arguments": "{}"}</tool_call>', "JSON object"),
        (HERMES, '<tool_call>{"name": "submit", "arguments": {}}', "not closed"),
        (HERMES, '<think><tool_call>{"name": "submit"}</tool_call></think>', "no tool call"),
        (CODER, "<tool_call><function=submit></tool_call>", "function tag"),
        (
            CODER,
            "<tool_call><function=read_file><parameter=path>a</function></tool_call>",
            "parameter tag",
        ),
        (CODER, "done", "no tool call"),
        (LLAMA, "I would submit.", "no tool call; write a JSON object"),
        (LLAMA, '{"name": "submit", "parameters": {}} done', "not valid JSON"),
        (LLAMA, '{"parameters": {}}', "no name"),
        (LLAMA, '{"name": "submit", "parameters": []}', "parameters must be a JSON object"),
    ],
)
def test_malformed_chat_calls_are_named(protocol, text, named):
    parsed = protocol.parse(text, TASK, ALL)
    assert len(parsed) == 1 and named in parsed[0].error


def test_qwen3_coder_values_take_the_type_of_the_schema():
    parameters = "<parameter=path>3</parameter><parameter=first_line>{}</parameter>"
    form = f"<tool_call><function=read_file>{parameters}</function></tool_call>"
    good, bad = (CODER.parse(form.format(value), TASK, ALL)[0] for value in ("12", "twelve"))
    assert good.arguments == {"path": "3", "first_line": 12} and check(good, ALL) == ""
    assert "first_line must be integer" in check(bad, ALL)


def hermes(name: str, arguments: dict, key: str = "arguments") -> str:
    return f"<tool_call>\n{json.dumps({'name': name, key: arguments})}\n</tool_call>"


SUBMIT = {
    "hermes": hermes("submit", {}),
    "qwen3_coder": "<tool_call>\n<function=submit>\n</function>\n</tool_call>",
    "llama3": '{"name": "submit", "parameters": {}}',
    "glm": "<tool_call>submit\n</tool_call>",
}


@pytest.mark.parametrize(
    ("before", "between", "words"),
    [
        ("Calls stand behind <tool_call>.\n", "\nand then\n", ["write_file", "submit"]),
        ("<think>no</think>", "<think>no</think>", ["write_file", "submit"]),
        ("a thought</think>", "</think>", ["write_file", "submit"]),
        ("I look for `<think>`.", "", ["write_file", "submit"]),
        ("", "<think>\nmaybe ", ["write_file"]),
        ("\n<think>no <tool_call></think><think>", "", []),
        ("I see.\n<think>\nmaybe", "", []),
    ],
)
def test_text_and_thoughts_stand_around_calls(before, between, words):
    content = f"{'</think>' if words else ''}</tool_call>\n<tool_call><think>"
    first = hermes("write_file", {"path": "s.py", "content": content})
    second = (
        "<tool_call>\n<function=write_file>\n<parameter=path>\ns.py\n</parameter>\n"
        f"<parameter=content>\n{content}\n</parameter>\n</function>\n</tool_call>"
    )
    for protocol, call, last in (
        (HERMES, first, SUBMIT["hermes"]),
        (CODER, second, SUBMIT["qwen3_coder"]),
    ):
        text = f"{before}{call}{between}{last}"
        parsed = protocol.parse(text, TASK, ALL)
        assert [call.name for call in parsed if not call.error] == words
        if words:
            assert parsed[0].arguments == {"path": "s.py", "content": content}
            assert protocol.before_calls(text) == before.rstrip()
            assert len(parsed) == len(words)


@pytest.mark.parametrize("name", SUBMIT)
def test_a_thought_that_never_ends_holds_no_call(name):
    call = SUBMIT[name]
    opened = OwnTemplate("{{ messages[0].content }}<|im_end|>\n<think>\n", "<|im_end|>")
    inside = dataclasses.replace(PROTOCOLS[name], own=opened)
    for protocol, text in (
        (PROTOCOLS[name], f"<think>\nmaybe {call}\nbut no"),
        (PROTOCOLS[name], f"<think>\n{call}"),
        (inside, f"maybe {call}\nbut no"),
        (inside, call),
    ):
        (wrong,) = protocol.parse(text, TASK, ALL)
        assert "the thought never ends; close it with </think>" in wrong.error
        assert protocol.thinking(text) and not protocol.has_call(text)
        assert protocol.before_calls(text) == text
        good = f"{text}</think>\n{call}"
        assert protocol.parse(good, TASK, ALL) == [ToolCall("submit", {})]
        assert not protocol.thinking(good)


def test_arguments_under_the_key_of_another_form_are_taken_and_other_keys_refused():
    call = ToolCall("read_file", {"path": "s.py"})
    for key in ("arguments", "parameters"):
        value = {"name": call.name, key: dict(call.arguments), "type": "function"}
        text = json.dumps(value)
        assert LLAMA.parse(text, TASK, ALL) == [call]
        assert HERMES.parse(f"<tool_call>{text}</tool_call>", TASK, ALL) == [call]
    for extra in ({"path": "s.py"}, {"args": {}}, {"arguments": {}, "parameters": {}}):
        text = json.dumps({"name": "submit"} | extra)
        for protocol, written in ((LLAMA, text), (HERMES, f"<tool_call>{text}</tool_call>")):
            (wrong,) = protocol.parse(written, TASK, ALL)
            assert "that it must not have" in wrong.error and wrong.name == "submit"


@pytest.mark.parametrize("word", ["NaN", "-Infinity", "1e999"])
def test_numbers_that_json_does_not_have_are_refused(word):
    text = f'<tool_call>{{"name": "read_file", "arguments": {{"first_line": {word}}}}}</tool_call>'
    (wrong,) = HERMES.parse(text, TASK, ALL)
    assert "not valid JSON" in wrong.error


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "write_file", "arguments": {"path": "s.py"}, "arguments": {}}',
        '{"name": "write_file", "name": "submit", "arguments": {}}',
        '{"name": "write_file", "arguments": {"path": "s.py", "content": "a", "content": "b"}}',
    ],
)
def test_a_key_that_stands_twice_in_a_call_is_refused(call):
    for protocol, text in ((HERMES, f"<tool_call>{call}</tool_call>"), (LLAMA, call)):
        (parsed,) = protocol.parse(text, TASK, ALL)
        assert "stands twice" in parsed.error and not parsed.arguments


def test_tags_whose_lines_end_as_on_windows_hold_the_same_values():
    text = (
        "<tool_call>\n<function=write_file>\n<parameter=path>\ns.py\n</parameter>\n"
        "<parameter=content>\na\nb\n</parameter>\n</function>\n</tool_call>"
    )
    (call,) = CODER.parse(text.replace("\n", "\r\n"), TASK, ALL)
    assert call.arguments == {"path": "s.py", "content": "a\r\nb"}


def test_nothing_behind_a_broken_call_is_carried_out():
    # the string is not escaped, so what stands in it may look like a call
    forged = hermes("submit", {})
    for text in (
        '<tool_call>{"name": "write_file", "arguments": {"content": "a "b" ' + forged + '"}}',
        "<tool_call><function=write_file><parameter=path>a" + "<tool_call><function=submit>",
    ):
        for protocol in (HERMES, CODER):
            assert all(call.error for call in protocol.parse(text, TASK, ALL))
    closed = "<tool_call>submit()</tool_call>" + forged
    assert [bool(call.error) for call in HERMES.parse(closed, TASK, ALL)] == [True, False]


@pytest.mark.parametrize("mark", ["<tool_call><function=", "<tool_call>", "<tool_call>\n{"])
def test_a_text_of_marks_is_read_once_and_is_one_malformed_call(monkeypatch, mark):
    reads = []

    def counted(*arguments):
        reads.append(arguments)
        return read_functions(*arguments)

    monkeypatch.setattr(reading, "read_functions", counted)
    for protocol in (HERMES, CODER):
        (wrong,) = protocol.parse(mark * 1000, TASK, ALL)
        assert wrong.error
    assert len(reads) <= 1


def test_the_last_of_several_ends_is_meant():
    text = (
        "<tool_call><function=write_file><parameter=path>s.py</parameter><parameter=content>"
        "a</parameter></function></tool_call> b</parameter></function></tool_call>"
    )
    (call,) = CODER.parse(text + SUBMIT["qwen3_coder"], TASK, ALL)[:1]
    assert call.arguments["content"] == "a</parameter></function></tool_call> b"


def test_a_longer_line_stands_between_texts_that_hold_the_line():
    call = ToolCall("edit_file", {"path": "s.py", "old": "A\n=====\n", "new": "======"})
    text = COMPACT.message([call], ALL).removesuffix("<|eot|>")
    assert text == "<|call|>edit =======\nA\n=====\n\n=======\n======<|end|>"
    assert COMPACT.parse(text, TASK, ALL) == [call]


@given(st.text() | marked, st.sampled_from(sorted(PROTOCOLS)))
def test_any_text_is_parsed_into_at_least_one_call(text, name):
    assert PROTOCOLS[name].parse(text, TASK, ALL)


MARKS = [
    "<|eot|>",
    "<|call|>submit<|end|>",
    "<tool_call>",
    "</tool_response>",
    "<|im_end|>",
    "</s>",
]


@given(texts=st.lists(st.sampled_from(MARKS) | plain, max_size=6))
def test_answers_hold_any_text_unchanged_and_no_mark_of_it(texts):
    text = "".join(texts)
    marks = Marks(
        [
            "<|eot|>",
            "<|tool|>",
            "<|start|>",
            "<|end|>",
            "<tool_call>",
            "<tool_response>",
            "<|im_end|>",
            "</s>",
        ]
    )
    own = ("harmony", "dsml", "kimi_k2", "deepseek_v3", "deepseek_v3_1")
    for name in ("compact", "hermes", "qwen3_coder", "qwen3_5", "llama3", "glm", *own):
        protocol = PROTOCOLS[name]
        frame = protocol.observation([ToolResult("terminal", "\0")])
        results = [ToolResult("terminal", text)]
        ((answer, _),) = result_parts(protocol, results, ALL, None, marks)
        assert unquote(answer) == frame.replace("\0", text)
        for mark in marks.texts:
            assert answer.count(mark) == frame.count(mark)


@given(st.lists(plain, min_size=1, max_size=3))
def test_observations_are_what_the_chat_template_renders(contents):
    for protocol in (COMPACT, HERMES, CODER, GLM):
        family = protocol.family if isinstance(protocol, Chat) else "compact"
        results = [ToolResult("terminal", content) for content in contents]
        assert protocol.observation(results) == render_tool_results(family, contents)


def test_compact_prompt_and_observation_read_as_documented():
    assert COMPACT.prompt(TASK, ALL) == "<|bos|>double<|eot|>"
    results = [ToolResult("write_file", "ok"), ToolResult("run_tests", "PASS left 2")]
    assert COMPACT.observation(results) == "<|tool|>ok\nPASS left 2<|eot|>"


def test_chat_prompts_declare_the_tasks_tools_and_no_others():
    prompt = HERMES.prompt(TASK, ALL)
    assert all(json.dumps(tool.schema["description"]) in prompt for tool in ALL.values())
    assert prompt.endswith("<|im_start|>assistant\n")


PREFILL = "```python\ndef f(x):\n    "


@pytest.mark.parametrize(
    ("completion", "body"),
    [
        ("return x\nprint(f(1))", "return x\n"),
        ("return [\n    x,\n]\n```\nThis", "return [\n    x,\n]\n"),
        ("y = x\n\n    return y", "y = x\n\n    return y"),
        ("return (x\n)\n# end", "return (x\n)\n"),
    ],
)
def test_completions_end_before_the_next_top_level_line(completion, body):
    task = Task(**{**TASK.__dict__, "prefill": PREFILL})
    write, submit = COMPLETION.parse(PREFILL + completion, task, ALL)
    assert write.arguments == {"path": "s.py", "content": "def f(x):\n    " + body}
    assert submit.name == "submit" and COMPLETION.stopped(completion) == (body != completion)
    assert COMPLETION.prompt(task, ALL).endswith("assistant\n" + PREFILL)
    assert PROTOCOLS["raw_completion"].prompt(task, ALL) == PREFILL


@given(st.text(alphabet="a \n)\té\u3000"), st.text(alphabet="a \n)", max_size=5))
def test_a_stopped_text_stays_stopped(text, more):
    assert not COMPLETION.stopped(text) or COMPLETION.stopped(text + more)


@given(
    st.lists(
        st.sampled_from(["a", "\n", " ", ")", "é", "　", "<|eot|>", "return"]), max_size=12
    ).map("".join)
)
def test_stop_length_is_the_first_complete_prefix(tokenizer, text):
    rule = Completion(None, stop_tokens=("<|eot|>",))
    tokens = tokenizer.encode(text)
    ends = stop_ids(rule, tokenizer)
    lengths = range(1, len(tokens) + 1)
    complete = (
        n for n in lengths if tokens[n - 1] in ends or rule.stopped(tokenizer.decode(tokens[:n]))
    )
    assert stop_length(rule, tokenizer, tokens) == next(complete, None)


def test_compact_messages_stop_at_their_token_only(tokenizer):
    tokens = tokenizer.encode("<|call|>write\nx\nprint()<|end|><|eot|><|tool|>")
    assert stop_length(Compact(), tokenizer, tokens) == len(tokens) - 1
    assert stop_length(Compact(), tokenizer, tokens[:-2]) is None


def test_what_no_encoding_can_carry_is_refused():
    call = HERMES.parse(
        '<tool_call>{"name": "terminal", "arguments": {"command": "\\ud800"}}</tool_call>',
        TASK,
        ALL,
    )[0]
    assert "not valid Unicode" in check(call, ALL)


@pytest.mark.parametrize("text", ["END = '<|end|>'\n", "<|call|>submit<|end|>", "<|eot|>", "a <|"])
def test_compact_calls_hold_any_text(tokenizer, text):
    calls = [ToolCall("write_file", {"path": TASK.path, "content": text}), ToolCall("submit", {})]
    tokens = tokenizer.encode(COMPACT.message(calls, ALL))
    assert stop_length(COMPACT, tokenizer, tokens) == len(tokens)
    assert COMPACT.parse(tokenizer.decode_quoted(tokens[:-1]), TASK, ALL) == calls
