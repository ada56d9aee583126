"""The set-up script installs once, says what is missing, and leaves the caller's environment
alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = (
    "bash",
    "cat",
    "cksum",
    "cp",
    "dirname",
    "env",
    "grep",
    "mkdir",
    "mv",
    "sed",
    "tail",
)

# Stands in for Python: is of a given version, makes a virtual environment of itself, notes what pip
# is asked.
PYTHON = """#!/usr/bin/env bash
case "$*" in
-c*) exit $TOO_OLD ;;
--version) echo "Python 3.9.0" ;;
"-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
"-m pip"*) echo "$*" >>installs && echo "Collecting jax" && echo "No matching distribution" && exit $PIP_FAILS ;;
esac
"""


@pytest.fixture
def set_up(tmp_path):
    """Sources the script in a copy of the repository and runs a command; returns the finished
    process.
    """
    repository = tmp_path / "repository"
    tools = tmp_path / "bin"
    (repository / "launch").mkdir(parents=True)
    tools.mkdir()
    (repository / "requirements" / "locked").mkdir(parents=True)
    for name in (
        "launch/set_up.sh",
        "requirements.txt",
        "requirements/test.txt",
        "requirements/locked/requirements.txt",
        "requirements/locked/test.txt",
        ".python-version",
    ):
        shutil.copy(ROOT / name, repository / name)
    for name in TOOLS:
        (tools / name).symlink_to(shutil.which(name))
    (tools / "python3").write_text(PYTHON)
    (tools / "python3").chmod(0o755)

    def run(command: str = "true", **environment: str) -> subprocess.CompletedProcess[str]:
        script = f"set -euo pipefail\nsource launch/set_up.sh\n{command}"
        base = {"PATH": str(tools), "HOME": "/nonexistent", "TOO_OLD": "0", "PIP_FAILS": "0"}
        return subprocess.run(
            ["bash", "-c", script],
            cwd=repository,
            env=base | environment,
            capture_output=True,
            text=True,
        )

    run.repository = repository
    return run


def installs(set_up) -> int:
    path = set_up.repository / "installs"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_requirements_are_installed_once_and_again_when_they_change(set_up):
    assert set_up().returncode == set_up().returncode == 0
    assert installs(set_up) == 1
    for name in ("requirements.txt", "requirements/locked/requirements.txt"):
        with open(set_up.repository / name, "a") as file:
            file.write("another==1.0\n")
    assert set_up("python -c ''").returncode == 0
    assert installs(set_up) == 2


def test_another_version_of_a_package_that_pins_bring_along_is_installed(set_up):
    assert set_up().returncode == set_up().returncode == 0
    lock = set_up.repository / "requirements/locked/requirements.txt"
    lock.write_text(lock.read_text() + "# another\n")
    assert set_up().returncode == set_up().returncode == 0
    assert installs(set_up) == 2


def test_what_is_installed_has_hashes_and_a_pin_that_is_not_locked_is_refused(set_up):
    assert set_up().returncode == 0
    (command,) = (set_up.repository / "installs").read_text().splitlines()
    assert "--require-hashes -r requirements/locked/requirements.txt" in command
    with open(set_up.repository / "requirements.txt", "a") as file:
        file.write("an_other[x]==1.0.*\n")
    finished = set_up()
    assert finished.returncode == 1 and installs(set_up) == 1
    assert "pins an-other==1.0" in finished.stderr and "bash launch/lock.sh" in finished.stderr


def test_what_only_the_tests_need_is_installed_for_them_alone(set_up):
    both = {"REQUIREMENTS": "requirements.txt requirements/test.txt"}
    assert set_up().returncode == set_up(**both).returncode == 0
    log = (set_up.repository / "installs").read_text().splitlines()
    assert ["test.txt" in line for line in log] == [False, True]
    # in turn, neither installs again
    assert set_up().returncode == set_up(**both).returncode == 0
    assert installs(set_up) == 2


def test_without_a_new_enough_python_it_says_what_to_do(set_up):
    finished = set_up(TOO_OLD="1")
    assert finished.returncode == 1 and installs(set_up) == 0
    assert (
        "needs Python 3.12 or newer; found Python 3.9.0" in finished.stderr
        and "PYTHON=" in finished.stderr
    )


def test_a_failed_install_is_shown_and_tried_again(set_up):
    finished = set_up(PIP_FAILS="1")
    assert finished.returncode == 1
    assert "No matching distribution" in finished.stderr and "install.log" in finished.stderr
    assert set_up().returncode == 0 and installs(set_up) == 2


def test_the_environment_is_set_unless_the_caller_has_set_it(set_up):
    show = 'echo "$XLA_FLAGS|${GLIBC_TUNABLES-}"'
    xla, tunables = set_up(show, ACCELERATORS="/nonexistent").stdout.strip().split("|")
    assert xla == "--xla_force_host_platform_device_count=2" and "hugetlb=1" in tunables
    # arrays are not in the host's memory
    assert set_up(show, ACCELERATORS="/nonexistent /dev/null").stdout.strip() == f"{xla}|"
    assert set_up(show, XLA_FLAGS="--mine", GLIBC_TUNABLES="").stdout.strip() == "--mine|"


@pytest.mark.parametrize("name", ["quickstart.sh", "test.sh", "lock.sh", "set_up.sh"])
def test_the_scripts_parse(name):
    assert subprocess.run(["bash", "-n", ROOT / "launch" / name]).returncode == 0
    assert name == "set_up.sh" or os.access(ROOT / "launch" / name, os.X_OK)


@pytest.mark.parametrize("locked", ["0.0.48.1", "0.0.48.12.3"])
def test_a_pin_of_a_series_is_locked_in_one_of_its_versions(set_up, locked):
    with open(set_up.repository / "requirements.txt", "a") as file:
        file.write("another==0.0.48.*\n")
    lock = set_up.repository / "requirements/locked/requirements.txt"
    before = lock.read_text()
    for version, code in (("0.0.4.8", 1), ("0.0.481", 1), (locked, 0)):
        lock.write_text(f"{before}another=={version} \\\n    --hash=sha256:0\n")
        finished = set_up()
        assert finished.returncode == code, finished.stderr
    assert installs(set_up) == 1
