"""Finds the block sizes of a kernel that are fastest on this device, and writes them to a file.

    python -m launch.tune flash --file=runs/tuning.json [--shape=1,8192,32,8,128]
    RL_CODE_TUNING=runs/tuning.json python -m launch.train ...     # uses them

The search starts from the sizes that the kernel chooses itself. One size after another is halved or
doubled, and the change is kept if it makes the forward and backward pass faster (for paged
attention, the forward pass). Sizes that the compiler refuses are left out. Every improvement is
written at once: a search that is stopped leaves the best sizes found so far. Entries of other
kernels stay in the file.
"""

from __future__ import annotations

from pathlib import Path

import jax
from absl import flags

from launch import command
from planner.tune import KERNELS, Shape, tune

FLAGS = flags.FLAGS
flags.DEFINE_string(
    "file", None, "Where the sizes go; RL_CODE_TUNING names it to those who use them."
)
flags.DEFINE_list(
    "shape",
    ["1", "8192", "32", "8", "128"],
    "Rows, tokens, query heads, key/value heads, head size.",
)
flags.DEFINE_integer(
    "alike", 8, "Consecutive queries that choose the same blocks, for selected.", lower_bound=1
)
flags.DEFINE_list(
    "matrices",
    ["128", "2048", "768"],
    "Experts, rows and columns of the matrix of each, for grouped; its input has as many rows as "
    "--shape has tokens in all.",
)
flags.DEFINE_integer("timings", 5, "Timed runs of each setting, of which the median counts.", 1)


def main(argv: list[str]) -> None:
    if len(argv) != 2 or argv[1] not in KERNELS:
        command.refuse(
            f"say which kernel to tune, one of {', '.join(KERNELS)}: python -m launch.tune flash "
            "--file=..."
        )
    if not FLAGS.file:
        command.refuse("--file=<file> is missing, for instance --file=runs/tuning.json")
    backend = jax.default_backend()
    if backend not in ("tpu", "gpu"):
        command.refuse(f"jax runs on {backend}, where no kernel does: tune on a TPU or a GPU")
    shape = Shape(
        *_sizes("shape", "five", "1,8192,32,8,128"),
        alike=FLAGS.alike,
        matrices=_sizes("matrices", "three", "128,2048,768"),
    )
    tune(KERNELS[argv[1]](shape, backend, False), Path(FLAGS.file), FLAGS.timings)


def _sizes(name: str, count: str, example: str) -> tuple[int, ...]:
    """The numbers of a flag, of which there must be as many as in the example."""
    given = FLAGS[name].value
    if len(given) != len(example.split(",")) or not all(x.isdigit() and int(x) for x in given):
        command.refuse(
            f"--{name}={','.join(given)} must be {count} positive numbers, as in --{name}={example}"
        )
    return tuple(map(int, given))


if __name__ == "__main__":
    command.run(main, arguments=True)
