"""A small git repository with a bug, its fix and its tests, and pytest for sandboxes."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
from pathlib import Path

_ENVIRONMENT = {
    "PATH": os.environ["PATH"],
    **{f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
    **{f"GIT_{who}_DATE": "2024-01-01T00:00:00Z" for who in ("AUTHOR", "COMMITTER")},
    "GIT_CONFIG_GLOBAL": os.devnull,
    "HOME": os.devnull,
}
BROKEN = "def total(prices):\n    return sum(prices[1:])\n\n\ndef largest(prices):\n    return max(prices)\n"
FIXED = BROKEN.replace("prices[1:]", "prices")
OLD_TESTS = (
    "from shop import prices\n\n\ndef test_largest():\n    assert prices.largest([1, 3]) == 3\n"
)
NEW_TESTS = OLD_TESTS + "\n\ndef test_total():\n    assert prices.total([1, 2]) == 3\n"
TESTS = "tests/test_prices.py"
SOURCE = "shop/prices.py"
FAILING = f"{TESTS}::test_total"
PASSING = f"{TESTS}::test_largest"
STATEMENT = "total() of the shop's prices leaves out the first price."


def git(folder: Path, *arguments: str, given: str = "") -> str:
    """What git prints, as it is."""
    return subprocess.run(
        ["git", "-C", str(folder), *arguments],
        input=given.encode(),
        capture_output=True,
        check=True,
        env=_ENVIRONMENT,
    ).stdout.decode(errors="replace")


def write(folder: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


def commit(folder: Path, files: dict[str, str], message: str) -> str:
    """The name of a commit of these files over what is there."""
    write(folder, files)
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", message)
    return git(folder, "rev-parse", "HEAD").strip()


def make_shop(folder: Path) -> dict[str, str]:
    """A repository at ``folder`` whose second commit is broken and whose third mends it.

    Returns the commits "first", "base" and "fix", and the "patch" and "test_patch" of the last.
    """
    folder.mkdir(parents=True)
    git(folder, "init", "-q", "-b", "trunk")
    start = {"shop/__init__.py": "", SOURCE: FIXED, TESTS: OLD_TESTS, "old.txt": "old\n"}
    first = commit(folder, start, "first")
    base = commit(folder, {SOURCE: BROKEN}, "faster")
    (folder / "old.txt").unlink()
    fix = commit(folder, {SOURCE: FIXED, TESTS: NEW_TESTS}, "FUTURE fix")
    patches = {
        "patch": git(folder, "diff", base, fix, "--", SOURCE, "old.txt"),
        "test_patch": git(folder, "diff", base, fix, "--", TESTS),
    }
    return {"first": first, "base": base, "fix": fix, **patches}


def swe_row(shop: dict[str, str], **changes) -> dict:
    """A row in SWE-bench's format."""
    row = {
        "instance_id": "lab__shop-1",
        "repo": "lab/shop",
        "base_commit": shop["base"],
        "problem_statement": STATEMENT,
        "patch": shop["patch"],
        "test_patch": shop["test_patch"],
        "FAIL_TO_PASS": json.dumps([FAILING]),
        "PASS_TO_PASS": [PASSING],
    }
    return {**row, **changes}


def write_rows(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def install_pytest(folder: Path) -> Path:
    """A folder with pytest and what it needs, copied from this interpreter's packages."""
    for name in ("pytest", "pluggy", "iniconfig", "packaging", "pygments"):
        for file in importlib.metadata.files(name) or ():
            if ".." in file.parts or "__pycache__" in file.parts:
                continue
            target = folder / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file.locate(), target)
    return folder
