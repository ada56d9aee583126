"""Programs of this project in processes of their own."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.forking import Forked

ROOT = Path(__file__).resolve().parents[1]
# Flags of XLA with which programs compile in a fraction of the time; they run slower.
QUICKLY = {
    "--xla_backend_optimization_level": "0",
    "--xla_cpu_parallel_codegen_split_count": "1",
    "--xla_backend_extra_options": "xla_cpu_disable_new_fusion_emitters",
}

# Where compiled programs stay. Small ones too: reading one takes a third of the time of compiling
# it, and each process has hundreds.
CACHE = {
    "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".jax_cache" / "tests"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": 0.0,
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
    fresh: bool = False,
    **popen,
) -> subprocess.Popen:
    """``python -m module``; devices and quickly are as in ``xla_flags``.

    fresh: start a new interpreter, which imports everything itself and hashes texts in an order of
    its own, instead of a fork. Output comes through one pipe unless ``popen`` says otherwise.
    """
    environment = dict(popen.pop("env", os.environ)) | {
        "XLA_FLAGS": xla_flags(devices, quickly),
        "PYTHONPATH": str(ROOT),
    }
    settings = dict(
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    line = [module, *map(str, arguments)]
    if fresh:
        return subprocess.Popen([sys.executable, "-m", *line], **settings | popen)
    return Forked(line, **settings | popen)


def run(module: str, *arguments: object, **settings) -> subprocess.CompletedProcess[str]:
    """As ``start``, to its end, with standard output and error apart."""
    timeout = settings.pop("timeout", None)
    with start(module, *arguments, **dict(stderr=subprocess.PIPE) | settings) as process:
        try:
            output, error = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, output, error)


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with contextlib.closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
