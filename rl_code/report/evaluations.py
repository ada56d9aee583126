"""The evaluations of runs as the rows of tables and the sentences under them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rl_code.evaluation.compare import Comparison, compare, whole_against_first_edit
from rl_code.evaluation.passk import Interval
from rl_code.evaluation.suite import SuiteResult


def by_suite(results: Sequence[SuiteResult]) -> list[list[SuiteResult]]:
    names = dict.fromkeys(result.suite for result in results)
    return [[result for result in results if result.suite == name] for name in names]


def paired(before: SuiteResult, after: SuiteResult, k: int) -> Comparison | None:
    """The comparison, or None where the results have other tasks or too few samples."""
    if set(before.ids) != set(after.ids) or k > min(before.largest_k, after.largest_k):
        return None
    return compare(before, after, k)


def suites(results: Mapping[str, Sequence[SuiteResult]], ks: Sequence[int]) -> list[dict[str, Any]]:
    """Per suite, the rows of its table and the sentences under it.

    results: of each run by its name. The last result of another run is compared with the first
    run's last.
    """
    several = len(results) > 1
    names = dict.fromkeys(result.suite for found in results.values() for result in found)
    tables = []
    for name in names:
        found = {
            run: [result for result in of_run if result.suite == name]
            for run, of_run in results.items()
        }
        found = {run: of_run for run, of_run in found.items() if of_run}
        rows = [
            _row(result, f"{run}: {result.label}" if several else result.label, ks)
            for run, of_run in found.items()
            for result in of_run
        ]
        pairs = []
        for run, of_run in found.items():
            prefix = f"{run}: " if several else ""
            for after in of_run[1:]:
                label = f"{prefix}{after.label} − {of_run[0].label}"
                pairs += _pairs(label, of_run[0], after, ks)
        (first_run, first), *others = found.items()
        for run, of_run in others:
            label = f"{run} ({of_run[-1].label}) − {first_run} ({first[-1].label})"
            pairs += _pairs(label, first[-1], of_run[-1], ks)
        example = next(iter(found.values()))[0]
        count = example.largest_k
        samples = f"{len(example.tasks)} tasks, {count} sample{'s' if count != 1 else ''} each"
        drawn = ", ".join(f"{key} {value}" for key, value in example.sampling.items())
        tables.append({"name": name, "about": f"{samples}; {drawn}", "rows": rows, "pairs": pairs})
    return tables


def _row(result: SuiteResult, label: str, ks: Sequence[int]) -> dict[str, Any]:
    graded = result.largest_k > 0
    return {
        "label": label,
        "step": result.step,
        "cells": [_cell(result.interval(k)) if k <= result.largest_k else None for k in ks],
        "first_edit": _cell(result.interval(1, first_edit=True)) if graded else None,
        "gain": signed(whole_against_first_edit(result)) if graded else "",
        "malformed": f"{result.per_episode('malformed'):.2f}",
        "tokens": f"{result.per_episode('tokens'):.0f}",
    }


def _pairs(
    label: str, before: SuiteResult, after: SuiteResult, ks: Sequence[int]
) -> list[dict[str, Any]]:
    """The sentences on two results, one for each k that both have."""
    return [
        {
            "label": label,
            "k": k,
            "difference": signed(comparison.difference),
            "gained": comparison.gained,
            "lost": comparison.lost,
            "p_value": None if comparison.p_value is None else f"{comparison.p_value:.2g}",
        }
        for k in ks
        if (comparison := paired(before, after, k))
    ]


def _cell(interval: Interval) -> dict[str, str]:
    """Texts and positions, in percent, of an interval in a table."""
    mean, low, high = (100 * value for value in (interval.mean, interval.low, interval.high))
    return {
        "mean": f"{mean:.1f}",
        "range": f"{low:.1f} – {high:.1f}",
        "left": f"{low:.2f}",
        "width": f"{high - low:.2f}",
        "at": f"{mean:.2f}",
    }


def signed(interval: Interval) -> str:
    mean, low, high = (
        f"{100 * value:+.1f}".replace("-", "−") for value in dataclasses.astuple(interval)
    )
    return f"{mean} points [{low}, {high}]"
