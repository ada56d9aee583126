"""The benches of tools run, name every tool, and count what is found rightly."""

from __future__ import annotations

import json

import pytest

from benchmarks import search, tools
from benchmarks.search import Question
from rl_code.environment.tools.api import TOOLS
from tests import programs


def test_every_tool_is_timed():
    # a sub-agent takes as long as its messages, a suggestion is a whole episode, and a person answers
    assert {*TOOLS, "mcp_echo"} - {"mcp", "sub_agent", "suggest", "ask"} == set(tools.CALLS)


@pytest.mark.long
def test_the_bench_of_tools_times_them(tmp_path):
    path = tmp_path / "a.json"
    small = ("--workspaces=2", "--calls=1", "--tool_files=5", f"--json={path}")
    done = programs.run("launch.bench", "tools", *small)
    assert done.returncode == 0, done.stderr
    times = json.loads(path.read_text())["times"]
    assert set(times) == set(tools.CALLS)
    assert all(len(one["2"]["first"]) == 2 for one in times.values())


@pytest.mark.long
def test_the_bench_of_search_compares_ways(tmp_path):
    path = tmp_path / "a.json"
    small = ("--sizes=10", "--repositories=4", f"--json={path}")
    done = programs.run("launch.bench", "search", *small)
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())["recall"]
    assert found["faults"]["10"]["grep name"]["all"]["count"] == 4
    assert 0 <= found["functions"]["10"]["semantic"]["all"]["@5"] <= 1


def test_recall_counts_the_wanted_file_among_the_first():
    files = {f"{i}.py": "" for i in range(9)}
    asked = [Question("q", "3.py", files, kind) for kind in ("a", "a", "b")]
    ranked = [["3.py"], ["0.py", "1.py", "2.py", "3.py"], []]
    found = search.recall(asked, ranked)
    assert found["a"] == {"@1": 0.5, "@5": 1.0, "count": 2}
    assert found["all"]["@1"] == pytest.approx(1 / 3)
    assert found["b"]["@5"] == 0.0


def test_questions_do_not_hold_their_answer():
    for one in search.functions(10, 3, 0):
        assert one.question not in one.files[one.wanted]
        assert len(one.files) == 10
    for one in search.faults(10, 3, 0):
        assert one.wanted in one.files
