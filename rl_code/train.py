"""Reinforcement learning of a coding agent: warm start, evaluate, then sample, grade, update, and
evaluate again.

``train`` is the whole system in one process, or its learner. ``act`` is an actor that serves a
learner in another process. The config says how far sampling runs ahead of training (``schedule``).

What was sampled goes into a store before it is trained on. A learner that was killed therefore
repeats the steps since its checkpoint with the same groups. If sampling is synchronous or exactly
one step ahead, the config and the step alone decide which tasks, which weights and which random
numbers are used. A run that was killed and started again then ends with the same weights, bit for
bit, as one that was not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import logging

from models.sharding import row_shards
from models.transformer import Transformer
from rl_code import sft
from rl_code.act import await_store, make_actor
from rl_code.checkpoint.checkpoint import Checkpoints
from rl_code.checkpoint.checkpoint import steps as checkpoint_steps
from rl_code.config.read_config import ConfigError
from rl_code.evaluation import during
from rl_code.evaluation import suite as suite_lib
from rl_code.evaluation.suite import SuiteResult
from rl_code.evaluation.suites import SuiteConfig
from rl_code.host.stop import Stopped, StopRequest
from rl_code.learner.teacher import first_state
from rl_code.learner.update import TrainState
from rl_code.metrics.progress import Progress
from rl_code.rewards.combine import check_models
from rl_code.rollout import late_credit
from rl_code.rollout.group_source import (
    FromOtherProcesses,
    GroupSource,
    InActorThread,
    InLearnerThread,
    StopWaiting,
)
from rl_code.run import provenance, teaching
from rl_code.run.config import RunConfig, check_rows, refuse_sync
from rl_code.run.journal import Journal
from rl_code.run.retraining import retraining
from rl_code.run.run import Run
from rl_code.run.step_metrics import METRIC_ERRORS, StepTimes, actor_metrics
from rl_code.run.workdir import ACTOR, LEARNER, MAY_CHANGE, STORE, check, fork_command, own
from rl_code.schedule import make_schedule
from rl_code.store.errors import ConsumedOtherwise, StoreError
from rl_code.store.group_records import GroupRecord
from rl_code.store.heartbeat import Heartbeat
from rl_code.store.record_keeper import RecordKeeper
from rl_code.store.store import GroupStore
from rl_code.types import Group, Task, Trajectory
from rl_code.weights.local import LocalWeights
from rl_code.weights.stored_publisher import StoredPublisher
from rl_code.weights.stored_subscriber import StoredSubscriber
from rl_code.weights.transfer_publisher import TransferPublisher
from rl_code.weights.versions import OtherBits, Publisher


def train(
    config: RunConfig, workdir: str | Path, role: str = "all", host: str = "127.0.0.1"
) -> list[SuiteResult]:
    """Runs a config to its end, from wherever the workdir left off; returns all evaluations.

    role: "all", or "learner" if other processes sample. host: the address of this machine at which
    those processes reach its devices.

    Raises:
      CheckpointError, ConfigError: the workdir cannot be continued.
      SandboxUnavailable: code cannot be run safely on this machine.
      HarnessError: the agent's programs cannot be run.
      FloatingPointError: the loss is not finite; the checkpoint is from before that step.
      StoreError, WeightError: storage fails, or nobody answers in time.
      Stopped: after Ctrl-C or SIGTERM.
    """
    workdir = Path(workdir)
    if role == "learner":
        refuse_sync(config)
    check(workdir, config)
    with Run(config, workdir, role) as run, jax.set_mesh(run.mesh), StopRequest() as stop:
        # Rows, tasks, models that pay and the agent are looked at before the workdir is claimed. If
        # a start fails because of a mesh, a path, a file of tasks or a program that is not there,
        # the corrected config must still be able to claim it.
        check_rows(config, row_shards(run.mesh))
        _ = run.task_sets.training
        run.task_sets.check_held_out()
        check_models(config.reward, run.tokenizer)
        if run.harness is not None:
            _ = run.harness.host
        workdir.mkdir(parents=True, exist_ok=True)
        if jax.process_index() == 0:
            own(workdir, config)
        provenance.record(run.journal)
        if run.config.sft is not None:
            model = sft.warm_start(run, stop).model
        else:
            model = run.init_model()
        evaluate(run, model, "before", 0)
        state = _reinforce(run, model, stop, host)
        evaluate(run, state.model, "after", config.train.steps)
        return suite_lib.load_all(workdir)


# --- The loop -------------------------------------------------------------------------------------


def _reinforce(run: Run, model: Transformer, stop: StopRequest, host: str) -> TrainState:
    """The RL steps that are still to be done."""
    config = run.config.train
    every = run.config.checkpoint.every
    learn = teaching.learner(run, config, model)
    keep = run.config.checkpoint.keep
    with Checkpoints(run.workdir, run.config, keep=keep, may_change=MAY_CHANGE) as checkpoints:
        state, start, position = _restore(run, model, checkpoints)
        # before the store: actors that wait for it then find what was prepared
        tasks = run.task_sets.training
        store = _open_store(run)
        pool = run.task_sets.pool(position["tasks"])
        schedule = make_schedule(run, store, pool, position["planned"])
        with (
            retraining(run.config, run.workdir, run.pool, store, start) as reward_model,
            _connected(run, store, stop, host, start, state.model) as (publisher, source),
            Journal(run, start) as journal,
            RecordKeeper(store, run.workdir, run.config.record) as keeper,
            stop.deferred(),
        ):
            for step in range(start, config.steps):
                begin = time.perf_counter()

                # Plan: the tasks of every step that may begin with the weights there are now.
                # Then wait for G episodes of each task of this one, sampled and graded by actors
                # here or elsewhere, and plan more where the config wants full batches.
                with _saved_when_stopped(checkpoints, step, state, position):
                    screened = schedule.plan(step, journal.while_screening(step, source.wait))
                    planned = time.perf_counter()
                    items = schedule.fill(step, source.wait)
                    prompts = (run.wording.prompt(tasks[item.task]) for item in items)
                    begun = learn.begin(state, prompts)
                    records = source.wait(step)
                groups = [_group_of(tasks[item.task], records[item.number]) for item in items]
                sampled = time.perf_counter()

                # Learn: advantages, batch, update.
                credited = late_credit.late(store, groups, run.config.memory)
                state, learned = learn(state, groups, step, begun, credited)
                batch = learned.pop("batch/crc32")
                trained = time.perf_counter()
                if not learned["train/finite"]:
                    # With several epochs, or a value function, some of the step's updates may have
                    # been made already.
                    if config.epochs == 1 and config.value is None:
                        checkpoints.save(step, state, position)
                    raise _not_finite(step, checkpoints, run.workdir)

                # Retrain the reward model, where that is due: episodes of the weights that are
                # published next are paid by it.
                used = [records[item.number] for item in items]
                retold = reward_model.after(step, used) if reward_model is not None else {}

                # Publish: first the new weights, then that this step's groups are used up. A
                # learner that is killed in between makes the same weights from the same groups
                # again; in the other order actors could wait for a version that nobody makes.
                with _fork_named(run.workdir):
                    version = publisher.publish(step + 1, state.model)
                    if store.writes:
                        sums = dict(weights=version.checksum, batch=batch)
                        store.consume(step, records, version=step, **sums)
                keeper.consumed(step)
                times = StepTimes(begin, planned, sampled, trained, time.perf_counter())

                # Evaluate, where the config asks for it, and write down. A learner that is killed
                # here makes the step again and plays the suites that have no result yet. The
                # position goes into the checkpoint: from it a continued run draws the same tasks
                # and plans the same steps.
                played = [item.task for item in items]
                pool.record(dict(zip(played, (group.solved for group in groups), strict=True)))
                position = {"tasks": pool.position(), "planned": schedule.next_step}
                drawn = {"tasks/screened": screened} | schedule.take_metrics() | pool.metrics()
                evaluated = _evaluated(run, state.model, step + 1, journal.progress)
                rest = _measured(times, source, publisher) | drawn | keeper.metrics()
                rest |= evaluated | retold
                metrics = journal.write(step, groups, learned, rest, times.seconds)
                stopping = stop.agreed
                scored = run.config.checkpoint.best in evaluated
                if (step + 1) % every == 0 or step + 1 == config.steps or scored or stopping:
                    checkpoints.save(step + 1, state, position, _score(run.config, metrics))
                    keeper.saved(step + 1)
                if stopping:
                    raise Stopped(f"stopped after step {step + 1} of {config.steps}")
            keeper.finish()
        return state


@contextlib.contextmanager
def _saved_when_stopped(
    checkpoints: Checkpoints, step: int, state: TrainState, position: Mapping[str, Any]
) -> Iterator[None]:
    """Around waits for groups: a run that is to stop saves the step it is at, and says so."""
    try:
        yield
    except StopWaiting:
        checkpoints.save(step, state, position)
        raise Stopped(f"stopped before step {step}") from None


@contextlib.contextmanager
def _fork_named(workdir: Path) -> Iterator[None]:
    """Around what refuses other bits than those on record: says how a fork goes on with them."""
    try:
        yield
    except (OtherBits, ConsumedOtherwise) as error:
        step = max(checkpoint_steps(workdir), default=0)
        command = fork_command(workdir, f"--step={step}", ending=str(step))
        raise type(error)(
            f"{error}. Or go on with other bits in a fork, which keeps the record before step "
            f"{step} and says where bits change, by\n    {command}"
        ) from error


def _measured(times: StepTimes, source: GroupSource, publisher: Publisher) -> dict[str, float]:
    """Metrics of a step's cost, here and in the actor of this process."""
    moved = publisher.published.metrics() if publisher.published else {}
    return times.metrics() | actor_metrics(source.take_stats()) | moved


def _restore(
    run: Run, model: Transformer, checkpoints: Checkpoints
) -> tuple[TrainState, int, dict[str, Any]]:
    """State, step and position to go on from: those of the newest checkpoint, or of the start.

    Raises ConfigError if more steps are done than the config asks for.
    """
    state = first_state(run.config.train, model)
    restored = teaching.restored(run.config.train, state, run.workdir, checkpoints.restore)
    if restored is None:
        return state, 0, {"tasks": None, "planned": 0}
    if restored.step > run.config.train.steps:
        raise ConfigError(
            f"config.train.steps = {run.config.train.steps}: {run.workdir} has been trained for "
            f"{restored.step} steps already; the number can be raised, not lowered below that"
        )
    return restored.state, restored.step, restored.position


def _score(config: RunConfig, metrics: Mapping[str, Any]) -> float | None:
    """Score of the state after a step, for the choice of the best checkpoint."""
    name = config.checkpoint.best
    if name is None or (name not in metrics and name.startswith(during.METRICS)):
        return None  # no evaluation after this step
    if name not in metrics and metrics.get(METRIC_ERRORS):
        return None  # it is that of a metric which failed
    if name not in metrics:
        raise ConfigError(
            f"config.checkpoint.best = {name!r}: no such metric; there are {', '.join(metrics)}"
        )
    return float(metrics[name])


def _not_finite(step: int, checkpoints: Checkpoints, workdir: Path) -> FloatingPointError:
    found = checkpoints.steps()
    return FloatingPointError(
        f"the loss or its gradient is not finite at step {step}; checkpoints of steps {found} are "
        f"in {workdir}"
    )


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
    await_store(run.workdir, run.config.asynchrony.work.deadline_s)
    return GroupStore(run.workdir / STORE)


@contextlib.contextmanager
def _connected(
    run: Run, store: GroupStore, stop: StopRequest, host: str, start: int, model: Transformer
) -> Iterator[tuple[Publisher, GroupSource]]:
    """Publishes the first version, and closes both sides at the end."""
    publisher, source = _connect(run, store, stop, host)
    publisher.publish(start, model)
    # The publisher closes before the source, whose actor may be waiting for weights: the wait then
    # ends with an error instead of at its deadline.
    with _heartbeat(run, store), source, contextlib.closing(publisher):
        yield publisher, source


def _heartbeat(run: Run, store: GroupStore) -> contextlib.AbstractContextManager[Any]:
    """The learner's sign of life, for whoever starts it again when it hangs. A step may take any
    time, so only a process that is stopped as a whole loses it.
    """
    if run.role != "learner" or not store.writes:
        return contextlib.nullcontext()
    work = run.config.asynchrony.work
    return contextlib.closing(
        Heartbeat(store.process, heartbeat_s=work.heartbeat_s, stall_s=math.inf)
    )


def _connect(
    run: Run, store: GroupStore, stop: StopRequest, host: str
) -> tuple[Publisher, GroupSource]:
    """Make the publisher by which weights leave the learner, and the source of its groups."""
    config = run.config.asynchrony
    rollout = run.config.rollout
    publish_stored = functools.partial(
        StoredPublisher, run.workdir, rollout.dtype, config.weights, quantised=rollout.weights
    )
    if run.role == "learner":
        return TransferPublisher(publish_stored(), host=host), FromOtherProcesses(
            store, config.work.deadline_s, stop
        )
    if rollout.prefill is not None:
        logging.warning(
            "config.rollout.prefill is for actors in processes of their own; the actor in this one "
            "prefills by itself"
        )
    in_memory = functools.partial(LocalWeights, run.sampling_model(), keep=config.weights.keep)
    actor_store = GroupStore(run.workdir / STORE, ACTOR)
    if config.mode == "sync":
        weights = in_memory()
        return weights, InLearnerThread(
            store, make_actor(run, actor_store, weights), config.work.deadline_s
        )
    subscriber = StoredSubscriber(run.workdir, run.sampling_model(), name=ACTOR)
    weights = in_memory(stored=(publish_stored(), subscriber))
    return weights, InActorThread(
        store, make_actor(run, actor_store, weights), config.work.deadline_s, stop
    )


# --- Evaluation -----------------------------------------------------------------------------------


def evaluate(
    run: Run,
    model: Transformer,
    label: str,
    step: int,
    suites: Sequence[SuiteConfig] | None = None,
    progress: Progress | None = None,
) -> list[SuiteResult]:
    """Plays every suite that has no result of this label and step yet, and keeps the results in the
    workdir; returns all of this label and step.

    There may be a result of this label from another step, such as "after" of a run whose
    ``train.steps`` was raised since. That one is kept under the label "step_<step>".

    Args:
      suites: all of the config unless given.
      progress: the line of training, which shows how far the evaluation is; None for a line of its
        own.
    """
    results = []
    for suite in run.config.suites if suites is None else suites:
        path = run.workdir / suite_lib.FOLDER / f"{suite.name}.{label}.json"
        if path.exists():
            known = suite_lib.load(path)
            if known.step == step:
                results.append(known)
                continue
            dataclasses.replace(known, label=f"step_{known.step}").save(run.workdir)
        result = _play(run, suite, model, label, step, progress)
        result.save(run.workdir)
        results.append(result)
    return results


def _play(
    run: Run,
    suite: SuiteConfig,
    model: Transformer,
    label: str,
    step: int,
    progress: Progress | None,
) -> SuiteResult:
    """Plays one suite and shows how far it is."""
    total = len(run.task_sets.of_suite(suite)) * suite.samples
    with contextlib.ExitStack() as stack:
        line = progress or stack.enter_context(Progress(f"{suite.name} {label}", total))
        solved: list[bool] = []

        def count(trajectory: Trajectory) -> None:
            solved.append(trajectory.solved)
            rate = sum(solved) / len(solved)
            if progress is None:
                line.update(len(solved), pass_rate=rate)
            else:
                line.update(step - 1, evaluating=f"{suite.name} {len(solved)}/{total}")

        return run.evaluate(suite, model, label=label, step=step, on_finished=count)


def _evaluated(run: Run, model: Transformer, step: int, progress: Progress) -> dict[str, float]:
    """Metrics of the suites that the config wants played after ``step`` steps."""
    config = run.config.evaluate
    if config is None:
        return {}
    begin = time.perf_counter()
    last = run.config.train.steps
    suites = config.due(run.config.suites, step, last)
    label = "after" if step == last else f"step_{step}"
    results = evaluate(run, model, label, step, suites, progress)
    seconds = {"time/evaluate_s": time.perf_counter() - begin} if suites else {}
    return during.metrics(results, config.samples) | seconds
