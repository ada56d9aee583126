"""The bench of a long history runs, keeps to its budgets and leaves nothing behind."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from rl_code.weights.waiting import Deadline
from tests import programs

SMALL = ("--document=1024", "--device_mib=2", "--host_mib=0", "--decode=5", "--check_tokens=1024")


def command(folder: Path, *flags: str) -> list[str]:
    return [
        "launch.bench",
        "million",
        "--device=cpu",
        f"--workdir={folder / 'blocks'}",
        *SMALL,
        *flags,
    ]


@pytest.mark.long
def test_a_small_run(tmp_path):
    done = programs.run(
        *command(tmp_path, "--tokens=4096", f"--json={tmp_path / 'out' / 'million.json'}")
    )
    assert done.returncode == 0, done.stderr
    assert "4,096 tokens in documents of 1,024" in done.stdout
    report = json.loads((tmp_path / "out" / "million.json").read_text())
    size = report["bytes"]
    decoding = report["decoding"]
    check = report["check"]
    assert size["device"] <= size["device_budget"] == 2 * 2**20 and size["host"] == 0
    assert size["disk"] >= size["history"] == 4096 * 2 * 2 * 32 * 4
    assert size["untiered"] > size["history"] * 2  # the window's keys have the same size
    assert decoding["compilations"] == 0
    assert decoding["present"] + decoding["prefetched"] + decoding["missing"] == 1
    moved = decoding["missing"] * decoding["blocks"] * 2**14
    assert decoding["from_disk_bytes"] == decoding["to_device_bytes"] == moved
    assert check["difference"] < 1e-4 * check["largest"] and check["same_best"] == check["decoded"]
    assert check["from_disk_bytes"] > 0
    assert list((tmp_path / "blocks").iterdir()) == []


def test_a_budget_that_is_too_small_is_refused(tmp_path):
    done = programs.run(*command(tmp_path, "--tokens=512000"))
    assert (
        done.returncode == 2
        and "device_bytes=2097152 hold no block" in done.stderr.splitlines()[-1]
    )


@pytest.mark.long
def test_what_is_on_disk_goes_when_the_bench_is_stopped(tmp_path):
    long = command(tmp_path, "--tokens=512000", "--device_mib=32")
    process = programs.start(*long, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        begun = lambda: any(tmp_path.glob("blocks/million_*/blocks"))  # noqa: E731
        assert (
            Deadline(240).wait(lambda: begun() or process.poll() is not None)
            and process.poll() is None
        )
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=400) == 130
    finally:
        process.kill()
    assert list((tmp_path / "blocks").iterdir()) == []
