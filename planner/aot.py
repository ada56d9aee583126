"""Compiles kernels for accelerators that are not here, and reads what the compilers say.

Each target has a process of its own, because the GPU compiler keeps the first target it was given.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

import jax
import rich.markup
import rich.table
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from planner.kernel_programs import WORKLOADS, Kernel, kernels
from planner.targets import INSTALL, TARGETS, Target, is_installed

ROOT = Path(__file__).resolve().parents[1]
# Of a multiprocessor of Hopper and of Blackwell: bytes of shared memory, registers and threads.
SHARED_PER_SM, REGISTERS_PER_SM, THREADS_PER_SM = 228 * 1024, 65536, 2048
_ANSWER = "aot row: "
_NAMES = "aot kernels: "
WORKLOAD_NAMES = tuple(workload.name for workload in WORKLOADS)


@dataclasses.dataclass(frozen=True)
class Row:
    """A kernel on a target, and what its compiler said."""

    kernel: str
    target: str
    # Those of its arguments that are not integers.
    shapes: str
    # Which programs call it.
    callers: tuple[str, ...]
    # "compiled", or what the compiler refused.
    answer: str
    # Bytes of VMEM, or of shared memory of a thread block.
    memory: int | None = None
    # Registers of a thread, and bytes of them that are spilled to memory. GPUs only.
    registers: int | None = None
    spilled: int | None = None
    # Threads of a thread block. GPUs only.
    threads: int | None = None
    # Bytes of HBM of arguments, results and temporaries.
    hbm: int | None = None
    # Operations that the kernel says it needs; None where it says nothing.
    flops: int | None = None

    @property
    def resident(self) -> int | None:
        """Thread blocks that a multiprocessor holds at a time; None where that is not known.

        Each block takes 1 KiB of shared memory more than it asks for, and a warp takes registers
        in units of 256.
        """
        if self.threads is None or self.memory is None or self.registers is None:
            return None
        registers = -(-self.registers // 8) * 8 * self.threads
        return min(
            SHARED_PER_SM // (self.memory + 1024),
            REGISTERS_PER_SM // registers,
            THREADS_PER_SM // self.threads,
        )

    @property
    def milliseconds(self) -> float | None:
        """The time that the peak rates of the target allow, None where nothing was compiled."""
        if self.hbm is None:
            return None
        target = TARGETS[self.target]
        return 1e3 * max((self.flops or 0) / target.flops, self.hbm / target.bandwidth)


def report(rows: list[Row]) -> dict:
    """Content of --json: the rows, and the versions of the compilers."""
    packages = {name for target in TARGETS.values() for name in target.packages}
    versions = {name: importlib.metadata.version(name) for name in packages if is_installed(name)}
    return {"compilers": versions, "rows": [dataclasses.asdict(row) for row in rows]}


def in_own_process(target: Target, workloads: Sequence[str] = WORKLOAD_NAMES) -> list[Row]:
    """The rows of a target. What ended the process, or a missing compiler, has a row too."""
    if missing := [name for name in target.packages if not is_installed(name)]:
        answer = f"{', '.join(missing)} not installed: {INSTALL}"
        return [Row("all kernels", target.name, "", (), answer)]
    command = [sys.executable, "-m", "launch.aot", f"--worker={target.name}"]
    done = subprocess.run(
        [*command, *(f"--kernels_of={name}" for name in workloads)],
        env=os.environ | target.environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    lines = done.stdout.splitlines()
    rows = [
        Row(**json.loads(line.removeprefix(_ANSWER))) for line in lines if line.startswith(_ANSWER)
    ]
    names = [json.loads(line.removeprefix(_NAMES)) for line in lines if line.startswith(_NAMES)]
    left = names[0][len(rows) :] if names else ["all kernels"]
    last = (done.stderr.strip() or "no message").splitlines()[-1]
    ended = f"the compiler's process ended with code {done.returncode}: {last}"
    return rows + [Row(name, target.name, "", (), ended) for name in left]


def work(target: Target, workloads: Sequence[str]) -> None:
    """Prints the names of the kernels of a target and, as they are compiled, their rows."""
    chosen = tuple(workload for workload in WORKLOADS if workload.name in workloads)
    found = kernels(target, chosen)
    print(_NAMES + json.dumps([kernel.name for kernel in found]), flush=True)
    for row in compile_all(target, found):
        print(_ANSWER + json.dumps(dataclasses.asdict(row)), flush=True)


def compile_all(target: Target, found: Sequence[Kernel]) -> Iterator[Row]:
    """Compiles each kernel for the target, in this process."""
    device = topologies.get_topology_desc(**target.topology()).devices[0]
    sharding = SingleDeviceSharding(device)
    for kernel in found:
        row = Row(
            kernel.name,
            target.name,
            kernel.shapes,
            kernel.callers,
            "compiled",
            threads=kernel.threads,
            flops=kernel.flops,
        )
        arguments = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in kernel.arguments
        ]
        with _captured() as texts:
            resources = {}
            try:
                compiled = jax.jit(kernel.function).lower(*arguments).compile()
                resources = _resources(target, compiled)
            except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as error:
                # a compiler's answer
                row = dataclasses.replace(row, answer=f"{type(error).__name__}: {error}")
        if target.platform == "cuda":
            resources |= _gpu_resources(texts[0])
        yield dataclasses.replace(row, **resources)


def table(rows: list[Row]) -> rich.table.Table:
    """One line per kernel and target."""
    found = rich.table.Table(title="kernels of traced programs", title_justify="left")
    for name in ("kernel", "target"):
        found.add_column(name, no_wrap=True)
    found.add_column("called by", overflow="fold")
    found.add_column("arguments", overflow="fold")
    found.add_column("compiler", overflow="fold")
    for name in ("VMEM / shared", "registers", "spilled", "resident", "HBM MB", "ms at peak"):
        found.add_column(name, justify="right")
    for row in rows:
        found.add_row(
            row.kernel,
            row.target,
            *map(rich.markup.escape, ("; ".join(row.callers), row.shapes, _shorten(row.answer))),
            "" if row.memory is None else f"{row.memory / 1024:,.0f} KiB",
            "" if row.registers is None else str(row.registers),
            "" if row.spilled is None else f"{row.spilled} B",
            "" if row.resident is None else str(row.resident),
            "" if row.hbm is None else f"{row.hbm / 1e6:,.0f}",
            "" if row.milliseconds is None else f"{row.milliseconds:.3f}",
        )
    return found


def summary(rows: list[Row]) -> rich.table.Table:
    """One line per target: how many kernels compiled, and the most of each resource."""
    found = rich.table.Table(title="by target", title_justify="left")
    for name in ("target", "compiled", "most VMEM / shared", "most registers", "that spill"):
        found.add_column(name, justify="left" if name == "target" else "right")
    for target in dict.fromkeys(row.target for row in rows):
        mine = [row for row in rows if row.target == target]
        memory = max((row.memory or 0 for row in mine), default=0)
        registers = max((row.registers or 0 for row in mine), default=0)
        found.add_row(
            target,
            f"{sum(row.answer == 'compiled' for row in mine)} of {len(mine)}",
            f"{memory / 1024:,.0f} KiB",
            str(registers) if registers else "",
            str(sum(bool(row.spilled) for row in mine)) if registers else "",
        )
    return found


def _shorten(text: str, most: int = 300) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 1] + "…"


def _resources(target: Target, compiled: jax.stages.Compiled) -> dict[str, int]:
    """HBM that a compiled kernel takes, and on TPU its VMEM."""
    sizes = compiled.memory_analysis()
    parts = (sizes.argument_size_in_bytes, sizes.output_size_in_bytes, sizes.temp_size_in_bytes)
    return {"hbm": sum(parts)} | (_tpu_resources(compiled) if target.platform == "tpu" else {})


def _tpu_resources(compiled) -> dict[str, int]:
    """VMEM that the kernel uses, as the compiled program says."""
    calls = [
        line
        for line in compiled.as_text().splitlines()
        if 'custom_call_target="tpu_custom_call"' in line
    ]
    found = re.findall(
        r'"used_scoped_memory_configs":\[{"memory_space":"1","offset":"0","size":"(\d+)"',
        "".join(calls),
    )
    return {"memory": max(map(int, found))} if found else {}


def _gpu_resources(log: str) -> dict[str, int]:
    """Shared memory as Mosaic says; registers per thread and spilled bytes as ptxas -v says."""
    patterns = {
        "memory": r"smem_scratch_bytes=(\d+)",
        "registers": r"Used (\d+) registers",
        "spilled": r"(\d+) bytes spill stores",
    }
    found = {name: re.findall(pattern, log) for name, pattern in patterns.items()}
    return {name: max(map(int, numbers)) for name, numbers in found.items() if numbers}


@contextlib.contextmanager
def _captured() -> Generator[list[str]]:
    """Everything that is written to standard output and error, by compilers too; one text once the
    block is left.
    """
    texts: list[str] = []
    sys.stdout.flush()
    with tempfile.TemporaryFile() as file:
        kept = [os.dup(i) for i in (1, 2)]
        for i in (1, 2):
            os.dup2(file.fileno(), i)
        try:
            yield texts
        finally:
            for i, old in zip((1, 2), kept, strict=True):
                os.dup2(old, i)
                os.close(old)
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
