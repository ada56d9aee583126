"""Times an update of a model at real sizes, and compares its memory with the planner's.

The groups are random tokens behind prompts that 8 trajectories share, a row for each prompt and a
micro-batch for each row. MFU is of the operations that the planner calls useful, over the rate of a
large product that is measured in the same process.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import model as bench_model
from benchmarks.episodes import random_groups
from models.model_config import ModelConfig
from models.sharding import MeshConfig
from planner import arithmetic
from planner.targets import TARGETS, Target
from planner.workload import Workload
from rl_code.learner.advantages import GRPO, group_advantages
from rl_code.learner.batch import Batch
from rl_code.learner.batching import PackConfig, pack
from rl_code.learner.update import init_state, make_update

SAMPLES = 8
# Part of a device's memory that a program may fill.
_FULL = 0.92


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of an update."""

    # Rows, each of a prompt and SAMPLES completions of so many tokens.
    rows: int
    prompt: int
    completion: int

    @property
    def context(self) -> int:
        """Tokens of a row."""
        return self.prompt + SAMPLES * self.completion


def target_here() -> Target:
    """The target that the device here is; H100 for one that the planner does not know."""
    kind = jax.devices()[0].device_kind.lower()
    known = [target for name, target in TARGETS.items() if name in kind]
    return known[0] if known else TARGETS["h100"]


def measure(
    config: ModelConfig, sizes: Sizes, steps: int, warmup: int, seed: int, rate: float
) -> Iterator[dict]:
    """A line when the update is compiled, then one when it is timed, first with layers that are
    computed again, then with everything kept where the planner says that it fits.

    config: of parameters in float32. rate: operations of a large product a second.
    """
    mesh = bench_model.all_devices()
    target = target_here()
    tokens = sizes.rows * sizes.context
    for remat in (True, False):
        own = dataclasses.replace(config, remat=remat)
        job = Workload("bench", own, target, tokens, sizes.context, rows=2)
        plan = arithmetic.learner(job, MeshConfig(data=mesh.size, tensor=1))
        kept = plan.total_bytes if remat else _kept_bytes(job, plan.total_bytes)
        if kept > _FULL * target.memory:
            yield dict(remat=remat, left_out=f"about {kept / 1e9:.0f} GB by the planner")
            continue
        yield from _timed(own, sizes, steps, warmup, seed, rate, mesh, plan, remat)


def _kept_bytes(job: Workload, with_remat: float) -> float:
    """Bytes of an update whose layers keep what their backward pass needs."""
    model = job.model
    size = jax.numpy.dtype(model.dtype).itemsize
    heads = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    layer = (4 * model.embed_dim + heads + 3 * model.mlp_dim) * size
    return with_remat + model.num_layers * job.context * layer


def _timed(
    config: ModelConfig,
    sizes: Sizes,
    steps: int,
    warmup: int,
    seed: int,
    rate: float,
    mesh: Mesh,
    plan: arithmetic.Estimate,
    remat: bool,
) -> Iterator[dict]:
    begin = time.perf_counter()
    # a function with the methods of ``jax.jit``
    update: Any = make_update(bench_model.LOSS, bench_model.OPTIMIZER, sizes.rows // mesh.size)
    with jax.set_mesh(mesh):
        batch = jax.device_put(random_batch(sizes, config.vocab_size, seed), _rows(mesh))
        model = bench_model.random_model(config, mesh, seed)
        state = init_state(model, bench_model.OPTIMIZER)
        program = update.lower(state, batch).compile()
        stats = program.memory_analysis()
        needed = stats.argument_size_in_bytes + stats.temp_size_in_bytes
        yield dict(
            remat=remat,
            compiled_s=round(time.perf_counter() - begin, 1),
            program_gb=round(needed / 1e9, 3),
            planned_gb=round(plan.total_bytes / 1e9, 3),
            planned_over_program=round(plan.total_bytes / needed, 3),
        )
        seconds = []
        for step in range(warmup + steps):
            start = time.perf_counter()
            state, metrics = update(state, batch)
            jax.device_get(metrics)
            if step >= warmup:
                seconds.append(time.perf_counter() - start)
    took = statistics.median(seconds)
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    yield dict(
        remat=remat,
        update_s=round(took, 4),
        fastest_s=round(min(seconds), 4),
        slowest_s=round(max(seconds), 4),
        tokens_per_s=round(plan.tokens / took),
        mfu=round(plan.useful * mesh.size / took / rate, 4),
        **({} if peak is None else {"peak_gb": round(peak / 1e9, 3)}),
    )


def random_batch(sizes: Sizes, vocab_size: int, seed: int) -> Batch:
    """A batch of random groups, packed as in training."""
    given = (sizes.rows, SAMPLES, sizes.prompt, sizes.completion, vocab_size, seed)
    groups = random_groups(*given)
    packing = PackConfig(
        rows=sizes.rows,
        slots=sizes.context,
        targets=SAMPLES * sizes.completion,
        max_staleness=0,
        drop_uninformative=False,
        align=64,
    )
    credit: Any = GRPO()
    return pack(groups, group_advantages(groups, credit), packing, version=0)[0]


def _rows(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P("data"))
