"""The benches as ``launch.bench`` starts them, with two narrow layers of the preset "tiny" and small
products.

Layers are one loop, whose body is compiled once. Two show that its operations are counted for each
layer; further ones find nothing more and take most of the time of a run. Of the methods of attention
two are checked before all are timed: the plainest, and the one with every kernel.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess

from benchmarks import correctness, model
from launch import bench, command
from models.families import PRESETS
from tests import programs

CHECKED = ("dense", "nsa")
TWO_LAYERS = dataclasses.replace(PRESETS["tiny"], num_layers=2, embed_dim=64, mlp_dim=128)


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A bench on the CPU, to its end.

    The allocator's settings are there already, so that the program does not start itself again:
    ``test_grouped`` has a bench that does.
    """
    environment = os.environ | {"GLIBC_TUNABLES": ""}
    return programs.run(
        "tests.benchmarks.small_bench", name, "--device=cpu", *arguments, env=environment
    )


if __name__ == "__main__":
    methods = correctness.methods
    correctness.methods = lambda tokens: {name: methods(tokens)[name] for name in CHECKED}
    PRESETS["tiny"] = TWO_LAYERS
    model.matmul_rate = functools.partial(model.matmul_rate, size=128)
    command.run(bench.main, arguments=True)
