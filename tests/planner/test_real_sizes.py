"""Configs for real hardware fit by the planner's arithmetic, and say what it says of them."""

from __future__ import annotations

import dataclasses

import pytest

from configs import coder_1_5b, qwen3_8b, qwen3_30b_a3b
from launch.cluster import check_devices
from models.families import PRESETS
from models.sharding import MeshConfig
from planner import arithmetic, table
from planner.targets import TARGETS
from planner.workload import Estimate, Workload
from rl_code.config.read_config import build
from rl_code.run.config import RunConfig

# (the config's module, its argument, the accelerator)
CASES = {
    "coder_1_5b": (coder_1_5b, "", "h100"),
    "coder_1_5b:long": (coder_1_5b, "long", "h100"),
    "qwen3_8b": (qwen3_8b, "", "h100"),
    "qwen3_8b:answers": (qwen3_8b, "answers", "h100"),
    "qwen3_30b_a3b": (qwen3_30b_a3b, "", "h100"),
    "qwen3_30b_a3b:gb200": (qwen3_30b_a3b, "gb200", "gb200"),
}
# (role, hosts, accelerators of a host) of those on several hosts, as their docstrings start them.
HOSTS = {
    "qwen3_8b": [("all", 1, 8)],
    "qwen3_8b:answers": [("all", 1, 8)],
    "qwen3_30b_a3b": [("learner", 4, 8), ("actor", 1, 8), ("prefill", 1, 8)],
    "qwen3_30b_a3b:gb200": [("learner", 9, 4), ("actor", 9, 4)],
}


def planned(case: str) -> tuple[RunConfig, Workload, Estimate, Estimate]:
    """(config, workload, estimate of the learner, of the sampler) of a variant."""
    module, argument, chip = CASES[case]
    config = build(RunConfig, module.get_config(argument))
    spec, pack, engine = config.model, config.train.pack, config.rollout.engine
    own = {
        name: getattr(spec, name)
        for name in ("dtype", "remat", "remat_keeps", "offload_activations", "sequence_parallel")
    }
    model = dataclasses.replace(PRESETS[module.PRESET], **own)
    if spec.fold_experts and model.moe:
        model = dataclasses.replace(model, moe=dataclasses.replace(model.moe, fold=True))
    assert pack.rows and pack.slots and engine.length, "a run settles them"
    slots = pack.slots + pack.prompt_slots
    learns = Workload(
        module.PRESET,
        model,
        TARGETS[chip],
        pack.rows * slots,
        slots,
        engine.slots,
        offload_moments=config.train.optimizer.offload,
        targets=pack.targets,
        prompts=pack.prompt_slots,
    )
    samples = dataclasses.replace(learns, context=engine.length)
    # what samples on the learner's devices has whole weights along fsdp, and its rows cut over it
    apart = config.rollout.apart or config.asynchrony.mode != "sync"
    mesh = config.rollout.mesh
    if not apart:
        mesh = MeshConfig(data=config.mesh.row_shards, tensor=config.mesh.tensor)
    return config, learns, arithmetic.learner(learns, config.mesh), arithmetic.actor(samples, mesh)


def line(job: Workload, estimate: Estimate) -> str:
    """An estimate as the docstrings of configs have it."""
    seconds = estimate.seconds(job.target)
    bound = max(seconds, key=lambda name: seconds[name])
    scale, unit = (1, "s") if estimate.role == "learner" else (1e3, "ms")
    rate = estimate.tokens_per_second(job.target)
    return (
        f"{estimate.role}: {table.words(estimate.mesh)} | {estimate.total_bytes / 1e9:.1f} GB | "
        f"{scale * seconds[bound]:.2f} {unit}, {bound} | {rate:,.0f}"
    )


@pytest.mark.parametrize("case", CASES)
def test_a_config_for_real_hardware_fits_and_says_what_the_planner_says(case):
    config, job, learner, actor = planned(case)
    # the planner counts one row of a device at a time
    assert config.train.pack.rows == config.train.micro_batches * config.mesh.row_shards
    room = table.FULL * job.target.memory
    apart = config.rollout.apart or config.asynchrony.mode != "sync"
    taken = [learner.total_bytes, actor.total_bytes]
    assert max(taken if apart else [sum(taken)]) < room
    doc = " ".join(str(CASES[case][0].__doc__).split())
    for estimate in (learner, actor):
        assert line(job, estimate) in doc
    for role, hosts, devices in HOSTS.get(case, []):
        assert check_devices(config, role, hosts, devices) == devices


def test_the_setting_that_a_config_needs_is_needed():
    """Without host memory or the axis context the same sizes do not fit."""
    for case in ("coder_1_5b:long", "qwen3_8b"):
        _, job, _, actor = planned(case)
        config = planned(case)[0]
        model = dataclasses.replace(job.model, offload_activations=False)
        without = dataclasses.replace(job, model=model, offload_moments=False)
        whole = arithmetic.learner(without, config.mesh).total_bytes + actor.total_bytes
        assert whole > table.FULL * job.target.memory
    _, job, _, _ = planned("qwen3_30b_a3b")
    uncut = arithmetic.learner(job, MeshConfig(fsdp=4, expert=8))
    assert uncut.total_bytes > table.FULL * job.target.memory
