"""One of the actors that serve a learner in other processes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path

import jax

from rl_code.config import read_config
from rl_code.host.stop import Stopped, StopRequest
from rl_code.metrics.progress import Progress
from rl_code.metrics.values import read_metrics
from rl_code.metrics.writers import MetricLog
from rl_code.rollout.actor import Actor
from rl_code.rollout.engine import Engine
from rl_code.rollout.multihost import Channel, LeadingWeights, follow
from rl_code.rollout.note_book import NoteBook
from rl_code.rollout.prefill_client import PrefillClient
from rl_code.run.config import RunConfig, refuse_sync
from rl_code.run.run import Run
from rl_code.run.step_metrics import actor_metrics
from rl_code.run.workdir import ACTORS, STORE, check
from rl_code.store import steps as steps_lib
from rl_code.store.claims import Claims
from rl_code.store.errors import StoreError
from rl_code.store.store import GroupStore
from rl_code.weights.stored_subscriber import StoredSubscriber
from rl_code.weights.transfer_subscriber import TransferSubscriber
from rl_code.weights.versions import Subscriber
from rl_code.weights.waiting import Deadline


def act(config: RunConfig, workdir: str | Path, name: str, host: str = "127.0.0.1") -> None:
    """Samples for the learner of a workdir until its last step is trained on; raises as ``train``.

    name: the name of this actor among those of the run. host: the address of this machine, in
    numbers. Metrics of what the actor did with each version of the weights go into the folder
    ``actors/<name>`` of the workdir.
    """
    workdir = Path(workdir)
    deadline_s = config.asynchrony.weights.deadline_s
    refuse_sync(config)
    await_store(workdir, config.asynchrony.work.deadline_s)
    check(workdir, config)
    with contextlib.ExitStack() as stack:
        channel = None
        if jax.process_count() > 1:
            channel = stack.enter_context(contextlib.closing(Channel(host, deadline_s)))
        run = stack.enter_context(Run(config, workdir, "actor", channel))
        stop = stack.enter_context(StopRequest())
        # Several processes must all stop between the same two calls, so a request to stop waits.
        # A single process stops at once.
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
        stopped = _sample(run, weights, name, stop, host)
        if channel is not None:
            channel.tell("stop")
        if stopped or stop.requested:
            raise Stopped(f"{name} stopped; what it held may be taken over")


def _sample(run: Run, weights: Subscriber, name: str, stop: StopRequest, host: str) -> bool:
    """Samples until the run's last step is consumed; returns whether Ctrl-C ended it earlier."""
    store = GroupStore(run.workdir / STORE, name)
    steps = run.config.train.steps
    with (
        _open_metrics(run, run.workdir / ACTORS / name) as metrics,
        Progress(name, steps) as progress,
    ):

        def report(version: int) -> None:
            """Report the work done with the version before, once ``version`` is loaded."""
            if weights.fetched is None:  # started when the last step was consumed already
                return
            row = actor_metrics(actor.take_stats()) | weights.fetched.metrics()
            if version > metrics.last_step:
                metrics.write(version, row)
            progress.update(
                version,
                groups=float(actor.claimed),
                tokens_per_s=row["engine/generated_per_s"],
                idle=f"{row['time/actor_idle']:.0%}",
            )

        remote = None
        if (prefill := run.config.rollout.prefill) is not None:
            remote = functools.partial(PrefillClient, run.workdir, name, host, prefill)
        actor = make_actor(run, store, weights, report, remote)
        try:
            actor.run(lambda: stop.requested or store.is_consumed(steps - 1))
            if stop.requested:  # a later start goes on behind the last row
                return True
            report(steps)
        except KeyboardInterrupt:
            return True
        finally:
            actor.close()
    return False


def make_actor(
    run: Run,
    store: GroupStore,
    weights: Subscriber,
    on_loaded: Callable[[int], None] = lambda version: None,
    remote: Callable[[Engine], PrefillClient] | None = None,
) -> Actor:
    """An actor of a run, on the devices that sample. remote: as ``Run.scheduler`` takes it."""
    config = run.config.asynchrony
    return Actor(
        run.player(remote),
        store,
        Claims(store, config.work),
        weights,
        run.task_sets.training,
        run.episode,
        config,
        on_loaded,
        NoteBook(
            store,
            run.tools,
            config.max_staleness,
            run.config.memory,
            run.config.train.group_size,
        ).task,
        run.config.rollout.forks,
        run.demonstrations.demonstrator(run.tokenizer, run.episode),
    )


def await_store(workdir: Path, deadline_s: float) -> None:
    """Waits until a learner has made its store, since an actor may be started before it."""
    if not Deadline(deadline_s).wait(lambda: steps_lib.exists(workdir / STORE), poll_s=0.2):
        raise StoreError(
            f"no learner has made {workdir / STORE} within {deadline_s:g} s; is --workdir right?"
        )


def _open_metrics(run: Run, folder: Path) -> MetricLog:
    """Goes on behind the last row that an earlier start of this actor wrote."""
    rows = read_metrics(folder)
    start = rows[-1]["step"] + 1 if rows else 0
    settings = run.config.metrics.open_settings()
    return MetricLog(folder, start, settings, read_config.to_dict(run.config))
