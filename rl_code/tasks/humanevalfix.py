"""HumanEvalFix of HumanEvalPack (Muennighoff et al. 2023, OctoPack, arXiv 2308.07124): functions of
HumanEval with a bug that a person put in, to be repaired.

The agent gets the broken function. With ``docs`` it also has the docstring (HumanEvalFixDocs);
without, the example tests stand in its message (HumanEvalFixTests). The tests are programs, as
those of HumanEval.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.tasks.forms import PATH, Form, present
from rl_code.tasks.row_files import Read, each_task, malformed, parse_python
from rl_code.tasks.source import SourceOfRows
from rl_code.types import Task, Tests

_FIELDS = {
    "task_id": str,
    "prompt": str,
    "declaration": str,
    "canonical_solution": str,
    "buggy_solution": str,
    "entry_point": str,
    "test": str,
    "example_test": str,
}


@dataclasses.dataclass(frozen=True)
class HumanEvalFix(SourceOfRows):
    """HumanEvalFix, which is a test split, see ``humanevalfix``."""

    # The file humanevalpack.jsonl of Python.
    path: str
    # True if the agent gets the docstring; False if it gets example tests.
    docs: bool = False
    # Form in which the problem is put to the agent, see ``forms``.
    form: Form = "agent"

    def read(self, pool: SandboxPool | None) -> Iterator[Read]:
        file = Path(self.path)
        return each_task(
            file, _FIELDS, lambda line, row: _task(file, line, row, self.docs, self.form)
        )


def _task(file: Path, line: int, row: dict[str, Any], docs: bool, form: Form) -> Task:
    entry_point = row["entry_point"]
    beginning = row["prompt"] if docs else row["declaration"]
    broken = beginning + row["buggy_solution"]
    fixed = beginning + row["canonical_solution"]
    for field, text in (("buggy_solution", broken), ("canonical_solution", fixed)):
        tree = parse_python(file, line, field, text)
        if entry_point not in _functions(tree):
            wanted = f"a definition of the entry point {entry_point!r}"
            malformed(file, line, field, wanted, repr(row[field][:80]))
    hidden = _checked(file, line, "test", row, beginning)
    shown = row["example_test"].strip()
    problem = f"Fix bugs in {entry_point}.\n\n```python\n{broken.strip()}\n```"
    if not docs and shown:
        problem += f"\n\nIt should pass these tests:\n\n```python\n{shown}\n```"
    fields = present(form, problem=problem, beginning=beginning, answer=beginning.strip())
    if form == "agent":
        content = f"Fix bugs in {entry_point} of the file {PATH}, and call submit."
        if not docs and shown:
            content += f" It should pass these tests:\n\n```python\n{shown}\n```"
        fields["messages"] = ({"role": "user", "content": content},)
        fields["files"] = {PATH: broken}
    visible = () if docs or not shown else (_checked(file, line, "example_test", row, beginning),)
    description = row.get("docstring") or row.get("instruction") or problem
    return Task(
        id=f"humanevalfix/{row['task_id']}",
        path=PATH,
        entry_point=entry_point,
        visible_tests=Tests(code=visible),
        hidden_tests=Tests(code=(hidden,)),
        reference={PATH: fixed},
        meta={
            "source": "humanevalfix",
            "split": "test",
            "description": description,
            "bug": row.get("bug_type", ""),
        },
        **fields,
    )


def _checked(file: Path, line: int, field: str, row: dict[str, Any], beginning: str) -> str:
    """A column of tests as one program: what the file defines before the function, the function
    ``check``, and a call of it.
    """
    tree = parse_python(file, line, field, row[field])
    entry_point = row["entry_point"]
    if "check" not in _functions(tree):
        found = ", ".join(_functions(tree)) or "no functions"
        malformed(file, line, field, "a function check(candidate)", found)
    called = any(
        isinstance(node, ast.Call) and ast.unparse(node.func) == "check"
        for statement in tree.body
        if isinstance(statement, ast.Expr)
        for node in ast.walk(statement)
    )
    call = "" if called else f"\n\ncheck({entry_point})\n"
    helpers = [
        ast.unparse(node)
        for node in parse_python(file, line, "prompt", row["prompt"]).body
        if not (isinstance(node, ast.FunctionDef) and node.name == entry_point)
    ]
    return "\n".join([*helpers, row[field].strip()]) + call


def _functions(tree: ast.Module) -> list[str]:
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
