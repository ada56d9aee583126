"""Errors that a person can mend end in one line with the right exit code; bugs keep a traceback."""

from __future__ import annotations

import errno
import os
import re
import signal
import sys

import jax
import pytest

import launch
from launch import __main__ as launch_main
from launch import endings, flags
from rl_code.config.read_config import ConfigError


def of_system(number: int, name: str | None = "runs/a/x") -> OSError:
    return OSError(number, os.strerror(number), name)


@pytest.mark.parametrize(
    ("error", "words", "code"),
    [
        (ConfigError("config.seed = 'x': expected int"), "config.seed = 'x': expected int", 2),
        (of_system(errno.EACCES), "runs/a/x: Permission denied: this user may not", 2),
        (of_system(errno.EROFS), "runs/a/x: Read-only file system: .* on another one", 2),
        (of_system(errno.ENOTDIR), "runs/a/x: Not a directory: a part of the path is a file", 2),
        (of_system(errno.EISDIR), "runs/a/x: Is a directory: it is a folder; name a file", 2),
        (of_system(errno.ENAMETOOLONG), "runs/a/x: File name too long: .* choose a shorter", 2),
        (of_system(errno.ELOOP), "symbolic links lead round in a circle", 2),
        (of_system(errno.ENOENT), "runs/a/x: no such file or folder", 2),
        (of_system(errno.ENOSPC), "runs/a/x: No space left on device; make room", 1),
        (of_system(errno.ENOSPC, None), "No space left on device; make room", 1),
        (MemoryError(), "the memory of this machine is exceeded", 1),
        (
            jax.errors.JaxRuntimeError(
                "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 3.5GiB."
            ),
            r"the memory of a device is exceeded.*train.micro_batches.*\(it asked for 3.5GiB\)",
            2,
        ),
    ],
)
def test_an_error_that_can_be_mended_has_a_line_and_a_code(monkeypatch, error, words, code):
    monkeypatch.setattr(sys, "argv", ["train", "--config=c.py", "--workdir=runs/a"])
    told = endings.ending(error)
    assert told is not None
    assert told[1] == code
    assert re.search(words, told[0]), told[0]


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a bug"),
        OSError("without a number"),
        of_system(errno.ENOENT, "elsewhere/x"),  # a file of ours, which may come back
        jax.errors.JaxRuntimeError("INTERNAL: a bug"),
    ],
)
def test_any_other_error_is_a_bug(monkeypatch, error):
    monkeypatch.setattr(sys, "argv", ["train", "--workdir=runs/a", "runs/b"])
    assert endings.ending(error) is None


MISTAKES = {
    "get_sweep": "def get_sweep(arg=''):\n    yield {}\n    yield {'seed': 1 / 0}\n",
    "get_figure": "def get_figure():\n    return int('x')\n\ndef get_sweep():\n    return [{}]\n",
    "import": "import no_such_module\n",
    "brackets": "def get_sweep(\n",
}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("get_sweep", "line 3: ZeroDivisionError: division by zero"),
        ("get_figure", "line 2: ValueError: invalid literal"),
        ("import", "line 1: ModuleNotFoundError: No module named 'no_such_module'"),
        ("brackets", "line 1: SyntaxError: '\\(' was never closed"),
    ],
)
def test_a_mistake_in_the_file_of_a_sweep_is_named_by_its_line(tmp_path, name, words):
    file = tmp_path / "swept.py"
    file.write_text(MISTAKES[name])
    with pytest.raises(ConfigError, match=rf"swept\.py, {words}"):
        flags.sweep_of(str(file))


def test_an_error_from_elsewhere_is_no_mistake_of_a_config_file(tmp_path):
    with pytest.raises(ZeroDivisionError), endings.running_config_file(str(tmp_path / "c.py")):
        _ = 1 / 0
    with pytest.raises(ConfigError, match=r"^as it is$"), endings.running_config_file(__file__):
        raise ConfigError("as it is")


def test_a_workdir_that_cannot_be_written_is_refused_before_anything_begins(tmp_path, monkeypatch):
    assert endings.refuse_workdir(str(tmp_path / "a" / "b")) is None
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # as for others than root
    told = endings.refuse_workdir(str(tmp_path / "a" / "b"))
    assert f"this user cannot write into {tmp_path}; name a folder" in str(told)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("python -m launch.train --config=c.py", "launch.train starts"),
        ("python -X dev -m launch.plan", "launch.plan starts"),
        ("python -m launch.train --help", None),
        ("python -m launch.report --workdir=runs/a", None),
        ("python -m pytest launch.train", None),
        ("python -m", None),
        ("python launch/train.py", None),
    ],
)
def test_a_long_command_says_at_once_that_it_starts(words, line):
    assert launch.first_line(words.split()) == line


def test_every_long_command_is_one():
    commands = {command for command, _ in launch_main.commands()}
    assert {f"python -m launch.{name}" for name in launch.LONG} <= commands


def test_interrupts_are_heard_once_a_command_has_begun():
    before = signal.signal(signal.SIGINT, launch.leave_quietly)
    try:
        launch.hear_interrupts()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
