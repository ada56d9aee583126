"""Killed at any moment, out of space, read-only: what is in the store is whole, and the work goes
on.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from rl_code.store.audit import check

ROOT = Path(__file__).resolve().parents[3]


def run(*arguments, prefix=()):
    """Runs ``processes`` and returns what it found."""
    command = [*prefix, sys.executable, "-m", "tests.rl_code.store.processes", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_racing_processes_never_share_an_item(tmp_path):
    claimed = run("race", tmp_path / "store")
    everything = [tuple(item) for items in claimed for item in items]
    assert sorted(everything) == [(step, number) for step in range(3) for number in range(100)]
    assert all(claimed)


@pytest.mark.long
def test_killed_before_any_of_its_system_calls_a_process_goes_on_where_it_was(tmp_path):
    found = run("kill_points", tmp_path / "store")
    assert found["points"] > found["begun"] > found["delivered"] > 0 and found["points"] > 30
    report = check(tmp_path / "store", max_staleness=0)
    assert report.problems == [] and report.consumed == found["points"] + 1
    assert list(tmp_path.rglob("aside.*")) == []


@pytest.mark.long
@pytest.mark.timeout(600)
def test_killed_while_a_shard_is_made_every_group_is_in_one_place(tmp_path):
    found = run("compaction_kill_points", tmp_path / "store")
    assert found["points"] > 40 and 0 < found["in_shard"] < found["points"] and found["left"] == 0
    report = check(tmp_path / "store", max_staleness=0)
    assert report.problems == [] and report.consumed == 2 * found["points"] + 2


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_learner_and_actors_killed_at_random_use_every_group_once(tmp_path):
    seed = random.randrange(1 << 30)
    print(f"{seed=}")
    found = run("fleet", tmp_path / "store", seed)
    assert found["code"] == 0 and found["left"] == 0 and found["starts"] >= 25
    report = check(tmp_path / "store", max_staleness=1)
    assert report.problems == [] and (report.steps, report.consumed, report.groups) == (30, 30, 180)
    assert report.takeovers >= 2 and report.staleness_max == 1


def test_a_full_and_a_read_only_disk_are_named_and_leave_whole_records(tmp_path):
    unshare = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode != 0:
        pytest.skip("mount namespaces are not allowed here, so no small disk can be made")
    mount = ["bash", "-c", f'mount -t tmpfs -o size=3m none "{tmp_path}" && exec "$@"', "bash"]
    found = run("full", tmp_path / "store", prefix=[*unshare, *mount])
    messages = found["messages"]
    for what, named in (
        ("deliver", "could not write the group of item (0, "),
        ("plan", "could not write the plan of step 0 to "),
    ):
        assert messages[what].startswith(named) and str(tmp_path) in messages[what]
        assert "the disk is full (0." in messages[what] and "MiB free" in messages[what]
    assert "Read-only file system" in messages["read-only"]
    assert found["delivered"] == found["verified"] > 5 and found["left"] == []
    assert found["again"] is True and found["readable"] == 400
