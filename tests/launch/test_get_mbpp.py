"""MBPP is taken only from the published file, whatever other columns and order it has."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from launch import get_mbpp
from launch.get_mbpp import COLUMNS, convert
from rl_code.tasks import mbpp
from rl_code.tasks.row_files import TaskFileError
from tests import programs

needs_mbpp = pytest.mark.skipif(
    "RL_CODE_DATA" not in os.environ, reason="RL_CODE_DATA, the folder with mbpp.jsonl, is not set"
)


def published() -> list[dict]:
    """The rows as they are published: without the sentence, with a column more, in other order."""
    lines = (Path(os.environ["RL_CODE_DATA"]) / "mbpp.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [{name: row[name] for name in COLUMNS} | {"completion": ""} for row in rows[::-1]]


@needs_mbpp
def test_the_published_file_becomes_the_file_that_is_read(tmp_path):
    text = "\n".join(map(json.dumps, published()))
    (tmp_path / "mbpp.jsonl").write_text("\n".join(map(json.dumps, convert(text))))
    here = mbpp.load(str(Path(os.environ["RL_CODE_DATA"]) / "mbpp.jsonl"))
    assert mbpp.load(str(tmp_path / "mbpp.jsonl")) == here


@needs_mbpp
def test_another_file_is_refused():
    rows = published()
    rows[3]["test"] += " "
    with pytest.raises(ValueError, match=r"974 rows have sha256 .*, the published 974 have"):
        convert("\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match="not a file of MBPP in mxeval's format"):
        convert("{}")


def test_a_missing_file_is_fetched_by_the_command_that_the_error_names(tmp_path):
    with pytest.raises(
        TaskFileError, match=r"none\.jsonl: no such file of tasks\. python -m (\S+)"
    ):
        mbpp.load(str(tmp_path / "none.jsonl"))
    assert "--file: The published file" in programs.run("launch.get_mbpp", "--helpshort").stdout


def test_a_download_that_is_not_there_is_a_wrong_command_line(tmp_path, monkeypatch, capsys):
    given = str(tmp_path / "none.jsonl")
    monkeypatch.setattr(get_mbpp.flags, "FLAGS", SimpleNamespace(file=given))
    with pytest.raises(SystemExit) as ended:
        get_mbpp.main([])
    assert ended.value.code == 2 and capsys.readouterr().err.startswith(f"--file={given}: ")
