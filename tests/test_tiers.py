"""The quick tests leave out no file but those that kill or train whole runs."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Whole runs, most in processes of their own; what they are made of has tests beside it.
WHOLE_RUNS = {
    "test_cluster_run.py",
    "test_elastic.py",
    "test_faults.py",
    "test_kill.py",
    "test_kills.py",
    "test_meshes.py",
    "test_realtime_served.py",
    "test_roles.py",
    "test_run_with_documents.py",
    "test_serve.py",
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
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        ]
        if tests and all(marks(test) & {"long", "slow"} for test in tests):
            without.add(path.name)
    assert without <= WHOLE_RUNS
