"""The process that prefills the prompts of the actors of a run."""

from __future__ import annotations

import contextlib
from pathlib import Path

from rl_code.act import await_store
from rl_code.config import read_config
from rl_code.host.stop import Stopped, StopRequest
from rl_code.metrics.progress import Progress
from rl_code.metrics.values import read_metrics
from rl_code.metrics.writers import MetricLog
from rl_code.rollout.prefill_server import PrefillServer
from rl_code.run.config import RunConfig, check_prefill
from rl_code.run.run import Run
from rl_code.run.workdir import PREFILL, STORE, check
from rl_code.store.store import GroupStore
from rl_code.weights.stored_subscriber import StoredSubscriber
from rl_code.weights.transfer_subscriber import TransferSubscriber
from rl_code.weights.waiting import Deadline

_LOOK_S = 1.0  # between two looks at whether the run is over
_TURN_S = 0.2  # the longest wait for a request


def prefill(config: RunConfig, workdir: str | Path, host: str = "127.0.0.1") -> None:
    """Prefills what the actors of a workdir ask for until its last step is trained on; raises as
    ``act``.

    host: the address of this machine, in numbers. Metrics of what was done with each version of the
    weights go into the folder ``prefill`` of the workdir, as those of actors do into theirs.
    """
    workdir = Path(workdir)
    check_prefill(config)
    await_store(workdir, config.asynchrony.work.deadline_s)
    check(workdir, config)
    rollout, deadline_s = config.rollout, config.asynchrony.weights.deadline_s
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(Run(config, workdir, "prefill"))
        stack.enter_context(StopRequest())
        stored = StoredSubscriber(workdir, run.sampling_model(), name=PREFILL)
        weights = TransferSubscriber(stored, host=host, pull_s=min(30.0, deadline_s))
        engine = run.engine(
            rollout.sampling, rollout.engine, config.protocol, rollout.dtype, run.rollout_mesh
        )
        metrics = stack.enter_context(_open_metrics(run))
        progress = stack.enter_context(Progress(PREFILL, config.train.steps))

        def report(version: int) -> None:
            """Report the work done with the version before, once ``version`` is loaded."""
            row = server.take_stats().metrics()
            if version > metrics.last_step:
                metrics.write(version, row)
            progress.update(version, prompts=row["prefill/prompts"])

        # Actors that wait for a version which does not come prefill by themselves meanwhile.
        wait_s = min(30.0, deadline_s)
        server = PrefillServer(
            engine, weights, workdir, host=host, deadline_s=wait_s, on_loaded=report
        )
        stack.enter_context(contextlib.closing(server))
        try:
            _serve(run, server)
            report(config.train.steps)
        except KeyboardInterrupt:
            raise Stopped("prefill stopped; actors prefill by themselves") from None


def _serve(run: Run, server: PrefillServer) -> None:
    """Serves until the run's last step is consumed."""
    store = GroupStore(run.workdir / STORE)
    last = run.config.train.steps - 1
    look = Deadline(_LOOK_S)
    while True:
        server.turn(_TURN_S)
        if look.left():
            continue
        if store.is_consumed(last):
            return
        look = Deadline(_LOOK_S)


def _open_metrics(run: Run) -> MetricLog:
    """Goes on behind the last row that an earlier start wrote."""
    folder = run.workdir / PREFILL
    rows = read_metrics(folder)
    start = rows[-1]["step"] + 1 if rows else 0
    settings = run.config.metrics.open_settings()
    return MetricLog(folder, start, settings, read_config.to_dict(run.config))
