"""Code of a candidate cannot reach what supervises it, nor limits of the whole machine."""

from __future__ import annotations

import ast
import os
import struct
import sys
import sysconfig
from pathlib import Path

import pytest

from rl_code.environment.sandbox import bubblewrap
from rl_code.environment.sandbox.inside import seccomp
from rl_code.environment.sandbox.pool import Mode, SandboxConfig, SandboxPool

CONFIG = SandboxConfig(
    workers=1, memory_mb=512, processes=24, workspace_mb=16, cpu_s=20, output_bytes=8000
)
CALLS = """
import ctypes, errno, os, resource
libc = ctypes.CDLL(None, use_errno=True)
def attempt(number, *arguments):
    ctypes.set_errno(0)
    result = libc.syscall(number, *map(ctypes.c_long, arguments))
    return 'allowed' if result >= 0 else errno.errorcode[ctypes.get_errno()]
"""
x86_64_only = pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of x86_64")


@pytest.fixture(scope="module", params=[True, False], ids=["users apart", "users together"])
def pool(request):
    """A pool for each way to isolate sessions."""
    with SandboxPool(CONFIG, [Mode(os.geteuid() == 0, request.param)]) as pool:
        yield pool


@pytest.fixture
def sandbox(pool):
    with pool.open({"solution.py": "def f(x):\n    return x\n"}) as sandbox:
        yield sandbox


def python(sandbox, script: str) -> str:
    """What the script prints."""
    return sandbox.run(["python3", "-c", script], timeout_s=60).stdout


ATTACKS = {
    "limits": """
for kind in range(16):
    for limits in ((0, 0), (1, 1)):
        try: resource.prlimit(target, kind, limits)
        except (OSError, ValueError): pass
""",
    "priority": """
for kind, who in ((0, target), (1, 0), (1, target), (2, 0), (2, os.getuid())):
    try: os.setpriority(kind, who, 19)
    except OSError: pass
""",
    "processors and schedulers": """
for attack in (lambda: os.sched_setaffinity(target, {0}),
               lambda: os.sched_setscheduler(target, os.SCHED_IDLE, os.sched_param(0)),
               lambda: os.sched_setparam(target, os.sched_param(0))):
    try: attack()
    except OSError: pass
""",
    "signals": """
for number in (1, 2, 3, 9, 13, 15, 19, 24, 25):
    if target:
        try: os.kill(target, number)
        except OSError: pass
""",
    "files of /proc": """
for name in ("oom_score_adj", "oom_adj", "mem", "autogroup", "timerslack_ns", "sched", "clear_refs",
             "coredump_filter", "comm", "uid_map", "setgroups", "loginuid", "make-it-fail"):
    try: open(f"/proc/{target or 'self'}/{name}", "w").write("0")
    except OSError: pass
""",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_call_of_a_command_reaches_its_supervisor(sandbox, attack):
    """With its first process's limits at nothing a session could start no further command."""
    look = ["bash", "-c", "nice; ulimit -a; taskset -p $$ | cut -d: -f2"]
    before = sandbox.run(look, timeout_s=60).stdout
    for target in ("1", "os.getppid()", "0"):
        script = f"import os, resource\ntarget = {target}\n{ATTACKS[attack]}\nprint('tried')"
        done = sandbox.run(["python3", "-c", script], timeout_s=60)
        assert "tried" in done.stdout or done.exit_code > 128, done
    sandbox.write_file("after.txt", "x" * 100_000)
    assert sandbox.run(["echo", "alive"], timeout_s=60).stdout == "alive\n"
    assert sandbox.call("solution.py", "f", [(1,)], timeout_s=60)[0].value == 1
    assert sandbox.run(look, timeout_s=60).stdout == before
    assert sandbox.list_files() == ["after.txt", "solution.py"]


def test_a_command_sees_no_process_but_its_own(sandbox):
    script = (
        "import os; print(os.getpid(), sorted(int(n) for n in os.listdir('/proc') if n.isdigit()))"
    )
    assert python(sandbox, script).strip() == "2 [1, 2]"


@x86_64_only
def test_no_process_survives_its_command_as_its_sibling(sandbox):
    """A process whose parent is the session was seen by nobody who looked for orphans."""
    script = f"""{CALLS}
import time
pid = libc.syscall(56, 0x8000 | 17, 0, 0, 0, 0)
if pid == 0:
    os.close(1), os.close(2)
    while True:
        open("solution.py", "w").write("stolen")
        time.sleep(0.001)
print(pid)
"""
    assert python(sandbox, script) == "-1\n"
    sandbox.write_file("solution.py", "honest")
    look = ["bash", "-c", "sleep 0.1; cat solution.py; ls /proc | grep -c '^[0-9]'"]
    assert sandbox.run(look, timeout_s=60).stdout.startswith("honest")


def test_the_mounts_below_proc_cannot_be_uncovered(sandbox):
    script = (
        f"{CALLS}\nprint(attempt({165 if os.uname().machine == 'x86_64' else 40}, 0, 0, 0, 0, 0))"
    )
    assert python(sandbox, script).strip() == "EPERM"
    assert sandbox.run(["umount", "-l", "/proc"], timeout_s=60).exit_code


@x86_64_only
def test_calls_that_change_a_process_take_only_the_caller(sandbox):
    calls = f"""{CALLS}
own = os.getpid()
results = [attempt(302, 1, 7, 0, 0), attempt(302, own, 7, 0, 0), attempt(302, 0, 7, 0, 0),
           attempt(141, 0, 1, 5), attempt(141, 2, 0, 5), attempt(141, 0, 0, 5),
           attempt(203, 1, 0, 0), attempt(144, 1, 0, 0), attempt(142, 1, 0), attempt(314, 1, 0, 0)]
print(results)"""
    refused = ["EPERM"]
    expected = [*refused * 2, "allowed", *refused * 2, "allowed", *refused * 4]
    assert ast.literal_eval(python(sandbox, calls)) == expected


@x86_64_only
def test_limits_of_the_whole_machine_cannot_be_used_up(sandbox):
    numbers = {
        "io_setup": 206, "io_submit": 209, "inotify_init": 253, "inotify_init1": 294,
        "inotify_add_watch": 254, "fanotify_init": 300, "sync": 162, "syncfs": 306, "mq_open": 240,
        "semget": 64, "msgget": 68, "shmget": 29, "add_key": 248, "memfd_create": 319,
        "memfd_secret": 447, "socket": 41, "ioprio_set": 251, "mbind": 237, "landlock": 444,
        "perf_event_open": 298, "userfaultfd": 323, "swapon": 167, "quotactl": 179, "mlockall": 151,
    }  # fmt: skip
    text = python(
        sandbox, f"{CALLS}\nprint({{n: attempt(k, 0, 0, 0, 0, 0) for n, k in {numbers!r}.items()}})"
    )
    assert set(ast.literal_eval(text).values()) == {"EPERM"}, text
    unknown = [435, 451, 453, 461, 470, 600]
    text = python(sandbox, f"{CALLS}\nprint([attempt(n, 0, 0, 0, 0) for n in {unknown}])")
    assert set(ast.literal_eval(text)) == {"ENOSYS"}, text


def test_every_call_but_the_allowed_ones_is_refused():
    """The program read as the kernel reads it, for every number, on both machines."""
    for machine in seccomp.MACHINES:
        allowed = {seccomp.number(name, machine) for name in seccomp.ALLOWED} - {None}
        code = seccomp.program(machine)
        for number in range(700):
            answer = decide(code, seccomp.AUDIT[machine], number, (0,) * 6)
            plain = number in allowed - {seccomp.number("personality", machine)}
            plain &= number != seccomp.number("socketpair", machine)
            assert (answer == seccomp.ALLOW) == plain, (machine, number)
        for other in (0, seccomp.AUDIT["x86_64" if machine == "aarch64" else "aarch64"]):
            assert decide(code, other, 0, (0,) * 6) == seccomp.KILL_PROCESS
        pair = seccomp.number("socketpair", machine)
        assert decide(code, seccomp.AUDIT[machine], pair, (1, 0, 0)) == seccomp.ALLOW
        clone = seccomp.number("clone", machine)
        for flag in (0x8000, 0x20000, 0x10000000, 0x20000000, 0x40000000, 0x02000000):
            answer = decide(code, seccomp.AUDIT[machine], clone, (flag | 17, 0, 0))
            assert answer != seccomp.ALLOW


def decide(code: bytes, architecture: int, number: int, arguments: tuple[int, ...]) -> int:
    """What a BPF program returns for a system call."""
    data = struct.pack("<IIQ6Q", number, architecture, 0, *[*arguments, *[0] * 6][:6])
    at = accumulator = 0
    while True:
        operation, if_true, if_false, value = struct.unpack_from("<HBBI", code, 8 * at)
        at += 1
        match operation:
            case seccomp.RETURN:
                return value
            case seccomp.LOAD:
                (accumulator,) = struct.unpack_from("<I", data, value)
                continue
            case seccomp.JUMP_EQUAL:
                true = accumulator == value
            case seccomp.JUMP_GREATER:
                true = accumulator > value
            case seccomp.JUMP_AT_LEAST:
                true = accumulator >= value
            case seccomp.JUMP_BITS:
                true = bool(accumulator & value)
        at += if_true if true else if_false


def test_honest_programs_work(sandbox):
    script = r"""
set -e
git init -q . && git config user.email a@b && git config user.name a
git add -A && git commit -qm one && echo y >> solution.py && git diff --stat | tail -1
git stash -q && git checkout -q -b other && git log --oneline | wc -l
for i in 1 2 3; do echo $i; done | sort -r | head -1 | tr 3 4
tar cf a.tar solution.py && gzip a.tar && tar tzf a.tar.gz && cp -a solution.py b.py && ls -l b.py | wc -l
find . -name '*.py' -newer a.tar.gz | wc -l; sed -i s/x/z/ b.py; grep -c z b.py; cp -p b.py c.py; awk 'END{print NR}' b.py
(sleep 0.1; echo late) & wait; timeout 5 true; nice -n 5 true; ulimit -n 100; mkfifo p; date +%Z; stat -c %s p
"""
    done = sandbox.run(["bash", "-c", script], timeout_s=60)
    assert done.exit_code == 0, done.stdout
    assert "1 insertion(+)" in done.stdout and done.stdout.split()[-2:] == ["UTC", "0"]
    assert "not permitted" not in done.stdout


def test_attributes_of_files_take_the_room_of_the_workspace(sandbox):
    script = """
import os
try:
    for i in range(100_000): os.setxattr("solution.py", f"user.{i}", b"a" * 60_000)
except OSError as error: print("refused")
"""
    assert sandbox.run(["python", "-c", script], timeout_s=60).stdout == "refused\n"


def test_threads_processes_and_event_loops_work(sandbox):
    script = """
import asyncio, concurrent.futures as cf, multiprocessing, os, resource, select, signal, socket
import sqlite3, subprocess, sys, tempfile, threading, time
with cf.ThreadPoolExecutor(4) as threads: print(sum(threads.map(abs, range(10))))
def square(x): return x * x
if __name__ == "__main__":
    with multiprocessing.Pool(2) as processes: print(processes.map(square, [1, 2, 3]))
    with cf.ProcessPoolExecutor(2) as processes: print(list(processes.map(square, [4])))
    print(subprocess.run(["echo", "out"], capture_output=True, text=True, start_new_session=True).stdout)
    async def main():
        process = await asyncio.create_subprocess_exec("echo", "loop", stdout=asyncio.subprocess.PIPE)
        await asyncio.sleep(0.01)
        return (await process.communicate())[0]
    print(asyncio.run(main()))
    signal.signal(signal.SIGALRM, lambda *a: print("alarm")); signal.setitimer(signal.ITIMER_REAL, 0.01)
    time.sleep(0.1)
    base = sqlite3.connect("base.db"); base.execute("create table t (x)"); base.commit()
    with tempfile.TemporaryDirectory() as folder: open(folder + "/x", "w").write("x")
    resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, 1 << 20)); os.nice(1)
    os.sched_setaffinity(0, os.sched_getaffinity(0)); print(threading.active_count(), os.cpu_count() > 0)
"""
    sandbox.write_file("m.py", script)
    done = sandbox.run(["python3", "m.py"], timeout_s=60)
    assert done.stdout.split("\n") == [
        "45", "[1, 4, 9]", "[16]", "out", "", "b'loop\\n'", "alarm", "1 True", "",
    ], done.stdout  # fmt: skip


def test_pytest_works(pool):
    packages = Path(sysconfig.get_path("purelib"))
    names = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments")
    files = {
        str(path.relative_to(packages)): path.read_text()
        for name in names
        for path in packages.joinpath(name).rglob("*.py")
        if name != "pygments"
        or path.parent.name != "lexers"
        or path.name[:4] in ("__in", "_map", "pyth", "diff")
    }
    files["py.py"] = packages.joinpath("py.py").read_text()
    files["test_x.py"] = "def test_a(tmp_path, capsys): print(1)\ndef test_b(): assert 1 == 2\n"
    with pool.open(files) as sandbox:
        done = sandbox.run(
            ["python3", "-m", "pytest", "-q", "-p", "no:cacheprovider"], timeout_s=60
        )
        assert done.exit_code == 1 and "1 failed, 1 passed" in done.stdout, done.stdout


def test_inside_holds_standard_library_only():
    """The files that the sandbox sees import each other and the standard library."""
    names = {path.stem for path in bubblewrap.INSIDE.glob("*.py")}
    assert {"zygote", "session", "candidate"} <= names
    for path in bubblewrap.INSIDE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                found = [node.module]
            elif isinstance(node, ast.ImportFrom):
                local = [node.module] if node.module else [alias.name for alias in node.names]
                assert node.level == 1 and set(local) <= names, f"{path.name}:{node.lineno}"
                continue
            else:
                continue
            for name in found:
                assert name.split(".")[0] in sys.stdlib_module_names, f"{path.name}:{node.lineno}"
    assert {Path(path).stem for path in bubblewrap.sources()} == names
