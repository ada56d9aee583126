"""MBPP: 974 short functions from a sentence and three asserts (Austin et al. 2021, arXiv
2108.07732), mxeval's format.

One assert is shown, the others grade. Asserts on literal values become value-level cases that
compare as ``==`` does; the rest stay statements. The reference is the signature with the solution's
body, without the docstring's examples.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from absl import logging

from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.tasks import humaneval, programs
from rl_code.tasks.deduplicate import DuplicateConfig, near_duplicates
from rl_code.tasks.differential import DifferentialConfig, mutations, strengthened
from rl_code.tasks.forms import INDENT, PATH, Form, present, signature_of, unfinished
from rl_code.tasks.records import tests_of
from rl_code.tasks.row_files import (
    Read,
    TaskFileError,
    each_task,
    malformed,
    parse_python,
    readable,
)
from rl_code.tasks.source import SourceOfRows
from rl_code.types import Task

SPLITS = {"prompt": (1, 10), "test": (11, 510), "validation": (511, 600), "train": (601, 974)}
_FIELDS = {
    "task_id": str,
    "prompt": str,
    "canonical_solution": str,
    "entry_point": str,
    "test": str,
    "language": str,
    "description": str,
}


def load(path: str, form: Form = "chat", visible: int = 1) -> list[Task]:
    """All tasks of ``each``. Raises TaskFileError, which names line and field of the first
    malformed row.
    """
    return readable(each(path, form, visible))


def each(path: str, form: Form = "chat", visible: int = 1) -> Iterator[Read]:
    """The tasks of a file in mxeval's MBPP format, of every split (``meta["split"]``), or why a row
    has none.

    visible: how many asserts the agent sees; the others are hidden.

    Raises TaskFileError for a file that is missing or empty.
    """
    if visible < 0:
        raise ValueError(f"{visible=} must not be negative")
    file = Path(path)
    if not file.is_file():
        raise TaskFileError(
            f"{path}: no such file of tasks. python -m launch.get_mbpp fetches MBPP into data/, or "
            "into the folder that RL_CODE_DATA names"
        )
    return each_task(file, _FIELDS, lambda line, row: _task(file, line, row, form, visible))


def _task(file: Path, line: int, row: dict[str, str], form: Form, visible: int) -> Task:
    split, number = _split(file, line, row["task_id"])
    if row["language"] != "python":
        malformed(file, line, "language", "'python'", repr(row["language"]))
    signature = _signature(file, line, row["prompt"], row["entry_point"])
    asserts = _asserts(file, line, row["test"], row["entry_point"])
    if len(asserts) <= visible:
        malformed(
            file,
            line,
            "test",
            f"more than {visible} asserts ({visible=} are shown)",
            f"{len(asserts)}",
        )
    shown = "\n".join(map(ast.unparse, asserts[:visible]))
    description = row["description"].strip()
    problem = (
        f"{description}\n\nYour code should pass this test:\n{shown}" if shown else description
    )
    return Task(
        id=row["task_id"],
        path=PATH,
        entry_point=row["entry_point"],
        visible_tests=tests_of(asserts[:visible], row["entry_point"]),
        hidden_tests=tests_of(asserts[visible:], row["entry_point"]),
        reference={PATH: f"{signature}\n{row['canonical_solution'].rstrip()}\n"},
        meta={"source": "mbpp", "split": split, "number": number, "description": description},
        **present(
            form,
            problem=problem,
            beginning=unfinished(signature, f"{description}\n\n{shown}"),
            answer=f"{signature}\n{INDENT}",
        ),
    )


def _split(file: Path, line: int, task_id: str) -> tuple[str, int]:
    match = re.fullmatch(r"MBPP/([0-9]{1,6})", task_id)
    number = int(match[1]) if match else 0
    for split, (first, last) in SPLITS.items():
        if first <= number <= last:
            return split, number
    malformed(file, line, "task_id", "MBPP/1 to MBPP/974", repr(task_id))


def _signature(file: Path, line: int, prompt: str, entry_point: str) -> str:
    """The function's first line in Python's usual spacing. The docstring below may be badly
    indented in the file.
    """
    match = re.search(rf"^def {re.escape(entry_point)}\s*\(.*:[ \t]*$", prompt, re.MULTILINE)
    if match is None:
        malformed(file, line, "prompt", f"a line 'def {entry_point}(...):'", repr(prompt[:80]))
    (node,) = parse_python(file, line, "prompt", f"{match[0]} pass").body
    return signature_of(node)


def _asserts(file: Path, line: int, test: str, entry_point: str) -> list[ast.Module]:
    """The statements of ``check(candidate)``, with the entry point's name for ``candidate``."""
    for node in parse_python(file, line, "test", test).body:
        if isinstance(node, ast.FunctionDef) and node.name == "check":
            break
    else:
        malformed(file, line, "test", "a function check(candidate)", repr(test[:80]))
    for statement in node.body:
        if not isinstance(statement, ast.Assert):
            malformed(
                file, line, "test", "only assert statements in check", repr(ast.unparse(statement))
            )
        for name in ast.walk(statement):
            if isinstance(name, ast.Name) and name.id == "candidate":
                name.id = entry_point
    return [ast.Module([statement], []) for statement in node.body]


@dataclasses.dataclass(frozen=True)
class Mbpp(SourceOfRows):
    """MBPP by split."""

    # "train", "validation", "test", or "prompt": the ten tasks that MBPP keeps for examples.
    split: str
    # The file mbpp.jsonl.
    path: str
    # Form in which the problem is put to the agent, see ``forms``.
    form: Form = "agent"
    # Number of a task's asserts that the agent sees.
    visible: int = 1
    # Adds hidden tests whose expected values come from the reference.
    differential: DifferentialConfig | None = None
    # With this section, "train" and "validation" lose tasks that are near-duplicates of a task of a
    # later split or of HumanEval.
    duplicates: DuplicateConfig | None = None

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise ValueError(f"{self.split=} is not one of {', '.join(SPLITS)}")

    def read(self, pool: SandboxPool | None) -> Iterator[Read]:
        return each(self.path, self.form, self.visible)

    def finish(
        self, every: Sequence[Task], pool: SandboxPool | None, workdir: Path | None
    ) -> Sequence[Task]:
        tasks = [task for task in every if task.meta["split"] == self.split]
        order = programs.SPLITS
        later = order[order.index(self.split) + 1 :] if self.split in order else ()
        if self.duplicates is not None and later:
            others = [task for task in every if task.meta["split"] in later] + humaneval.load()
            near = {pair.task for pair in near_duplicates(tasks, others, self.duplicates)}
            logging.info(
                "mbpp %s: left out %d near-duplicates of held-out tasks among %d",
                self.split,
                len(near),
                len(tasks),
            )
            tasks = [task for task in tasks if task.id not in near]
        return strengthened(
            tasks, mutations, self.differential, pool, workdir, f"mbpp {self.split}", every
        )
