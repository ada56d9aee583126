"""Programs that tests start as forks are what new interpreters would be."""

from __future__ import annotations

import json
import os
import signal
import subprocess

import pytest

from tests import programs


def shown(tmp_path, fresh: bool) -> dict:
    folder = tmp_path / ("fresh" if fresh else "forked")
    folder.mkdir()
    changes = {
        "MINE": "yes",
        "JAX_ENABLE_X64": "1",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.25",
    }
    settings = dict(
        devices=3,
        cwd=folder,
        env=os.environ | changes,
        start_new_session=True,
    )
    done = programs.run("tests.shown", "a b", fresh=fresh, **settings)
    assert (done.returncode, done.stderr) == (3, "an error\n")
    found = json.loads(done.stdout)
    assert found.pop("folder") == str(folder)
    return found


def test_a_fork_gets_what_a_new_interpreter_gets(tmp_path):
    forked = shown(tmp_path, fresh=False)
    assert forked == shown(tmp_path, fresh=True)
    assert forked["words"] == ["a b"] and forked["devices"] == 3 and forked["leads"]
    assert (forked["x64"], forked["least"], forked["cache"]) == (True, 0.25, str(tmp_path))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_fork_is_a_child_that_signals_end(number):
    process = programs.start("tests.shown", "wait", stderr=subprocess.PIPE)
    assert json.loads(process.stdout.readline())["words"] == ["wait"]
    assert process.poll() is None
    process.send_signal(number)
    output, error = process.communicate()
    assert process.returncode == -number
    assert output == "" and error.startswith("an error\n")


def test_a_fork_reads_its_own_input():
    process = programs.start("tests.shown", "read", stdin=subprocess.PIPE, stderr=None)
    output, _ = process.communicate("asked\n")
    assert json.loads(output)["asked"] == "asked\n" and process.returncode == 3


def test_a_text_is_run_as_by_an_interpreter():
    done = programs.run("-c", "import sys; print(sys.argv); raise ValueError('no')", "x")
    assert done.returncode == 1 and done.stdout == "['-c', 'x']\n"
    assert done.stderr.endswith("ValueError: no\n")
