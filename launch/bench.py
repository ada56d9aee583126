"""Costs of the parts: speed as ratios of contenders measured side by side in one run, and memory.

python -m launch.bench attention --device=cpu [--lengths=2048,4096 --heads=16 ...]
python -m launch.bench grouped --device=gpu [--pairs=65536 --experts=128 --matrix=2048,768]
python -m launch.bench agreement --folders=weights/a,weights/b
python -m launch.bench rl_step --workload=W1|W2 [--steps=5 --warmup=2 --tag=name --rival=hand]
python -m launch.bench async [--steps=5]
python -m launch.bench overlap [--workload=W1 --wait_s=1 --trace=runs/profile]
python -m launch.bench engine [--batches=1,8,64 --prompt=1024]
python -m launch.bench speculation [--batches=1,8,64 --drafts=4 --played=runs/quickstart]
python -m launch.bench record [--record_actors=100 --record_groups=10000 --delay_ms=1]
python -m launch.bench layers [--layer_mb=320 --opens=200 --at_once=32]
python -m launch.bench play [--threads=1,4,16 --episodes=128 --kill=0.05]
python -m launch.bench tools [--workspaces=1,32 --calls=20 --vocabulary=weights/a.gguf]
python -m launch.bench documents [--session_turns=20 --session_files=12 --file_tokens=256]
python -m launch.bench search [--sizes=10,40,160 --repositories=100]

Each takes --json=<file> for its numbers. The benches themselves are in benchmarks/.
"""

from __future__ import annotations

import os
import signal
import sys

import jax
from absl import flags, logging

from benchmarks import (
    agreement,
    asynchrony,
    attention,
    documents,
    engine,
    grouped,
    layers,
    overlap,
    play,
    record,
    rl_step,
    search,
    speculation,
    tools,
)
from launch import command
from launch.flags import use_virtual_devices
from models.sharding import MeshConfig

BENCHES = {
    "attention": attention.main,
    "grouped": grouped.main,
    "agreement": agreement.main,
    "rl_step": rl_step.main,
    "async": asynchrony.main,
    "overlap": overlap.main,
    "engine": engine.main,
    "speculation": speculation.main,
    "record": record.main,
    "layers": layers.main,
    "play": play.main,
    "tools": tools.main,
    "search": search.main,
    "documents": documents.main,
}
# Benches of a whole system, for which the CPU stands for a device per core.
ON_ALL_CORES = ("rl_step", "async", "overlap", "engine", "speculation")

# Settings with which the C library's allocator keeps large blocks of memory. By default it gives
# freed ones back to the system, and every step gets its memory anew, page by page.
_TUNABLES = ":".join(
    f"glibc.malloc.{name}"
    for name in (
        "arena_max=1",
        "hugetlb=1",
        "mmap_threshold=8589934592",
        "trim_threshold=8589934592",
        "top_pad=268435456",
    )
)

# What to do where jax does not find the device.
_HELP = {
    "gpu": ": it found no GPU. Does nvidia-smi list one? Then pip install -e .[cuda]",
    "tpu": ": it found no TPU. On a TPU machine, pip install -e .[tpu]",
}

flags.DEFINE_enum("device", "cpu", ["cpu", "gpu", "tpu"], "Where to run.")
flags.DEFINE_integer(
    "repeats",
    3,
    "Timed runs; of attention, grouped, engine, speculation and async.",
    lower_bound=1,
)
flags.DEFINE_integer("seed", 0, "Of weights and tokens; of all but attention and grouped.")


def main(argv: list[str]) -> None:
    if len(argv) != 2 or argv[1] not in BENCHES:
        command.refuse(
            f"expected one of {', '.join(BENCHES)} after launch.bench, found "
            f"{' '.join(argv[1:]) or 'nothing'}"
        )
    logging.set_verbosity(logging.WARNING)
    # arrays of other devices are not in this memory
    if flags.FLAGS.device == "cpu" and sys.platform == "linux":
        if "GLIBC_TUNABLES" not in os.environ:  # they are read when a process starts
            os.environ["GLIBC_TUNABLES"] = _TUNABLES
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    if flags.FLAGS.device == "cpu" and argv[1] in ON_ALL_CORES:
        use_virtual_devices(MeshConfig(data=os.cpu_count() or 1, tensor=1))
    if (device := flags.FLAGS.device) != (backend := jax.default_backend()):
        command.refuse(f"--device={device}, but jax runs on {backend}{_HELP.get(device, '')}")
    # an exception, so that what is on disk is removed
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    BENCHES[argv[1]]()


if __name__ == "__main__":
    command.run(main, arguments=True)
