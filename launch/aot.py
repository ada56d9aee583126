"""Compiles every kernel for accelerators that are not here, and prints what the compilers say.

python -m launch.aot kernels                       # every kernel for every target
python -m launch.aot kernels --targets=v5e,h100

Needs the compilers: pip install -e .[aot]. Each target has a process of its own, because the GPU
compiler keeps the first target it was given. Operations and bytes are those of whole causal rows
(``Program.cost``). The time is a lower bound that follows from them and the device's peak rates; it
is not measured.
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
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import rich.table
from absl import app, flags
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from launch.flags import console
from launch.kernel_programs import NAMES, SIZES, programs
from launch.targets import TARGETS, Target
from pallas_kernels.cost import Cost

INSTALL = "pip install -e .[aot]"
ROOT = Path(__file__).resolve().parents[1]
_ANSWER = "aot row: "

FLAGS = flags.FLAGS
flags.DEFINE_list("targets", list(TARGETS), f"Of {', '.join(TARGETS)}.")
flags.DEFINE_string(
    "worker", None, "Compile for this target in this process and print rows as JSON."
)


@dataclasses.dataclass(frozen=True)
class Row:
    """A kernel on a target: the compiler's answer, memory on the chip in bytes, registers and
    spilled bytes.
    """

    kernel: str
    target: str
    answer: str
    memory: int | None = None
    registers: int | None = None
    spilled: int | None = None
    cost: Cost | None = None

    @property
    def milliseconds(self) -> float | None:
        """The time that the peak rates of the target allow."""
        if self.cost is None:
            return None
        target = TARGETS[self.target]
        return 1e3 * max(
            self.cost.flops / target.flops, self.cost.bytes_accessed / target.bandwidth
        )


def main(argv: Sequence[str]) -> None:
    if FLAGS.worker:
        for row in compile_all(TARGETS[FLAGS.worker]):
            print(_ANSWER + json.dumps(dataclasses.asdict(row)), flush=True)
        return
    if argv[1:] != ["kernels"]:
        sys.exit("say what to compile: python -m launch.aot kernels")
    if unknown := [name for name in FLAGS.targets if name not in TARGETS]:
        sys.exit(f"--targets={','.join(unknown)} must be of {', '.join(TARGETS)}")
    rows = [row for name in FLAGS.targets for row in in_own_process(TARGETS[name])]
    console().print(table(rows))


def in_own_process(target: Target) -> list[Row]:
    """The rows of a target; a kernel that ended the process, or a missing compiler, has its row
    too.
    """
    names = [f"{family} {name}" for family in NAMES for name in NAMES[family]]
    if missing := [name for name in target.packages if not _installed(name)]:
        return [
            Row(name, target.name, f"{', '.join(missing)} not installed: {INSTALL}")
            for name in names
        ]
    done = subprocess.run(
        [sys.executable, "-m", "launch.aot", f"--worker={target.name}"],
        env=os.environ | target.environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    answers = [
        line.removeprefix(_ANSWER) for line in done.stdout.splitlines() if line.startswith(_ANSWER)
    ]
    rows = [json.loads(answer) for answer in answers]
    rows = [Row(**row | {"cost": row["cost"] and Cost(**row["cost"])}) for row in rows]
    found = {row.kernel for row in rows}
    last = (done.stderr.strip() or "no message").splitlines()[-1]
    ended = f"the compiler's process ended with code {done.returncode}: {last}"
    return rows + [Row(name, target.name, ended) for name in names if name not in found]


def compile_all(target: Target) -> Iterator[Row]:
    """Compiles each kernel for the target, in this process."""
    device = topologies.get_topology_desc(**target.topology()).devices[0]
    sharding = SingleDeviceSharding(device)

    def array(*shape: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    for program in programs(target, array):
        if program.obstacle:
            yield Row(program.name, target.name, program.obstacle)
            continue
        row = Row(program.name, target.name, "compiled", cost=program.cost)
        with _captured() as texts:
            found = {}
            try:
                compiled = jax.jit(program.function).lower(*program.arguments).compile()
                found = _tpu_resources(compiled) if target.platform == "tpu" else {}
            except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as error:
                # a compiler's answer
                row = dataclasses.replace(row, answer=f"{type(error).__name__}: {error}", cost=None)
        if target.platform == "cuda":
            found = _gpu_resources(texts[0])
        yield dataclasses.replace(row, **found)


def table(rows: list[Row]) -> rich.table.Table:
    """One line per kernel and target."""
    title = "\n".join(["bfloat16", *(f"{family}: {sizes}" for family, sizes in SIZES.items())])
    found = rich.table.Table(title=title, title_justify="left")
    for name in ("kernel", "target"):
        found.add_column(name, no_wrap=True)
    found.add_column("compiler", overflow="fold")
    for name in ("VMEM / shared", "registers", "spilled", "GFLOP", "MB moved", "ms at peak"):
        found.add_column(name, justify="right")
    for row in rows:
        cost = row.cost
        found.add_row(
            row.kernel,
            row.target,
            _shorten(row.answer),
            "" if row.memory is None else f"{row.memory / 1024:,.0f} KiB",
            "" if row.registers is None else str(row.registers),
            "" if row.spilled is None else f"{row.spilled} B",
            f"{cost.flops / 1e9:,.1f}" if cost else "",
            f"{cost.bytes_accessed / 1e6:,.0f}" if cost else "",
            f"{row.milliseconds:.3f}" if cost else "",
        )
    return found


def _installed(package: str) -> bool:
    try:
        return bool(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return False


def _shorten(text: str, most: int = 300) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 1] + "…"


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
def _captured() -> Iterator[list[str]]:
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


if __name__ == "__main__":
    app.run(main)
