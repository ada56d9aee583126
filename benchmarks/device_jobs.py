"""Jobs of ``launch.on_device``: all that is asked of a device when one is there, in the order of
importance.

A job writes each line as soon as it has it (``budgets.Lines``). Its sizes are flags of the benches,
which ``JOBS`` gives, smaller ones for a rehearsal on CPU.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import rich.console
from absl import flags

from benchmarks import attention, correctness, engine, grouped, publishing, rl_step, training
from benchmarks import model as bench_model
from benchmarks.asynchrony import arrange
from benchmarks.budgets import Lines
from benchmarks.results import hardware, is_too_large
from models.sharding import MeshConfig, make_mesh
from models.transformer import abstract_model
from planner import started

ROOT = Path(__file__).resolve().parents[1]


class CannotRun(Exception):
    """A job lacks something here, in words."""


@dataclasses.dataclass(frozen=True)
class DeviceJob:
    """A job, and the sizes that it has."""

    name: str
    # What it answers, and what is hoped for.
    question: str
    run: Callable[[Lines], None]
    # Its share of the time, in proportion to those still to come, and the least seconds.
    weight: float
    least_s: float
    # Flags of the benches on a device, and those that a rehearsal changes.
    given: Mapping[str, str] = dataclasses.field(default_factory=dict)
    rehearsal: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # Added to XLA_FLAGS.
    xla: str = ""

    def flags(self, rehearse: bool) -> list[str]:
        """Its sizes as words of a command line."""
        found = {**self.given, **(self.rehearsal if rehearse else {})}
        return [f"--{name}={value}" for name, value in found.items()]


def device(line: Lines) -> None:
    """Name and rates of this machine, which shares are of."""
    here = jax.devices()[0]
    names = ("jax", "jaxlib", "jax-cuda13-plugin")
    line(
        hardware=hardware(),
        backend=jax.default_backend(),
        kind=here.device_kind,
        memory_gb=round(((here.memory_stats() or {}).get("bytes_limit", 0)) / 1e9, 1),
        versions={name: _version(name) for name in names},
        platform=here.client.platform_version.replace("\n", " "),
    )
    mesh = bench_model.all_devices()
    line(memory_gb_per_s=round(bench_model.memory_rate(mesh, _mib()) / 1e9, 1))
    line(product_tflop_per_s=round(_product_rate() / 1e12, 3))


def checks(line: Lines) -> None:
    """Every kernel against float64; those of grouped products against float32."""
    options = flags.FLAGS
    dtype = _dtype()
    error = grouped.errors(jnp.dtype(dtype))
    for name, size in error.items():
        line(check=f"grouped, {name}", error=float(size), right=bool(size <= grouped.BOUND))
    wrong = 0
    for head_dim in (int(x) for x in options.head_dims):
        sizes = correctness.Sizes(options.check_length, options.heads, options.kv_heads, head_dim)
        for found in itertools.islice(correctness.check_all(dtype, sizes), options.checks):
            wrong += not found.right
            line(
                check=f"{found.check}, heads of {head_dim}",
                of=found.of,
                error=found.error,
                bound=found.bound,
                right=bool(found.right),
            )
    line(wrong=wrong)


def sampling(line: Lines) -> None:
    """Decoding behind --prompt tokens: speed, launches, and what the host adds."""
    options = flags.FLAGS
    config = bench_model.model_config()
    rate = bench_model.memory_rate(bench_model.all_devices(), _mib())
    line(memory_gb_per_s=round(rate / 1e9, 1), xla_flags=os.environ.get("XLA_FLAGS", ""))
    for batch in map(int, options.batches):
        line(**_launches(config, batch, options))
        groups = max(1, batch // options.rows_of_group)
        found = engine.decode(config, batch, rate, options.prompt, groups)
        line(model=options.model, context=options.prompt, **found)


def train(line: Lines) -> None:
    """Updates of --model with AdamW."""
    options = flags.FLAGS
    sizes = training.Sizes(options.rows, options.prompt, options.completion)
    rate = _product_rate()
    line(model=options.model, context=sizes.context, rows=sizes.rows, product_tflop=rate / 1e12)
    given = (sizes, options.steps, options.warmup, options.seed, rate)
    for found in training.measure(bench_model.model_config(), *given):
        line(**found)


def grpo(line: Lines) -> None:
    """A whole GRPO step: sampling, then the update, seconds of each."""
    options = flags.FLAGS
    config = dataclasses.replace(bench_model.model_config(), remat=True)
    mesh = bench_model.all_devices()
    ours = rl_step.Ours(
        options.prompt,
        options.completion,
        mesh,
        options.seed,
        groups=options.rows,
        config=config,
        micro_batches=max(1, options.rows // mesh.size),
    )
    with jax.set_mesh(mesh):
        for step in range(options.warmup + options.steps):
            found = rl_step.timed(ours, step)
            line(
                model=options.model,
                trajectories=options.rows * rl_step.SAMPLES,
                warm=step >= options.warmup,
                **{name: round(found[name], 4) for name in rl_step.PARTS},
            )
    ours.close()


def one_ahead(line: Lines) -> None:
    """One step ahead against synchronous, where both halves share the device."""
    mesh = bench_model.all_devices()
    with tempfile.TemporaryDirectory(prefix="on_device_") as folder:
        found = arrange(Path(folder) / "shared", rich.console.Console(), mesh, mesh)
    line(model=flags.FLAGS.model, **found)


def attend(line: Lines) -> None:
    """The table of lengths, with keys that are alike as trained ones are, and random ones."""
    options = flags.FLAGS
    console = rich.console.Console()
    dtype = _dtype()
    one = make_mesh(MeshConfig(1, 1), jax.devices()[:1])
    with jax.set_mesh(one):
        for length in map(int, options.lengths):
            for alike in map(int, options.alikes):
                options.alike_keys = alike
                for row in attention.time_rows(length, options, 1, console):
                    line(keys="random" if alike == 1 else f"{alike} alike", **row)
            for row in attention.time_decoding(length, options, dtype, console):
                line(decoding=True, **row)


def weights(line: Lines) -> None:
    """Publishing, changes and loading."""
    config = bench_model.model_config()
    with tempfile.TemporaryDirectory(prefix="on_device_") as folder:
        for found in publishing.measure(config, Path(folder), flags.FLAGS.seed):
            line(model=flags.FLAGS.model, **found)


def evidence(line: Lines) -> None:
    """SmolLM2-135M on MBPP by GRPO, one seed after another; a line after each step."""
    options = flags.FLAGS
    needed = [ROOT / "weights" / "SmolLM2-135M-Instruct.Q4_1.gguf"] * (options.evidence != "tiny")
    if missing := [str(path) for path in needed if not path.exists()]:
        raise CannotRun(f"{', '.join(missing)} is missing: bash launch/get_smollm2.sh")
    config = "quickstart.py:smoke" if options.evidence == "tiny" else "smollm2_mbpp.py"
    for seed in range(options.seeds):
        folder = Path(options.out) / f"evidence_{seed}"
        command = (sys.executable, "-m", "launch.train", f"--config=configs/{config}")
        words = (f"--config.seed={seed}", f"--workdir={folder}")
        with (Path(options.out) / f"evidence_{seed}.log").open("wb") as log:
            child = subprocess.Popen((*command, *words), cwd=ROOT, stdout=log, stderr=log)
            known = 0
            while True:
                ended = child.poll() is not None
                rows = _metrics(folder)
                for row in rows[known:]:
                    line(seed=seed, **row)
                known = len(rows)
                if ended:
                    break
                time.sleep(0.5)
    if not known:
        raise CannotRun("no step was made: see the logs beside the results")


def _metrics(folder: Path) -> list[dict[str, Any]]:
    """Lines that a run has written of its steps."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    found = []
    for text in path.read_text().splitlines():
        try:
            found.append(json.loads(text))
        except ValueError:  # the line that is written now
            break
    return found


def _launches(config, batch: int, options) -> dict[str, Any]:
    """Launches, copies and bytes of a step of an engine's decode program here."""
    shapes = bench_model.engine_config(
        batch,
        max(1, batch // options.rows_of_group),
        options.prompt,
        options.completion,
        1,
        config.dtype,
    )
    mesh = make_mesh(MeshConfig(1, 1), jax.devices()[:1])
    scheduler = bench_model.make_scheduler(config, shapes, mesh)
    sampled = dataclasses.replace(config, param_dtype=config.dtype)
    program = scheduler.engine.tracers(abstract_model(sampled, mesh, whole=True))["decode"]()
    compiled = program.lower().compile()
    scheduler.close()
    sizes = (config.num_layers, shapes.decode_steps, shapes.pages)
    found = started.row(compiled, "decode", training.target_here(), *sizes)
    return dict(
        batch=batch,
        launches_a_step=found.launches,
        copies_a_step=found.copies,
        again_a_step=found.again,
        again_mb=found.again_bytes / 1e6,
        moved_gb=(found.read + found.written) / 1e9,
        temporary_gb=found.temporary / 1e9,
    )


def _dtype() -> str:
    """As attention is measured in."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def _mib() -> int:
    """Memory that is read to find its rate: much more than caches hold."""
    return 64 if jax.default_backend() == "cpu" else 1024


def _product_rate() -> float:
    """Operations a second of a large product."""
    size = 512 if jax.default_backend() == "cpu" else 8192
    return bench_model.matmul_rate(bench_model.all_devices(), _dtype(), size)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


_TINY = {"model": "tiny", "dtype": "float32"}
_SMALL_MODEL = {"model": "smollm2-135m", "dtype": "bfloat16", "repeats": "2"}
_MIDDLE = {"model": "qwen3-1.7b", "dtype": "bfloat16"}
_LARGE = {"model": "qwen3-8b", "dtype": "bfloat16", "repeats": "1", "completion": "128"}
_FEW_ROWS = {"batches": "4", "prompt": "64", "completion": "8", "repeats": "1"}
# completions fill whole pieces of 64 slots
_SHORT = {"rows": "2", "prompt": "64", "completion": "64", "steps": "1", "warmup": "1"}


def _decode_small(name: str, words: str, xla: str = "", weight: float = 4.0) -> DeviceJob:
    """Sampling of SmolLM2-135M with some flags of XLA."""
    given = {**_SMALL_MODEL, "batches": "64", "prompt": "1024", "completion": "128"}
    return DeviceJob(name, words, sampling, weight, 20.0, given, {**_TINY, **_FEW_ROWS}, xla)


JOBS = (
    DeviceJob("device", "What is this machine, and how fast is it?", device, 1.0, 30.0),
    DeviceJob(
        "checks",
        "Are the kernels right? Aim: every error within its bound.",
        checks,
        8.0,
        20.0,
        {"head_dims": "64,128"},
        {"head_dims": "16", "heads": "2", "kv_heads": "1", "check_length": "64", "checks": "3"},
    ),
    _decode_small(
        "sampling_135m", "Decoding 64 rows of SmolLM2-135M. Aim: at most 1 ms a step (was 2.7)."
    ),
    DeviceJob(
        "sampling_8b",
        "Decoding 64 rows of Qwen3-8B behind 4,096 tokens. Aim: 70 % of the bound of memory.",
        sampling,
        8.0,
        40.0,
        {**_LARGE, "batches": "64", "prompt": "4096"},
        {**_TINY, **_FEW_ROWS},
    ),
    DeviceJob(
        "sampling_8b_long",
        "Decoding 8 rows of Qwen3-8B behind 32,768 tokens.",
        sampling,
        6.0,
        40.0,
        {**_LARGE, "batches": "8", "prompt": "32768", "rows_of_group": "4"},
        {**_TINY, **_FEW_ROWS},
    ),
    DeviceJob(
        "training",
        "Updates of Qwen3-1.7B, 8 rows of 8,192 tokens. Aim: 45 % MFU, memory within 10 % of the "
        "planner's.",
        train,
        8.0,
        40.0,
        {**_MIDDLE, "rows": "8", "prompt": "2048", "completion": "768", "steps": "3"},
        {**_TINY, **_SHORT},
    ),
    DeviceJob(
        "grpo",
        "A GRPO step of Qwen3-1.7B, 16 x 8 trajectories of 2,048 + 1,024 tokens.",
        grpo,
        8.0,
        40.0,
        {**_MIDDLE, "rows": "16", "prompt": "2048", "completion": "1024", "steps": "2"}
        | {"warmup": "1"},
        {**_TINY, **_SHORT},
    ),
    DeviceJob(
        "attention",
        "Dense, NSA and others at 8k to 128k. Aims at 64k: NSA 2 x dense forward, 3 x with "
        "gradients, 4 x decoding; dense 0.95 of cuDNN.",
        attend,
        8.0,
        20.0,
        {"lengths": "65536,8192,32768,131072", "heads": "32", "kv_heads": "8", "head_dim": "128"}
        | {"contenders": "cudnn,dense,nsa", "alikes": "16,1"},
        {"lengths": "256", "heads": "2", "kv_heads": "1", "head_dim": "16", "contenders": "dense"}
        | {"repeats": "1", "decode_rows": "2"},
    ),
    DeviceJob(
        "weights",
        "Publishing, changes and loading of 1.7 B parameters: seconds.",
        weights,
        4.0,
        20.0,
        _MIDDLE,
        _TINY,
    ),
    _decode_small(
        "sampling_135m_no_buffers",
        "The same without command buffers.",
        "--xla_gpu_enable_command_buffer=",
        3.0,
    ),
    _decode_small(
        "sampling_135m_while",
        "The same with the loop itself as a command buffer.",
        "--xla_gpu_enable_command_buffer=+WHILE",
        3.0,
    ),
    DeviceJob(
        "one_ahead",
        "Qwen3-1.7B one step ahead against synchronous, both halves on one device.",
        one_ahead,
        6.0,
        60.0,
        {**_MIDDLE, "steps": "2", "warmup": "1", "repeats": "1"},
        {**_TINY, "steps": "1", "warmup": "1", "repeats": "1"},
    ),
    DeviceJob(
        "evidence",
        "SmolLM2-135M on MBPP, GRPO 40 steps, as many seeds as fit.",
        evidence,
        20.0,
        60.0,
        {"seeds": "3"},
        {"seeds": "1", "evidence": "tiny"},
    ),
)


def work(job: DeviceJob, line: Lines, *, rehearse: bool) -> int:
    """Runs a job in this process and returns its exit code.

    What the device lacks, memory or a package, is a line that says so.
    """
    backend = jax.default_backend()
    if backend == "cpu" and not rehearse:
        line(cannot="jax runs on cpu: pip install -e .[cuda], or --rehearse for small sizes")
        return 1
    flags.FLAGS.device = backend
    try:
        job.run(line)
    except (CannotRun, ImportError) as error:
        line(cannot=str(error))
        return 1
    except jax.errors.JaxRuntimeError as error:
        if not is_too_large(error):
            raise
        line(cannot=str(error).split("\n")[0][:300])
        return 1
    return 0
