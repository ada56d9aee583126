"""The quick tests leave out no file but those that kill or train whole runs."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.syntax import statements

ROOT = Path(__file__).resolve().parents[1]
# Whole runs, most in processes of their own, and whole models on meshes; what they are made of has
# tests beside it.
WHOLE_RUNS = {
    "cluster/test_run.py",
    "launch/test_elastic.py",
    "launch/test_faults.py",
    "launch/test_realtime_served.py",
    "launch/test_roles.py",
    "people/feedback/test_kills.py",
    "rl_code/learner/test_expert_parallel.py",
    "rl_code/recording/test_replay_signals.py",
    "rl_code/recording/test_values.py",
    "rl_code/learner/test_meshes.py",
    "rl_code/learner/test_padding.py",
    "rl_code/learner/test_sequence_parallel.py",
    "people/realtime/test_kills.py",
    "rl_code/rollout/test_experts.py",
    "rl_code/rollout/test_lora.py",
    "rl_code/rollout/test_meshes.py",
    "rl_code/rollout/test_quantised.py",
    "rl_code/test_asynchrony.py",
    "rl_code/test_kill.py",
    "rl_code/run/test_run_with_documents.py",
    "rl_code/run/test_run_with_summaries.py",
}


def marks(function: ast.FunctionDef) -> set[str]:
    """Names of the marks of a test."""
    texts = [ast.unparse(decorator) for decorator in function.decorator_list]
    return {
        text.removeprefix("pytest.mark.").partition("(")[0]
        for text in texts
        if text.startswith("pytest.mark.")
    }


def test_every_file_has_quick_tests():
    without = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        tests = [
            node
            for node in statements(ast.parse(path.read_text()))
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        ]
        if tests and all(marks(test) & {"long", "slow"} for test in tests):
            without.add(str(path.relative_to(ROOT / "tests")))
    assert without == WHOLE_RUNS
