"""Runs jobs of pytest in a sandbox, each in a fork of one warm interpreter.

A job is some files that are laid over the workspace and the test files to run. Before each job the
workspace is as the sandbox was opened, and /tmp is empty. The warm process has imported pytest and
nothing of the package, so that every job imports its own version of it. Bytecode of the package is
made once. It is bound to the text of its source (PEP 552, checked), so a changed file is compiled
anew in every job.

The text of this file is a program of its own (``runs.py`` gives it to the sandbox's interpreter):
it uses the standard library and pytest only. It reads a request from standard input, and writes a
line of JSON for each job.
"""

from __future__ import annotations

import compileall
import gc
import json
import os
import py_compile
import resource
import select
import shutil
import signal
import sys
import time
from typing import Any

SCRATCH = "/tmp/scratch"
_PIPE = 1 << 16
OPTIONS = ("-q", "-p", "no:cacheprovider", "--continue-on-collection-errors")
# Characters of what a failed test said.
_SAID = 300
# Lines at the end of what was said of a file that cannot be imported.
_LAST = 2


class Recorder:
    """A plugin of pytest that notes how each test ended, and which code it ran.

    root: the workspace, with "/" at its end. traced: whether to note the code that runs.
    """

    def __init__(self, root: str, traced: bool):
        self._root = root
        self._traced = traced
        # By id: how it ended, CPU seconds, and what it said when it failed.
        self.tests: dict[str, list[Any]] = {}
        # By id: path and first line of the test's function.
        self.places: dict[str, list[Any]] = {}
        # Test files that could not be imported, with what was said.
        self.errors: dict[str, str] = {}
        # Functions as (path, first line), in order; by id: the numbers of those that it ran.
        self.functions: dict[tuple[str, int], int] = {}
        self.calls: dict[str, list[int]] = {}
        # Lines of code that some test ran, by path.
        self.lines: dict[str, set[int]] = {}
        self._now: set[int] = set()
        self._begin = 0.0

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            lines = str(report.longrepr).strip().splitlines()
            self.errors[report.nodeid] = _short("\n".join(lines[-_LAST:]))

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        for item in items:
            path, line, _ = item.location
            self.places[item.nodeid] = [path, (line or 0) + 1]

    def pytest_sessionstart(self) -> None:
        if self._traced:
            _trace(self._on_start, self._on_line)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._begin = time.process_time()
        if self._traced:
            self._now = set()
            sys.monitoring.restart_events()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.tests[nodeid][1] = time.process_time() - self._begin
        self.calls[nodeid] = sorted(self._now)

    def pytest_runtest_logreport(self, report: Any) -> None:
        known = self.tests.setdefault(report.nodeid, ["passed", 0.0, ""])
        if report.failed:
            known[0] = "failed"
            known[2] = known[2] or _crash(report)
        elif report.skipped or hasattr(report, "wasxfail"):
            known[0] = "skipped" if known[0] == "passed" else known[0]

    def _on_start(self, code: Any, _: int) -> Any:
        if code.co_filename.startswith(self._root):
            key = (code.co_filename[len(self._root) :], code.co_firstlineno)
            self._now.add(self.functions.setdefault(key, len(self.functions)))
        return sys.monitoring.DISABLE

    def _on_line(self, code: Any, line: int) -> Any:
        if code.co_filename.startswith(self._root):
            self.lines.setdefault(code.co_filename[len(self._root) :], set()).add(line)
        return sys.monitoring.DISABLE

    def result(self) -> dict[str, Any]:
        """All of it as JSON."""
        found = {"tests": self.tests, "errors": self.errors}
        if self._traced:
            found["places"] = self.places
            found["functions"] = list(self.functions)
            found["calls"] = self.calls
            found["lines"] = {path: sorted(lines) for path, lines in self.lines.items()}
        return found


def _trace(on_start: Any, on_line: Any) -> None:
    """Calls back for functions that start and lines that run, until told to stop for one."""
    tool = sys.monitoring.PROFILER_ID
    events = sys.monitoring.events
    sys.monitoring.use_tool_id(tool, "tasks")
    sys.monitoring.register_callback(tool, events.PY_START, on_start)
    sys.monitoring.register_callback(tool, events.LINE, on_line)
    sys.monitoring.set_events(tool, events.PY_START | events.LINE)


def _crash(report: Any) -> str:
    """The exception of a failed test in one line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return _short(crash.message if crash is not None else str(report.longrepr))


def _short(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return " ".join(lines)[:_SAID]


def _tests(job: dict[str, Any], root: str, pipe: int) -> None:
    """The child: runs the tests of a job and writes what came of them."""
    import pytest

    resource.setrlimit(resource.RLIMIT_CPU, (job["cpu_s"], job["cpu_s"] + 1))
    recorder = Recorder(f"{root}/", job["traced"])
    asserts = "--assert=rewrite" if job["explained"] else "--assert=plain"
    gc.enable()
    pytest.main([*OPTIONS, asserts, f"--rootdir={root}", *job["targets"]], plugins=[recorder])
    data = json.dumps(recorder.result()).encode()
    while data:
        data = data[os.write(pipe, data) :]


def _run(job: dict[str, Any], root: str) -> dict[str, Any]:
    """Forks a child for a job and waits for it, as long as the job may take."""
    begin = time.monotonic()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            os.close(reader)
            _tests(job, root, writer)
        finally:
            os._exit(0)
    os.close(writer)
    data = b""
    ending = "timeout"
    while (left := begin + job["timeout_s"] - time.monotonic()) > 0:
        if not select.select([reader], [], [], left)[0]:
            break
        part = os.read(reader, _PIPE)
        data += part
        if not part:
            ending = ""
            break
    os.close(reader)
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    try:
        found = json.loads(data)
    except ValueError:  # it ended before it had written all
        found = {"tests": {}, "errors": {}}
        ending = ending or f"ended with status {status}"
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
            ending = "timeout"
    cpu_s = usage.ru_utime + usage.ru_stime
    return {**found, "name": job["name"], "ending": ending, "cpu_s": cpu_s}


class Workspace:
    """The files of a workspace as they were at the start."""

    def __init__(self, root: str):
        self._root = root
        self._content: dict[str, bytes] = {}
        for path in self._signatures():
            with open(path, "rb") as file:
                self._content[path] = file.read()
        self._known = self._signatures()

    def lay(self, files: dict[str, str | None]) -> None:
        """Writes files; None deletes one."""
        for path, text in files.items():
            full = os.path.join(self._root, path)
            if text is None:
                os.unlink(full)
                continue
            os.makedirs(os.path.dirname(full), exist_ok=True)
            with open(full, "wb") as file:
                file.write(text.encode())

    def restore(self) -> None:
        """Gives every file that differs the content of the start, and deletes others."""
        now = self._signatures()
        for path in now.keys() - self._known.keys():
            os.unlink(path)
        for path, signature in self._known.items():
            if now.get(path) != signature:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "wb") as file:
                    file.write(self._content[path])
                status = os.lstat(path)
                self._known[path] = (status.st_mtime_ns, status.st_size, status.st_ino)

    def _signatures(self) -> dict[str, tuple[int, int, int]]:
        """Time, size and number of every file that is no link."""
        found = {}
        for folder, _, names in os.walk(self._root):
            for name in names:
                path = os.path.join(folder, name)
                status = os.lstat(path)
                found[path] = (status.st_mtime_ns, status.st_size, status.st_ino)
        return found


def _clean() -> None:
    """Empties /tmp."""
    for name in os.listdir("/tmp"):
        path = os.path.join("/tmp", name)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.unlink(path)
    os.mkdir(SCRATCH)


def _warm_up() -> None:
    """Imports what jobs need and runs a test of its own, so that forks find pytest at work. What is
    there then is no business of the garbage collector, which would copy it in every fork.
    """
    import unittest.mock  # noqa: F401  for the forks

    import pytest

    _clean()
    path = os.path.join(SCRATCH, "test_nothing.py")
    with open(path, "w") as file:
        file.write("def test_nothing():\n    pass\n")
    pytest.main([*OPTIONS, "-c", os.devnull, f"--rootdir={SCRATCH}", path])
    del sys.modules["test_nothing"]
    sys.path.remove(SCRATCH)
    gc.collect()
    gc.disable()
    gc.freeze()


def main() -> None:
    """Carries out the jobs of the request, one after another."""
    request = json.load(sys.stdin)
    root = os.getcwd()
    answers = os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    os.environ["TMPDIR"] = SCRATCH
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    mode = py_compile.PycInvalidationMode.CHECKED_HASH
    compileall.compile_dir(root, quiet=2, invalidation_mode=mode)
    _warm_up()
    workspace = Workspace(root)
    for job in request["jobs"]:
        _clean()
        workspace.lay(job["files"])
        answer = _run(job, root)
        workspace.restore()
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
