"""One sandbox takes no more of the machine than its share, with cgroups and without."""

from __future__ import annotations

import ast
import concurrent.futures
import os

import pytest

from rl_code.environment.sandbox import cgroups
from rl_code.environment.sandbox.pool import Mode, SandboxConfig, SandboxPool

CONFIG = SandboxConfig(
    workers=1,
    memory_mb=200,
    processes=24,
    workspace_mb=8,
    cpu_s=1,
    output_bytes=4000,
    cpus=0.5,
)
# Each in a session of its own, so that the kernel's own grouping of processes does not help.
SPIN = """
import os
for _ in range(14):
    if os.fork() == 0:
        os.setsid()
        while True: pass
os.wait()
"""
SPIN_ALONE = """
import time
end = time.monotonic() + 1.5
while time.monotonic() < end: pass
print(time.process_time())
"""
HOG = """
import os, time
for _ in range(8):
    if os.fork() == 0:
        block = bytearray(SIZE << 20)
        for i in range(0, len(block), 4096): block[i] = 1
        time.sleep(SECONDS)
        os._exit(0)
print([os.wait()[1] for _ in range(8)])
"""


@pytest.fixture(scope="module")
def pool():
    with SandboxPool(CONFIG) as pool:
        yield pool


@pytest.fixture(scope="module")
def without_cgroups():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cgroups, "parents", dict)
        with SandboxPool(CONFIG) as pool:
            yield pool


def run(pool, script: str, timeout_s: float = 60.0):
    with pool.open({}) as sandbox:
        return sandbox.run(["python3", "-c", script], timeout_s=timeout_s)


def test_processors_are_shared_by_sandboxes_not_by_processes(pool):
    if "cpu" not in pool._sandboxes._cgroups.controllers:
        pytest.skip("no cgroup can be made here")
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        greedy = threads.submit(run, pool, SPIN, 1.7)
        honest = threads.submit(run, pool, SPIN_ALONE)
        greedy, honest = greedy.result(), honest.result()
    assert greedy.timed_out and greedy.cpu_s <= 0.5 * greedy.seconds + 0.2
    # Of a processor shared by processes it would have had a fifteenth.
    assert float(honest.stdout) > 0.3 * greedy.cpu_s * honest.seconds / greedy.seconds


@pytest.mark.parametrize("kind", ["pool", "without_cgroups"])
def test_the_cpu_time_of_a_command_is_that_of_all_its_processes(kind, request):
    done = run(request.getfixturevalue(kind), SPIN)
    assert (done.exceeded, done.exit_code, done.timed_out) == ("cpu", 137, False)
    assert "CPU time" in done.stdout and 1 <= done.cpu_s < 3


@pytest.mark.parametrize("kind", ["pool", "without_cgroups"])
def test_a_result_says_whether_time_ran_out_without_work(kind, request):
    pool = request.getfixturevalue(kind)
    idle = run(pool, "import time; time.sleep(60)", 0.7)
    busy = run(pool, "while True: pass", 0.7)
    assert idle.timed_out and idle.cpu_s < 0.35
    assert busy.timed_out and busy.cpu_s > 0.05


def test_memory_of_all_processes_is_limited_without_cgroups(without_cgroups):
    done = run(without_cgroups, HOG.replace("SIZE", "100").replace("SECONDS", "5"))
    assert (done.exceeded, done.exit_code) == ("memory", 137) and "memory" in done.stdout
    assert run(without_cgroups, "print('next')").stdout == "next\n"


def test_memory_that_processes_share_counts_once(without_cgroups):
    script = "block = bytearray(120 << 20)\n" + HOG.replace("SIZE", "2").replace("SECONDS", "0.3")
    assert ast.literal_eval(run(without_cgroups, script).stdout) == [0] * 8


def test_processes_are_limited_without_cgroups_and_user_namespaces():
    bomb = "import os, time\nfor _ in range(100):\n    if os.fork() == 0: time.sleep(60)\ntime.sleep(60)"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cgroups, "parents", dict)
        with SandboxPool(CONFIG, [Mode(os.geteuid() == 0, False)]) as pool:
            assert run(pool, bomb).exceeded == "processes"


def test_what_no_cgroup_holds_is_said(monkeypatch, caplog):
    monkeypatch.setattr(cgroups, "parents", dict)
    with caplog.at_level("WARNING"), SandboxPool(CONFIG):
        pass
    for what in ("memory", "processors"):
        assert f"no cgroup can be made here for {what}" in caplog.text
