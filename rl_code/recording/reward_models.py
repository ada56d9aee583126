"""A reward model made of recorded runs: outcomes are read, a model is trained on most tasks and
judged on the others.

The change of a trajectory's work is read from the notes of a reward signal where there are some.
Else the calls on record are carried out again in a sandbox, as ``review`` does. Only work that was
handed in and is no proven cheat is an outcome, since no other work is scored.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import logging

from models import families
from models.scalar_head import with_head
from models.sharding import MeshConfig, make_mesh
from models.tokenizer import Tokenizer
from rl_code.checkpoint import checkpoint
from rl_code.checkpoint.checkpoint import Checkpoints
from rl_code.config import read_config
from rl_code.config.read_config import ConfigError, at_least
from rl_code.environment.finished import CHEATS
from rl_code.environment.protocols.api import find_protocol
from rl_code.environment.sandbox.errors import SandboxFault
from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.environment.sandbox.snapshot import texts
from rl_code.environment.suites.applied import texts_before
from rl_code.environment.tools.api import find_tools, offered
from rl_code.host.files import write_atomically
from rl_code.metrics.progress import Progress
from rl_code.recording import kept_config
from rl_code.recording.review import work_of
from rl_code.rewards.calibration import Quality, judge, platt, sigmoid
from rl_code.rewards.differing import diff
from rl_code.rewards.reading import Reading
from rl_code.rewards.reward_model import WORK
from rl_code.rewards.reward_model_fit import FitConfig, Outcome, fit, scores_of
from rl_code.rewards.reward_model_folder import (
    Description,
    Weights,
    names_of,
    save,
    write,
)
from rl_code.run import origin as origin_lib
from rl_code.run.config import RunConfig
from rl_code.run.origin import Origin
from rl_code.run.workdir import STORE, refuse_run
from rl_code.store.source import read_ahead
from rl_code.store.store import GroupStore
from rl_code.types import Group, Trajectory

# The file of a reward model's folder with its measures.
REPORT = "report.json"


@dataclasses.dataclass(frozen=True)
class RewardModelConfig:
    """A reward model and the recorded runs that it is made of."""

    # Weights and tokenizer of the backbone, as ``model.weights`` of a run names them: the workdir
    # of a run, perhaps with @ and a step, a Hugging Face folder or a .gguf file.
    weights: str
    # Workdirs of the runs whose outcomes are read.
    runs: tuple[str, ...]
    # Steps that are read: from the first, up to but not including the last (None for all), and of
    # these every so many.
    first: int = 0
    last: int | None = None
    every: int = 1
    # Parts that the model reads: with ``sees_reference`` it has sight of the ground truth.
    reading: Reading = Reading()
    fit: FitConfig = FitConfig(updates=200)
    # Share of the tasks by which it is judged and on which it is not trained.
    held_out: float = 0.25
    # Seed of the order of texts, and of the choice of tasks that are held out.
    seed: int = 0

    def __post_init__(self) -> None:
        at_least(self, first=0, every=1)
        if not self.weights or not self.runs:
            raise ValueError(
                f"weights={self.weights!r} and runs={self.runs} must name what it is made of"
            )
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out={self.held_out} must be above 0 and below 1")


def make(
    config: RewardModelConfig,
    folder: Path,
) -> dict[str, Any]:
    """Makes the reward model of a config, and returns its report: what it was trained on, and its
    measures on held-out tasks. Makes nothing where the folder has it already.

    Raises ConfigError, StoreError for a damaged record, SandboxUnavailable.
    """
    refuse_run(folder)
    if (folder / REPORT).exists():
        there = json.loads((folder / REPORT).read_text())
        read_config.check_same(there["config"], config, folder)
        return there
    origin = origin_lib.find(config.weights, "config.weights")
    tokenizer = origin.tokenizer()
    outcomes = [one for run in config.runs for one in outcomes_of_run(Path(run), config, tokenizer)]
    trained, held_out = split(outcomes, config.held_out, config.seed)
    _check(trained, held_out, config)
    mesh = make_mesh(MeshConfig(), jax.local_devices()[:1])
    backbone = _backbone(origin, config, mesh)
    align = backbone.config.alignment
    slots = -(-config.reading.tokens // align) * align
    with Progress("reward model", config.fit.updates) as progress:
        model, metrics = fit(
            with_head(backbone),
            trained,
            config.fit,
            slots=slots,
            mesh=mesh,
            seed=[config.seed, 0],
            tell=lambda number, told: progress.update(number + 1, loss=told["train/loss"]),
        )
    scale = (1.0, 0.0)
    parts = {"held_out": held_out, "trained": trained}
    scores = {
        name: scores_of(model, [one.tokens for one in part], slots=slots, mesh=mesh)
        for name, part in parts.items()
    }
    if config.fit.kind == "pairs":
        scale = platt(scores["trained"].tolist(), [one.good for one in trained])
    judged = {}
    for name, part in parts.items():
        p = sigmoid(scale[0] * scores[name] + scale[1]).tolist()
        quality = judge(p, [one.good for one in part], [one.task for one in part])
        judged[name] = dataclasses.asdict(quality)
    report = {
        "config": read_config.to_dict(config),
        "texts": {"trained": len(trained), "held_out": len(held_out)},
        "tasks": {"trained": _tasks(trained), "held_out": _tasks(held_out)},
        "last_update": metrics,
        "judged": judged,
    }
    report = json.loads(json.dumps(report))  # as it is read later
    _write(
        folder, config, origin, tokenizer, Weights(model, scale, _digest(trained), metrics), report
    )
    return report


def quality_of(report: dict[str, Any]) -> Quality:
    """The measures on held-out tasks of a report."""
    return read_config.build(Quality, report["judged"]["held_out"], "judged.held_out")


def outcomes_of_run(
    workdir: Path, config: RewardModelConfig, tokenizer: Tokenizer
) -> Iterator[Outcome]:
    """The outcomes on record, of continuations too, in their order. Raises ConfigError, and
    StoreError.
    """
    run = kept_config.read(workdir)
    store = GroupStore(workdir / STORE)
    steps = [
        step
        for step in store.consumed()[:: config.every]
        if step >= config.first and (config.last is None or step < config.last)
    ]
    if not steps:
        raise ConfigError(
            f"config.runs: {workdir} has no steps {config.first} to {config.last} on record"
        )
    trained = {(step, item.number) for step in steps for item in store.items(step) if item.trained}
    places = [place for place in store.places(steps) if place in trained]
    reading = config.reading
    with (
        SandboxPool(run.sandbox) as pool,
        Progress(f"groups of {workdir.name}", len(places)) as progress,
    ):
        for number, record in enumerate(read_ahead(store.folder, places), start=1):
            task = record.group.task
            for trajectory in record.group.all:
                work = change_of(record.group, trajectory, run, pool)
                if work is not None:
                    ids = reading.ids(tokenizer, task, reading.kept(work), pool)
                    yield Outcome(task.id, tuple(ids), trajectory.solved)
            progress.update(number)


def change_of(
    group: Group, trajectory: Trajectory, run: RunConfig, pool: SandboxPool
) -> str | None:
    """The change of work that was handed in; None for none, for a proven cheat, for a change that
    is too large, and where the calls on record cannot be carried out again in their order.
    """
    if trajectory.status != "submitted" or not CHEATS.isdisjoint(trajectory.reward.flags):
        return None
    for notes in (trajectory.reward.notes or {}).values():
        if WORK in notes:
            return notes[WORK]
    if len(trajectory.contexts) > 1 or run.harness is not None:
        return None
    tools = find_tools(run.tools)
    verbose = find_protocol(run.protocol, tools, "config.protocol").verbose
    own = offered(group.task, tools)
    try:
        files = work_of(group.task, trajectory, own, pool, run.limits, verbose=verbose)
        if files is None:
            return None
        return diff(texts_before(group.task, pool, files), texts(files))
    except SandboxFault as fault:
        logging.warning("the work on task %s cannot be made again: %s", group.task.id, fault)
        return None


def split(
    outcomes: Sequence[Outcome], share: float, seed: int
) -> tuple[list[Outcome], list[Outcome]]:
    """(Outcomes to train on, outcomes of other tasks to judge by). A task belongs to the same part
    in every call with this seed.
    """

    def held(task: str) -> bool:
        digest = hashlib.sha256(f"{seed}/{task}".encode()).digest()
        return int.from_bytes(digest[:8], "big") < share * 2**64

    parts: tuple[list[Outcome], list[Outcome]] = ([], [])
    for one in outcomes:
        parts[held(one.task)].append(one)
    return parts


def _check(
    trained: Sequence[Outcome], held_out: Sequence[Outcome], config: RewardModelConfig
) -> None:
    """Raises ConfigError where there is nothing to learn from, or to judge by."""
    for name, part in (("trained on", trained), ("held out", held_out)):
        good = sum(one.good for one in part)
        if not 0 < good < len(part):
            raise ConfigError(
                f"config.runs: of {len(part)} outcomes that are {name}, {good} are good; both "
                f"kinds are needed. Read more steps, or change config.held_out={config.held_out}"
            )


def _backbone(origin: Origin, config: RewardModelConfig, mesh: jax.sharding.Mesh) -> Any:
    """The parameters of the backbone, in float32. Raises ConfigError."""
    shape = origin.shape()
    methods = shape.attention
    if origin.workdir is not None:
        workdir = origin.workdir
        kept = workdir if (workdir / "config.json").exists() else workdir.parent
        methods = kept_config.read(kept).model.methods() or methods
    names_of(methods, f"config.weights = {config.weights!r}")
    origin.check_methods(methods, shape)
    architecture = families.of_config(shape).architecture
    whole = dataclasses.replace(shape, attention=methods, architecture=architecture)
    with jax.set_mesh(mesh):
        return origin.load(whole, mesh)


def _write(
    folder: Path,
    config: RewardModelConfig,
    origin: Origin,
    tokenizer: Tokenizer,
    weights: Weights,
    report: dict[str, Any],
) -> None:
    """Writes the folder; the report last, by which it counts as made."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = weights.model.config
    origin_lib.keep(
        folder,
        origin,
        shape,
        tokenizer,
        max_positions=config.reading.tokens,
        stop_ids=[tokenizer.eos_id],
        chat_template=None,
        own_tokenizer=True,
    )
    attention = names_of(shape.attention, "config.weights")
    judged = {name: report["judged"]["held_out"][name] for name in ("auc", "auc_within", "ece")}
    made_of = {"weights": config.weights, "runs": list(config.runs)}
    write(folder, Description(config.reading, attention, config.fit.kind, made_of, judged))
    with Checkpoints(folder, config, keep=1) as checkpoints:
        if 0 not in checkpoint.steps(folder):
            save(checkpoints, 0, weights)
    write_atomically(folder / REPORT, (json.dumps(report, indent=1) + "\n").encode())


def _tasks(outcomes: Sequence[Outcome]) -> int:
    return len({one.task for one in outcomes})


def _digest(outcomes: Sequence[Outcome]) -> str:
    whole = json.dumps([[one.task, one.tokens, one.good] for one in outcomes])
    return hashlib.sha256(whole.encode("utf-8", "surrogatepass")).hexdigest()[:16]
