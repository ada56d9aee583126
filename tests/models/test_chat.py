"""Templates: what an episode appends is what a fresh rendering would contain; formats are exact to
the letter.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.chat import render, render_tool_results
from models.families import FAMILIES

TOOL = {
    "type": "function",
    "function": {
        "name": "run",
        "description": "Run <it> & see",
        "parameters": {
            "type": "object",
            "properties": {
                "command": {"type": "string", "description": "what to run"},
                "n": {"type": "integer"},
            },
            "required": ["command"],
        },
    },
}
TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "fix {{ it }}"}]
# How a message begins that a model of the family samples; other text is put there by the template.
SAMPLED = {"gpt_oss": "<|channel|>final<|message|>", "deepseek_v32": "</think>"}
texts = st.text(alphabet=st.characters(codec="utf-8"), max_size=20)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=25, deadline=None)
@given(contents=st.lists(texts, min_size=1, max_size=3), answer=texts, system=st.booleans())
def test_appended_results_equal_a_fresh_rendering(family, contents, answer, system):
    talk = TALK if system else TALK[1:]
    answer = SAMPLED.get(family, "") + answer
    appended = (
        render(family, talk) + answer + FAMILIES[family].end + render_tool_results(family, contents)
    )
    results = [{"role": "tool", "content": content} for content in contents]
    assert appended == render(family, [*talk, {"role": "assistant", "content": answer}, *results])


@pytest.mark.parametrize(
    "family", [name for name, family in FAMILIES.items() if family.declares_tools]
)
def test_tools_are_declared_in_the_system_turn_and_nothing_else_changes(family):
    end = FAMILIES[family].end
    plain = render(family, TALK)
    declared = render(family, TALK, [TOOL])
    assert plain.split(end)[1:] == declared.split(end)[1:]
    assert "Run <it> & see" in declared.split(end)[0]
    assert "Be brief." in declared.split(end)[0]
    assert "run" in render(family, TALK[1:], [TOOL]).split(end)[0]


def test_qwen_writes_calls_and_results_as_hermes_does():
    call = {"function": {"name": "run", "arguments": {"command": "ls 'é' <b>"}}}
    text = render(
        "qwen2",
        [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": "Sure.", "tool_calls": [call, call]},
            {"role": "tool", "content": "a\n"},
            {"role": "tool", "content": "b"},
        ],
    )
    written = '<tool_call>\n{"name": "run", "arguments": {"command": "ls \'é\' <b>"}}\n</tool_call>'
    assert text == (
        "<|im_start|>user\ngo<|im_end|>\n"
        f"<|im_start|>assistant\nSure.\n{written}\n{written}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\na\n\n</tool_response>\n<tool_response>\nb\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert f"<tools>\n{json.dumps(TOOL)}\n</tools>" in render("qwen2", TALK, [TOOL])


def test_qwen3_coder_writes_values_as_they_are():
    call = {"function": {"name": "run", "arguments": {"command": 'echo "x"\nls', "n": 3}}}
    text = render(
        "qwen3_coder",
        [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "a"},
        ],
    )
    assert text == (
        "<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n"
        '<tool_call>\n<function=run>\n<parameter=command>\necho "x"\nls\n</parameter>\n<parameter=n>\n3\n</parameter>\n'
        "</function>\n</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\na\n</tool_response>\n<|im_end|>\n<|im_start|>assistant\n"
    )
    declared = render("qwen3_coder", TALK, [TOOL])
    assert (
        "<parameter>\n<name>command</name>\n<type>string</type>\n<description>what to "
        "run</description>" in declared
    )
    assert '<required>["command"]</required>' in declared


def test_llama3_has_headers_and_one_call_per_message():
    call = {"function": {"name": "run", "arguments": {"command": "ls"}}}
    talk = [
        *TALK,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "a"},
    ]
    head = "<|start_header_id|>{}<|end_header_id|>\n\n".format
    assert render("llama3", talk) == (
        f"<|begin_of_text|>{head('system')}Be brief.<|eot_id|>{head('user')}fix "
        f"{{{{ it }}}}<|eot_id|>"
        f'{head("assistant")}{{"name": "run", "parameters": {{"command": "ls"}}}}<|eot_id|>'
        f"{head('ipython')}a<|eot_id|>{head('assistant')}"
    )
    talk[2]["tool_calls"] = [call, call]
    with pytest.raises(ValueError, match="2 calls"):
        render("llama3", talk)


def test_smollm2_has_its_system_turn_unless_one_is_given():
    start = "<|im_start|>system\n{}<|im_end|>\n<|im_start|>user\nfix {{{{ it }}}}<|im_end|>\n<|im_start|>assistant\n"
    assert render("smollm2", TALK) == start.format("Be brief.")
    default = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert render("smollm2", TALK[1:]) == start.format(default)


def test_mistral_puts_the_system_message_and_results_into_turns_of_the_user():
    assert render("mistral", TALK) == "<s>[INST] Be brief.\n\nfix {{ it }}[/INST]"
    assert render_tool_results("mistral", ["ok", "PASS"]) == "[INST] ok\nPASS[/INST]"


def test_compact_marks_turns_with_single_tokens():
    assert render("compact", [{"role": "user", "content": "task"}]) == "<|bos|>task<|eot|>"
    assert render("compact", TALK) == "<|bos|>Be brief.\nfix {{ it }}<|eot|>"
    assert render_tool_results("compact", ["ok", "PASS"]) == "<|tool|>ok\nPASS<|eot|>"


def test_what_a_format_cannot_hold_is_refused():
    for family, talk, tools, words in (
        ("gpt", TALK, (), "family='gpt'"),
        ("qwen2", [], (), "at least one message"),
        ("smollm2", TALK, [TOOL], "no place for tools.*run"),
        ("qwen2", [{"role": "robot", "content": ""}], (), "role 'robot'"),
        ("qwen2", [*TALK, TALK[0]], (), r"messages\[2\] is a system message"),
        ("qwen2", [{"role": "user", "content": None}], (), "content None"),
    ):
        with pytest.raises(ValueError, match=words):
            render(family, talk, tools)


@pytest.mark.parametrize("family", [name for name in FAMILIES if FAMILIES[name].declares_tools])
def test_schemas_and_calls_of_others_are_written_or_refused(family):
    for function in (
        {},
        {"parameters": {}},
        {"description": None, "parameters": None},
        {"parameters": {"properties": None}},
        {"parameters": {"properties": {"x": True, "y": {"anyOf": [{"type": "null"}]}}}},
    ):
        tool = {"type": "function", "function": {"name": "other", **function}}
        assert "other" in render(family, TALK, [tool])
    for calls in (None, []):
        talk = [*TALK, {"role": "assistant", "content": "ok", "tool_calls": calls}]
        assert render(family, talk) == render(family, [*TALK, talk[2] | {"tool_calls": ()}])
    for wrong in ({}, {"function": {"name": "f", "arguments": {1, 2}}}):
        talk = [*TALK, {"role": "assistant", "content": "", "tool_calls": [wrong]}]
        with pytest.raises(ValueError, match=f"family='{family}' cannot write this"):
            render(family, talk)
    with pytest.raises(ValueError, match="content None"):
        render(family, [{"role": "user"}])
