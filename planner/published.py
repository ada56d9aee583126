"""Published throughput of other systems, beside the bound that the planner's arithmetic gives.

A step of RL is sampling (``arithmetic.actor``), forward passes for the log-probabilities of the
policy and of its reference, and updates (``arithmetic.learner``). On policy they follow one another
on the same devices; steps behind, those that sample and those that learn work at the same time, and
the slower ones set the pace. Each part takes the least time of its slowest resource at peak rate.

What the bound leaves out: waiting for the longest answer of a batch, prompts being computed apart
from answers, bubbles of a pipeline (its devices are counted as further replicas), new weights on
their way, grading, and everything between programs. So a ratio of 1 cannot be had.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import rich.table

from models.families import PRESETS
from models.sharding import MeshConfig
from planner import arithmetic
from planner.table import FULL, words
from planner.targets import TARGETS
from planner.workload import Workload

_V06 = "NeMo RL 0.6, performance-summary.md"
_V04 = "NeMo RL 0.4, performance-summary.md"
# Settings that hold for all rows and that the published tables do not say. The first three are read
# from the recipes (examples/configs/grpo_math_1B.yaml and recipes/llm/performance), whose versions
# may be others than those that ran.
ASSUMED = (
    "no activation is computed again (activation_checkpointing: false)",
    "two forward passes for log-probabilities, of the policy and of its reference "
    "(reference_policy_kl_penalty: 0.01)",
    "devices that sample, where there are some for it alone (generation.colocated.resources)",
    "sequences of later steps decode beside those of this one, as many as fit into memory",
    "every sequence has the average length, and all of its tokens are sampled: prompts are "
    "counted as answers",
    "no room is wasted in packed rows, and experts get equal shares",
)


@dataclasses.dataclass(frozen=True)
class Published:
    """A published row: settings of a run, and what was measured."""

    source: str
    # A key of models.families.PRESETS, and one of planner.targets.TARGETS.
    model: str
    chip: str
    # All devices, and those of them that only sample; 0 where all do both in turn.
    devices: int
    samplers: int
    # By how many steps samples may be older than the weights that they train; 0 on policy.
    behind: int
    # Sequences that one step samples, and those of one update.
    sequences: int
    update: int
    # Average tokens of a sequence.
    tokens: int
    # Devices along tensor that sample together.
    sampler_tensor: int
    # Devices of the learner along tensor, expert and the stages of a pipeline.
    tensor: int
    expert: int
    stages: int
    # Tokens per second of one device, and seconds of a step, as published.
    rate: float
    step_s: float

    @property
    def learners(self) -> int:
        """Devices that learn."""
        return self.devices - self.samplers


# Of both releases.
_STEP: dict[str, Any] = dict(sequences=2048, update=512)


def _a3b(**settings: Any) -> Published:
    return Published(source=_V06, model="qwen3-30b-a3b", tensor=1, **_STEP, **settings)


def _dense(**settings: Any) -> Published:
    return Published(source=_V04, chip="h100", expert=1, **_STEP, **settings)


_ON_POLICY = dict(samplers=0, behind=0)
ROWS = (
    _a3b(
        **dict(chip="h100", devices=32, **_ON_POLICY),
        **dict(tokens=3203, sampler_tensor=2, expert=8, stages=1, rate=1102, step_s=192),
    ),
    _a3b(
        **dict(chip="h100", devices=32, samplers=16, behind=1),
        **dict(tokens=3201, sampler_tensor=2, expert=8, stages=2, rate=1414, step_s=152),
    ),
    _a3b(
        **dict(chip="h100", devices=192, samplers=64, behind=8),
        **dict(tokens=3206, sampler_tensor=2, expert=8, stages=1, rate=1025, step_s=34.5),
    ),
    _a3b(
        **dict(chip="gb200", devices=16, **_ON_POLICY),
        **dict(tokens=3199, sampler_tensor=1, expert=16, stages=1, rate=1910, step_s=221),
    ),
    _a3b(
        **dict(chip="gb200", devices=16, samplers=8, behind=1),
        **dict(tokens=3197, sampler_tensor=1, expert=8, stages=1, rate=1406, step_s=301),
    ),
    _dense(
        **dict(model="qwen3-32b", devices=32, **_ON_POLICY),
        **dict(tokens=3206, sampler_tensor=4, tensor=4, stages=4, rate=540, step_s=393),
    ),
    _dense(
        **dict(model="qwen3-32b", devices=64, samplers=32, behind=1),
        **dict(tokens=3207, sampler_tensor=4, tensor=4, stages=4, rate=494, step_s=215),
    ),
    _dense(
        **dict(model="llama-3.1-8b", devices=16, **_ON_POLICY),
        **dict(tokens=1060, sampler_tensor=1, tensor=1, stages=2, rate=1562, step_s=97.7),
    ),
    _dense(
        **dict(model="llama-3.1-8b", devices=16, samplers=8, behind=1),
        **dict(tokens=1129, sampler_tensor=1, tensor=1, stages=2, rate=2161, step_s=74.6),
    ),
)


@dataclasses.dataclass(frozen=True)
class Bound:
    """The least times of a published row's step, by arithmetic."""

    row: Published
    learner: MeshConfig
    sampler: MeshConfig
    # Sequences that decode together on each replica of the sampler.
    together: int
    # Seconds, and the resource that bounds them.
    sampling_s: float
    sampling_by: str
    forward_s: float
    updates_s: float
    updates_by: str

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        learning = self.forward_s + self.updates_s
        if self.row.samplers:
            return max(self.sampling_s, learning)
        return self.sampling_s + learning

    @property
    def rate(self) -> float:
        """Tokens per second of one device, at most."""
        return self.row.sequences * self.row.tokens / self.step_s / self.row.devices

    @property
    def ratio(self) -> float:
        """The published rate as a part of the bound."""
        return self.row.rate / self.rate


def bound(row: Published) -> Bound:
    """The least times of a row's step. Raises ValueError where its sizes do not divide."""
    target = TARGETS[row.chip]
    model = dataclasses.replace(PRESETS[row.model], dtype="bfloat16")
    samplers = row.samplers or row.devices
    replicas = samplers // row.sampler_tensor
    job = Workload(
        row.model,
        model,
        target,
        tokens=row.update * row.tokens,
        context=row.tokens,
        rows=1,
        targets=row.tokens,
    )
    sampler = MeshConfig(data=replicas, tensor=row.sampler_tensor)
    # the sequences of later steps decode beside those of this one, as many as fit, half full
    most = row.sequences * (1 + row.behind) // replicas
    one = arithmetic.actor(job, sampler)
    room = FULL * target.memory - one.memory["weights"]
    job = dataclasses.replace(job, rows=min(most, int(2 * room / one.memory["pages"])))
    # stages of a pipeline hold other layers, and do as much work as further replicas would
    data = row.learners // (row.tensor * row.expert)
    learner = MeshConfig(data=data, tensor=row.tensor, expert=row.expert)
    decoded = arithmetic.actor(job, sampler)
    updated = arithmetic.learner(job, learner)
    updates = row.sequences / row.update
    of_token, of_update = decoded.seconds(target), updated.seconds(target)
    # of three passes of use one is forward
    forward = updates * updated.useful / 3 / target.flops
    return Bound(
        row,
        learner,
        sampler,
        together=job.rows,
        # each takes a step for each token, and the replicas hold this part of the sequences
        sampling_s=row.tokens * decoded.bound(target) * row.sequences / (replicas * job.rows),
        sampling_by=max(of_token, key=lambda name: of_token[name]),
        forward_s=2 * forward,
        updates_s=updates * updated.bound(target),
        updates_by=max(of_update, key=lambda name: of_update[name]),
    )


def table(found: list[Bound]) -> rich.table.Table:
    """One line for each row: its settings, the bound by part, what was published, their ratio."""
    made = rich.table.Table(title="published throughput beside its bound", title_justify="left")
    made.add_column("row", overflow="fold")
    made.add_column("settings", overflow="fold")
    made.add_column("least time, s", overflow="fold")
    made.add_column("tokens/s of a device at most", justify="right")
    made.add_column("published", justify="right")
    made.add_column("ratio", justify="right")
    for one in found:
        row = one.row
        behind = f"{row.behind} behind, {row.samplers} sample" if row.samplers else "on policy"
        stages = f" x {row.stages} stages" if row.stages > 1 else ""
        made.add_row(
            f"{row.model}, {row.devices} {row.chip}, {behind}\n{row.source}",
            f"{row.sequences} sequences of {row.tokens:,}, {row.update} an update\n"
            f"samples on {words(one.sampler)}, {one.together} together\n"
            f"learns on {words(one.learner)}{stages}",
            f"sampling {one.sampling_s:.1f} ({one.sampling_by})\nforward {one.forward_s:.1f}\n"
            f"updates {one.updates_s:.1f} ({one.updates_by})\nstep {one.step_s:.1f}",
            f"{one.rate:,.0f}",
            f"{row.rate:,.0f}\nin {row.step_s:g} s",
            f"{one.ratio:.2f}",
        )
    return made


def to_json(one: Bound) -> dict[str, Any]:
    """A bound as JSON's types."""
    derived = {"step_s": one.step_s, "rate": one.rate, "ratio": one.ratio}
    return dataclasses.asdict(one) | derived
