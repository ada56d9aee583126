"""Shared parts of the benchmarks of the whole system: the model, the settings that it is sampled
and trained with, and measured speeds of the machine.
"""

from __future__ import annotations

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.episodes import STOP_IDS, Letters
from models.families import PRESETS
from models.model_config import ModelConfig
from models.sharding import MeshConfig, make_mesh, parameter_shardings
from models.transformer import Transformer, abstract_model
from rl_code.config.named import Named
from rl_code.learner.objective import LossConfig
from rl_code.learner.update import OptimizerConfig
from rl_code.rollout.engine import Engine
from rl_code.rollout.engine_config import EngineConfig
from rl_code.rollout.sampling import SamplingConfig
from rl_code.rollout.scheduler import Scheduler

SMALL = "small"
flags.DEFINE_enum(
    "model",
    SMALL,
    [SMALL, *PRESETS],
    "Architecture, with random weights; of rl_step, async, overlap and engine.",
)
flags.DEFINE_string(
    "dtype",
    "float32",
    "Of computation, sampling weights and keys; of rl_step, async, overlap and engine.",
)
flags.DEFINE_integer(
    "steps", 5, "Timed training steps; of rl_step, async and overlap.", lower_bound=1
)
flags.DEFINE_integer(
    "warmup", 2, "Steps before them, in which programs are compiled.", lower_bound=1
)

# A Qwen2 architecture of 5.6 M parameters.
_SMALL = ModelConfig(
    vocab_size=4096,
    embed_dim=256,
    mlp_dim=768,
    num_layers=6,
    num_heads=8,
    num_kv_heads=2,
    head_dim=32,
    rope_theta=1e6,
    norm_eps=1e-6,
    tied_embeddings=True,
    qkv_bias=True,
)
LOSS = LossConfig(
    policy=Named("ppo", {"clip_low": 0.2, "clip_high": 0.2}),
    aggregation="token",
    constant_length=128,
    kl_coef=0.0,
    kl_estimator="k3",
    entropy_coef=0.0,
    correction="decoupled",
    correction_low=0.0,
    correction_high=2.0,
    temperature=1.0,
)
OPTIMIZER = OptimizerConfig(
    learning_rate=1e-5,
    muon_learning_rate=None,
    schedule="constant",
    warmup_steps=0,
    total_steps=1,
    b1=0.9,
    b2=0.999,
    eps=1e-8,
    weight_decay=0.0,
    clip_norm=1.0,
)


def model_config() -> ModelConfig:
    """The architecture that the flags name. Parameters are float32, computation is in --dtype."""
    chosen = _SMALL if flags.FLAGS.model == SMALL else PRESETS[flags.FLAGS.model]
    return dataclasses.replace(chosen, dtype=flags.FLAGS.dtype)


def all_devices() -> Mesh:
    """A mesh of all devices, with data parallelism only."""
    return make_mesh(MeshConfig(data=len(jax.devices()), tensor=1))


def random_model(config: ModelConfig, mesh: Mesh, seed: int) -> Transformer:
    """A randomly initialised model, laid out over the mesh."""
    shardings = parameter_shardings(abstract_model(config), mesh)
    return jax.jit(lambda: Transformer(config, nnx.Rngs(seed)), out_shardings=shardings)()


def engine_config(
    rows: int, groups: int, prompt: int, after: int, shards: int, dtype: str
) -> EngineConfig:
    """Shapes of an engine in which all episodes decode at the same time.

    rows: episodes of all shards. groups: different prompts of all shards. prompt: tokens of a
    prompt. after: tokens of an episode behind its prompt. shards: devices with rows of their own.
    """
    page = 32
    rows = -(-rows // shards)
    groups = -(-groups // shards)
    return EngineConfig(
        slots=rows,
        episodes=rows,
        page=page,
        pages=groups * (-(-prompt // page) + 1)
        + rows * (-(-after // page) + 3)
        + -(-(prompt + after) // page)
        + 1,
        prefill_rows=min(max(2, groups), 16),
        prefill_tokens=min(prompt, 256),
        prompt_length=prompt,
        length=prompt + after,
        decode_steps=min(after, 32),
        cache_dtype=dtype,
        view_block=64,
        result_rows=max(2, rows),
        result_tokens=32,
    )


def make_scheduler(
    config: ModelConfig, engine: EngineConfig, mesh: Mesh, workers: int = 2
) -> Scheduler:
    """A scheduler that samples at temperature 1. Messages end by their length only."""
    sampled = dataclasses.replace(config, param_dtype=config.dtype)
    made = Engine(sampled, engine, SamplingConfig(1.0, 0, 1.0), STOP_IDS, mesh)
    return Scheduler(made, Letters(), workers=workers, worker_deadline_s=120.0)


def matmul_rate(mesh: Mesh, dtype: str, size: int = 2048) -> float:
    """Floating-point operations per second of all devices together.

    Every device multiplies two square matrices of ``size`` rows, all at the same time.
    """
    a = jax.device_put(np.ones((mesh.size, size, size), dtype), NamedSharding(mesh, P("data")))
    product = jax.jit(
        jax.shard_map(lambda x: x @ x, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    )
    return 2.0 * mesh.size * size**3 / _fastest(product, a)


def memory_rate(mesh: Mesh, mib: int = 256) -> float:
    """Bytes per second that all devices together read from memory, ``mib`` MiB each."""
    a = jax.device_put(
        np.ones((mesh.size, mib * 2**18), np.float32), NamedSharding(mesh, P("data"))
    )
    total = jax.jit(
        jax.shard_map(
            lambda x: jnp.sum(x, axis=1), mesh=mesh, in_specs=P("data"), out_specs=P("data")
        )
    )
    return a.nbytes / _fastest(total, a)


def _fastest(function, argument, repeats: int = 7) -> float:
    """Seconds of the fastest of several calls, after one that is not timed."""
    jax.block_until_ready(function(argument))
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function(argument))
        best = min(best, time.perf_counter() - start)
    return best
