"""The programs of a planned mesh, compiled for devices that are not here, and read.

A whole GRPO step is compiled: its layers are scanned. The layers of a decode step are not, so it is
compiled with two and with four periods of layers, and what a period adds is taken for the rest.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import jax
from jax.experimental import topologies

from models.expert_parallel import room
from models.model_config import ModelConfig
from models.sharding import make_mesh
from planner.arithmetic import padded
from planner.collectives import Kind, sent_bytes
from planner.flops import matmul_flops
from planner.kernel_programs import changed
from planner.workload import Estimate, Workload, expert_devices
from rl_code.run.config import RunConfig
from rl_code.run.traced import traced_programs

# Periods of layers with which a decode step is compiled.
_FEW = (2, 4)
# Tokens that a row decodes in one dispatch.
_STEPS = 16


def compiled(job: Workload, estimate: Estimate) -> Estimate:
    """The estimate with what the compiled program says in place of what it says itself."""
    job = padded(job, estimate.mesh)
    if estimate.role == "learner":
        return _learner(job, estimate)
    return _actor(job, estimate)


def _learner(job: Workload, estimate: Estimate) -> Estimate:
    config = settings(job, estimate)
    micro = config.train.micro_batches
    program, seconds = _compile(job, estimate, config, job.model, "update")
    text = program.as_text()
    # further rounds of exchange are not made where every device gets as many tokens
    trips, filled = _exchange(job, estimate, job.context, [micro, 1])
    stats = program.memory_analysis()
    kept = {name: x for name, x in estimate.memory.items() if name in ("weights", "moments")}
    if job.offload_moments:
        del kept["moments"]  # the program's own, as its gradients and activations
    host = {
        "arguments": stats.host_argument_size_in_bytes,
        "program": stats.host_temp_size_in_bytes,
    }
    return dataclasses.replace(
        estimate,
        memory=kept | {"gradients, activations": stats.temp_size_in_bytes},
        host={name: size for name, size in host.items() if size},
        flops=matmul_flops(text, trips, filled) + estimate.attention,
        sent=sent_bytes(text, job.target.domain, trips),
        source=f"compiled whole in {seconds:.0f} s",
    )


def _actor(job: Workload, estimate: Estimate) -> Estimate:
    config = settings(job, estimate)
    found = []
    spent = 0.0
    # the loop over tokens ends early where all rows have ended
    trips, filled = _exchange(job, estimate, job.rows, [_STEPS, 1])
    for periods in _FEW:
        layers = periods * len(job.model.attention)
        model = dataclasses.replace(job.model, num_layers=layers, param_dtype=job.model.dtype)
        program, seconds = _compile(job, estimate, config, model, "decode")
        text = program.as_text()
        sent = sent_bytes(text, job.target.domain, trips)
        found.append(
            {
                "flops": matmul_flops(text, trips, filled) / _STEPS,
                "working": program.memory_analysis().temp_size_in_bytes,
                **{kind: size / _STEPS for kind, size in sent.items()},
            }
        )
        spent += seconds
    numbers = extrapolated(found, job.model.periods)
    return dataclasses.replace(
        estimate,
        memory={**estimate.memory, "working": numbers["working"]},
        flops=numbers["flops"] + estimate.attention,
        sent={kind: size for kind, size in numbers.items() if isinstance(kind, Kind)},
        source=f"compiled with {_FEW[0]} and {_FEW[1]} periods of layers in {spent:.0f} s",
    )


def _exchange(
    job: Workload, estimate: Estimate, tokens: int, trips: list[int]
) -> tuple[list[int], float]:
    """(How often loops run, which part of the rows that come to experts is no padding).

    tokens: that a shard of rows has at a time. trips: without exchange.
    """
    devices = expert_devices(job.model, estimate.mesh)
    if devices == 1:
        return trips, 1.0
    moe = job.model.moe
    own = -(-tokens // estimate.mesh.tensor) if moe.fold else tokens
    slots = (moe.slots or moe.experts) // devices
    most = devices * own * min(moe.active, slots)
    return [*trips[:-1], 0], own * moe.active / room(own * moe.active, most, moe.buffer)


def extrapolated(found: list[Mapping[Any, float]], periods: int) -> dict[Any, float]:
    """Measures of programs of ``_FEW`` periods of layers, for another number of periods."""
    few, more = (collections.Counter(x) for x in found)
    steps = (periods - _FEW[0]) / (_FEW[1] - _FEW[0])
    return {key: few[key] + steps * (more[key] - few[key]) for key in {**few, **more}}


def settings(job: Workload, estimate: Estimate) -> RunConfig:
    """A run of one turn whose rows and pages are those of the job."""
    shards = estimate.mesh.row_shards
    rows = max(1, round(job.tokens / job.context))
    page = max([64, *(method.block_size() or 0 for method in job.model.attention)])
    changes = {
        "mesh": dataclasses.asdict(estimate.mesh),
        "model.dtype": job.model.dtype,
        "rollout.dtype": job.model.dtype,
        "limits.turns": 1,
        "limits.tokens": job.context,
        "limits.turn_tokens": job.context // 2,
        "rollout.engine.slots": job.rows,
        "rollout.engine.page": page,
        "rollout.engine.view_block": page,
        "rollout.engine.prefill_rows": 2,
        "rollout.engine.prefill_tokens": min(2048, job.context // 2),
        "rollout.engine.decode_steps": _STEPS,
        "rollout.engine.length": job.context,
        "rollout.engine.prompt_length": job.context // 2,
        "rollout.engine.pages": job.rows * -(-job.context // page) + 1,
        "train.pack.slots": job.context,
        "train.pack.rows": rows,
        "train.pack.targets": job.predicted,
        "train.pack.runs": 12,
        "train.optimizer.muon_learning_rate": None,
        "train.optimizer.offload": job.offload_moments,
        "train.micro_batches": max(1, rows // shards),
    }
    return changed("quickstart", changes)


def _compile(
    job: Workload, estimate: Estimate, config: RunConfig, model: ModelConfig, program: str
) -> tuple[jax.stages.Compiled, float]:
    devices = topologies.get_topology_desc(**job.target.topology(estimate.mesh.devices)).devices
    mesh = make_mesh(estimate.mesh, list(devices))
    begin = time.perf_counter()
    learns = program == "update"
    traced = traced_programs(config, model, mesh, learns=learns, samples=not learns)[program]
    return traced.lower().compile(), time.perf_counter() - begin
