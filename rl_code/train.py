"""Reinforcement learning of a coding agent: warm start, evaluate, then sample, grade, update, and
evaluate again.

``train`` is the whole system in one process, or its learner; ``act`` is one of the actors that
serve a learner in other processes. How far sampling runs ahead of training is the config's
(``schedule``). What was sampled goes into a store before it is trained on, so a learner that was
killed goes through the steps since its checkpoint again with the same groups. Where sampling is
synchronous or exactly one step ahead, everything that decides what happens (which tasks, which
weights, which random numbers) is a function of the config and the step, so a run that was killed
and started again ends with the same weights, bit for bit, as one that was not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np

from models.transformer import Transformer
from rl_code import provenance, sft
from rl_code.checkpoint import Checkpoints
from rl_code.evaluation import suite as suite_lib
from rl_code.evaluation.suite import SuiteResult
from rl_code.learner.learner import Learner
from rl_code.learner.update import TrainState, init_state
from rl_code.metrics import CompilationCounter, MetricWriter, Progress, read_metrics
from rl_code.rollout.actor import Actor, ActorStats
from rl_code.rollout.group_source import (
    FromOtherProcesses,
    GroupSource,
    InActorThread,
    InLearnerThread,
    StopWaiting,
)
from rl_code.rollout.multihost import Channel, LeadingWeights, follow
from rl_code.run import Run
from rl_code.run_config import RunConfig, refuse_sync
from rl_code.schedule import solved
from rl_code.stop import Stopped, StopRequest
from rl_code.store import steps as steps_lib
from rl_code.store.claims import Claims
from rl_code.store.errors import StoreError
from rl_code.store.group_records import GroupRecord
from rl_code.store.store import GroupStore
from rl_code.tasks.screening import TaskPool
from rl_code.trajectory_log import TrajectoryLog
from rl_code.types import Group, Task, Trajectory
from rl_code.weights.local import LocalWeights
from rl_code.weights.local_and_stored import LocalAndStoredWeights
from rl_code.weights.stored_publisher import StoredPublisher
from rl_code.weights.stored_subscriber import StoredSubscriber
from rl_code.weights.transfer import TransferPublisher, TransferSubscriber
from rl_code.weights.versions import Publisher, Subscriber
from rl_code.weights.waiting import Deadline
from rl_code.workdir import MAY_CHANGE, check, own

STORE = "store"
ACTORS = "actors"
# Names that the processes of a run have of themselves: the learner, and the actor within its
# process.
RESERVED = LEARNER, ACTOR = "learner", "actor"


def train(
    config: RunConfig, workdir: str | Path, role: str = "all", host: str = "127.0.0.1"
) -> list[SuiteResult]:
    """Runs a config to its end, from wherever the workdir left off; returns all evaluations.

    role: "all", or "learner" where other processes sample, which reach this one's devices at
    ``host``. Raises CheckpointError or ConfigError for a workdir that cannot be continued,
    SandboxUnavailable where code cannot be run safely, FloatingPointError when the loss is not
    finite (the checkpoint is from before that step), StoreError or WeightError when storage fails
    or nobody answers in time, Stopped after Ctrl-C or SIGTERM.
    """
    workdir = Path(workdir)
    if role == "learner":
        refuse_sync(config)
    workdir.mkdir(parents=True, exist_ok=True)
    if jax.process_index() == 0:
        own(workdir, config)
    with Run(config, workdir, role) as run, jax.set_mesh(run.mesh), StopRequest() as stop:
        provenance.record(run.journal)
        if run.config.sft.steps:
            model = sft.warm_start(run, stop).model
        else:
            model = run.init_model()
        evaluate(run, model, "before", 0)
        state = _reinforce(run, model, stop, host)
        evaluate(run, state.model, "after", config.train.steps)
        return suite_lib.load_all(workdir)


def act(config: RunConfig, workdir: str | Path, name: str, host: str = "127.0.0.1") -> None:
    """Samples for the learner of a workdir until its last step is trained on; raises as ``train``.

    name: among the actors of the run. host: address of this machine in numbers. What it did for
    each version of the weights goes into the folder ``actors/<name>`` of the workdir.
    """
    workdir = Path(workdir)
    deadline_s = config.asynchrony.weights.deadline_s
    refuse_sync(config)
    _await_store(workdir, config.asynchrony.work.deadline_s)
    check(workdir, config)
    with contextlib.ExitStack() as stack:
        channel = (
            stack.enter_context(contextlib.closing(Channel(host, deadline_s)))
            if jax.process_count() > 1
            else None
        )
        run = stack.enter_context(Run(config, workdir, "actor", channel))
        stop = stack.enter_context(StopRequest())
        # all processes stop between the same two calls; one alone stops at once
        if channel is not None:
            stack.enter_context(stop.deferred())
        stored = StoredSubscriber(workdir, run.sampling_model(), name=name)
        weights = TransferSubscriber(stored, host=host, pull_s=min(30.0, deadline_s))
        if channel is not None and not channel.leads:
            rollout = config.rollout
            engine = run.engine(
                rollout.sampling, rollout.engine, config.protocol, rollout.dtype, run.rollout_mesh
            )
            follow(engine, weights, channel)
            return
        if channel is not None:
            weights = LeadingWeights(weights, channel)
        store = GroupStore(workdir / STORE, name)
        last = config.train.steps - 1
        writer = stack.enter_context(_resumed_writer(workdir / ACTORS / name))

        def write(version: int) -> None:
            if version > writer.last_step:
                writer.write(version, actor_metrics(actor.take_stats()) | weights.fetched.metrics())

        actor = make_actor(run, store, weights, write)
        stopped = False
        try:
            actor.run(lambda: stop.requested or store.is_consumed(last))
            write(config.train.steps)
        except KeyboardInterrupt:
            stopped = True
        finally:
            actor.close()
        if channel is not None:
            channel.tell("stop")
        if stopped or stop.requested:
            raise Stopped(f"{name} stopped; what it held may be taken over")


def make_actor(
    run: Run,
    store: GroupStore,
    weights: Subscriber,
    on_loaded: Callable[[int], None] = lambda version: None,
) -> Actor:
    """An actor of a run, on the devices that sample."""
    config = run.config.asynchrony
    scheduler = run.scheduler(run.config.rollout.sampling)
    return Actor(
        scheduler,
        store,
        Claims(store, config.work),
        weights,
        run.tasks,
        run.episode,
        config,
        on_loaded,
    )


def _resumed_writer(folder: Path) -> MetricWriter:
    """Goes on behind the last row."""
    rows = read_metrics(folder)
    return MetricWriter(folder, rows[-1]["step"] + 1 if rows else 0)


# --- The loop -------------------------------------------------------------------------------------


def _reinforce(run: Run, model: Transformer, stop: StopRequest, host: str) -> TrainState:
    """The RL steps that are still to be done."""
    config = run.config.train
    checkpoint = run.config.checkpoint
    learn = Learner(config, run.rows_sharding, model)

    with Checkpoints(
        run.workdir, run.config, keep=checkpoint.keep, may_change=MAY_CHANGE
    ) as checkpoints:
        state = init_state(model, config.optimizer)
        restored = checkpoints.restore(state)
        start = 0
        position = {"tasks": None, "planned": 0}
        if restored is not None:
            start = restored.step
            position = restored.position
            state = restored.state
        log = TrajectoryLog(run.journal, run.tokenizer.decode, start)
        tasks = run.tasks  # before the store: actors that wait for it then find what was prepared
        store = _open_store(run)
        pool = TaskPool(len(tasks), run.config.seed, config.screening, position["tasks"])
        schedule = run.schedule(store, pool, position["planned"])
        publisher, source = _connect(run, store, stop, host)
        publisher.publish(start, state.model)

        with (
            source,
            # before the source, whose actor may be waiting for weights
            contextlib.closing(publisher),
            MetricWriter(run.journal, start) as writer,
            Progress("training", config.steps, start) as progress,
            CompilationCounter() as compilations,
            stop.deferred(),
        ):
            for step in range(start, config.steps):
                begin = time.perf_counter()

                # Plan: the tasks of every step that may begin with the weights there are now.
                # Then wait for G episodes of each task of this one, sampled and graded by actors
                # here or elsewhere.
                try:
                    screened = schedule.plan(step, source.wait)
                    planned = time.perf_counter()
                    items = [item for item in store.items(step) if item.kind == "train"]
                    begun = learn.begin(state, [run.prompt(tasks[item.task]) for item in items])
                    records = source.wait(step)
                except StopWaiting:
                    checkpoints.save(step, state, position)
                    raise Stopped(f"stopped before step {step} of {config.steps}") from None
                groups = [_group_of(tasks[item.task], records[item.number]) for item in items]
                sampled = time.perf_counter()

                # Learn: advantages, batch, update.
                state, learner_metrics = learn(state, groups, step, begun)
                trained = time.perf_counter()
                if not learner_metrics["train/finite"]:
                    if config.epochs == 1:  # else some of the step's updates may have been made
                        checkpoints.save(step, state, position)
                    there = f"checkpoints of steps {checkpoints.steps()} are in {run.workdir}"
                    raise FloatingPointError(
                        f"the loss or its gradient is not finite at step {step}; {there}"
                    )

                # Publish: the new weights, then that this step's groups are used up.
                version = publisher.publish(step + 1, state.model)
                if store.writes:
                    store.consume(step, records, version=step, weights=version.checksum)

                # Write down.
                log.append(step, groups)
                pool.record(
                    {item.task: solved(group) for item, group in zip(items, groups, strict=True)}
                )
                position = {"tasks": pool.position(), "planned": schedule.next_step}
                times = StepTimes(begin, planned, sampled, trained, time.perf_counter())
                metrics = (
                    episode_metrics(groups, step)
                    | learner_metrics
                    | actor_metrics(source.take_stats())
                )
                metrics |= publisher.published.metrics() if publisher.published else {}
                metrics |= times.metrics(metrics["rollout/sampled_tokens"]) | {
                    "time/compilations": compilations.count,
                    "tasks/screened": screened,
                    "tasks/pool": len(pool.active),
                }
                writer.write(step, metrics)
                progress.update(
                    step + 1,
                    reward=metrics["reward/total"],
                    pass_rate=metrics["reward/solved"],
                    tokens_per_s=metrics["time/tokens_per_s"],
                )
                last = step + 1 == config.steps
                stopping = stop.agreed
                if (step + 1) % checkpoint.every == 0 or last or stopping:
                    checkpoints.save(step + 1, state, position)
                if stopping:
                    raise Stopped(f"stopped after step {step + 1} of {config.steps}")
        return state


def _group_of(task: Task, record: GroupRecord) -> Group:
    """The group of a record. Raises StoreError if its actor has another task at that place."""
    if record.group.task.id != task.id:
        raise StoreError(
            f"{record.actor} sampled {record.group.task.id!r} for item ({record.step}, "
            f"{record.number}), which is "
            f"{task.id!r} here: do both read the same files of tasks?"
        )
    return record.group


def _open_store(run: Run) -> GroupStore:
    """The learner's store; of several processes the first one writes."""
    if jax.process_index() == 0:
        return GroupStore(run.workdir / STORE, LEARNER)
    _await_store(run.workdir, run.config.asynchrony.work.deadline_s)
    return GroupStore(run.workdir / STORE)


def _connect(
    run: Run, store: GroupStore, stop: StopRequest, host: str
) -> tuple[Publisher, GroupSource]:
    """How weights leave the learner, and how groups reach it."""
    config = run.config.asynchrony
    if run.role == "learner":
        stored = StoredPublisher(run.workdir, run.config.rollout.dtype, config.weights)
        return TransferPublisher(stored, host=host), FromOtherProcesses(
            store, config.work.deadline_s, stop
        )
    local = LocalWeights(run.sampling_model(), keep=config.weights.keep)
    actor_store = GroupStore(run.workdir / STORE, ACTOR)
    if config.mode == "sync":
        return local, InLearnerThread(
            store, make_actor(run, actor_store, local), config.work.deadline_s
        )
    stored = StoredPublisher(run.workdir, run.config.rollout.dtype, config.weights)
    weights = LocalAndStoredWeights(
        local, stored, StoredSubscriber(run.workdir, run.sampling_model(), name=ACTOR)
    )
    return weights, InActorThread(
        store, make_actor(run, actor_store, weights), config.work.deadline_s, stop
    )


def _await_store(workdir: Path, deadline_s: float) -> None:
    """Until a learner has made its store: an actor may be started first."""
    if not Deadline(deadline_s).wait(lambda: steps_lib.exists(workdir / STORE), poll_s=0.2):
        raise StoreError(
            f"no learner has made {workdir / STORE} within {deadline_s:g} s; is --workdir right?"
        )


# --- Evaluation -----------------------------------------------------------------------------------


def evaluate(run: Run, model: Transformer, label: str, step: int) -> None:
    """Plays every suite that has no result under this label yet, and keeps the results in the
    workdir.
    """
    for suite in run.config.suites:
        if (run.workdir / suite_lib.FOLDER / f"{suite.name}.{label}.json").exists():
            continue
        solved = []
        with Progress(
            f"{suite.name} {label}", len(run.suite_tasks(suite)) * suite.samples
        ) as progress:

            def count(trajectory: Trajectory, solved=solved, progress=progress) -> None:
                solved.append(trajectory.solved)
                progress.update(len(solved), pass_rate=sum(solved) / len(solved))

            result = run.evaluate(suite, model, label=label, step=step, on_finished=count)
        result.save(run.workdir)


# --- What is measured -----------------------------------------------------------------------------


def episode_metrics(groups: Sequence[Group], version: int) -> dict[str, float]:
    """Means over the episodes of one step; version: the learner's, when they were trained on."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    counts = [solved(group) for group in groups]
    ages = np.concatenate([version - t.versions[t.sampled] for t in trajectories])

    def mean(values) -> float:
        return float(np.mean([float(value) for value in values]))

    return {
        "reward/total": mean(t.reward.total for t in trajectories),
        **{
            f"reward/{name}": mean(t.reward.components.get(name, 0.0) for t in trajectories)
            for name in sorted({name for t in trajectories for name in t.reward.components})
        },
        "reward/solved": mean(t.solved for t in trajectories),
        "reward/first_edit": mean(t.first_edit_passed for t in trajectories),
        "reward/mixed_groups": mean(0 < good < graded for good, graded in counts),
        "episode/sampled_tokens": mean(t.sampled.sum() for t in trajectories),
        "episode/tokens": mean(len(t.tokens) for t in trajectories),
        "episode/turns": mean(
            sum(turn.role == "assistant" for turn in t.turns) for t in trajectories
        ),
        "episode/malformed_calls": mean(t.malformed_calls for t in trajectories),
        "episode/submitted": mean(t.status == "submitted" for t in trajectories),
        "episode/faults": float(sum(t.status == "fault" for t in trajectories)),
        "rollout/sampled_tokens": float(len(ages)),
        **{
            f"staleness/{age}": float(np.mean(ages == age))
            for age in range(int(ages.max(initial=0)) + 1)
        },
        "time/tools_s": sum(t.seconds.get("tools", 0.0) for t in trajectories),
        "time/grade_s": sum(t.seconds.get("grade", 0.0) for t in trajectories),
    }


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """When a step began, was planned, had its groups, had its update and was published; of
    time.perf_counter.
    """

    begin: float
    planned: float
    sampled: float
    trained: float
    done: float

    def metrics(self, sampled_tokens: float) -> dict[str, float]:
        """Seconds of the parts, the learner's share without work, and tokens per second of the
        whole.
        """
        whole = self.done - self.begin
        return {
            "time/step_s": whole,
            "time/screening_s": self.planned - self.begin,
            "time/rollout_s": self.sampled - self.planned,
            "time/update_s": self.trained - self.sampled,
            "time/publish_s": self.done - self.trained,
            "time/learner_idle": (self.sampled - self.begin) / whole,
            "time/tokens_per_s": sampled_tokens / whole,
        }


def actor_metrics(stats: ActorStats | None) -> dict[str, float]:
    """How an actor spent its time since it was last asked; which step that was for may differ.

    engine/hits_*: shares of the context that were found in the cache. engine/*_per_s: tokens per
    second of wall clock.
    """
    if stats is None:
        return {}
    rollout = stats.rollout
    needed = max(stats.rollout.needed_tokens, 1)
    seconds = max(stats.total_s, 1e-9)
    return {
        "engine/generated_tokens": float(rollout.sampled_tokens),
        "engine/prefilled_tokens": float(rollout.prefilled_tokens),
        "engine/generated_per_s": rollout.sampled_tokens / seconds,
        "engine/prefilled_per_s": rollout.prefilled_tokens / seconds,
        "engine/prefix_hit_rate": rollout.prefix_hit_rate,
        "engine/hits_groups": rollout.found_in_groups / needed,
        "engine/hits_turns": rollout.found_in_turns / needed,
        "engine/hits_tasks": rollout.found_in_tasks / needed,
        "engine/occupancy": rollout.occupancy,
        "engine/preempted": float(rollout.preempted),
        "engine/kv_mib": rollout.kv_bytes / 2**20,
        "actor/decode_s": rollout.decode_s,
        "actor/prefill_s": rollout.prefill_s,
        "actor/tool_wait_s": rollout.wait_s,
        "actor/idle_s": stats.idle_s,
        "actor/total_s": stats.total_s,
        "time/actor_idle": stats.idle_share,
        "time/actor_waits": rollout.wait_s / seconds,
    }
