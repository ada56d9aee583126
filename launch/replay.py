"""Trains again on the groups in a run's store, and says whether every step gives the same weights.

    python -m launch.replay --config=<the run's> --workdir=runs/first [--start=18 --end=36]

Overrides of the config must be those of the run. The store is checked first: every planned group is
there, was consumed once, and none is older than the bound. Exits with 1 when anything differs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import ml_collections
from absl import flags as absl_flags

from launch import flags
from rl_code import checkpoint, read_config
from rl_code.environment.sandbox.pool import SandboxUnavailable
from rl_code.progress import Progress
from rl_code.replay import replay, same_bits
from rl_code.run import Run
from rl_code.run_config import RunConfig, meshes
from rl_code.stop import StopRequest
from rl_code.store import audit
from rl_code.store.errors import StoreError
from rl_code.workdir import STORE, check

START = absl_flags.DEFINE_integer(
    "start", 0, "First step: 0, or that of a checkpoint in the workdir.", 0
)
END = absl_flags.DEFINE_integer("end", None, "Step to stop before; the newest by default.")


def main(config: ml_collections.ConfigDict, workdir: str | None) -> None:
    run_config = read_config.build(RunConfig, config)
    flags.use_virtual_devices(*meshes(run_config, "learner"))
    check(Path(workdir), run_config)
    with (
        Run(run_config, Path(workdir), "learner") as run,
        jax.set_mesh(run.mesh),
        StopRequest() as stop,
    ):
        report = audit.check(run.workdir / STORE, run_config.asynchrony.max_staleness)
        print(
            f"{report.consumed} of {report.steps} steps consumed, {report.groups} groups, "
            f"{report.takeovers} taken "
            f"over, oldest token {report.staleness_max} versions old (bound "
            f"{run_config.asynchrony.max_staleness})"
        )
        if report.removed is not None:
            print(report.removed)
        for problem in report.problems:
            print(f"problem: {problem}")
        last = None
        differing = []
        with Progress("replay", (END.value or report.consumed) - START.value) as progress:
            for step in replay(run, stop, START.value, END.value):
                last = step
                differing += [] if step.same else [step]
                progress.update(step.step + 1 - START.value)
        for step in differing[:5]:
            print(f"step {step.step}: weights {step.then} then, {step.now} now")
        equal = last is not None and not differing
        if last is not None and last.step + 1 in checkpoint.steps(workdir):
            stored = checkpoint.load(workdir, last.state, step=last.step + 1)
            equal = equal and same_bits(stored.state, last.state)
            print(
                f"the checkpoint of step {last.step + 1} {'equals' if equal else 'differs from'} "
                "the replayed state"
            )
        print("replayed: equal, bit for bit" if equal else "replayed: not equal")
    sys.exit(0 if equal and not report.problems else 1)


if __name__ == "__main__":
    flags.run(main, kind=RunConfig, expected=(SandboxUnavailable, StoreError))
