"""Times a synchronous GRPO step of a small model with the Qwen2 architecture: sampling, then the
update, and nothing else.

A step has 8 prompts with 8 trajectories each. There is no reference model, and no token ends a
message. AdamW has the learning rate 1e-5, the temperature is 1, and the reward is the share of
tokens with an even id. The engine samples as in training: a prompt is prefilled once for its group,
and keys and values are in a paged cache. The update computes each prompt once.

FLOPs are counted in the compiled programs. They are compared with the rate of a large matrix
product on all devices, which is measured in the same process. The result is one line of JSON.

--rival names steps that are written by hand (``hand_written``). They have the same model, prompts
and random numbers, and take turns with the project's step. Ratios are ours / theirs of the same
turn, so less than 1 where ours is faster. Those of CPU seconds hold where other programs use the
cores, too.
"""

from __future__ import annotations

import json
import resource
import statistics
import time
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np
from absl import flags
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from attention.methods.dense import Dense
from benchmarks import hand_written
from benchmarks import model as bench_model
from benchmarks.episodes import FixedEpisode, prompts
from benchmarks.results import hardware, save
from models.model_config import ModelConfig
from models.transformer import cast
from pallas_kernels.tokens import packed_rows
from planner.flops import attention_trips, matmul_flops
from rl_code.learner.advantages import GRPO, group_advantages
from rl_code.learner.batch import Batch
from rl_code.learner.batching import PackConfig, pack
from rl_code.learner.update import init_state, make_update
from rl_code.rollout.scheduler import Scheduler
from rl_code.rollout.stats import RolloutStats
from rl_code.types import Group

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


# Steps to compare with, and whether their updates compute a prompt once for its group.
BESIDE = {"hand": True, "hand_repeated": False}
flags.DEFINE_multi_enum(
    "rival",
    [],
    list(BESIDE),
    "Steps that take turns with rl_step's. hand: written by hand. hand_repeated: its update has a "
    "row for each completion, with the prompt in front.",
)


def main() -> None:
    options = flags.FLAGS
    report = measure(
        options.workload, options.steps, options.warmup, options.seed, options.tag, options.rival
    )
    print(json.dumps(report), flush=True)
    save(report)


class Contender(Protocol):
    """A step that is measured."""

    def sample(self, number: int) -> Any:
        """Samples the completions of step ``number``, from 0."""

    def learn(self, sampled: Any) -> None:
        """Makes the update with what ``sample`` gave."""

    def gflop(self) -> tuple[float, float]:
        """(of the update, of sampling), of all devices; only after a step."""


# What is timed of a step, as named in reports.
PARTS = ("step", "generation", "update")


def measure(
    workload: str, steps: int, warmup: int, seed: int, tag: str, beside: Sequence[str] = ()
) -> dict:
    """Runs the steps and returns the numbers.

    steps: how many are timed. warmup: steps before them, which compile the programs. tag: text that
    is copied into the result. beside: names of BESIDE.
    """
    mesh = bench_model.all_devices()
    config = bench_model.model_config()
    prompt, completion = WORKLOADS[workload]
    ours = Ours(prompt, completion, mesh, seed)
    contenders: dict[str, Contender] = {"ours": ours}
    for name in beside:
        contenders[name] = ByHand(prompt, completion, mesh, seed, share=BESIDE[name])
    times: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    with jax.set_mesh(mesh):
        for step in range(warmup + steps):
            # every other turn backwards, so that nobody is always the first
            for name in list(contenders)[:: -1 if step % 2 else 1]:
                took = timed(contenders[name], step)
                if step >= warmup:
                    times[name].append(took)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        gflop = {name: contender.gflop() for name, contender in contenders.items()}
    ours.close()
    rate = bench_model.matmul_rate(mesh, config.dtype)
    median = {part: statistics.median(took[part] for took in times["ours"]) for part in PARTS}
    whole = [took["step"] for took in times["ours"]]
    report = dict(
        peer="ours",
        workload=workload,
        tag=tag,
        s_per_step=round(median["step"], 3),
        generation_s=round(median["generation"], 3),
        update_s=round(median["update"], 3),
        fastest_s=round(min(whole), 3),
        slowest_s=round(max(whole), 3),
        cpu_s_per_step=round(statistics.median(took["step_cpu"] for took in times["ours"]), 3),
        steps=steps,
        peak_rss_mib=round(peak),
        gen_tokens_per_s=round(PROMPTS * SAMPLES * completion / median["generation"]),
        gflop=round(sum(gflop["ours"]), 1),
        gflop_update=round(gflop["ours"][0], 1),
        matmul_gflop_per_s=round(rate / 1e9),
        share_of_matmul_rate=round(sum(gflop["ours"]) * 1e9 / median["step"] / rate, 3),
        occupancy=round(ours.stats.occupancy, 3),
        prefix_hit_rate=round(ours.stats.prefix_hit_rate, 3),
        model=flags.FLAGS.model,
        dtype=config.dtype,
        hardware=hardware(),
    )
    others = {
        name: compared(times["ours"], times[name])
        | dict(gflop=round(sum(gflop[name]), 1), gflop_update=round(gflop[name][0], 1))
        for name in beside
    }
    return report | ({"beside": others} if others else {})


def timed(contender: Contender, step: int) -> dict[str, float]:
    """Seconds of each part of a step, and under the name with _cpu those of this process's CPUs."""
    clocks = {"": time.perf_counter, "_cpu": time.process_time}
    marks = [{name: clock() for name, clock in clocks.items()}]
    sampled = contender.sample(step)
    marks.append({name: clock() for name, clock in clocks.items()})
    contender.learn(sampled)
    marks.append({name: clock() for name, clock in clocks.items()})
    begin, between, end = marks
    found = {}
    for name in clocks:
        found[f"step{name}"] = end[name] - begin[name]
        found[f"generation{name}"] = between[name] - begin[name]
        found[f"update{name}"] = end[name] - between[name]
    return found


def compared(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> dict[str, Any]:
    """Medians of another step's seconds, and ratios ours / theirs: [median, least, greatest]."""
    found: dict[str, Any] = {}
    for part in theirs[0]:
        found[f"{part}_s"] = round(statistics.median(took[part] for took in theirs), 3)
        ratios = [mine[part] / other[part] for mine, other in zip(ours, theirs, strict=True)]
        spread = (statistics.median(ratios), min(ratios), max(ratios))
        found[f"ratio_{part}"] = [round(x, 3) for x in spread]
    return found


class Ours:
    """The project's step: its engine, its packing and its update."""

    def __init__(
        self,
        prompt: int,
        completion: int,
        mesh: Mesh,
        seed: int,
        *,
        groups: int = PROMPTS,
        config: ModelConfig | None = None,
        micro_batches: int = 1,
    ):
        """prompt, completion: tokens of each. seed: of weights, prompts and random numbers. groups:
        prompts. config: by default the model that the flags name.
        """
        self._lengths, self._mesh, self._seed = (prompt, completion), mesh, seed
        self._groups = groups
        self._config = config or bench_model.model_config()
        engine = bench_model.engine_config(
            groups * SAMPLES, groups, prompt, completion, mesh.size, self._config.dtype
        )
        self._scheduler = bench_model.make_scheduler(self._config, engine, mesh)
        self._packing = PackConfig(
            rows=groups,
            slots=prompt + SAMPLES * completion,
            targets=SAMPLES * completion,
            max_staleness=0,
            drop_uninformative=False,
            align=64,
        )
        self._update = make_update(bench_model.LOSS, bench_model.OPTIMIZER, micro_batches)
        with jax.set_mesh(mesh):
            model = bench_model.random_model(self._config, mesh, seed)
            self._state = init_state(model, bench_model.OPTIMIZER)
        self._batch: Batch | None = None
        # of the last rollout
        self.stats = RolloutStats()

    def sample(self, number: int) -> list[Group]:
        """As ``Contender.sample``."""
        prompt, completion = self._lengths
        groups, self.stats = self._scheduler.rollout(
            cast(self._state.model, self._config.dtype),
            prompts(self._groups, prompt, self._config.vocab_size, self._seed + number),
            lambda *a: FixedEpisode(*a, message=completion),
            group_size=SAMPLES,
            version=number,
            key=jax.random.key(self._seed),
            first_group=number * self._groups,
        )
        return groups

    def learn(self, sampled: list[Group]) -> None:
        """As ``Contender.learn``."""
        credit = group_advantages(sampled, GRPO())
        version = int(sampled[0].trajectories[0].versions.max())
        batch, _ = pack(sampled, credit, self._packing, version=version)
        self._batch = jax.device_put(batch, NamedSharding(self._mesh, P("data")))
        self._state, metrics = self._update(self._state, self._batch)
        jax.device_get(metrics)

    def gflop(self) -> tuple[float, float]:
        """As ``Contender.gflop``."""
        program = self._update.lower(self._state, self._batch).compile()
        learn = update_flops(program.as_text(), self._batch) * self._mesh.size
        model = cast(self._state.model, self._config.dtype)
        sample = generation_flops(self._scheduler, model, self.stats, self._lengths[1])
        return learn / 1e9, sample / 1e9

    def close(self) -> None:
        """Stops the scheduler's threads."""
        self._scheduler.close()


class ByHand:
    """The step of ``hand_written``, with rows cut over all devices as ours are."""

    def __init__(self, prompt: int, completion: int, mesh: Mesh, seed: int, share: bool):
        """As ``Ours``. share: whether the update computes a prompt once for its group."""
        config = bench_model.model_config()
        hand_written.check(config)
        self._lengths, self._mesh, self._seed = (prompt, completion), mesh, seed
        self._vocab, self._share = config.vocab_size, share
        with jax.set_mesh(mesh):
            self._state = hand_written.init_state(bench_model.random_model(config, mesh, seed))
        # those of the last rollout, and of the last update
        self._arguments: tuple = ()
        self._batch: tuple = ()

    def sample(self, number: int) -> hand_written.Samples:
        """As ``Contender.sample``."""
        prompt, completion = self._lengths
        tasks = prompts(PROMPTS, prompt, self._vocab, self._seed + number)
        tokens = np.array([task.meta["tokens"] for task in tasks], np.int32)
        numbers = np.arange(number * PROMPTS, (number + 1) * PROMPTS, dtype=np.int32)
        cut = NamedSharding(self._mesh, P("data"))
        key = jax.random.key_data(jax.random.key(self._seed))
        self._arguments = (*jax.device_put((tokens, numbers), cut), key, SAMPLES, completion)
        return jax.block_until_ready(hand_written.rollout(self._state.model, *self._arguments))

    def learn(self, sampled: hand_written.Samples) -> None:
        """As ``Contender.learn``."""
        credit = hand_written.advantages(np.asarray(sampled.completions))
        self._batch = sampled, jax.device_put(credit, NamedSharding(self._mesh, P("data")))
        self._state, value = hand_written.update(self._state, *self._batch, self._share)
        jax.device_get(value)

    def gflop(self) -> tuple[float, float]:
        """As ``Contender.gflop``."""
        learn = hand_written.update.lower(self._state, *self._batch, self._share)
        sample = hand_written.rollout.lower(self._state.model, *self._arguments)
        learned, sampled = (
            matmul_flops(program.compile().as_text()) * self._mesh.size / 1e9
            for program in (learn, sample)
        )
        return learned, sampled


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
