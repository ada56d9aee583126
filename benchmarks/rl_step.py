"""Times a synchronous GRPO step of a small model with the Qwen2 architecture: sampling, then the
update, and nothing else.

A step has 8 prompts with 8 trajectories each. There is no reference model, and no token ends a
message. AdamW has the learning rate 1e-5, the temperature is 1, and the reward is the share of
tokens with an even id. The engine samples as in training: a prompt is prefilled once for its group,
and keys and values are in a paged cache. The update computes each prompt once.

FLOPs are counted in the compiled programs. They are compared with the rate of a large matrix
product on all devices, which is measured in the same process. The result is one line of JSON.
"""

from __future__ import annotations

import json
import resource
import statistics
import time

import jax
from absl import flags
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from attention.methods.dense import Dense
from benchmarks import model as bench_model
from benchmarks.episodes import FixedEpisode, prompts
from benchmarks.flops import attention_trips, matmul_flops
from benchmarks.results import hardware, save
from models.transformer import cast
from pallas_kernels.tokens import packed_rows
from rl_code.learner.advantages import GRPO, group_advantages
from rl_code.learner.batching import PackConfig, pack
from rl_code.learner.update import init_state, make_update
from rl_code.rollout.scheduler import Scheduler
from rl_code.rollout.stats import RolloutStats
from rl_code.types import Batch

# Tokens of a prompt, and of what a trajectory adds to it.
WORKLOADS = {"W1": (256, 128), "W2": (1024, 64), "smoke": (64, 64)}
PROMPTS, SAMPLES = 8, 8

flags.DEFINE_enum(
    "workload",
    "W1",
    list(WORKLOADS),
    "W1: prompts of 256 tokens, completions of 128. W2: 1024 and 64. smoke: 64 and 64.",
)
flags.DEFINE_string("tag", "", "Goes into the line that rl_step prints.")


def main() -> None:
    options = flags.FLAGS
    report = measure(options.workload, options.steps, options.warmup, options.seed, options.tag)
    print(json.dumps(report), flush=True)
    save(report)


def measure(workload: str, steps: int, warmup: int, seed: int, tag: str) -> dict:
    """Runs the steps and returns the numbers.

    steps: how many are timed. warmup: steps before them, which compile the programs. tag: text that
    is copied into the result.
    """
    prompt, completion = WORKLOADS[workload]
    mesh = bench_model.all_devices()
    config = bench_model.model_config()
    engine = bench_model.engine_config(
        PROMPTS * SAMPLES, PROMPTS, prompt, completion, mesh.size, config.dtype
    )
    scheduler = bench_model.make_scheduler(config, engine, mesh)
    packing = PackConfig(
        rows=PROMPTS,
        slots=prompt + SAMPLES * completion,
        targets=SAMPLES * completion,
        max_staleness=0,
        drop_uninformative=False,
        align=64,
    )
    update = make_update(bench_model.LOSS, bench_model.OPTIMIZER, 1)
    seconds: dict[str, list[float]] = {"step": [], "generation": [], "update": []}
    with jax.set_mesh(mesh):
        state = init_state(bench_model.random_model(config, mesh, seed), bench_model.OPTIMIZER)
        for step in range(warmup + steps):
            tasks = prompts(PROMPTS, prompt, config.vocab_size, seed + step)
            begin = time.perf_counter()
            groups, stats = scheduler.rollout(
                cast(state.model, config.dtype),
                tasks,
                lambda *a: FixedEpisode(*a, message=completion),
                group_size=SAMPLES,
                version=step,
                key=jax.random.key(seed),
                first_group=step * PROMPTS,
            )
            sampled = time.perf_counter()
            batch, _ = pack(groups, group_advantages(groups, GRPO()), packing, version=step)
            batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
            state, metrics = update(state, batch)
            metrics = jax.device_get(metrics)
            done = time.perf_counter()
            if step >= warmup:
                for name, took in (
                    ("step", done - begin),
                    ("generation", sampled - begin),
                    ("update", done - sampled),
                ):
                    seconds[name].append(took)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        learn = update_flops(update.lower(state, batch).compile().as_text(), batch) * mesh.size
        sample = generation_flops(scheduler, cast(state.model, config.dtype), stats, completion)
    scheduler.close()
    median = {name: statistics.median(times) for name, times in seconds.items()}
    rate = bench_model.matmul_rate(mesh, config.dtype)
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
        gflop=round((learn + sample) / 1e9, 1),
        gflop_update=round(learn / 1e9, 1),
        matmul_gflop_per_s=round(rate / 1e9),
        share_of_matmul_rate=round((learn + sample) / median["step"] / rate, 3),
        occupancy=round(stats.occupancy, 3),
        prefix_hit_rate=round(stats.prefix_hit_rate, 3),
        model=flags.FLAGS.model,
        dtype=config.dtype,
        hardware=hardware(),
    )


def update_flops(hlo: str, batch: Batch) -> float:
    """Floating-point operations of one device's matrix products in an update.

    Only the blocks of keys that the rows visit count. There is one micro-batch, for which the
    compiler makes no loop, so the loops over blocks of keys are the outermost.
    """
    rows = packed_rows(batch.segments, batch.branches, batch.positions)
    return matmul_flops(hlo, attention_trips((Dense(),), rows))


def generation_flops(scheduler: Scheduler, model, stats: RolloutStats, completion: int) -> float:
    """Floating-point operations of the matrix products that sample the groups of one step.

    They are those of the compiled prefill and decode programs, times how often each ran.
    """
    engine = scheduler.engine
    config = engine.config
    prefills = stats.prefilled_tokens / (
        engine.shards * config.prefill_rows * config.prefill_tokens
    )
    tiles = PROMPTS * SAMPLES / engine.shards / config.tile
    programs = engine.compiled(model)
    decoding = matmul_flops(programs["decode"].as_text(), (config.decode_steps, tiles))
    decoding *= completion / config.decode_steps
    return engine.shards * (prefills * matmul_flops(programs["prefill"].as_text()) + decoding)
