"""Storage that launch.faults makes slow is slow where it should be, and does what it did."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from cluster.fault_stages import environment

ROOT = Path(__file__).resolve().parents[2]
# Prints how many waits each operation had, and what the store's own writes came to.
PROGRAM = """
import json, os, sys, time
waits = []
time.sleep = waits.append
from pathlib import Path
from rl_code.host import files
folder = Path(sys.argv[1])
def waited(operation):
    waits.clear()
    result = operation()
    return len(waits), result
found = {
    "once": waited(lambda: files.write_once(folder / "store/a", b"one", folder / "store/b")),
    "again": waited(lambda: files.write_once(folder / "store/a", b"two", folder / "store/b")),
    "read": waited(lambda: (folder / "store/a").read_text()),
    "list": waited(lambda: os.listdir(folder / "store")),
    "elsewhere": waited(lambda: (folder / "other").write_text("x")),
}
print(json.dumps(found))
"""


def test_every_operation_of_the_store_waits_and_others_do_not(tmp_path):
    (tmp_path / "store").mkdir()
    variables = environment(tmp_path, 7.0)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    slow = subprocess.run(
        command, cwd=ROOT, env=variables, check=True, capture_output=True, text=True
    )
    found = json.loads(slow.stdout)
    assert {name: result for name, (_, result) in found.items()} == {
        "once": True,
        "again": False,
        "read": "one",
        "list": ["a"],
        "elsewhere": 1,
    }
    waits = {name: count for name, (count, _) in found.items()}
    # aside: opened, synced, linked, deleted twice; the folder: opened and synced
    # again: both names are looked at, for the link may be this one
    assert waits == {"once": 7, "again": 7, "read": 1, "list": 1, "elsewhere": 0}
    assert "SLOW_STORAGE" not in environment(tmp_path) and "SLOW_STORAGE" not in os.environ
