"""A sandbox works wherever bubblewrap does: for root, for others, for the root of a container."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rl_code.environment.sandbox import worker
from rl_code.environment.sandbox.pool import SandboxConfig, SandboxPool, SandboxUnavailable
from rl_code.environment.sandbox.worker import Mode

ROOT = Path(__file__).parents[4]
CONFIG = SandboxConfig(
    workers=1, memory_mb=256, processes=16, workspace_mb=8, cpu_s=20, output_bytes=4000
)
SCRIPT = f"""
import os
from rl_code.environment.sandbox.pool import *
files = {{"s.py": "def f(x):\\n    return x\\n"}}
with SandboxPool({CONFIG!r}) as pool, pool.open(files) as sandbox:
    look = ["bash", "-c", "id -u; cat /proc/self/status | grep -c 'CapEff:.*0000000000000000'"]
    print(sandbox.run(look, timeout_s=60).stdout.split(), end=" ")
    attack = "import os, resource\\nresource.prlimit(1, resource.RLIMIT_NPROC, (0, 0))"
    sandbox.run(["python3", "-c", attack], timeout_s=60)
    print(sandbox.call("s.py", "f", [(7,)], timeout_s=60)[0].value, end=" ")
    bomb = "import os, time\\nfor _ in range(50):\\n    if os.fork() == 0: time.sleep(9)"
    print(sandbox.run(["python3", "-c", bomb], timeout_s=60).exit_code, os.geteuid())
"""

# Changes a file of a layer, in a store of its own, and forks.
LAYERS = """
import pathlib, tempfile
from rl_code.environment.layers import folder
from rl_code.environment.layers.store import LayerStore
from rl_code.environment.sandbox.pool import *
from rl_code.types import Layer, World
with tempfile.TemporaryDirectory() as place:
    source = pathlib.Path(place, "source")
    source.mkdir()
    (source / "a").write_text("1")
    store = LayerStore(place + "/store")
    world = World((Layer(folder.build(store, source), "/workspace"),))
    with SandboxPool(SandboxConfig(workers=1, layers=str(store.folder))) as pool:
        with pool.open({}, world) as sandbox:
            script = "cat a; echo; echo 2 > a; cat a; mkdir b; mv a b; ls /opt/layers 2> /dev/null"
            print(sandbox.run(["bash", "-c", script], timeout_s=60).stdout, end="")
            with pool.fork(sandbox) as fork:
                print(fork.snapshot() == sandbox.snapshot() != {})
"""

# Becomes root of a user namespace that has 65536 users of its own, and runs its arguments.
CONTAINER = """
import os, sys
go, ready = os.pipe(), os.pipe()
pid = os.fork()
if pid == 0:
    os.unshare(os.CLONE_NEWUSER)
    os.write(ready[1], b"x")
    os.read(go[0], 1)
    os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    os.execvp(sys.argv[1], sys.argv[1:])
os.read(ready[0], 1)
for name in ("uid_map", "gid_map"):
    with open(f"/proc/{pid}/{name}", "w") as file:
        file.write("0 100000 65536")
os.write(go[1], b"x")
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
ORDINARY = ["setpriv", "--reuid=1234", "--regid=1234", "--clear-groups"]
MANY = [sys.executable, "-c", CONTAINER]
# What becomes somebody else and then runs the rest of its arguments, and the user that it sees.
WAYS = {
    "an ordinary user": (ORDINARY, 1234),
    "root of a container with one user": ([*ORDINARY, "unshare", "--user", "--map-root-user"], 0),
    "root of a container with many users": (MANY, 0),
    "root of a container who may not mount": ([*MANY, "setpriv", "--bounding-set=-sys_admin"], 0),
}


def reachable(command: list[str]) -> list[str]:
    """The command in a mount namespace in which everybody may read Python, its packages and ROOT.

    A folder on the way to them that is closed to others is covered by an empty one that is open,
    into which they are mounted again.
    """
    needed = {Path(os.path.realpath(sys.base_prefix)), Path(sys.prefix).resolve(), ROOT}
    needed |= {Path(os.path.realpath(name)) for name in sys.path if name.startswith("/")}
    covered: dict[Path, set[Path]] = {}
    for path in filter(Path.exists, needed):
        closed = [way for way in (*reversed(path.parents), path) if not way.stat().st_mode & 0o001]
        if closed:
            # a folder that is closed itself stays so when it is mounted again, its entries do not
            covered.setdefault(closed[0], set()).update(
                path.iterdir() if path in closed else {path}
            )
    aside = Path("/dev/shm")
    out = [f"mount -t tmpfs -o mode=1777 tmpfs {aside}"]
    back = []
    for number, path in enumerate(sorted(set().union(*covered.values()))):
        kept = aside / str(number)
        if path.is_symlink():
            out.append(f"cp -P '{path}' {kept}")
            back.append(f"mv {kept} '{path}'")
            continue
        make = "mkdir -p" if path.is_dir() else "touch"
        out.append(f"{make} {kept}; mount --bind '{path}' {kept}")
        back.append(f"mkdir -p '{path.parent}'; {make} '{path}'; mount --move {kept} '{path}'")
    cover = [f"mount -t tmpfs -o mode=755 tmpfs '{folder}'" for folder in covered]
    script = [*out, *cover, *back, 'exec "$@"'] if covered else ['exec "$@"']
    return ["unshare", "--mount", "bash", "-ec", "\n".join(script), "-", *command]


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("setpriv") or not shutil.which("unshare"),
    reason="becomes other users, which only root can",
)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.quick(first=2)
def test_whoever_starts_it_gets_a_sandbox_that_holds(way):
    shell, user = WAYS[way]
    done = subprocess.run(
        reachable([*shell, sys.executable, "-c", SCRIPT]),
        capture_output=True,
        text=True,
        timeout=400,
        cwd="/",
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.stdout.split() == ["['1000',", "'1']", "7", "1", str(user)], done


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("setpriv") or not shutil.which("unshare"),
    reason="becomes other users, which only root can",
)
@pytest.mark.quick(first=1)
@pytest.mark.parametrize("way", WAYS)
def test_layers_are_for_whoever_owns_the_store(way, tmp_path):
    """Only the root of a container that may not map owners on this disk is refused."""
    shell, _ = WAYS[way]
    done = subprocess.run(
        reachable([*shell, sys.executable, "-c", LAYERS]),
        capture_output=True,
        text=True,
        timeout=400,
        cwd="/",
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)},
        check=False,
    )
    if "many" in way or "may not" in way:
        assert "SandboxUnavailable" in done.stderr, done
    else:
        assert done.stdout.split() == ["1", "2", "True"], done


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="ways that root has")
def test_layers_work_in_each_way_of_root():
    for mode in worker.modes(layers=True):
        script = LAYERS.replace(
            "layers=str(store.folder))", f"layers=str(store.folder)), [{mode!r}]"
        )
        script = script.replace(
            "import *", "import *; from rl_code.environment.sandbox.worker import Mode"
        )
        done = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            timeout=400,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)},
            check=False,
        )
        assert done.stdout.split() == ["1", "2", "True"], (mode, done)


def test_users_are_those_of_this_user_namespace(monkeypatch):
    maps = {}
    monkeypatch.setattr(worker, "_mapped", lambda name: maps[name])
    whole = [range(0, 4294967295)]
    maps |= {"uid_map": whole, "gid_map": whole}
    assert worker.users() == worker.UNPRIVILEGED
    container = [range(0, 1), range(1, 65536)]
    maps |= {"uid_map": container, "gid_map": container}
    assert worker.users() == range(1000, 65536)
    maps |= {"uid_map": [range(0, 1)], "gid_map": container}
    assert not worker.users()


def test_root_alone_with_itself_is_refused(monkeypatch):
    """Without another user to give way to, its sandboxes would run as root of the machine."""
    monkeypatch.setattr(worker.os, "geteuid", lambda: 0)
    monkeypatch.setattr(worker, "users", lambda: range(0))
    if Path("/proc/self/uid_map").read_text().split()[1] != "0":
        pytest.skip("this is a container's root")
    assert worker.modes() == ()
    with pytest.raises(SandboxUnavailable, match="no other user"):
        SandboxPool(CONFIG)


def test_the_strongest_way_is_tried_first():
    ways = worker.modes()
    assert ways[0] == Mode(as_root=os.geteuid() == 0, own_users=True)
    assert len(set(ways)) == len(ways) >= 2
