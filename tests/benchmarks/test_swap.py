"""The bench of a swap runs, and what it computes after a swap is what prefill computes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests import programs


def run(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return programs.run(
        "launch.bench", "swap", "--device=cpu", f"--workdir={folder / 'documents'}", *flags
    )


@pytest.mark.long
def test_a_small_run(tmp_path):
    done = run(
        tmp_path,
        "--row=300",
        "--documents=9",
        "--question=12",
        "--repeats=2",
        "--caches=1,4",
        f"--json={tmp_path / 'a.json'}",
    )
    assert done.returncode == 0, done.stderr
    assert "9 documents and a question of 12, 300 tokens" in done.stdout
    report = json.loads((tmp_path / "a.json").read_text())
    assert len(report["contenders"]) == 6
    assert all(
        0 < row["fastest"] <= row["seconds"] <= row["slowest"]
        for row in report["contenders"].values()
    )
    assert [row["cache_mib"] for row in report["alone"]] == [1, 4]
    assert all(0 < row["fastest"] <= row["seconds"] <= row["slowest"] for row in report["alone"])
    assert report["difference"] < 1e-4 * report["largest"]
    assert list((tmp_path / "documents").iterdir()) == []


def test_a_row_that_is_too_short_is_refused(tmp_path):
    done = run(tmp_path, "--row=79")
    assert (
        done.returncode == 2
        and "--row=79 leaves no token for each of --documents=16" in done.stderr
    )
