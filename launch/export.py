"""Writes the model of a run as a Hugging Face folder, which transformers, vLLM and others load.

    python -m launch.export --workdir=runs/first --out=exports/first [--step=120] [--dtype=bfloat16]

The adapters of a run that trained them (``model.lora``) are merged into the weights. With --adapter
they are written alone, in PEFT's format, and adapter_config.json names the model that they belong
to: the run's ``model.weights``, or --base.

Weights are stored as they are trained, in float32; --dtype=bfloat16 halves them. --dtype=float16
does too, and is refused where a weight is too large for it. The folder gets config.json,
safetensors (with an index where there are several), the tokenizer, its special tokens and chat
template, and generation_config.json. The latter names every token that ended a turn in training,
of the run and of the weights that it began with, and no sampling settings of theirs.

The newest checkpoint is taken unless --step names another, or the best by --step=best. The run may
still be going on.

A model that one host cannot hold is exported by several, on shared storage: each starts the same
command with --coordinator=<host>:<port> --processes=<n> --process=<i> (under SLURM or on a TPU pod
--distributed alone) and --tensor=<devices that share each layer>. A host then holds its part of the
model and one file's tensors at a time.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Literal

import jax
from absl import flags

from launch import command
from launch.workdir import WORKDIR
from models import huggingface, huggingface_config, json_files, peft
from models.sharding import MeshConfig, make_mesh
from rl_code.checkpoint import checkpoint
from rl_code.checkpoint.checkpoint import CheckpointError
from rl_code.config.read_config import ConfigError
from rl_code.run import origin


def export(
    workdir: Path,
    out: Path,
    *,
    step: int | Literal["best"] | None = None,
    dtype: str = "float32",
    max_file_bytes: int = 5 * 10**9,
    tensor: int = 1,
    adapter: bool = False,
    base: str | None = None,
) -> int:
    """Writes a checkpoint of a run to ``out`` and returns its step.

    step: of the checkpoint, "best" for the one with the highest score, None for the newest.
    dtype: of the stored weights. tensor: devices that share each layer. adapter: writes the
    adapters alone. base: the model that they belong to; None for the run's ``model.weights``.

    Raises:
      ConfigError: the workdir holds no run, ``out`` holds a model already, the model attends in
        ways that Hugging Face has no words for, or it has no adapters to write.
      CheckpointError: the checkpoint cannot be read.
      ValueError: the checkpoint does not fit the model that the run keeps beside it, or ``dtype``
        cannot hold its numbers.
    """
    kept = origin.kept_by(workdir)
    if base is not None and not adapter:
        raise ConfigError(f"--base={base} is for --adapter; leave one out, or give both")
    if list(out.glob("*.safetensors*")):
        raise ConfigError(f"--out={out} already holds a model; name another folder")
    lora = origin.kept_adapters(kept)
    if adapter and lora is None:
        raise ConfigError(
            f"--adapter: {workdir} trained no adapters (config.model.lora); leave the flag out"
        )
    config = dataclasses.replace(huggingface_config.read_config(kept), lora=lora)
    content = json_files.read_json(kept / "config.json")
    if origin.ATTENTION in content:
        raise ConfigError(
            f"the model attends by {content[origin.ATTENTION]}, for which Hugging Face has no "
            "words; only dense attention can be exported"
        )
    mesh = make_mesh(MeshConfig(data=0, tensor=tensor))
    model, step = origin.load_checkpoint(workdir, config, mesh, step)
    if adapter:
        if base is None:
            base = checkpoint.record_of(workdir, step).config["model"]["weights"] or None
        peft.save(out, model, base=base, dtype=dtype)
        return step
    if lora is not None:
        model = origin.merge(model, mesh)
    special = huggingface_config.special_ids(content)
    huggingface.save(
        out,
        model,
        max_positions=content["max_position_embeddings"],
        dtype=dtype,
        extra=special,
        max_file_bytes=max_file_bytes,
    )
    if jax.process_index() == 0:
        for path in kept.iterdir():
            if path.name not in ("config.json", huggingface_config.GENERATION_FILE):
                shutil.copyfile(path, out / path.name)
        # Tokens alone: engines then stop where training did, and sample as their users say.
        json_files.write_json(out / huggingface_config.GENERATION_FILE, special)
    return step


def define_flags() -> None:
    """Defines the flags of this command; other commands have flags of the same names."""
    flags.DEFINE_string("out", None, "Folder that the model is written to.")
    help_step = "Checkpoint to export instead of the newest: its step, or best (checkpoint.best)."
    flags.DEFINE_string("step", None, help_step)
    dtypes = ["float32", "bfloat16", "float16"]
    flags.DEFINE_enum("dtype", "float32", dtypes, "Of the stored weights.")
    flags.DEFINE_bool("adapter", False, "Write the adapters alone, in PEFT's format.")
    flags.DEFINE_string("base", None, "With --adapter, the model that PEFT is to load for them.")
    flags.DEFINE_float("file_gb", 5.0, "Largest size of one file of weights.", 1e-6)
    flags.DEFINE_integer("tensor", 1, "Devices that share each layer.", 1)
    flags.DEFINE_string("coordinator", None, "host:port of the first process.")
    flags.DEFINE_integer("processes", None, "Processes, with --coordinator.")
    flags.DEFINE_integer("process", None, "Number of this process, from 0.")
    flags.DEFINE_bool("distributed", False, "Several processes, known to the cluster.")


def _step(text: str | None) -> int | Literal["best"] | None:
    """Value of --step. Raises ConfigError for anything but a number, newest or best."""
    if text in (None, "newest"):
        return None
    if text == "best" or text.isdecimal():
        return "best" if text == "best" else int(text)
    raise ConfigError(f"--step={text}: expected the step of a checkpoint, newest or best")


def main(_: list[str]) -> None:
    given = flags.FLAGS
    if not WORKDIR.value or not given.out:
        command.refuse("--workdir=<folder of a run> and --out=<folder to write> are both needed")
    if given.coordinator or given.distributed:
        jax.distributed.initialize(given.coordinator, given.processes, given.process)
    try:
        step = export(
            Path(WORKDIR.value),
            Path(given.out),
            step=_step(given.step),
            dtype=given.dtype,
            max_file_bytes=int(given.file_gb * 1e9),
            tensor=given.tensor,
            adapter=given.adapter,
            base=given.base,
        )
    except (ConfigError, CheckpointError, ValueError) as error:
        command.refuse(str(error))
    if jax.process_index() == 0:
        print(f"step {step} of {WORKDIR.value} is in {given.out} ({given.dtype})")


if __name__ == "__main__":
    define_flags()
    command.run(main)
