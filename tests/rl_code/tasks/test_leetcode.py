"""LeetCode-style rows: methods, nodes as arguments and results, packages. All made for these tests."""

from __future__ import annotations

import pytest

from rl_code.config.named import Named
from rl_code.environment.grading import grade_work
from rl_code.tasks import validate
from rl_code.tasks.api import find_source
from rl_code.tasks.row_files import TaskFileError
from rl_code.types import Case, Limits
from tests.rl_code.tasks import projects

LIMITS = Limits(turns=1, tokens=1, turn_tokens=1, test_runs=1, command_s=60.0, grade_s=120.0)
PROMPT = """import math
from typing import *

class ListNode:
    def __init__(self, val=0, next=None):
        self.val = val
        self.next = next

class TreeNode:
    def __init__(self, val=0, left=None, right=None):
        self.val = val
        self.left = left
        self.right = right
"""


def row(**change):
    fields = {
        "task_id": "add-up",
        "prompt": PROMPT,
        "problem_description": "Add two numbers up.",
        "starter_code": "class Solution:\n    def addUp(self, a: int, b: int) -> int:\n        ",
        "completion": "class Solution:\n    def addUp(self, a: int, b: int) -> int:\n        return a + b\n",
        "entry_point": "Solution().addUp",
        "test": (
            "def check(candidate):\n    assert candidate(a = 1, b = 2) == 3\n"
            "    assert candidate(b = 5, a = 2) == 7\n    assert abs(candidate(1, 1) - 2) < 1e-6\n"
        ),
        "difficulty": "Easy",
    }
    return {**fields, **change}


NODES = [
    row(
        task_id="reversed",
        starter_code="class Solution:\n    def rev(self, head: Optional[ListNode]) -> Optional[ListNode]:\n        ",
        completion=(
            "class Solution:\n    def rev(self, head):\n        before = None\n        while head:\n"
            "            head.next, before, head = before, head, head.next\n        return before\n"
        ),
        entry_point="Solution().rev",
        test=(
            "def check(candidate):\n"
            "    assert is_same_list(candidate(head = list_node([1, 2, 3])), list_node([3, 2, 1]))\n"
            "    assert is_same_list(candidate(head = list_node([])), list_node([]))\n"
            "    assert is_same_list(candidate(head = list_node(range(500))), list_node(range(499, -1, -1)))\n"
        ),
    ),
    row(
        task_id="mirrored",
        starter_code="class Solution:\n    def mirror(self, root: Optional[TreeNode]) -> Optional[TreeNode]:\n        ",
        completion=(
            "class Solution:\n    def mirror(self, root):\n        if not root:\n            return None\n"
            "        return TreeNode(root.val, self.mirror(root.right), self.mirror(root.left))\n"
        ),
        entry_point="Solution().mirror",
        test=(
            "def check(candidate):\n"
            "    assert is_same_tree(candidate(tree_node([1, 2, 3, None, 4])), tree_node([1, 3, 2, None, None, 4]))\n"
            "    assert candidate(root = tree_node([])) == None\n"
        ),
    ),
    row(
        task_id="merged",
        starter_code="class Solution:\n    def total(self, lists: List[Optional[ListNode]]) -> List[int]:\n        ",
        completion=(
            "class Solution:\n    def total(self, lists):\n        found = []\n        for node in lists:\n"
            "            while node:\n                found.append(node.val)\n                node = node.next\n"
            "        return sorted(found)\n"
        ),
        entry_point="Solution().total",
        test="def check(candidate):\n    assert candidate([list_node([3]), None, list_node([1, 2])]) == [1, 2, 3]\n",
    ),
]


def load(rows, pool, tmp_path, **settings):
    path = projects.write_rows(tmp_path / "rows.jsonl", *rows)
    return find_source(Named("leetcode", {"path": str(path), **settings}), "tasks").load(pool, None)


def test_a_method_and_its_asserts(layered_pool, tmp_path):
    (task,) = load([row()], None, tmp_path, visible=1)
    assert task.visible_tests.cases == (Case((1, 2), 3, tolerance=0.0),)
    assert task.hidden_tests.cases == (Case((2, 5), 7, tolerance=0.0),)
    assert len(task.hidden_tests.code) == 1 and task.world is None
    start = task.files["solution.py"]
    assert start.startswith("import math\nfrom typing import *\n") and "ListNode" not in start
    assert validate.judge(task, layered_pool, LIMITS, 1).reason == ""


def test_nodes_are_arguments_and_results_by_value(layered_pool, tmp_path):
    for task in load(NODES, None, tmp_path):
        verdict = validate.judge(task, layered_pool, LIMITS, 1)
        assert (verdict.reason, verdict.detail) == ("", ""), task.id
        if task.id != "leetcode/merged":
            assert (
                "class ListNode" in task.files["solution.py"]
                or "class TreeNode" in task.files["solution.py"]
            )


@pytest.mark.parametrize(
    "body",
    [
        "return head",  # not reversed
        "return [3, 2, 1]",  # values, not nodes
        "head.next.next.next = head; return head",  # in a circle
        "return ListNode(3, ListNode(2, ListNode(1, ListNode(0))))",
    ],
)
def test_wrong_nodes_do_not_pass(layered_pool, tmp_path, body):
    (task,) = load(NODES[:1], None, tmp_path)
    text = f"{PROMPT}\nclass Solution:\n    def rev(self, head):\n        {body}\n"
    grade = grade_work(task, {"solution.py": text}, layered_pool, LIMITS)
    assert not grade.hidden[0] and not grade.solved and not grade.cheated


def test_nodes_of_the_sandbox_serve_where_the_file_defines_none(layered_pool, tmp_path):
    (task,) = load(NODES[:1], None, tmp_path)
    text = task.reference["solution.py"].partition("class Solution")
    grade = grade_work(task, {"solution.py": text[1] + text[2]}, layered_pool, LIMITS)
    assert grade.solved


def test_what_a_reference_imports_comes_as_a_layer(layered_pool, tmp_path):
    """A package of these tests' own, so that nothing is installed for them."""
    (tmp_path / "site" / "sortings").mkdir(parents=True)
    (tmp_path / "site" / "sortings" / "__init__.py").write_text(
        "def add(a, b):\n    return a + b\n"
    )
    imports = row(
        completion="from sortings import add\n" + row()["completion"].replace("a + b", "add(a, b)")
    )
    with pytest.raises(TaskFileError, match=r"add-up: it imports sortings: name a lock with it"):
        load([imports], layered_pool, tmp_path)
    plain = row(task_id="plain")
    task, other = load([imports, plain], layered_pool, tmp_path, packages=str(tmp_path / "site"))
    assert task.world is not None and other.world is None
    assert validate.judge(task, layered_pool, LIMITS, 1).reason == ""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(entry_point="a b"), r"line 1, field 'entry_point': expected f or Solution\(\).f"),
        (
            dict(entry_point="Solution().other"),
            r"'completion': expected a definition of Solution\(\).other",
        ),
        (dict(test="x = 1"), r"'test': expected a function check\(candidate\)"),
        (dict(problem_description=None), "'problem_description': expected the text of the problem"),
        (dict(prompt="def"), "'prompt': expected Python code"),
    ],
)
def test_a_malformed_row_is_named(tmp_path, change, message):
    with pytest.raises(TaskFileError, match=message):
        load([row(**change)], None, tmp_path)
    with pytest.raises(TaskFileError, match="'task_id': expected an id that no other row has"):
        load([row(), row()], None, tmp_path)
