"""A tool from outside of the tree, as docs/adding.md adds it."""

from __future__ import annotations

import pytest

from rl_code.config.read_config import ConfigError
from rl_code.environment.protocols.api import PROTOCOLS
from rl_code.environment.tools.api import find_tools
from tests.drills.episodes import SUBMIT, TASK, answers, configured, player

SEARCH = dict(name="my_lab.tools:Search", most=1)


def test_a_tool_from_outside_is_called_in_every_protocol(outside):
    outside("A tool")
    config = configured(tools=("write_file", "submit", SEARCH))
    with player(config) as play:
        call = "<|call|>search\nreturn<|end|><|call|>search\nnowhere<|end|><|call|>search<|end|>"
        trajectory = play(TASK, call, SUBMIT)
    assert answers(trajectory) == [
        "solution.py:2:     return x\n1 lines",
        "nothing found",
        "search wants a new line, then the text",
        "submitted",
    ]
    assert trajectory.malformed_calls == 1
    tools = find_tools(config.tools)
    for name in ("hermes", "qwen3_coder", "llama3"):
        assert "Find the lines that hold a text" in PROTOCOLS[name].prompt(TASK, tools)
    written = '<tool_call>{"name": "search", "arguments": {"text": "x"}}</tool_call>'
    (call,) = PROTOCOLS["hermes"].parse(written, TASK, tools)
    assert (call.name, call.arguments, call.error) == ("search", {"text": "x"}, "")


def test_a_tool_from_outside_may_answer_with_documents(outside):
    outside("A tool")
    documents = dict(longest=64, shortest=2)
    config = configured(tools=("write_file", "submit", SEARCH), documents=documents)
    with player(config) as play:
        call = "<|call|>search\nreturn<|end|><|call|>search\nnowhere<|end|>"
        trajectory = play(TASK, call, SUBMIT)
    answer = trajectory.turns[2]
    assert answer.text == "<|tool|>solution.py:2:     return x\n1 lines\nnothing found<|eot|>"
    kinds = trajectory.documents
    # what was found, and nothing else
    assert kinds.max() == 1 and set(kinds[: answer.start]) == {0}


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        (("my_lab.tools:Serch",), r"tools\[0\].*my_lab\.tools has no 'Serch'"),
        ((dict(name="my_lab.tools:Search", least=1),), r"tools\[0\]\.least: no such key"),
        (("submit", SEARCH, SEARCH), "a second tool named 'search'"),
        (("my_lab.tools:function_schema",), r"is no rl_code\.environment\.tools\.tool\.Tool"),
    ],
)
def test_a_wrong_tool_is_named_when_the_config_is_built(outside, tools, message):
    outside("A tool")
    with pytest.raises(ConfigError, match=message):
        configured(tools=tools)
