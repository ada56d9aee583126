"""Fetches MBPP (974 tasks, 1 MB, CC-BY-4.0) in mxeval's format and writes it as mbpp.jsonl.

    python -m launch.get_mbpp                     # downloads it from GitHub
    python -m launch.get_mbpp --file=<download>   # takes mbpp_release_v1.jsonl that is already here

The file goes where configs look for it: into the folder that RL_CODE_DATA names, or into data/. Its
content is checked, wherever it comes from; a file that is there and whole is left alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from absl import flags

from launch import command
from rl_code.host.files import write_atomically
from rl_code.text.lines import split_lines

URL = (
    "https://raw.githubusercontent.com/amazon-science/mxeval/"
    "b09217e24b789b5bce4ed957b0d7bfa4f753aabb/data/mbxp/mbpp_release_v1.jsonl"
)
# Of the columns below in all rows; other columns and the order of rows do not count.
SHA256 = "0a7dba52ed854ce67aaec6b64fa21e4be011da276ef32956e8c67dbe91be4493"
COLUMNS = ("task_id", "prompt", "canonical_solution", "entry_point", "test", "language")
# Tasks whose docstring lacks a word of MBPP's sentence.
_LOST_A_WORD = {"MBPP/341": "Write a function to convert the given set into ordered tuples."}
_TIMEOUT_S = 60.0


def convert(text: str) -> list[dict[str, Any]]:
    """Rows of the published file, in order of their number, with the task's sentence as the column
    ``description``.

    Raises:
      ValueError: the text is not the published file.
    """
    try:
        rows = [json.loads(line) for line in split_lines(text) if line.strip()]
        rows = [{name: row[name] for name in COLUMNS} for row in rows]
        rows.sort(key=lambda row: int(row["task_id"].removeprefix("MBPP/")))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"not a file of MBPP in mxeval's format ({error!r})") from error
    if (found := digest(rows)) != SHA256:
        raise ValueError(f"{len(rows)} rows have sha256 {found}, the published 974 have {SHA256}")
    return [row | {"description": _describe(row)} for row in rows]


def _describe(row: dict[str, Any]) -> str:
    """The sentence of a task: its docstring up to the examples."""
    found = row["prompt"].split('"""')[1].split(">>>")[0].strip()
    return _LOST_A_WORD.get(row["task_id"], found)


def digest(rows: list[dict[str, Any]]) -> str:
    """sha256 of the columns that are published, of rows in the order of their number."""
    hashed = hashlib.sha256()
    for row in rows:
        hashed.update(json.dumps([row[name] for name in COLUMNS]).encode() + b"\n")
    return hashed.hexdigest()


def main(_: list[str]) -> None:
    target = Path(os.environ.get("RL_CODE_DATA", "data")) / "mbpp.jsonl"
    given = flags.FLAGS.file
    try:
        if not given and target.is_file():
            convert(target.read_text(encoding="utf-8"))
            print(f"{target} is there")
            return
        if given:
            text = Path(given).read_text(encoding="utf-8")
        else:
            with urllib.request.urlopen(URL, timeout=_TIMEOUT_S) as answer:
                text = answer.read().decode()
        rows = convert(text)
    except urllib.error.URLError as error:
        sys.exit(
            f"cannot fetch {URL}: {error.reason}. Download it elsewhere and run "
            "python -m launch.get_mbpp --file=<download>"
        )
    except (OSError, ValueError) as error:
        if given:
            command.refuse(f"--file={given}: {error}")
        sys.exit(f"{target if target.is_file() else URL}: {error}")
    target.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    write_atomically(target, "".join(lines).encode())
    print(target)


if __name__ == "__main__":
    flags.DEFINE_string("file", None, "The published file, already downloaded.")
    command.run(main)
