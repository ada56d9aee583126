"""Compiles the kernels or the programs of a run for accelerators that are not here, and prints what
the compilers say.

python -m launch.aot kernels                                    # all kernels for every target
python -m launch.aot kernels --targets=v5e,h100 --json=runs/aot.json
python -m launch.aot launches --targets=h100 --model=qwen3-8b   # what whole programs start and move
python -m launch.aot launches --targets=h100 --config=configs/smollm2_mbpp.py --programs=update

Needs the compilers: pip install -e .[aot]. Each target has a process of its own, because the GPU
compiler keeps the first target it was given.

kernels: those that runs call, read from traced programs (``planner.kernel_programs``). The time is
a lower bound that follows from the bytes of a kernel's arguments and results, and on TPU from its
operations (``Kernel.flops``), and the device's peak rates; it is not measured. "resident" is how
many thread blocks a multiprocessor of a GPU holds at a time.

launches: how often a step of decoding and an update start something on a GPU, which of it copies
and which of that is done again in every step, what is moved, and the least times that follow
(``planner.started``). The sizes are those of the config, or --rows rows of --context tokens that
decode together and --train_rows that are trained, in bfloat16, of the shape --model.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from benchmarks.results import save
from launch import command
from launch.command import console
from models.families import PRESETS
from models.model_config import ModelConfig
from models.sharding import MeshConfig
from planner import aot, arithmetic, compiled, started
from planner.targets import INSTALL, TARGETS, is_installed
from planner.workload import Workload
from rl_code.config import read_config
from rl_code.run.config import RunConfig

ROOT = Path(__file__).resolve().parents[1]
# How a worker's row begins, and how many operations of a program are shown.
_ROW, _SHOWN = "started: ", 12
WHAT = ("kernels", "launches")

FLAGS = flags.FLAGS


def define_flags() -> None:
    """Flags of this command alone: other modules have some of the same name."""
    flags.DEFINE_list("targets", list(TARGETS), f"Of {', '.join(TARGETS)}.")
    flags.DEFINE_multi_string(
        "kernels_of",
        list(aot.WORKLOAD_NAMES),
        f"Whose kernels: {'; '.join(aot.WORKLOAD_NAMES)}. May be given several times.",
    )
    flags.DEFINE_string(
        "worker", None, "Compile for this target in this process and print rows as JSON."
    )
    flags.DEFINE_string("config", None, "Whose launches: a config file, <file>[:<argument>].")
    flags.DEFINE_string(
        "model",
        None,
        f"Whose launches, or the shape in place of the config's: {', '.join(PRESETS)}.",
    )
    flags.DEFINE_list("programs", ["decode", "update"], f"Of {', '.join(started.PROGRAMS)}.")
    flags.DEFINE_integer("rows", 64, "Rows that decode together, of launches with --model.", 2)
    flags.DEFINE_integer("context", 4096, "Tokens of a row, of launches with --model.", 128)
    flags.DEFINE_integer(
        "train_rows", 4, "Rows of an update, a micro-batch each, of launches with --model.", 1
    )
    flags.DEFINE_integer("layers", None, "Layers, in place of the shape's, of launches.", 1)


def main(argv: Sequence[str]) -> None:
    if argv[1:] not in ([word] for word in WHAT) and not (FLAGS.worker and not argv[1:]):
        command.refuse("say what to compile: python -m launch.aot kernels, or launches")
    for flag, known in (
        ("kernels_of", aot.WORKLOAD_NAMES),
        ("targets", tuple(TARGETS)),
        ("programs", started.PROGRAMS),
    ):
        given: list[str] = FLAGS[flag].value or []
        if unknown := [name for name in given if name not in known]:
            command.refuse(f"--{flag}={unknown[0]} must be one of {'; '.join(known)}")
    if argv[1:] == ["launches"]:
        show_launches()
    elif FLAGS.worker:
        aot.work(TARGETS[FLAGS.worker], FLAGS.kernels_of)
    else:
        show_kernels()


def show_kernels() -> None:
    """Compiles the kernels for the targets and prints the tables."""
    rows = []
    for name in FLAGS.targets:
        console().print(f"{name}: tracing and compiling", style="dim")
        rows += aot.in_own_process(TARGETS[name], FLAGS.kernels_of)
        save(aot.report(rows))
    console().print(aot.table(rows))
    console().print(aot.summary(rows))


def show_launches() -> None:
    """Compiles the programs for the targets and prints the tables."""
    if FLAGS.model is not None and FLAGS.model not in PRESETS:
        command.refuse(f"--model={FLAGS.model} must be one of {', '.join(PRESETS)}")
    if FLAGS.model is None and FLAGS.config is None:
        command.refuse("launches needs --model=<preset> or --config=<file>")
    config, model = of_flags()
    if FLAGS.worker:
        for row in started.rows(TARGETS[FLAGS.worker], config, model, FLAGS.programs):
            print(_ROW + json.dumps(started.to_json(row)), flush=True)
        return
    if not FLAGS["targets"].present:
        command.refuse("launches needs --targets, for instance --targets=h100")
    for name in FLAGS.targets:
        if TARGETS[name].platform != "cuda":
            command.refuse(f"--targets={name}: only a GPU's programs start kernels one by one")
        if missing := [x for x in TARGETS[name].packages if not is_installed(x)]:
            command.refuse(f"--targets={name}: {', '.join(missing)} not installed: {INSTALL}")
    rows = [row for name in FLAGS.targets for row in launches_apart(name)]
    for row in rows:
        console().print(started.source_table(row, _SHOWN))
    console().print(started.table(rows))
    save({"rows": [started.to_json(row) for row in rows]})


def of_flags() -> tuple[RunConfig, ModelConfig]:
    """The config and the model whose programs are compiled."""
    if FLAGS.config is not None:
        path, _, argument = command.config_file(FLAGS.config).partition(":")
        config = read_config.build(RunConfig, command.config_of_file(Path(path), argument))
        mesh = dataclasses.replace(config.mesh, data=config.mesh.data or 1)
        config = dataclasses.replace(config, mesh=mesh)
        shape = PRESETS[FLAGS.model] if FLAGS.model else config.model.shape()
        if shape is None:
            command.refuse(f"--config={FLAGS.config}: its weights are not read; give --model too")
        model = dataclasses.replace(
            shape,
            dtype=config.model.dtype,
            remat=config.model.remat,
            attention=config.model.methods() or shape.attention,
        )
    else:
        shape = PRESETS[FLAGS.model]
        model = dataclasses.replace(shape, dtype="bfloat16", param_dtype="float32", remat=True)
        tokens = FLAGS.train_rows * FLAGS.context
        job = Workload(FLAGS.model, model, TARGETS["h100"], tokens, FLAGS.context, FLAGS.rows)
        config = compiled.settings(job, arithmetic.learner(job, MeshConfig(data=1, tensor=1)))
    if FLAGS.layers:
        if FLAGS.layers % len(model.attention):
            command.refuse(
                f"--layers={FLAGS.layers} must be a multiple of the {len(model.attention)} kinds "
                "of layers"
            )
        model = dataclasses.replace(model, num_layers=FLAGS.layers)
    return config, model


def launches_apart(target: str) -> list[started.Row]:
    """The rows of a target, from a process of its own; ends the command where it fails."""
    console().print(f"{target}: compiling {', '.join(FLAGS.programs)}", style="dim")
    done = subprocess.run(
        [sys.executable, "-m", "launch.aot", *sys.argv[1:], f"--worker={target}"],
        env=os.environ | TARGETS[target].environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        sys.exit(f"{target}: the compiler's process ended with code {done.returncode}: {last}")
    lines = done.stdout.splitlines()
    words = [line.removeprefix(_ROW) for line in lines if line.startswith(_ROW)]
    return [started.from_json(json.loads(word)) for word in words]


if __name__ == "__main__":
    define_flags()
    command.run(main, arguments=True)
