"""Programs of this project in processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Flags of XLA with which programs compile in a fraction of the time; they run slower.
QUICKLY = {
    "--xla_backend_optimization_level": "0",
    "--xla_cpu_parallel_codegen_split_count": "1",
    "--xla_backend_extra_options": "xla_cpu_disable_new_fusion_emitters",
}

# Where compiled programs stay, and how long a program must have taken to compile to be kept.
CACHE = {
    "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".jax_cache" / "tests"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": 0.1,
}


def xla_flags(devices: int | None, quickly: bool = True) -> str:
    """XLA_FLAGS of a program on so many virtual devices; None leaves their number to the program.

    quickly: compile as the tests do, instead of as users do.
    """
    count = {} if devices is None else {"--xla_force_host_platform_device_count": devices}
    flags = count | (QUICKLY if quickly else {})
    return " ".join(f"{name}={value}" for name, value in flags.items())


def start(
    module: str,
    *arguments: object,
    devices: int | None = 2,
    quickly: bool = True,
    cache: Path | None = None,
    **popen,
) -> subprocess.Popen:
    """``python -m module``; devices and quickly are as in ``xla_flags``.

    cache: a folder that keeps what was compiled. Output comes through one pipe unless ``popen`` says
    otherwise.
    """
    environment = os.environ | {
        "XLA_FLAGS": xla_flags(devices, quickly),
        "PYTHONPATH": str(ROOT),
    }
    if cache is not None:
        environment |= {
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
    command = [sys.executable, "-m", module, *map(str, arguments)]
    settings = dict(
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return subprocess.Popen(command, **settings | popen)


def run(module: str, *arguments: object, **settings) -> subprocess.CompletedProcess[str]:
    """As ``start``, to its end, with standard output and error apart."""
    process = start(module, *arguments, stderr=subprocess.PIPE, **settings)
    output, error = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, output, error)


# What a module imports is imported once. Its own code runs in a fork for each command line.
_EACH = """
import ast, importlib.util, json, os, pathlib, runpy, sys

module, lines, folder = sys.argv[1], json.loads(sys.argv[2]), pathlib.Path(sys.argv[3])
source = pathlib.Path(importlib.util.find_spec(module).origin).read_text()
imports = [x for x in ast.parse(source).body if isinstance(x, ast.Import | ast.ImportFrom)]
exec(compile(ast.Module(imports, []), module, "exec"), {})
for number, line in enumerate(lines):
    if not os.fork():
        for stream, name in ((1, "output"), (2, "error")):
            os.dup2(os.open(folder / f"{number}.{name}", os.O_CREAT | os.O_WRONLY), stream)
        sys.argv[1:] = line
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        sys.exit()
    code = os.waitstatus_to_exitcode(os.wait()[1])
    (folder / f"{number}.code").write_text(str(code))
"""


def run_each(module: str, lines: Sequence[Sequence[str]]) -> list[subprocess.CompletedProcess[str]]:
    """``python -m module`` with each of the command lines, one after another, to their ends."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", _EACH, module, json.dumps(lines), folder]
        subprocess.run(command, cwd=ROOT, check=True)

        def told(number: int, name: str) -> str:
            return (Path(folder) / f"{number}.{name}").read_text()

        return [
            subprocess.CompletedProcess(
                line, int(told(number, "code")), told(number, "output"), told(number, "error")
            )
            for number, line in enumerate(lines)
        ]


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with contextlib.closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
