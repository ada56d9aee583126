"""The command that makes tasks says what is wrong with its input, and makes nothing then."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GOOD = f"shop==1.0 --hash=sha256:{'0' * 64}\n"


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "launch.make_tasks", *flags]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "text, flag, words",
    [
        (None, "--json", "No such file"),
        ("shop>=1.0\n", "--json", "line 1: expected name==version --hash=sha256:"),
        (GOOD, "--deletions=-1", "must not be negative"),
        (GOOD, "--jobs=0", "jobs"),
    ],
)
def test_bad_input_is_refused(tmp_path, text, flag, words):
    listed = tmp_path / "packages.txt"
    if text is not None:
        listed.write_text(text)
    out = tmp_path / "out"
    done = run(f"--packages={listed}", f"--out={out}", flag)
    assert done.returncode == 2, done
    assert words in done.stderr
    assert not out.exists()
