"""Trains by reinforcement learning, then prints the evaluations and writes a report.

python -m launch.train --config=configs/quickstart.py[:smoke] --workdir=runs/first [--config.seed=1
...]

Everything runs in one process by default. With --role=learner it only learns, and actors sample.
Each actor is started with --role=actor --name=actor-0 (a name of its own) and the same config and
workdir, on shared storage. There may be any number of actors, started in any order. With the
section rollout.prefill in the config, --role=prefill prefills their prompts. Each of them may be
killed and started again at any time.

A role may consist of several hosts. Each host starts the same command with
--coordinator=<host>:<port> --processes=<n> --process=<i>; under SLURM or on a TPU pod
--distributed alone.
"""

from __future__ import annotations

from pathlib import Path

import jax
import ml_collections
import rich.console
from absl import flags as absl_flags

from launch import command, dry_run, flags, trusted
from rl_code.act import act
from rl_code.config import read_config
from rl_code.environment.sandbox.pool import SandboxUnavailable
from rl_code.evaluation import compare, suite
from rl_code.evaluation.suite import SuiteResult
from rl_code.harness.agent import HarnessError
from rl_code.prefill import prefill
from rl_code.report.page import ReportConfig, write_report
from rl_code.rollout.multihost import ProcessLost
from rl_code.rollout.playing import RolloutTimeout
from rl_code.rollout.vllm_client import VllmError
from rl_code.run.config import RunConfig, meshes
from rl_code.run.workdir import RESERVED
from rl_code.store.errors import StoreError
from rl_code.store.heartbeat import Replaced
from rl_code.train import train
from rl_code.weights.versions import WeightError

REPORT = ReportConfig()


ROLE = absl_flags.DEFINE_enum(
    "role", "all", ["all", "learner", "actor", "prefill"], "What this process does."
)
NAME = absl_flags.DEFINE_string(
    "name", None, "Of an actor, its own among those of the run, as in actor-0."
)
HOST = absl_flags.DEFINE_string(
    "host", "127.0.0.1", "Address of this machine in numbers, for the other roles."
)
COORDINATOR = absl_flags.DEFINE_string(
    "coordinator", None, "host:port of the first process of this role."
)
PROCESSES = absl_flags.DEFINE_integer(
    "processes", None, "Processes of this role, with --coordinator."
)
PROCESS = absl_flags.DEFINE_integer("process", None, "Number of this one, from 0.")
DISTRIBUTED = absl_flags.DEFINE_bool(
    "distributed", False, "Several processes, which the cluster tells about."
)
DRY_RUN = absl_flags.DEFINE_bool(
    "dry_run",
    False,
    "Print the config with what was derived, the parameters, the memory per device, the attention "
    "calls and what each tool takes of every prompt, compile the programs, and end; no workdir is "
    "needed or touched.",
)


def main(config: ml_collections.ConfigDict, workdir: str | None) -> None:
    run_config = read_config.build(RunConfig, config)
    if ROLE.value == "actor" and NAME.value in (None, *RESERVED):
        raise read_config.ConfigError(
            f"--name={NAME.value or ''}: an actor needs a name of its own among those of the run, "
            "as in --name=actor-0"
        )
    if COORDINATOR.value or DISTRIBUTED.value:
        jax.distributed.initialize(COORDINATOR.value, PROCESSES.value, PROCESS.value)
    else:
        flags.use_virtual_devices(*meshes(run_config, ROLE.value))
    if DRY_RUN.value:
        dry_run.show(flags.console(), run_config, flags.written())
        return
    if ROLE.value == "actor":
        act(run_config, workdir, NAME.value, HOST.value)
        return
    if ROLE.value == "prefill":
        prefill(run_config, workdir, HOST.value)
        return
    results = train(run_config, workdir, ROLE.value, HOST.value)
    if jax.process_index():
        return
    console = flags.console()
    if results:
        console.print(suite.tables(results, REPORT.ks))
    for name in dict.fromkeys(result.suite for result in results):
        show_difference(console, [result for result in results if result.suite == name])
    page = write_report(workdir, Path(workdir) / "report.html", REPORT, title=Path(workdir).name)
    console.print(f"Report: {page}", soft_wrap=True)
    console.print(what_next(run_config, workdir), soft_wrap=True, highlight=False, markup=False)


def what_next(config: RunConfig, workdir: str) -> str:
    """Uses of a run that has finished, as commands that work when they are pasted."""
    run = f"--workdir={workdir}"
    found = {}
    if config.suites:
        suite = f"--suite={config.suites[0].name}"
        found["play a suite again"] = command.shown(
            "launch.evaluate", *flags.given(), run, suite, *trusted.passed_on()
        )
    found["write the model for others to load"] = command.shown(
        "launch.export", run, f"--out=exports/{Path(workdir).name}"
    )
    more = f"--config.train.steps={2 * max(1, config.train.steps)}"
    found["train on, for as many steps again"] = command.shown(
        "launch.train", *flags.given(but=("train.steps",)), run, more, *trusted.passed_on()
    )
    return "\n".join(["Next:", *(f"# {what}\n{line}" for what, line in found.items())])


def show_difference(console: rich.console.Console, results: list[SuiteResult]) -> None:
    """Changes by training on one suite, and what the turns after the first edit are worth."""
    before = results[0]
    after = results[-1]
    ks = [k for k in REPORT.ks if k <= min(before.largest_k, after.largest_k)]
    if before is after or not ks:
        return
    console.print(compare.table([compare.compare(before, after, k) for k in ks]))
    if not after.knows_first_edits:
        return
    gain = suite.percent(compare.whole_against_first_edit(after), signed=True)
    console.print(
        f"{after.suite}, {after.label}: whole episode against its first edit alone {gain} points "
        "of pass@1"
    )


if __name__ == "__main__":
    flags.run(
        main,
        kind=RunConfig,
        needs_workdir=lambda: not DRY_RUN.value,
        expected=(
            SandboxUnavailable,
            StoreError,
            WeightError,
            RolloutTimeout,
            ProcessLost,
            HarnessError,
            VllmError,
        ),
        # steps repeat exactly, so the same loss would not be finite again
        lasting=(FloatingPointError, Replaced),
    )
