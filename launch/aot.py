"""Compiles every kernel that runs call for accelerators that are not here, and prints what the
compilers say.

python -m launch.aot kernels                                    # all kernels for every target
python -m launch.aot kernels --targets=v5e,h100 --json=runs/aot.json

Needs the compilers: pip install -e .[aot]. The kernels are read from traced programs
(``planner.kernel_programs``). Each target has a process of its own, because the GPU compiler keeps
the first target it was given. The time is a lower bound that follows from the bytes of a kernel's
arguments and results, and on TPU from its operations (``Kernel.flops``), and the device's peak
rates; it is not measured. "resident" is how many thread blocks a multiprocessor of a GPU holds at a
time.
"""

from __future__ import annotations

from collections.abc import Sequence

from absl import flags

from benchmarks.results import save
from launch import command
from launch.command import console
from planner import aot
from planner.targets import TARGETS

FLAGS = flags.FLAGS
flags.DEFINE_list("targets", list(TARGETS), f"Of {', '.join(TARGETS)}.")
flags.DEFINE_multi_string(
    "kernels_of",
    list(aot.WORKLOAD_NAMES),
    f"Whose kernels: {'; '.join(aot.WORKLOAD_NAMES)}. May be given several times.",
)
flags.DEFINE_string(
    "worker", None, "Compile for this target in this process and print rows as JSON."
)


def main(argv: Sequence[str]) -> None:
    if unknown := [name for name in FLAGS.kernels_of if name not in aot.WORKLOAD_NAMES]:
        command.refuse(f"--kernels_of={unknown[0]} must be one of {'; '.join(aot.WORKLOAD_NAMES)}")
    if FLAGS.worker:
        aot.work(TARGETS[FLAGS.worker], FLAGS.kernels_of)
        return
    if argv[1:] != ["kernels"]:
        command.refuse("say what to compile: python -m launch.aot kernels")
    if unknown := [name for name in FLAGS.targets if name not in TARGETS]:
        command.refuse(f"--targets={','.join(unknown)} must be of {', '.join(TARGETS)}")
    rows = []
    for name in FLAGS.targets:
        console().print(f"{name}: tracing and compiling", style="dim")
        rows += aot.in_own_process(TARGETS[name], FLAGS.kernels_of)
        save(aot.report(rows))
    console().print(aot.table(rows))
    console().print(aot.summary(rows))


if __name__ == "__main__":
    command.run(main, arguments=True)
