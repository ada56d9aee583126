"""Trains by reinforcement learning, then prints the evaluations and writes a report.

python -m launch.train --config=configs/quickstart.py[:smoke] --workdir=runs/first [--config.seed=1 ...]
"""

from __future__ import annotations

from pathlib import Path

import ml_collections
import rich.console

from launch import flags
from rl_code import config as config_lib
from rl_code.environment.sandbox import SandboxUnavailable
from rl_code.evaluation import compare, suite
from rl_code.evaluation.suite import SuiteResult
from rl_code.report import ReportConfig, write_report
from rl_code.run import RunConfig
from rl_code.train import train

REPORT = ReportConfig(ks=(1, 8), trajectories_per_step=16, trajectory_steps=24, megabytes=4.8)


def main(config: ml_collections.ConfigDict, workdir: str | None) -> None:
    run_config = config_lib.build(RunConfig, config)
    flags.use_virtual_devices(run_config.mesh)
    results = train(run_config, workdir)
    console = flags.console()
    if results:
        console.print(suite.table(results, REPORT.ks))
    for name in dict.fromkeys(result.suite for result in results):
        show_difference(console, [result for result in results if result.suite == name])
    page = write_report(workdir, Path(workdir) / "report.html", REPORT, title=Path(workdir).name)
    console.print(f"Report: {page}", soft_wrap=True)


def show_difference(console: rich.console.Console, results: list[SuiteResult]) -> None:
    """What training changed on one suite, and what the turns after the first edit are worth."""
    before, after = results[0], results[-1]
    ks = [k for k in REPORT.ks if k <= min(before.largest_k, after.largest_k)]
    if before is after or not ks:
        return
    console.print(compare.table([compare.compare(before, after, k) for k in ks]))
    gain = suite.percent(compare.whole_against_first_edit(after), signed=True)
    console.print(f"{after.suite}, {after.label}: whole episode against its first edit alone {gain} points of pass@1")


if __name__ == "__main__":
    flags.run(main, expected=(SandboxUnavailable, FloatingPointError))
