"""Ways out of the sandbox, as commands of a shell, and what on the host would show that one worked.

Each runs in a sandbox while a ``Host`` watches: a secret file, a server, a process and a layer that
sandboxes do not get, a second sandbox, and what is left behind. A command may also say itself that
it got what it must not have, by printing ESCAPED.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from rl_code.environment.layers.store import LayerStore
from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.types import World

ESCAPED = "ESCAPED"
_COMMAND_S = 6.0
_CALM_S = 30.0
_LAYERS = "/opt/layers"


@dataclasses.dataclass(frozen=True)
class Escape:
    """One attempt. In ``command`` {secret}, {port}, {pid}, {mark} and {store} stand for what is
    on the host; the program of Python begins with the names os, ctypes and libc.
    """

    name: str
    command: str = ""
    python: str = ""

    def argv(self, **names: object) -> list[str]:
        """Command line of the escape, with the values of ``names`` filled in."""
        text = self.command or self.python
        for name, value in names.items():
            text = text.replace("{" + name + "}", str(value))
        if self.command:
            return ["bash", "-c", text]
        return ["python3", "-c", _HEAD + text]


_HEAD = """\
import ctypes, os, signal, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def got(number):
    if number >= 0: print("ESCAPED")
"""

ESCAPES = (
    Escape("read a file of the host", "cat {secret}; find / -name '*secret*' -exec cat {} + "),
    Escape("read the host through /proc", "cat /proc/*/root{secret} /proc/1/cwd{secret}"),
    Escape("read another layer", f"find {_LAYERS} / -name 'hidden*' -exec cat {{}} +"),
    Escape("read the store by its path on the host", "cat {store}/*/tree/hidden*; ls {store}/*"),
    Escape(
        "write to a layer",
        "for f in $(find /opt/packages -maxdepth 2 | head -50); do echo {mark} >> $f; done;"
        " rm -rf /opt/packages/*; mount -o remount,rw /opt/packages",
    ),
    Escape(
        "connect to a server of the host",
        python="for family, to in ((2, ('127.0.0.1', {port})), (10, ('::1', {port})),"
        " (1, '\\0{mark}')):\n"
        "    try: socket.socket(family).connect(to); print('ESCAPED')\n"
        "    except OSError: pass\n",
    ),
    Escape("kill a process of the host", "kill -9 {pid}; kill -9 -1; kill -9 1 2 3 4 5"),
    Escape(
        "signal every number",
        python="for pid in range(2, 40000):\n"
        "    if pid != os.getpid():\n"
        "        try: os.kill(pid, 0); print('ESCAPED')\n"
        "        except OSError: pass\n",
    ),
    Escape(
        "limits of the supervisor",
        python="import resource\n"
        "for pid in range(1, 50):\n"
        "    if pid == os.getpid(): continue\n"
        "    for kind in range(16):\n"
        "        try: resource.prlimit(pid, kind, (0, 0))\n"
        "        except (OSError, ValueError): pass\n",
    ),
    Escape(
        "trace the supervisor",
        python="for pid in range(1, 50):\n"
        "    if pid != os.getpid(): got(libc.ptrace(16, pid, 0, 0))\n",
    ),
    Escape(
        "memory of other processes",
        python="for other in os.listdir('/proc'):\n"
        "    if other.isdigit() and int(other) != os.getpid():\n"
        "        try: open('/proc/' + other + '/mem', 'r+b'); print('ESCAPED')\n"
        "        except OSError: pass\n",
    ),
    Escape("mounts", python="got(libc.mount(b'none', b'/tmp', b'tmpfs', 0, None))\n"),
    Escape(
        "namespaces of its own",
        python="for flag in (0x10000000, 0x20000, 0x20000000, 0x40000000):\n"
        "    got(libc.unshare(flag))\n",
    ),
    Escape("another root", python="got(libc.chroot(b'/tmp'))\ngot(libc.pivot_root(b'/', b'/'))\n"),
    Escape(
        "devices of the host",
        python="import stat\n"
        "for major, minor in ((8, 0), (1, 1), (259, 0)):\n"
        "    try:\n"
        "        os.mknod('/tmp/d%d' % major, 0o600 | stat.S_IFBLK, os.makedev(major, minor))\n"
        "        os.open('/tmp/d%d' % major, os.O_RDONLY); print('ESCAPED')\n"
        "    except OSError: pass\n",
    ),
    Escape(
        "to be root",
        python="for act, what in ((os.setuid, 0), (os.setgid, 0), (os.setgroups, [0])):\n"
        "    try: act(what); print('ESCAPED')\n"
        "    except OSError: pass\n"
        "caps = [l for l in open('/proc/self/status') if l.startswith('CapEff')][0]\n"
        "if int(caps.split()[1], 16): print('ESCAPED')\n",
    ),
    Escape(
        "calls that open the kernel",
        # bpf, perf_event_open, userfaultfd, io_uring_setup, kexec_load, init_module, keyctl and
        # add_key
        python="import platform\n"
        "numbers = (321, 298, 323, 425, 246, 175, 250, 248)\n"
        "if platform.machine() != 'x86_64': numbers = (280, 241, 282, 425, 104, 105, 219, 217)\n"
        "for number in numbers:\n"
        "    if libc.syscall(number, 0, 0, 0, 0, 0) >= 0 or ctypes.get_errno() not in (1, 38):\n"
        "        print('ESCAPED', number)\n",
    ),
    Escape(
        "limits of the whole machine",
        # inotify_init1, io_setup, shmget, msgget, semget, mq_open
        python="import platform\n"
        "numbers = (294, 206, 29, 68, 64, 240)\n"
        "if platform.machine() != 'x86_64': numbers = (26, 0, 194, 186, 190, 180)\n"
        "for number in numbers:\n"
        "    if libc.syscall(number, 8, 8, 0o1777, 0) >= 0 or ctypes.get_errno() not in (1, 38):\n"
        "        print('ESCAPED', number)\n",
    ),
    Escape(
        "settings of the kernel",
        "for f in /proc/sys/kernel/core_pattern /proc/sysrq-trigger /proc/sys/vm/drop_caches"
        " /sys/kernel/uevent_helper; do"
        " (echo {mark} > $f) 2>/dev/null && echo ESCAPED; done",
    ),
    Escape(
        "the terminal of whoever started it",
        python="import fcntl, termios\n"
        "for fd in range(3):\n"
        "    try: fcntl.ioctl(fd, termios.TIOCSTI, b'x'); print('ESCAPED')\n"
        "    except OSError: pass\n"
        "try: os.open('/dev/tty', os.O_RDWR); print('ESCAPED')\n"
        "except OSError: pass\n",
    ),
    Escape("processes without end", "b() { b | b & }; b; b; sleep 2"),
    Escape(
        "memory without end",
        python="for i in range(6): os.fork()\nx = [b'x' * (64 << 20) for i in range(99)]\n",
    ),
    Escape(
        "a full disk", "head -c 9999999999 /dev/zero > /tmp/z; head -c 9999999999 /dev/zero > z"
    ),
    Escape("output without end", "yes {mark} | head -c 500000000"),
    Escape("a process that stays", "(setsid bash -c 'exec -a {mark} sleep 300' &); sleep 0.2"),
    Escape("a link out that is read", "ln -sf {secret} solution.py"),
    Escape("a link to the supervisor's memory", "ln -sf /proc/1/mem solution.py"),
    Escape("a folder without end", "mkdir -p $(printf 'd/%.0s' {1..900}); touch d/d/d/x"),
    Escape(
        "descriptors of the supervisor",
        python="for fd in range(3, 256):\n"
        "    for act in (lambda: os.write(fd, b'{\"ok\": {}}'), lambda: os.read(fd, 1)):\n"
        "        try: act(); print('ESCAPED', fd)\n"
        "        except OSError: pass\n",
    ),
)


class Host:
    """Things on the host that are watched while an escape is tried.

    folder: of this object's own. store: of the pool's layers; a layer is put there that no world
    names. world: that of the sandboxes.
    """

    def __init__(self, folder: Path, store: LayerStore, world: World):
        self.mark = f"escape-{secrets.token_hex(6)}"
        self.secret = folder / f"{self.mark}-secret.txt"
        self.word = secrets.token_hex(16)
        self.secret.write_text(self.word)
        self.store = store
        self.world = world
        self.hidden = store.build(
            {"kind": "redteam", "mark": self.mark},
            self._fill,
        )
        self.reached = 0
        self._stack = contextlib.ExitStack()
        self._process = subprocess.Popen(["sleep", "3600"])
        self._stack.callback(self._end)
        self.port = self._serve(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
        abstract = socket.socket(socket.AF_UNIX)
        abstract.bind(f"\0{self.mark}")
        abstract.listen()
        self._serve(abstract)

    def _fill(self, tree: Path) -> None:
        (tree / "hidden.txt").write_text(self.word)

    def _serve(self, server: socket.socket) -> socket.socket:
        """Counts who connects."""
        self._stack.callback(server.close)
        self._stack.callback(lambda: server.shutdown(socket.SHUT_RDWR))

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    server.accept()[0].close()
                    self.reached += 1

        threading.Thread(target=accept, daemon=True).start()
        return server

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Ends what was started."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def names(self) -> dict[str, object]:
        """Name -> value that commands may mention in braces."""
        return {
            "secret": self.secret,
            "port": self.port,
            "pid": self._process.pid,
            "mark": self.mark,
            "store": self.store.folder,
        }

    def harm(self) -> Iterator[str]:
        """Harm that the host has suffered, in words."""
        if self.reached:
            yield f"{self.reached} connections to the host"
        if self._process.poll() is not None:
            yield "a process of the host was killed"
        if self.secret.read_text() != self.word:
            yield "a file of the host was changed"
        for layer in (*(layer.digest for layer in self.world.layers), self.hidden):
            try:
                self.store.verify(layer)
            except (ValueError, LookupError, OSError) as error:
                yield f"a layer was changed: {error}"
        for process in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if self.mark.encode() in process.read_bytes() and os.getpid() != int(
                    process.parent.name
                ):
                    yield "a process has outlived its command"


def attempt(escape: Escape, pool: SandboxPool, host: Host) -> tuple[str, ...]:
    """Tries an escape; the harm that it has done, () for none."""
    harm: list[str] = []
    with pool.open({"other.txt": host.mark}, host.world) as other:
        with pool.open({"solution.py": "x = 1\n"}, host.world) as sandbox:
            done = sandbox.run(escape.argv(**host.names()), timeout_s=_COMMAND_S)
            said = done.stdout
            try:
                said += sandbox.read_file("solution.py")
            except (OSError, ValueError):
                pass
            try:
                said += repr(sandbox.snapshot())
            except ValueError:
                pass
        if host.word in said:
            harm.append("a secret was read")
        if ESCAPED in done.stdout:
            harm.append(f"it got what it must not have: {' '.join(done.stdout.split())[:100]}")
        # The one beside it works, and so does one that is opened afterwards.
        calm = other.run(["sh", "-c", "cat other.txt && echo x > y"], timeout_s=_CALM_S)
        if calm.exit_code or host.mark not in calm.stdout:
            harm.append(f"another sandbox does not work: {calm.stdout[:100]}")
    with pool.open({"a.txt": "a"}, host.world) as after:
        calm = after.run(["sh", "-c", "ls -A; touch b"], timeout_s=_CALM_S)
        if calm.exit_code or calm.stdout != "a.txt\n":
            harm.append(f"the next sandbox is not new: {calm.stdout[:100]}")
    harm += host.harm()
    return tuple(harm)
