"""The command line of bubblewrap: what of this machine the inside of the sandbox sees.

Inside are the system's programs and libraries and Python's standard library, all read-only, the
linker's cache from /etc, and the devices null, zero, full and random. Installed packages are
hidden, because they may hold solutions. There is no home folder, and the network namespace has no
way out.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rl_code.environment.sandbox.inside import world

PYTHON_PREFIX = world.PYTHON
SOURCES = "/opt/sandbox"
# The user and group that candidates see themselves as.
AGENT = 1000
# All that the sandbox sees of this package.
INSIDE = Path(__file__).with_name("inside")
START = "import sys; sys.path.insert(0, '/opt/sandbox'); from inside import zygote; zygote.main()"

_SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libexec", "share/zoneinfo", "share/git-core")
_FOLDERS = (
    *("/usr", "/usr/share", "/etc", "/opt", PYTHON_PREFIX, SOURCES, f"{SOURCES}/inside"),
    *("/workspace", "/tmp", "/proc"),
)
_DEVICES = ("null", "zero", "full", "random", "urandom")
_PACKAGES = ("site-packages", "dist-packages")


def interpreter() -> tuple[str, str]:
    """Path of the real interpreter inside the sandbox, and the prefix it has outside."""
    prefix = os.path.realpath(sys.base_prefix)
    program = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    if not program.startswith(prefix + "/"):
        program = f"{prefix}/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    return (program if prefix == "/usr" else PYTHON_PREFIX + program.removeprefix(prefix)), prefix


def environment() -> dict[str, str]:
    """The variables that everything inside the sandbox runs with."""
    return {
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
        "LD_LIBRARY_PATH": f"{PYTHON_PREFIX}/lib",
        "PATH": f"{PYTHON_PREFIX}/bin:/usr/bin:/bin",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONNOUSERSITE": "1",
        "TERM": "dumb",
        "TMPDIR": "/tmp",
        "TZ": "UTC",
        "USER": "agent",
    }


def sources() -> dict[str, Path]:
    """The files of ``inside``, by the path that each has in the sandbox."""
    return {f"{SOURCES}/inside/{path.name}": path for path in sorted(INSIDE.glob("*.py"))}


def arguments(
    program: str,
    descriptors: dict[str, int],
    as_root: bool,
    own_users: bool,
    layers: str = "",
    programs: Sequence[str] = (),
) -> list[str]:
    """The command up to and including the interpreter and START; one more argument, the limits,
    belongs to it.

    program: bwrap. descriptors: of the files to copy in, by their path inside, open for reading.
    as_root: started as root, without a user namespace; the zygote changes its user. own_users:
    sessions get user namespaces of their own; otherwise the zygote needs the right to mount.
    layers: the folder of the layer store, "" for none. Sessions cover it (inside/world.py).
    programs: paths of this machine that are shown below /opt/programs.
    """
    python, prefix = interpreter()
    line = [program, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    line += ["--unshare-cgroup-try", "--as-pid-1", "--die-with-parent", "--new-session"]
    line += ["--hostname", "sandbox", "--clearenv"]
    if not as_root:
        line += ["--unshare-user", "--uid", str(AGENT), "--gid", str(AGENT)]
    for name, value in environment().items():
        line += ["--setenv", name, value]
    for folder in _FOLDERS:  # made on the way they would be for root only
        line += ["--perms", "0755", "--dir", folder]
    for name in _SYSTEM:
        line += ["--ro-bind-try", f"/usr/{name}", f"/usr/{name}"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        outside = Path("/", name)
        if outside.is_symlink():
            line += ["--symlink", os.readlink(outside), str(outside)]
        elif outside.is_dir():
            line += ["--ro-bind", str(outside), str(outside)]
    for name in ("/etc/ld.so.cache", "/etc/alternatives"):
        line += ["--ro-bind-try", name, name]
    if prefix != "/usr":
        for name in ("bin", "lib"):
            line += ["--ro-bind", f"{prefix}/{name}", f"{PYTHON_PREFIX}/{name}"]
    line += _hide_packages(prefix)
    line += ["--perms", "0755", "--tmpfs", "/dev", "--perms", "0755", "--dir", "/dev/shm"]
    for name in _DEVICES:
        line += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    line += ["--symlink", "/proc/self/fd", "/dev/fd"]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        line += ["--symlink", f"/proc/self/fd/{number}", f"/dev/{name}"]
    for path, descriptor in descriptors.items():
        line += ["--perms", "0444", "--file", str(descriptor), path]
    line += ["--remount-ro", "/dev"]
    line += ["--perms", "0755", "--dir", world.PROGRAMS]
    for path in programs:
        line += ["--ro-bind", os.path.realpath(path), f"{world.PROGRAMS}/{os.path.basename(path)}"]
    if layers:
        line += ["--ro-bind", layers, world.STORE]
        for folder in (world.CHANGES, world.ROOT, world.PACKAGES):
            line += ["--perms", "0755", "--dir", folder]
    # As root bubblewrap would cover parts of /proc, and a /proc that is not whole cannot be mounted
    # anew in a user namespace. The zygote mounts it there.
    line += [] if as_root else ["--proc", "/proc"]
    capabilities = ["CAP_SETUID", "CAP_SETGID", "CAP_SYS_ADMIN"] if as_root else []
    if not own_users:
        capabilities = [*capabilities, "CAP_SYS_ADMIN", "CAP_SYS_CHROOT"]
        capabilities += ["CAP_DAC_OVERRIDE", "CAP_FOWNER"] if layers else []
    line += ["--cap-drop", "ALL"]
    for name in dict.fromkeys(capabilities):
        line += ["--cap-add", name]
    return [*line, "--remount-ro", "/", python, "-I", "-S", "-B", "-c", START]


def _hide_packages(prefix: str) -> list[str]:
    """Arguments that put empty folders over installed packages."""
    line = []
    inside = "/usr" if prefix == "/usr" else PYTHON_PREFIX
    roots = {Path("/usr/lib"): "/usr/lib", Path(prefix, "lib"): f"{inside}/lib"}
    for root, shown in roots.items():
        for folder in sorted(root.glob("python3*/*-packages")):
            if folder.name in _PACKAGES and folder.is_dir():
                line += [
                    "--perms",
                    "0755",
                    "--tmpfs",
                    f"{shown}/{folder.parent.name}/{folder.name}",
                ]
                line += ["--remount-ro", f"{shown}/{folder.parent.name}/{folder.name}"]
    return line
