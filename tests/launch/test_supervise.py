"""A supervised command is started again when it dies, and only then; signals reach it and end it
for good.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "launch" / "supervise.sh"
LONG_S = 300.0


@pytest.fixture
def supervise(tmp_path):
    """Starts a supervised shell command in a folder of its own; whatever is left of it is killed in
    the end.
    """
    started = []

    def start(command: str, **environment: str) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                ["bash", str(SCRIPT), "bash", "-c", command, "command", "an argument", "*"],
                cwd=tmp_path,
                env=os.environ
                | {"SUPERVISE_PAUSE_S": "0", "SUPERVISE_MAX": "100", "SUPERVISE_QUICK": "100"}
                | environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize(
    ("script", "arguments", "said"),
    [
        ("supervise.sh", [], "expected a command to start, not ''"),
        ("supervise.sh", ["--once", "true"], "expected a command to start, not '--once'"),
        ("supervise.sh", ["no-such-command"], "no-such-command cannot be started"),
        ("docs.sh", ["--open"], "unknown option --open"),
        ("docs.sh", ["site", "other"], "unexpected argument other"),
        ("get_smollm2.sh", ["weights"], "unknown argument weights"),
        ("lock.sh", ["--all"], "unknown argument --all"),
    ],
)
def test_what_a_script_does_not_take_is_said_with_exit_code_2(script, arguments, said):
    ran = subprocess.run(
        ["bash", SCRIPT.with_name(script), *arguments], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 2 and said in ran.stderr


def test_a_command_that_was_there_once_is_started_again(supervise, tmp_path):
    """A file system may be away for a moment."""
    away = supervise('echo >>ends; [ "$(wc -l <ends)" = 2 ] && exit 127; [ "$(wc -l <ends)" = 3 ]')
    assert away.wait(LONG_S) == 0
    assert len((tmp_path / "ends").read_text().splitlines()) == 3


def wait_for(path: Path) -> str:
    """The content of a file, as soon as it has some."""
    deadline = time.monotonic() + LONG_S
    while not path.exists() or not path.read_text():
        assert time.monotonic() < deadline, f"{path} was not written"
        time.sleep(0.005)
    return path.read_text()


def starts(folder: Path) -> int:
    path = folder / "starts"
    return len(path.read_text().splitlines()) if path.exists() else 0


# Fails with ``first`` until it has been started so many ``times``, then ends with ``last``.
COUNT = "echo start >>starts; [ $(wc -l <starts) -ge {times} ] && exit {last}; exit {first}"
# A command that goes on until SIGTERM, then takes its time and ends with 7.
PATIENT = (
    "trap 'sleep 0.2; echo >>ended; exit 7' TERM; echo start >>starts; while :; do sleep 0.01; done"
)


@pytest.mark.parametrize("first", [1, 3, 137, 143])
@pytest.mark.parametrize("last", [0, 2])
def test_a_crash_is_started_again_until_it_ends_well_or_cannot(supervise, tmp_path, first, last):
    process = supervise(COUNT.format(times=3, first=first, last=last))
    _, errors = process.communicate(timeout=LONG_S)
    assert process.returncode == last and starts(tmp_path) == 3
    assert errors.count(f"exit code {first}, starting again: bash -c") == 2


@pytest.mark.parametrize("code", [0, 2])
def test_what_ends_at_once_is_not_started_again(supervise, tmp_path, code):
    process = supervise(COUNT.format(times=1, first=1, last=code))
    assert process.wait(LONG_S) == code and starts(tmp_path) == 1
    assert process.communicate()[1] == ""


def test_a_process_that_is_killed_is_started_again(supervise, tmp_path):
    process = supervise("echo start >>starts; [ $(wc -l <starts) -ge 3 ] && exit 0; kill -KILL $$")
    assert process.wait(LONG_S) == 0 and starts(tmp_path) == 3


def test_arguments_and_output_are_the_commands_own(supervise):
    process = supervise('echo "$0|$1|$2|$#"')
    assert process.communicate(timeout=LONG_S)[0] == "command|an argument|*|2\n"


@pytest.mark.parametrize("restarts", [0, 3])
def test_it_gives_up_after_so_many_restarts(supervise, tmp_path, restarts):
    process = supervise(COUNT.format(times=100, first=5, last=0), SUPERVISE_MAX=str(restarts))
    _, errors = process.communicate(timeout=LONG_S)
    assert process.returncode == 1 and starts(tmp_path) == restarts + 1
    assert (
        f"given up after {restarts} restarts" in errors
        and errors.count("starting again") == restarts
    )


@pytest.mark.parametrize(("code", "starts_made"), [(1, 3), (5, 3), (137, 8)])
def test_it_gives_up_soon_when_an_error_lasts_but_not_when_it_is_killed(
    supervise, tmp_path, code, starts_made
):
    process = supervise(COUNT.format(times=8, first=code, last=0), SUPERVISE_QUICK="3")
    _, errors = process.communicate(timeout=LONG_S)
    assert starts(tmp_path) == starts_made
    assert process.returncode == (0 if code == 137 else 1)
    assert ("given up" in errors) == (code != 137)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_command_and_nothing_is_started_again(supervise, tmp_path, number):
    process = supervise(PATIENT)
    wait_for(tmp_path / "starts")
    process.send_signal(number)
    assert process.wait(LONG_S) == 7  # after the command's own end
    assert (tmp_path / "ended").exists() and starts(tmp_path) == 1
    assert process.communicate()[1] == ""


def test_a_command_that_needs_a_second_signal_gets_it(supervise, tmp_path):
    trap = "trap 'echo >>heard; [ $(wc -l <heard) -ge 2 ] && exit 9' TERM"
    command = f"{trap}; echo >>starts; while :; do [ -e heard ] && echo >>still; sleep 0.01; done"
    process = supervise(command)
    wait_for(tmp_path / "starts")
    process.send_signal(signal.SIGTERM)
    wait_for(tmp_path / "still")  # it goes on after the first
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(LONG_S) == 9 and starts(tmp_path) == 1


def test_a_signal_between_two_starts_ends_it(supervise, tmp_path):
    process = supervise("echo start >>starts; exit 1", SUPERVISE_PAUSE_S="1")
    while "starting again" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGTERM)
    assert process.wait(LONG_S) == 1 and starts(tmp_path) == 1
