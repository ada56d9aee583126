"""Tables and the figure of the runs of a sweep that have finished."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import rich.console
import rich.markup
import rich.table

from rl_code.evaluation import suite
from rl_code.evaluation.suite import SuiteResult
from rl_code.run.workdir import CONFIG_FILE
from sweeps import DONE, costs, fork, paired
from sweeps import figure as sweep_figure
from sweeps.figure import Panel
from sweeps.runs import SweepRun
from sweeps.start import FAILED


def report(
    runs: Sequence[SweepRun],
    panels: Sequence[Panel],
    workdir: Path,
    shown: rich.console.Console,
    figure: str | None = None,
    *,
    base: str | None = None,
    missing: Sequence[SweepRun] = (),
) -> None:
    """Prints the table of the finished runs and the numbers of the figure, writes both and the
    figure into the workdir.

    shown: where it prints. figure: another file that the figure is written to, or None. base: where
    runs of one seed draw common random numbers, the variant from which paired differences are
    taken. missing: the other runs of the sweep, each of which has a row that says what became of
    it.

    Raises ConfigError for a metric that a run did not write.
    """
    variants: dict[str, list[Path]] = {}
    for run in runs:
        variants.setdefault(run.variant, []).append(run.workdir)
    views: list[Any] = [table(variants)] if runs else []
    # a run without suites has no costs of an episode
    views += [view for view in (costs.table(variants),) if view.row_count]
    views += [missing_table(missing)] if missing else []
    if runs:
        views += (sweep_figure.table(panel, variants) for panel in panels)
    if base in variants:
        found = [(run.variant, run.config.seed, run.workdir) for run in runs]
        views.append(paired.table(base, found))
    elif base is not None and runs:
        views.append(f"no run of {base} has finished, so there are no paired differences from it")
    with open(workdir / "sweep.txt", "w") as file:
        for console in (shown, rich.console.Console(file=file, width=160)):
            console.print(*views)
    if panels and runs:
        sweep_figure.draw(variants, panels, workdir / "sweep.png")
        print(f"Figure: {workdir / 'sweep.png'}")
        if figure:
            Path(figure).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(workdir / "sweep.png", figure)
            print(f"and {figure}")


def table(variants: Mapping[str, Sequence[Path]]) -> rich.table.Table:
    """A table with one row for each variant.

    For every suite it has pass@1 before and after training and the difference, as means over the
    seeds. Before is for a fork where it begins, if that was evaluated. variants: the folders of
    each variant's runs.
    """
    evaluations = {
        workdir: fork.evaluations(workdir) for workdirs in variants.values() for workdir in workdirs
    }
    names = list(
        dict.fromkeys(result.suite for results in evaluations.values() for result in results)
    )
    view = rich.table.Table(
        caption=rich.markup.escape(
            "pass@1 in %: mean [lowest, highest] over seeds, or [95 % interval] of one seed"
        ),
        caption_justify="left",
    )
    view.add_column("variant", overflow="fold")
    for column in (
        "seeds",
        *(f"{name} {what}" for name in names for what in ("before", "after", "gain")),
        "minutes",
    ):
        view.add_column(column, justify="right", overflow="fold")
    for variant, workdirs in variants.items():
        cells = []
        for name in names:
            found = [[r for r in evaluations[workdir] if r.suite == name] for workdir in workdirs]
            cells += _suite_cells([results for results in found if len(results) > 1])
        minutes = [json.loads((workdir / DONE).read_text())["seconds"] / 60 for workdir in workdirs]
        view.add_row(
            rich.markup.escape(variant), str(len(workdirs)), *cells, f"{np.mean(minutes):.1f}"
        )
    return view


def missing_table(runs: Sequence[SweepRun]) -> rich.table.Table:
    """A table of runs that have not finished, with what became of each."""
    view = rich.table.Table(title="not finished", title_justify="left")
    view.add_column("variant", overflow="fold")
    view.add_column("seed", justify="right")
    view.add_column("what became of it")
    for run in runs:
        what = "begun" if (run.workdir / CONFIG_FILE).exists() else "not begun"
        if (path := run.workdir / FAILED).exists():
            what = f"failed with exit code {json.loads(path.read_text())['exit_code']}"
        view.add_row(rich.markup.escape(run.variant), str(run.config.seed), what)
    return view


def _suite_cells(results: Sequence[Sequence[SuiteResult]]) -> list[str]:
    """Three cells for one suite: pass@1 before training, after training, and the difference.

    results: for each seed the results of the suite, the earliest first.
    """
    if not results:
        return ["-"] * 3
    if len(results) == 1:
        before = results[0][0].interval(1)
        after = results[0][-1].interval(1)
        return [
            suite.percent(before),
            suite.percent(after),
            f"{100 * (after.mean - before.mean):+.1f}",
        ]
    values = 100 * np.array(
        [[seed[0].interval(1).mean, seed[-1].interval(1).mean] for seed in results]
    )
    columns = (values[:, 0], values[:, 1], values[:, 1] - values[:, 0])
    return [f"{column.mean():.1f} [{column.min():.1f}, {column.max():.1f}]" for column in columns]
