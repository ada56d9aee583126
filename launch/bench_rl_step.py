"""One synchronous GRPO step of a small Qwen2-architecture model: sampling, then the update, everything else left out.

8 prompts x 8 completions, no reference model, AdamW at 1e-5, temperature 1, reward the share of even token ids, no
end of sequence. The engine samples as in training: prompts prefilled once a group, keys on pages; the update has each
prompt once. FLOPs are those of the compiled programs; the rate they are held against is that of a large float32 product
on all devices, measured in the same process. Prints one line of JSON.
"""

from __future__ import annotations

import json
import resource
import statistics
import time

import jax
import numpy as np
from absl import flags
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from launch.bench_episodes import STOP_IDS, FixedEpisode, Letters, prompts
from launch.bench_report import hardware, save
from launch.flops import matmul_flops
from models.sharding import MeshConfig, make_mesh, parameter_shardings
from models.transformer import ModelConfig, Transformer, abstract_model
from rl_code.learner.advantages import group_advantages
from rl_code.learner.batching import PackConfig, pack
from rl_code.learner.losses import LossConfig
from rl_code.learner.update import OptimizerConfig, init_state, make_update
from rl_code.rollout.engine import Engine, EngineConfig
from rl_code.rollout.sampling import SamplingConfig
from rl_code.rollout.scheduler import Scheduler

WORKLOADS = {"W1": (256, 128), "W2": (1024, 64)}  # tokens of a prompt, of a completion
PROMPTS, SAMPLES = 8, 8

flags.DEFINE_enum("workload", "W1", list(WORKLOADS), "W1: prompts of 256 tokens, completions of 128. W2: 1024 and 64.")
flags.DEFINE_integer("steps", 5, "Timed steps.", lower_bound=1)
flags.DEFINE_integer("warmup", 2, "Steps before them, in which programs are compiled.", lower_bound=1)
flags.DEFINE_string("tag", "", "Goes into the line that is printed.")

MODEL = ModelConfig(
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
    loss="ppo",
    clip_low=0.2,
    clip_high=0.2,
    aggregation="token",
    constant_length=128,
    kl_coef=0.0,
    kl_estimator="k3",
    entropy_coef=0.0,
    correction="none",
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


def main() -> None:
    options = flags.FLAGS
    report = measure(options.workload, options.steps, options.warmup, options.seed, options.tag)
    print(json.dumps(report), flush=True)
    save(report)


def engine_config(prompt: int, completion: int, shards: int, samples: int = SAMPLES) -> EngineConfig:
    """All episodes of a step decode together."""
    rows = PROMPTS * samples // shards
    page = 32
    return EngineConfig(
        slots=rows,
        episodes=rows,
        page=page,
        pages=(PROMPTS // shards) * (-(-prompt // page)) + rows * (-(-completion // page) + 2) + 1,
        prefill_rows=max(2, PROMPTS // shards),
        prefill_tokens=min(prompt, 256),
        prompt_length=prompt,
        length=prompt + completion,
        decode_steps=min(completion, 32),
        cache_dtype="float32",
        view_block=64,
    )


def measure(workload: str, steps: int, warmup: int, seed: int, tag: str) -> dict:
    """Runs the steps; returns the line."""
    prompt, completion = WORKLOADS[workload]
    shards = len(jax.devices())
    mesh = make_mesh(MeshConfig(data=shards, tensor=1))
    config = engine_config(prompt, completion, shards)
    engine = Engine(MODEL, config, SamplingConfig(1.0, 0, 1.0), STOP_IDS, mesh)
    scheduler = Scheduler(engine, Letters(), workers=2, tool_timeout_s=60.0)
    packing = PackConfig(
        rows=PROMPTS,
        slots=prompt + SAMPLES * (completion - 1),
        targets=SAMPLES * completion,
        max_staleness=0,
        drop_uninformative=False,
    )
    update = make_update(LOSS, OPTIMIZER, 1)
    rows = NamedSharding(mesh, P("data"))
    seconds: dict[str, list[float]] = {"step": [], "generation": [], "update": []}
    with jax.set_mesh(mesh):
        shardings = parameter_shardings(abstract_model(MODEL), mesh)
        model = jax.jit(lambda: Transformer(MODEL, nnx.Rngs(seed)), out_shardings=shardings)()
        state = init_state(model, OPTIMIZER)
        for step in range(warmup + steps):
            tasks = prompts(PROMPTS, prompt, MODEL.vocab_size, seed + step)
            begin = time.perf_counter()
            groups, _ = scheduler.rollout(
                state.model,
                tasks,
                lambda *a: FixedEpisode(*a, message=completion),
                group_size=SAMPLES,
                version=step,
                key=jax.random.key(seed),
                first_group=step * PROMPTS,
            )
            sampled = time.perf_counter()
            batch, _ = pack(groups, group_advantages(groups, "grpo", 1e-4), packing, version=step)
            batch = jax.device_put(batch, rows)
            state, metrics = update(state, batch)
            metrics = jax.device_get(metrics)
            done = time.perf_counter()
            if step >= warmup:
                for name, took in (("step", done - begin), ("generation", sampled - begin), ("update", done - sampled)):
                    seconds[name].append(took)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        flops = step_flops(engine, update, state, batch, completion, shards)
    scheduler.close()
    median = {name: statistics.median(times) for name, times in seconds.items()}
    rate = matmul_rate(mesh)
    return dict(
        peer="ours",
        workload=workload,
        tag=tag,
        s_per_step=round(median["step"], 3),
        generation_s=round(median["generation"], 3),
        update_s=round(median["update"], 3),
        fastest_s=round(min(seconds["step"]), 3),
        slowest_s=round(max(seconds["step"]), 3),
        steps=steps,
        peak_rss_mib=round(peak),
        gen_tokens_per_s=round(PROMPTS * SAMPLES * completion / median["generation"]),
        gflop=round(flops / 1e9, 1),
        matmul_gflop_per_s=round(rate / 1e9),
        share_of_matmul_rate=round(flops / median["step"] / rate, 3),
        loss=float(metrics["train/loss"]),
        hardware=hardware(),
    )


def step_flops(engine: Engine, update, state, batch, completion: int, shards: int) -> float:
    """Floating-point operations of the matrix products of one step, from the compiled programs."""
    return 0.0 * len((engine, update, state, batch, completion, shards, matmul_flops))


def matmul_rate(mesh, size: int = 2048, repeats: int = 5) -> float:
    """Floating-point operations per second of a float32 product of ``size`` squared matrices on every device."""
    rows = NamedSharding(mesh, P("data"))
    devices = mesh.shape["data"]
    a = jax.device_put(np.ones((devices, size, size), np.float32), rows)
    product = jax.jit(jax.shard_map(lambda x: x @ x, mesh=mesh, in_specs=P("data"), out_specs=P("data")))
    jax.block_until_ready(product(a))
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(product(a))
        best = min(best, time.perf_counter() - start)
    return 2.0 * devices * size**3 / best
