"""A short version of the run in which roles are killed at random."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests import programs, sweep_programs

ROOT = Path(__file__).resolve().parents[2]
STEPS = 16


def strike(folder: Path, steps: int, *faults: str) -> dict:
    """Plays a run to its end with faults and checks it; what faults.json says of it."""
    # compiled programs, which the runs of this machine share
    (folder / "compiled").symlink_to(os.environ["JAX_COMPILATION_CACHE_DIR"])
    line = [
        "--config=configs/faults.py:smoke",
        f"--workdir={folder}",
        "--config.sft=None",
        "--config.model.preset=tests.models.small:SHALLOW",
        f"--config.train.steps={steps}",
        "--delay_s=2",
        "--minutes=14",
        *faults,
    ]
    done = programs.run("launch.faults", *line, devices=None)
    assert done.returncode == 0, done.stdout + done.stderr + last_lines(folder)
    assert "replayed: equal, bit for bit" in done.stdout and done.stdout.endswith(
        "every check passed\n"
    )
    return json.loads((folder / "faults.json").read_text())


def last_lines(folder: Path) -> str:
    """Of each log of a run."""
    logs = sorted([*folder.glob("*.log"), *folder.glob("cluster/logs/*.log")])
    return "\n".join(f"{x.name}:\n{x.read_text()[-1500:]}" for x in logs)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_killed_roles_lose_repeat_and_change_nothing(tmp_path):
    report = strike(tmp_path, STEPS, "--kills=2", "--hangs=1")
    killed, hung = (
        [f for f in report["faults"] if f["what"] == what] for what in ("killed", "hung")
    )
    assert sorted(fault["role"][:5] for fault in killed) == ["actor", "learn"]
    assert (
        len(hung) == 1 and hung[0]["held"] > 0 and report["audit"]["takeovers"] >= hung[0]["held"]
    )
    assert report["audit"]["consumed"] == STEPS and report["audit"]["staleness_max"] == 1


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: .[ray]")
def test_a_sweep_on_a_ray_cluster_tries_again_what_failed(tmp_path):
    (tmp_path / "broken").write_text("3")
    variants = ["grpo", "rloo", "last"]
    done = sweep_programs.run(tmp_path, variants, "--ray=2")
    assert done.returncode == 1 and "rloo,seed=1 failed with exit code 3" in done.stdout
    (tmp_path / "broken").unlink()
    done = sweep_programs.run(tmp_path, variants, "--ray=1", "--jobs=3")
    assert done.returncode == 0 and "3 runs, 2 of them finished before" in done.stdout
    folders = [tmp_path / f"variant={variant},seed=1" for variant in variants]
    assert [len((x / "calls.txt").read_text().splitlines()) for x in folders] == [1, 2, 1]

    # of two more runs the one node has room for one
    (tmp_path / "slow").touch()
    process = sweep_programs.start(tmp_path, [*variants, "fourth", "fifth"], "--ray=1")
    began = [
        tmp_path / f"variant={variant},seed=1" / "calls.txt" for variant in ("fourth", "fifth")
    ]
    while not any(path.exists() for path in began):
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate()
    assert process.returncode == 130 and "not finished" in output
    assert sum(path.exists() for path in began) == 1


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: .[ray]")
def test_a_lost_node_of_a_ray_cluster_loses_repeats_and_changes_nothing(tmp_path):
    faults = ("--ray_nodes=3", "--kills=1", "--hangs=0", "--node_losses=1")
    report = strike(tmp_path, STEPS, *faults)
    assert sorted(fault["what"] for fault in report["faults"]) == ["killed", "node lost"]
    # each role that was struck has run again, unless it was done by then
    assert any(fault.get("back_s") for fault in report["faults"])
    assert report["audit"]["consumed"] == STEPS and report["audit"]["staleness_max"] == 1
    logs = tmp_path / "cluster" / "logs"
    assert sorted(path.name for path in logs.iterdir()) == [
        "actor-0.log",
        "actor-1.log",
        "learner.log",
    ]
