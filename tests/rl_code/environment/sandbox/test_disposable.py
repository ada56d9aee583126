"""What costs too much to read is read in a process that ends, and never in this one."""

from __future__ import annotations

import ast
import json
import os
import string
import sys
import textwrap
import time

import pytest

from rl_code.environment.sandbox import disposable, kept
from rl_code.environment.sandbox.disposable import OutOfBounds, bounded
from rl_code.environment.sandbox.errors import SandboxFault


def test_a_call_has_the_value_of_the_function():
    assert bounded(string.capwords, 1.0, "a b-c", sep="-") == "A b-C"
    # one process serves them all
    pids = {bounded(os.getpid, 1.0) for _ in range(3)}
    assert len(pids) == 1 and os.getpid() not in pids


@pytest.mark.parametrize(
    ("function", "arguments", "said"),
    [
        (time.sleep, ("x",), "TypeError"),
        (ast.literal_eval, ("-" * 100_000 + "1",), "Error"),
        (json.loads, ("[" * 200_000,), "RecursionError"),
        (textwrap.dedent, ("x" * 3_000_000,), "bytes to read"),
        (int, ("1" * 5000,), "ValueError"),
        (sys.exit, (3,), "it ended: 3"),
        (os.abort, (), "it ended: -6"),
        (bytearray, (1 << 40,), "MemoryError"),
        (eval, ("'x' * 3_000_000",), "no answer"),
        (eval, ("{1}",), "not JSON serializable"),
        (exec, ("while True: pass",), "more than 0.1 CPU seconds"),
        (time.sleep, (60,), "too long"),
    ],
)
def test_a_call_that_exceeds_a_bound_is_an_error_and_the_next_one_is_served(
    function, arguments, said, monkeypatch
):
    monkeypatch.setattr(disposable, "ASKED_BYTES", 2_000_000)
    with monkeypatch.context() as patch, pytest.raises(OutOfBounds, match=said):
        if said == "too long":
            patch.setattr(disposable, "_SPARE_S", 0.5)
            patch.setattr(disposable, "_BUSY", 1)
        bounded(
            function, 0.1 if said in ("more than 0.1 CPU seconds", "too long") else 10, *arguments
        )
    assert bounded(len, 1.0, "abc") == 3


def test_a_process_that_the_machine_ends_is_asked_once_more(tmp_path):
    mark = tmp_path / "mark"
    program = f"""
import os, pathlib
mark = pathlib.Path({str(mark)!r})
if not mark.exists():
    mark.touch()
    os.kill(os.getpid(), 9)
"""
    assert bounded(exec, 1.0, program) is None
    assert mark.exists()
    with pytest.raises(OutOfBounds, match="it ended: -9"):
        bounded(exec, 1.0, "import os; os.kill(os.getpid(), 9)")


def test_a_process_that_cannot_start_is_a_fault(monkeypatch):
    monkeypatch.setattr(kept, "_START", "raise SystemExit('no memory')")
    processes = kept.KeptProcesses("none")
    with pytest.raises(SandboxFault, match="no memory"):
        processes.take()
