"""A short version of the run in which roles are killed at random."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STEPS = 16


@pytest.mark.long
@pytest.mark.timeout(900)
def test_killed_roles_lose_repeat_and_change_nothing(tmp_path):
    command = [
        sys.executable,
        "-m",
        "launch.faults",
        "--config=configs/faults.py:smoke",
        f"--workdir={tmp_path}",
    ]
    command += ["--config.sft=None", f"--config.train.steps={STEPS}"]
    done = subprocess.run(
        [*command, "--kills=2", "--hangs=1", "--delay_s=2", "--minutes=14"],
        cwd=ROOT,
        # compiled as users do: what is killed is to get somewhere
        env=os.environ | {"XLA_FLAGS": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "replayed: equal, bit for bit" in done.stdout and done.stdout.endswith(
        "every check passed\n"
    )
    report = json.loads((tmp_path / "faults.json").read_text())
    killed, hung = (
        [f for f in report["faults"] if f["what"] == what] for what in ("killed", "hung")
    )
    assert sorted(fault["role"][:5] for fault in killed) == ["actor", "learn"]
    assert (
        len(hung) == 1 and hung[0]["held"] > 0 and report["audit"]["takeovers"] >= hung[0]["held"]
    )
    assert report["audit"]["consumed"] == STEPS and report["audit"]["staleness_max"] == 1
