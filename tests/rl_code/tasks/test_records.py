"""Files of one's own become tasks by naming their columns; a wrong column is named."""

from __future__ import annotations

import gzip
import json
import sys

import pytest

from rl_code.config.named import Named
from rl_code.config.read_config import ConfigError
from rl_code.tasks.api import find_source
from rl_code.tasks.records import load
from rl_code.tasks.row_files import TaskFileError
from rl_code.types import Case, Layer, Tests, World

ROWS = [
    {
        "number": 3,
        "text": "Add two numbers.",
        "name": "add",
        "asserts": ["assert add(1, 2) == 3", "assert add(1, 2) < 4"],
        "solution": "def add(a, b):\n    return a + b\n",
        "part": "train",
    },
    {
        "number": 4,
        "text": "Double a number.",
        "name": "twice",
        "asserts": ["assert twice(2) == 4"],
        "solution": "def twice(a):\n    return a * 2\n",
        "part": "test",
    },
]
COLUMNS = {
    "id": "number",
    "messages": "text",
    "entry_point": "name",
    "tests": "asserts",
    "reference": "solution",
    "split": "part",
}


def write(folder, ending: str) -> str:
    path = folder / f"own.{ending}"
    text = "".join(json.dumps(row) + "\n" for row in ROWS)
    if ending == "jsonl":
        path.write_text(text)
    elif ending == "jsonl.gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    return str(path)


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "parquet"])
def test_every_format_gives_the_same_tasks(tmp_path, ending):
    add, twice = load(write(tmp_path, ending), COLUMNS)
    assert (add.id, add.entry_point, add.meta["split"]) == ("3", "add", "train")
    assert add.messages == ({"role": "user", "content": "Add two numbers."},)
    assert add.hidden_tests == Tests(
        cases=(Case((1, 2), 3, tolerance=0.0),), code=("assert add(1, 2) < 4",)
    )
    assert add.reference == {"solution.py": ROWS[0]["solution"]} and twice.id == "4"


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_wrong_column_is_named_with_what_the_file_has(tmp_path, ending):
    path = write(tmp_path, ending)
    with pytest.raises(TaskFileError, match=r"own\.\w+, line 1, field 'title'.*row has 'number', "):
        load(path, COLUMNS | {"id": "title"})
    with pytest.raises(TaskFileError, match="field 'number': expected a list or a string, found 3"):
        load(path, COLUMNS | {"messages": "number"})


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"tests": None}, r"columns\.tests: missing"),
        ({"test": "asserts"}, r"columns\.test: no such field; there are id, messages"),
    ],
)
def test_a_wrong_mapping_is_named(tmp_path, columns, message):
    mapping = {key: value for key, value in (COLUMNS | columns).items() if value}
    with pytest.raises(TaskFileError, match=message):
        load(write(tmp_path, "jsonl"), mapping)


def test_a_config_names_the_columns(tmp_path):
    section = {"name": "records", "split": "test", "path": write(tmp_path, "jsonl")}
    source = find_source(Named.from_config(section | {"columns": COLUMNS}, "tasks"), "tasks")
    assert [task.id for task in source.load(None, None)] == ["4"]
    with pytest.raises(ConfigError, match=r"tasks\.columns: missing"):
        find_source(Named.from_config(section, "tasks"), "tasks")


def test_chats_files_and_code_are_taken_as_they_are(tmp_path):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Fix a.py."}]
    code = "x = [2, 1]\nf(x)\nassert x == [1, 2]"
    row = {
        "i": "a",
        "m": chat,
        "e": "f",
        "t": code,
        "d": {"src/a.py": "def f(x): ...\n"},
        "p": "src/a.py",
    }
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps(row) + "\n")
    columns = {
        "id": "i",
        "messages": "m",
        "entry_point": "e",
        "tests": "t",
        "files": "d",
        "path": "p",
    }
    (task,) = load(str(path), columns, "agent")
    assert list(task.messages) == chat and task.files == row["d"] and task.path == "src/a.py"
    assert task.hidden_tests == Tests(code=(code,))
    path.write_text(2 * (json.dumps(row) + "\n"))
    with pytest.raises(TaskFileError, match=r"line 2.*'a'"):
        load(str(path), columns, "agent")


def test_a_column_names_the_layers_of_a_task(tmp_path):
    layer = {"digest": "sha256:" + "a" * 64, "at": "/workspace"}
    path = tmp_path / "own.jsonl"
    columns = COLUMNS | {"world": "layers"}
    path.write_text(
        "".join(json.dumps(row | {"layers": {"layers": [layer]}}) + "\n" for row in ROWS)
    )
    assert [task.world for task in load(str(path), columns)] == [World((Layer(**layer),))] * 2
    path.write_text(json.dumps(ROWS[0] | {"layers": {"layers": [layer | {"at": "/etc"}]}}))
    with pytest.raises(TaskFileError, match=r"line 1, field .layers.: .*must be at /, /opt"):
        load(str(path), columns)


def test_an_assert_on_another_function_stays_code(tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps(ROWS[1] | {"asserts": ["assert len('ab') == 2"]}) + "\n")
    (task,) = load(str(path), COLUMNS)
    assert task.hidden_tests == Tests(code=("assert len('ab') == 2",))


def test_parquet_without_its_package_names_the_extra(tmp_path, monkeypatch):
    path = write(tmp_path, "parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(TaskFileError, match=r"pip install -e '\.\[data\]'"):
        load(path, COLUMNS)


def test_a_damaged_parquet_file_is_named(tmp_path):
    pytest.importorskip("pyarrow")
    path = tmp_path / "own.parquet"
    path.write_bytes(b"no parquet")
    with pytest.raises(TaskFileError, match="expected a Parquet file"):
        load(str(path), COLUMNS)
