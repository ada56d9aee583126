"""LeetCode-style JSON lines, as LeetCodeDataset has them (Xia et al. 2025, arXiv 2504.14655): a
method ``Solution().f`` and tests ``check(candidate)``.

An assert ``candidate(<literals>) == <literal>`` becomes a value-level case; others stay programs.
Lists and trees of nodes are arguments and results by value: tests make them with ``list_node`` and
``tree_node`` and compare them with ``is_same_list`` and ``is_same_tree``, and the candidate's
process gets real nodes of the class that its file defines.

A task whose reference imports packages gets a layer of them; the others have no world.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.tasks.forms import PATH, Form, present
from rl_code.tasks.row_files import count_rows, each_task, malformed, parse_python
from rl_code.tasks.source import SourceOfWorlds, builders_of, store_of
from rl_code.tasks.worlds import NoWorld, packages_layer
from rl_code.types import Case, Task, Tests, World

_FIELDS = {
    "task_id": (str, int),
    "prompt": str,
    "completion": str,
    "entry_point": str,
    "test": str,
}
_ENTRY = re.compile(r"(?:[A-Za-z_]\w*\(\)\.)?[A-Za-z_]\w*")
_NODES = ("ListNode", "TreeNode")
# What programs of tests on nodes begin with: values that stand for nodes, which the candidate's
# process makes real ones of (``sandbox.inside.nodes``).
_NODE_HELPERS = """
import dataclasses as _dataclasses

@_dataclasses.dataclass
class ListNode:
    values: list

@_dataclasses.dataclass
class TreeNode:
    values: list

def list_node(values):
    return ListNode(list(values)) if values else None

def tree_node(values):
    values = list(values or ())
    while values and values[-1] is None:
        values.pop()
    return TreeNode(values) if values else None

def is_same_list(a, b):
    return a == b

def is_same_tree(a, b):
    return a == b
"""


@dataclasses.dataclass(frozen=True)
class LeetCode(SourceOfWorlds):
    """LeetCode-style files, see ``leetcode``."""

    # The file: .jsonl, .jsonl.gz or .parquet.
    path: str = dataclasses.field(kw_only=True)
    # Form in which the problem is put to the agent, see ``forms``.
    form: Form = "agent"
    # Number of a task's asserts that the agent may run.
    visible: int = 0
    # Packages that references import: a lock, or a folder in which they are installed.
    packages: str = ""
    # The split that the tasks are said to be of.
    split: str = "test"

    refusals = (NoWorld,)

    def __post_init__(self) -> None:
        if self.visible < 0:
            raise ValueError(f"visible={self.visible} must not be negative")

    def count(self) -> int:
        return count_rows(Path(self.path))

    def builders(
        self, pool: SandboxPool | None, workdir: Path | None
    ) -> Iterator[tuple[str, Callable[[], Task]]]:
        file = Path(self.path)
        rows = each_task(file, _FIELDS, lambda line, row: _task(file, line, row, self))
        return builders_of(rows, lambda task: self._with_packages(task, pool))

    def _with_packages(self, task: Task, pool: SandboxPool | None) -> Task:
        """The task with a world, if its reference imports packages. Raises NoWorld."""
        needed = sorted(_packages(task.reference[PATH]))
        if not needed:
            return task
        if not self.packages:
            raise NoWorld(f"it imports {', '.join(needed)}: name a lock with it as packages")
        world = World((packages_layer(store_of(pool, "leetcode"), self.packages),))
        return dataclasses.replace(task, world=world)


def _task(file: Path, line: int, row: dict[str, Any], source: LeetCode) -> Task:
    entry_point = row["entry_point"]
    if not _ENTRY.fullmatch(entry_point):
        malformed(file, line, "entry_point", "f or Solution().f", repr(entry_point[:80]))
    prompt = parse_python(file, line, "prompt", row["prompt"])
    reference = f"{row['prompt'].rstrip()}\n\n{row['completion'].strip()}\n"
    function = _function(parse_python(file, line, "completion", reference), entry_point)
    if function is None:
        found = repr(row["completion"][:80])
        malformed(file, line, "completion", f"a definition of {entry_point}", found)
    name = entry_point.rpartition(".")[2]
    visible, hidden = _tests(file, line, row, name, function, prompt, source.visible)
    starter = row.get("starter_code") or _signature(entry_point, function)
    beginning = f"{_header(prompt, starter)}{starter.rstrip()}\n"
    statement = row.get("problem_description") or row.get("query") or row.get("content") or ""
    if not isinstance(statement, str) or not statement.strip():
        malformed(file, line, "problem_description", "the text of the problem", repr(statement))
    problem = f"{statement.strip()}\n\n```python\n{starter.strip()}\n```"
    fields = present(source.form, problem=problem, beginning=beginning, answer=beginning.rstrip())
    return Task(
        id=f"leetcode/{row['task_id']}",
        path=PATH,
        entry_point=entry_point,
        visible_tests=visible,
        hidden_tests=hidden,
        reference={PATH: reference},
        meta={
            "source": "leetcode",
            "split": source.split,
            "description": statement.strip(),
            "difficulty": str(row.get("difficulty") or ""),
        },
        **fields,
    )


def _tests(
    file: Path,
    line: int,
    row: dict[str, Any],
    name: str,
    function: ast.FunctionDef,
    prompt: ast.Module,
    visible: int,
) -> tuple[Tests, Tests]:
    """Visible and hidden tests of a row."""
    tree = parse_python(file, line, "test", row["test"])
    checks = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "check"]
    if not checks or len(checks[-1].args.args) != 1:
        malformed(file, line, "test", "a function check(candidate)", repr(row["test"][:80]))
    check = checks[-1]
    helpers = [ast.unparse(node) for node in prompt.body if _is_standard_import(node)]
    if any(word in row["test"] for word in ("list_node", "tree_node", *_NODES)):
        helpers.append(_NODE_HELPERS)
    before = "\n".join(helpers)
    asserts = check.body
    if not all(isinstance(statement, ast.Assert) for statement in asserts):
        program = f"{before}\n{row['test'].strip()}\n\ncheck({name})\n"
        return Tests(), Tests(code=(program,))
    if len(asserts) <= visible:
        malformed(file, line, "test", f"more than {visible} asserts", f"{len(asserts)}")
    called = check.args.args[0].arg
    names = [argument.arg for argument in function.args.args if argument.arg != "self"]
    cases: list[Case | str] = []
    for statement in asserts:
        case = _case(statement, called, names)
        cases.append(case or f"{before}\n{called} = {name}\n{ast.unparse(statement)}")
    return _grouped(cases[:visible]), _grouped(cases[visible:])


def _grouped(tests: Sequence[Case | str]) -> Tests:
    cases = tuple(test for test in tests if isinstance(test, Case))
    return Tests(cases, tuple(test for test in tests if isinstance(test, str)))


def _case(statement: ast.stmt, called: str, names: Sequence[str]) -> Case | None:
    """An assert ``candidate(<literals>) == <literal>`` as a case; None for any other.

    names: of the function's parameters, which arguments by keyword are put in order by.
    """
    match statement:
        case ast.Assert(
            test=ast.Compare(
                left=ast.Call(func=ast.Name(id=name), args=args, keywords=keywords),
                ops=[ast.Eq()],
                comparators=[expected],
            )
        ) if name == called:
            by_name = {keyword.arg: keyword.value for keyword in keywords}
            rest = names[len(args) :]
            rest = rest[: len(by_name)]
            if set(by_name) != set(rest):
                return None
            values = [*args, *(by_name[key] for key in rest)]
            try:
                arguments = tuple(map(ast.literal_eval, values))
                return Case(arguments, ast.literal_eval(expected), tolerance=0.0)
            except (ValueError, TypeError):
                return None
    return None


def _function(tree: ast.Module, entry_point: str) -> ast.FunctionDef | None:
    """The definition of ``f`` or of ``Solution().f``."""
    holder, _, name = entry_point.rpartition(".")
    body: Sequence[ast.stmt] = tree.body
    if holder:
        wanted = holder.removesuffix("()")
        classes = [n for n in body if isinstance(n, ast.ClassDef) and n.name == wanted]
        body = classes[-1].body if classes else ()
    found = [n for n in body if isinstance(n, ast.FunctionDef) and n.name == name]
    return found[-1] if found else None


def _signature(entry_point: str, function: ast.FunctionDef) -> str:
    """Default text from which the agent starts: the class and the method's first line."""
    returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    line = f"def {function.name}({ast.unparse(function.args)}){returns}:"
    holder = entry_point.rpartition(".")[0].removesuffix("()")
    return f"class {holder}:\n    {line}\n        " if holder else f"{line}\n    "


def _header(prompt: ast.Module, starter: str) -> str:
    """Header above the code to write: imports, and the classes of the nodes that it names."""
    kept = [
        ast.unparse(node)
        for node in prompt.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        or (isinstance(node, ast.ClassDef) and node.name in _NODES and node.name in starter)
    ]
    return "".join(f"{part}\n" for part in kept) + ("\n\n" if kept else "")


def _is_standard_import(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom) and not _imported(node) - _STANDARD


def _packages(text: str) -> set[str]:
    """The modules that a text imports and Python does not bring."""
    nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Import | ast.ImportFrom)]
    return set().union(*map(_imported, nodes)) - _STANDARD


def _imported(node: ast.Import | ast.ImportFrom) -> set[str]:
    if isinstance(node, ast.ImportFrom):
        return {(node.module or "").partition(".")[0]}
    return {alias.name.partition(".")[0] for alias in node.names}


_STANDARD = frozenset(sys.stdlib_module_names)
