"""Starts ``python -m`` programs as forks of a process that has imported what all of them import.

Importing the tree takes more CPU time than most of the programs that tests start. A template
process imports it once. For each program it forks a child that gets its own arguments, environment,
folder and streams, and runs the module as ``python -m`` does. The child belongs to the process that
asked, so that it is waited for, signalled and killed as any other. Children of multiprocessing's
forkserver are no children of who asked, run no atexit functions and have no standard input.

The template holds one thread of Python and no device of jax. It imports nothing that defines a flag.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import inspect
import json
import os
import pkgutil
import runpy
import socket
import subprocess
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("attention", "models", "pallas_kernels", "rl_code")
# Needed by commands alone.
OTHERS = ("ml_collections.config_flags", "rich.console", "rich.progress", "rich.table")

_PR_SET_CHILD_SUBREAPER = 36
_MAX_REQUEST = 1 << 20
_LOCK = threading.Lock()

# Of what Popen can be given.
UNUSUAL = ("executable", "preexec_fn", "pass_fds", "startupinfo", "shell")
PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


class Forked(subprocess.Popen):
    """A program that is a fork of the template; otherwise what Popen is.

    args: a module and its arguments, or -c, a text and its arguments.
    """

    # Called by Popen.__init__, which has made the pipes.
    def _execute_child(self, *values):
        given = inspect.signature(super()._execute_child).bind(*values).arguments
        if unusual := {name: given[name] for name in UNUSUAL if given[name]}:
            raise ValueError(f"a forked program takes none of these: {unusual}")
        request = dict(
            args=given["args"],
            cwd=str(given["cwd"] or os.getcwd()),
            env=dict(os.environ if given["env"] is None else given["env"]),
            new_session=given["start_new_session"],
        )
        ends = enumerate(given[name] for name in ("p2cread", "c2pwrite", "errwrite"))
        self.pid = _fork(request, [standard if end == -1 else end for standard, end in ends])
        self._child_created = True
        self._close_pipe_fds(*(given[name] for name in PIPES))


def _fork(request: dict, streams: list[int]) -> int:
    """The process id of a new child of this process, one at a time."""
    with _LOCK:
        control = _template()
        # The template's child is orphaned at once and comes to the nearest process that takes
        # orphans. Only meanwhile, so that other orphans go where they always go.
        _take_orphans(True)
        try:
            socket.send_fds(control, [json.dumps(request).encode()], streams)
            answer = control.recv(100)
        finally:
            _take_orphans(False)
    if not answer:
        raise RuntimeError("the template of forked programs has ended")
    return int(answer)


def _take_orphans(on: bool) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


@functools.cache
def _template() -> socket.socket:
    """The control socket of this process's template, which ends when the socket is closed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MAX_REQUEST)
    with theirs:
        subprocess.Popen(
            [sys.executable, "-m", "tests.forking", str(theirs.fileno())],
            cwd=ROOT,
            # children set what they are given, and have jax's defaults otherwise
            env={name: text for name, text in os.environ.items() if not name.startswith("JAX_")},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
    return ours


def main() -> None:
    """The template: forks a child for each request, until the other side closes."""
    control = socket.socket(fileno=int(sys.argv[1]))
    for name in PACKAGES:
        package = importlib.import_module(name)
        for module in pkgutil.walk_packages(package.__path__, f"{name}."):
            # what runs inside a sandbox or as a program of its own is not for importing
            if ".inside" not in module.name and not module.name.endswith("_driver"):
                importlib.import_module(module.name)
    for name in OTHERS:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)  # for the reasons of tests/conftest.py
    while True:
        data, streams, _, _ = socket.recv_fds(control, _MAX_REQUEST, 3)
        if not data:
            return
        read, write = os.pipe()
        middle = os.fork()
        if not middle:
            child = os.fork()
            if child:
                os.write(write, str(child).encode())
                os._exit(0)
            for descriptor in (read, write, control.detach()):
                os.close(descriptor)
            _become(json.loads(data), streams)
            return
        os.waitpid(middle, 0)  # from now on the child belongs to who asked
        control.send(os.read(read, 100))
        for descriptor in (read, write, *streams):
            os.close(descriptor)


def _become(request: dict, streams: list[int]) -> None:
    """Runs the requested module in this process."""
    if request["new_session"]:
        os.setsid()
    for standard, stream in enumerate(streams):
        os.dup2(stream, standard)
    for stream in streams:
        os.close(stream)
    environment = request["env"]
    os.environ.clear()
    os.environ.update(environment)
    unbuffered = bool(environment.get("PYTHONUNBUFFERED"))
    sys.stdout.reconfigure(line_buffering=sys.stdout.isatty(), write_through=unbuffered)
    os.chdir(request["cwd"])
    paths = [request["cwd"], *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    sys.path[:] = [*paths, *(path for path in sys.path if path not in paths)]
    _configure_jax(environment)
    module, *arguments = request["args"]
    # as programs read that start themselves again
    sys.orig_argv = [sys.executable, *(() if module == "-c" else ("-m",)), module, *arguments]
    if module == "-c":
        sys.argv = ["-c", *arguments[1:]]
        exec(compile(arguments[0], "<string>", "exec"), {"__name__": "__main__"})
        return
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _configure_jax(environment: dict[str, str]) -> None:
    """Sets what jax reads from the environment when it is imported."""
    import jax

    for name, text in environment.items():
        option = name.lower()
        if name.startswith("JAX_") and hasattr(jax.config, option):
            old = getattr(jax.config, option)
            if isinstance(old, bool):
                jax.config.update(option, text.lower() in ("1", "true", "on", "yes", "t", "y"))
            else:
                jax.config.update(option, text if old is None else type(old)(text))


if __name__ == "__main__":
    main()
