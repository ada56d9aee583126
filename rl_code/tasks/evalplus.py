"""Files in EvalPlus's format (Liu et al. 2023, arXiv 2305.01210): HumanEval+ and MBPP+,
differential by construction.

A row has inputs and a reference but no expected values; ``differential.strengthen`` computes those
in the sandbox. JSON has no tuples and no sets, so functions of MBPP+ that need them as arguments
are called with lists, reference and candidate alike; where the reference does not take a list, the
input is dropped.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.tasks.differential import DifferentialConfig, strengthened
from rl_code.tasks.forms import INDENT, PATH, Form, present, signature_of, unfinished
from rl_code.tasks.humaneval import docstring
from rl_code.tasks.row_files import Read, each_task, malformed, parse_python
from rl_code.tasks.source import SourceOfRows
from rl_code.types import Task, Tests

_FIELDS = {
    "task_id": str,
    "prompt": str,
    "canonical_solution": str,
    "entry_point": str,
    "base_input": list,
    "plus_input": list,
    "atol": (int, float),
}


def each(path: str, form: Form = "raw") -> Iterator[Read]:
    """The tasks of a file, without tests yet, or why a row has none.

    ``meta["inputs"]`` of a task has argument tuples of the base and plus inputs, base first
    (``without_inputs``), and ``meta["tolerance"]`` the row's ``atol``.

    Raises TaskFileError for a file that is missing or empty.
    """
    file = Path(path)
    return each_task(file, _FIELDS, lambda line, row: _task(file, line, row, form))


def without_inputs(task: Task) -> Task:
    """A task of ``each`` as it is played."""
    meta = {key: value for key, value in task.meta.items() if key != "inputs"}
    return dataclasses.replace(task, meta=meta)


def _task(file: Path, line: int, row: dict[str, Any], form: Form) -> Task:
    for field in ("base_input", "plus_input"):
        for i, arguments in enumerate(row[field]):
            if not isinstance(arguments, list):
                malformed(file, line, f"{field}[{i}]", "a list of arguments", repr(arguments)[:80])
    if row["atol"] < 0:
        malformed(file, line, "atol", "a number that is not negative", repr(row["atol"]))
    prompt = row["prompt"]
    entry_point = row["entry_point"]
    reference = prompt + row["canonical_solution"]
    function = _function(parse_python(file, line, "canonical_solution", reference), entry_point)
    if function is None:
        found = repr(row["canonical_solution"][:80])
        malformed(
            file,
            line,
            "canonical_solution",
            f"a definition of the entry point {entry_point!r}",
            found,
        )
    tree = parse_python(file, line, "prompt", prompt)
    # HumanEval+: the prompt is the beginning of the file
    if _function(tree, entry_point) is not None:
        description = docstring(prompt, entry_point)
        problem = f"Complete this Python function.\n\n```python\n{prompt.strip()}\n```"
        texts = {"problem": problem, "beginning": prompt, "answer": prompt.strip()}
    else:  # MBPP+: the prompt is a docstring, sentence and assert
        text = (ast.get_docstring(tree) or prompt).strip()
        description = text.partition("\nassert ")[0].strip()
        signature = signature_of(function)
        texts = {
            "problem": f"{text}\n\nThe function begins with:\n{signature}",
            "beginning": unfinished(signature, text),
            "answer": f"{signature}\n{INDENT}",
        }
    return Task(
        id=row["task_id"],
        path=PATH,
        entry_point=entry_point,
        visible_tests=Tests(),
        hidden_tests=Tests(),
        reference={PATH: reference},
        meta={
            "source": "evalplus",
            "split": "test",
            "description": description,
            "tolerance": float(row["atol"]),
            "inputs": [tuple(given) for given in row["base_input"] + row["plus_input"]],
        },
        **present(form, **texts),
    )


def _function(tree: ast.Module, name: str) -> ast.FunctionDef | None:
    """The last definition of a top-level function."""
    return next(
        (n for n in reversed(tree.body) if isinstance(n, ast.FunctionDef) and n.name == name), None
    )


@dataclasses.dataclass(frozen=True)
class EvalPlus(SourceOfRows):
    """HumanEval+ or MBPP+: inputs whose expected values are what the reference gives."""

    # The file, in EvalPlus's format.
    path: str
    # Settings by which the expected values are computed.
    differential: DifferentialConfig
    # Form in which the problem is put to the agent, see ``forms``.
    form: Form = "agent"

    def read(self, pool: SandboxPool | None) -> Iterator[Read]:
        return each(self.path, self.form)

    def finish(
        self, every: Sequence[Task], pool: SandboxPool | None, workdir: Path | None
    ) -> Sequence[Task]:
        inputs = {task.id: task.meta["inputs"] for task in every}
        tasks = [without_inputs(task) for task in every]
        return strengthened(
            tasks, lambda task: inputs[task.id], self.differential, pool, workdir, "evalplus"
        )
