"""The metric of a tool's use counts calls, episodes that call, and what these solve."""

from __future__ import annotations

from types import SimpleNamespace

from rl_code.config.named import Named
from rl_code.run.sections import MetricsConfig
from rl_code.types import ToolCall


def group(*episodes):
    own = [
        SimpleNamespace(
            solved=solved,
            turns=[SimpleNamespace(calls=tuple(ToolCall(name, {}) for name in t)) for t in turns],
        )
        for solved, *turns in episodes
    ]
    return SimpleNamespace(own=own)


def test_the_use_of_tools():
    named = Named("tool_calls", {"tools": ("grep", "think", "jump")})
    (metric,) = MetricsConfig(extra=(named,)).extra_functions()
    groups = [
        group((True, ["grep", "think"], ["think"]), (False, [], ["think"])),
        group((False, ["think"]), (True, ["submit"])),
    ]
    assert metric(groups, {}) == {
        "calls/grep": 0.25,
        "calls/grep_used": 0.25,
        "calls/grep_solved": 1.0,
        "calls/grep_unused_solved": 1 / 3,
        "calls/think": 1.0,
        "calls/think_used": 0.75,
        "calls/think_solved": 1 / 3,
        "calls/think_unused_solved": 1.0,
        "calls/jump": 0.0,
        "calls/jump_used": 0.0,
        "calls/jump_unused_solved": 0.5,
    }
