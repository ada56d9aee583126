"""Costs of an episode in the variants of a sweep: tokens, calls and seconds, in a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import rich.markup
import rich.table

from rl_code.evaluation.suite import SuiteResult
from sweeps import fork

# Fields of ``SuiteResult.per_episode``, and how their numbers are written.
_COLUMNS = {"tokens": ".0f", "calls": ".1f", "malformed": ".2f", "seconds": ".2f"}


def table(variants: Mapping[str, Sequence[Path]]) -> rich.table.Table:
    """A table with one row for each variant and suite: means per episode of the last evaluation, as
    means over the seeds.

    variants: the folders of each variant's runs.
    """
    view = rich.table.Table(
        caption="of an episode, after training: sampled tokens, well-formed calls, malformed ones, "
        "seconds of tools and grading; mean [lowest, highest] over seeds",
        caption_justify="left",
    )
    view.add_column("variant", overflow="fold")
    view.add_column("suite")
    for name in _COLUMNS:
        view.add_column(name, justify="right")
    for variant, workdirs in variants.items():
        # by suite and then by step: the last one of each suite stands
        last = [{result.suite: result for result in fork.evaluations(w)} for w in workdirs]
        for suite in dict.fromkeys(name for results in last for name in results):
            found = [results[suite] for results in last if suite in results]
            cells = [_cell(found, name, form) for name, form in _COLUMNS.items()]
            view.add_row(rich.markup.escape(variant), suite, *cells)
    return view


def _cell(results: Sequence[SuiteResult], field: str, form: str) -> str:
    """One number of a variant; "-" where a result does not say it."""
    values = [result.per_episode(field) for result in results]
    if None in values:
        return "-"
    mean = f"{np.mean(values):{form}}"
    if len(values) == 1:
        return mean
    return f"{mean} \\[{min(values):{form}}, {max(values):{form}}]"
