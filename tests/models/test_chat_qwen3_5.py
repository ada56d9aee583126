"""The chat template of Qwen3.5: turns as the package ``renderers`` writes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from models.chat import render, render_tool_results
from rl_code.environment.protocols.api import PROTOCOLS
from rl_code.types import ToolResult

FOLDER = Path(__file__).parent / "golden_chat"
GOLDEN = json.loads((FOLDER / "qwen3_5.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_conversations_are_written_as_renderers_writes_them(name, family):
    talk, written = GOLDEN[name]
    assert render(family, talk) == written


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_results_are_what_renderers_puts_behind_a_message_with_calls(name):
    talk, written = GOLDEN[name]
    results = [message["content"] for message in talk if message["role"] == "tool"]
    assert PROTOCOLS["qwen3_5"].observation([ToolResult("f", one) for one in results]) == (
        render_tool_results("qwen3_5", results)
    )
    behind = written.split("</tool_call><|im_end|>")[-1]
    assert behind.startswith(render_tool_results("qwen3_5", results).removesuffix("assistant\n"))
