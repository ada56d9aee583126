"""The benchmark of the record counts what is done to its folder, and plays its steps to the end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.counted_storage import REQUESTS
from tests import programs

ROOT = Path(__file__).resolve().parents[2]
# Prints the counts of what is done to one folder, while the same is done to another.
PROGRAM = """
import json, os, sys
from pathlib import Path
from benchmarks.counted_storage import Counts
counts = Counts(sys.argv[1])
for folder in map(Path, sys.argv[1:]):
    folder.mkdir()
    (folder / "a").write_bytes(b"12345")
    assert (folder / "a").read_bytes() == b"12345"
    descriptor = os.open(folder / "b", os.O_WRONLY | os.O_CREAT)
    os.write(descriptor, b"123")
    os.close(descriptor)
    os.link(folder / "a", folder / "c")
    os.replace(folder / "c", folder / "d")
    assert sorted(os.listdir(folder)) == ["a", "b", "d"]
    with os.scandir(folder) as entries:
        assert sorted(entry.name for entry in entries) == ["a", "b", "d"]
    assert [(top, files) for top, _, files in os.walk(folder)] == [(str(folder), os.listdir(folder))]
    (folder / "d").unlink()
    assert not (folder / "d").exists()
print(json.dumps(counts.total))
"""


def test_each_operation_in_the_folder_is_counted_and_no_other(tmp_path):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "one"), str(tmp_path / "other")]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert json.loads(done.stdout) == {
        "mkdir": 1,
        "open": 3,
        "write": 2,
        "bytes written": 8,
        "read": 1,
        "bytes read": 5,
        "link": 1,
        "rename": 1,
        "list": 4,
        "entries": 12,
        "longest": 3,
        "unlink": 1,
        "stat": 1,
    }


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_small_record_is_played_and_measured(tmp_path):
    done = programs.run(
        "launch.bench",
        "record",
        "--record_actors=3",
        "--record_groups=12",
        "--steps=2",
        "--history=2",
        f"--json={tmp_path / 'found.json'}",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found["seconds"]) == 2 and set(found["counts"]) >= set(REQUESTS)
    # A plan, what was taken, the consumption, a claim on each group, a file for each actor.
    assert all(15 < files <= 3 + 12 + 3 for files in found["files"])
