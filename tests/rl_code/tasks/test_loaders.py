"""HumanEval, MBPP and EvalPlus files become tasks; a row that is not right stops the load and is
named.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
from pathlib import Path

import pytest

from rl_code.config.named import Named
from rl_code.tasks import evalplus, humaneval, mbpp
from rl_code.tasks.api import find_source
from rl_code.tasks.row_files import TaskFileError, readable
from rl_code.tasks.source import UNREADABLE, Refusal
from rl_code.types import Case, Tests

MBPP_ROW = {
    "task_id": "MBPP/601",
    "prompt": '\n\ndef add(a,b):\n"""\nbadly indented\n',
    "canonical_solution": "  \n  return a + b\n",
    "entry_point": "add",
    "test": "\n\nMETADATA = {}\n\n\ndef check(candidate):\n    assert candidate(1,2)==3\n"
    "    assert candidate([1], (2,)) == [(1, 2)]\n    assert candidate(x) == 3\n",
    "language": "python",
    "description": "Write a function to add two numbers. ",
}
HUMANEVAL_ROW = {
    "task_id": "HumanEval/0",
    "prompt": "import math\n\ndef helper(x):\n    return x\n\n"
    'def area(r: float) -> float:\n    """ Area.\n    >>> area(0)\n    0\n    """\n',
    "entry_point": "area",
    "canonical_solution": "    return math.pi * r * r\n",
    "test": "def check(candidate):\n    assert abs(candidate(helper(1)) - math.pi) < 1e-6\n",
}
EVALPLUS_ROW = HUMANEVAL_ROW | {
    "base_input": [[1.0]],
    "plus_input": [[2.0], [0.0]],
    "atol": 1e-6,
    "contract": "",
}
EVALPLUS_MBPP_ROW = {
    "task_id": "Mbpp/2",
    "prompt": '"""\nWrite a function to add.\nassert add(1, 2) == 3\n"""\n',
    "entry_point": "add",
    "canonical_solution": "\ndef add(a, b=0):\n    return a + b\n",
    "base_input": [[1, 2]],
    "plus_input": [],
    "atol": 0,
}


def write(folder: Path, *rows: object) -> str:
    path = folder / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_mbpp_asserts_are_split_and_keep_their_meaning(tmp_path):
    (task,) = mbpp.load(write(tmp_path, MBPP_ROW))
    assert task.visible_tests == Tests(cases=(Case((1, 2), 3, tolerance=0.0),))
    assert task.hidden_tests == Tests(
        cases=(Case(([1], (2,)), [(1, 2)], tolerance=0.0),), code=("assert add(x) == 3",)
    )
    assert task.meta["split"] == "train"


def test_mbpp_shows_only_the_visible_assert(tmp_path):
    path = write(tmp_path, MBPP_ROW)
    for form in ("raw", "chat", "agent"):
        (task,) = mbpp.load(path, form)
        shown = json.dumps([*task.messages, task.files, task.prefill])
        assert "add two numbers" in shown or form == "chat"
        assert "(2,)" not in shown and "return a + b" not in shown
        assert "assert add(1, 2) == 3" in shown
    (task,) = mbpp.load(path, "chat", visible=0)
    assert "assert" not in task.messages[0]["content"] and len(task.hidden_tests) == 3


def test_mbpp_reference_continues_the_chat_prefill(tmp_path):
    (task,) = mbpp.load(write(tmp_path, MBPP_ROW), "chat")
    assert task.prefill == "```python\ndef add(a, b):\n    "
    namespace: dict = {}
    exec(task.reference[task.path], namespace)
    assert namespace["add"](2, 3) == 5
    assert task.reference[task.path].startswith("def add(a, b):\n")


def test_humaneval_raw_prompt_ends_without_newline_and_tests_know_the_helpers(tmp_path):
    (task,) = humaneval.load(write(tmp_path, HUMANEVAL_ROW))
    assert task.prefill + "\n" == HUMANEVAL_ROW["prompt"] and task.messages == ()
    namespace = {"area": lambda r: 3.141592653589793 * r * r}
    exec(task.hidden_tests.code[0], namespace)
    with pytest.raises(AssertionError):
        exec(task.hidden_tests.code[0], {"area": lambda r: 3 * r * r})
    assert "def area" not in task.hidden_tests.code[0]


def test_humaneval_comes_with_its_package():
    tasks = humaneval.load()
    assert len({task.id for task in tasks}) == 164
    for task in tasks:
        assert not task.prefill.endswith("\n")
        assert task.reference[task.path].startswith(task.prefill)


def test_gzipped_files_load(tmp_path):
    path = tmp_path / "tasks.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(HUMANEVAL_ROW).encode()))
    assert len(humaneval.load(str(path))) == 1


def load_evalplus(path):
    return readable(evalplus.each(path))


def test_evalplus_keeps_inputs_and_tolerance(tmp_path):
    tasks = load_evalplus(write(tmp_path, EVALPLUS_ROW, EVALPLUS_MBPP_ROW))
    inputs = {task.id: task.meta["inputs"] for task in tasks}
    assert inputs == {"HumanEval/0": [(1.0,), (2.0,), (0.0,)], "Mbpp/2": [(1, 2)]}
    assert all("inputs" not in evalplus.without_inputs(task).meta for task in tasks)
    assert [task.meta["tolerance"] for task in tasks] == [1e-6, 0.0]
    assert tasks[1].prefill.startswith("def add(a, b=0):\n")
    assert tasks[1].meta["description"] == "Write a function to add."
    for task in tasks:
        assert "return a + b" not in task.prefill and "math.pi * r" not in task.prefill


LOADERS = {
    "mbpp": (mbpp.load, MBPP_ROW),
    "humaneval": (humaneval.load, HUMANEVAL_ROW),
    "evalplus": (load_evalplus, EVALPLUS_ROW),
}


@pytest.mark.parametrize(
    ("loader", "field", "value", "expected"),
    [
        ("mbpp", "description", None, "expected a string, found None"),
        ("mbpp", "task_id", "MBPP/975", "expected MBPP/1 to MBPP/974, found 'MBPP/975'"),
        ("mbpp", "language", "java", "expected 'python', found 'java'"),
        ("mbpp", "entry_point", "sub", "a line 'def sub(...):'"),
        ("mbpp", "test", "def check(candidate:", "expected Python code"),
        ("mbpp", "test", "x = 1", "expected a function check"),
        (
            "mbpp",
            "test",
            "def check(candidate):\n    import os",
            "only assert statements in check, found 'import os'",
        ),
        ("mbpp", "test", "def check(candidate):\n    assert candidate(1)", "more than 1 asserts"),
        ("humaneval", "prompt", 3, "expected a string, found 3"),
        ("humaneval", "prompt", "def area(r):", "expected Python code"),
        ("humaneval", "entry_point", "volume", "definition of the entry point 'volume'"),
        ("humaneval", "test", "def test(): pass", "expected a function check"),
        ("humaneval", "canonical_solution", "return (", "expected Python code"),
        ("evalplus", "base_input", {}, "expected a list, found {}"),
        ("evalplus", "plus_input", [[1], 2], "expected a list of arguments, found 2"),
        ("evalplus", "atol", True, "expected a number, found True"),
        ("evalplus", "atol", -1, "expected a number that is not negative, found -1"),
        ("evalplus", "entry_point", "volume", "definition of the entry point 'volume'"),
    ],
)
def test_a_malformed_row_is_named_by_file_line_and_field(tmp_path, loader, field, value, expected):
    load, row = LOADERS[loader]
    path = write(tmp_path, row, row | {field: value})
    with pytest.raises(ValueError) as caught:
        load(path)
    message = str(caught.value)
    assert expected in message
    assert message.startswith(f"{path}, line 2, field ")
    if field != "entry_point":
        assert f"field '{field}" in message


@pytest.mark.parametrize("loader", LOADERS)
def test_a_missing_field_is_named(tmp_path, loader):
    load, row = LOADERS[loader]
    for field in row:
        if loader == "evalplus" and field in ("contract", "test"):  # in its files, not needed
            continue
        path = write(tmp_path, {key: value for key, value in row.items() if key != field})
        with pytest.raises(ValueError, match=f"line 1, field '{field}': expected .* found nothing"):
            load(path)


SETTINGS = {
    "mbpp": dict(split="train"),
    "humaneval": {},
    "records": dict(columns=dict(id="task_id", messages="prompt", entry_point="entry_point",
                                 tests="test")),
}  # fmt: skip
ROWS = {**{name: row for name, (_, row) in LOADERS.items()}, "records": HUMANEVAL_ROW}
# What a line of a file of tasks may hold in place of a row.
BROKEN = (
    *(b"{", b"[1]", b"\xff\xfe{}", b'{"task_id": 3}', b"[" * 100_000, b"1" * 5_000),
    b'{"task_id": "MBPP/601", "prompt": "' + b"(" * 5_000 + b'"}',
)


@pytest.mark.parametrize("name", ["mbpp", "humaneval", "records"])
def test_a_row_that_cannot_be_read_leaves_the_others_alone(tmp_path, name):
    rows = [ROWS[name] | {"task_id": f"MBPP/{601 + number}"} for number in range(2)]
    good = [json.dumps(row).encode() for row in rows]
    twice = json.dumps(rows[0]).encode()
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(b"\n".join([good[0], *BROKEN, twice, good[1]]))
    source = find_source(Named(name, {"path": str(path), **SETTINGS[name]}), "tasks")
    found = list(source.load_each(None, None))
    wrong = [(id, why) for id, why in found if isinstance(why, Refusal)]
    lines = range(2, 3 + len(BROKEN))
    assert [id for id, _ in wrong] == [f"tasks.jsonl:{line}" for line in lines]
    for line, (_, why) in zip(lines, wrong, strict=True):
        assert f"{path}, line {line}" in why and "expected" in why
        assert why.reason == UNREADABLE
    tasks = [task.id for _, task in found if not isinstance(task, Refusal)]
    assert tasks == [row["task_id"] for row in rows]
    with pytest.raises(TaskFileError, match=r"line 2.*works=FILE loads those alone"):
        source.load(None, None)
    working = tmp_path / "working.json"
    working.write_text(json.dumps({"works": tasks[1:]}))
    kept = dataclasses.replace(source, works=str(working)).load(None, None)
    assert [task.id for task in kept] == tasks[1:]


def test_a_file_that_ends_in_the_middle_keeps_the_rows_before(tmp_path):
    path = tmp_path / "tasks.jsonl.gz"
    text = gzip.compress("".join(json.dumps(HUMANEVAL_ROW) + "\n" for _ in range(9)).encode(), 0)
    path.write_bytes(text[: len(text) // 2])
    first, *_, last = humaneval.each(str(path))
    assert first[1].entry_point == "area" and "found Compressed file ended" in str(last[1])


@pytest.mark.parametrize("content", [b"{", b"[1]\n", b'"a"\n', b"\xff\xfe\n", b"", b"\n\n"])
def test_a_file_that_is_not_json_lines_is_named(tmp_path, content):
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"tasks\.jsonl.*expected"):
        mbpp.load(str(path))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(TaskFileError, match=r"none\.jsonl"):
        mbpp.load(str(tmp_path / "none.jsonl"))


@pytest.mark.skipif(
    "RL_CODE_DATA" not in os.environ, reason="RL_CODE_DATA, the folder with mbpp.jsonl, is not set"
)
def test_all_of_mbpp_loads_in_its_usual_splits():
    tasks = mbpp.load(str(Path(os.environ["RL_CODE_DATA"]) / "mbpp.jsonl"))
    sizes = {split: sum(task.meta["split"] == split for task in tasks) for split in mbpp.SPLITS}
    assert sizes == {"prompt": 10, "test": 500, "validation": 90, "train": 374}
    assert all(len(task.visible_tests) == 1 and len(task.hidden_tests) == 2 for task in tasks)
