"""The evaluations of runs as the rows of tables and the sentences under them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rl_code.evaluation.compare import Comparison, compare, whole_against_first_edit
from rl_code.evaluation.passk import Interval
from rl_code.evaluation.suite import SuiteResult

# Results of a suite that are each compared with the first in words.
_IN_WORDS = 3


def by_suite(results: Sequence[SuiteResult]) -> list[list[SuiteResult]]:
    """Evaluations grouped by suite, in their order."""
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
    run's last. ks: a suite shows those for which one of its results has enough samples.
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
        largest = max(result.largest_k for of_run in found.values() for result in of_run)
        shown = [k for k in ks if k <= largest]
        rows = [
            _row(result, f"{run}: {result.label}" if several else result.label, shown)
            for run, of_run in found.items()
            for result in of_run
        ]
        pairs = []
        for run, of_run in found.items():
            prefix = f"{run}: " if several else ""
            # of many evaluations only the last is put into words; the curves show the others
            for after in of_run[1:] if len(of_run) <= _IN_WORDS else of_run[-1:]:
                label = f"{prefix}{after.label} − {of_run[0].label}"
                pairs += _pairs(label, of_run[0], after, shown)
        (first_run, first), *others = found.items()
        for run, of_run in others:
            label = f"{run} ({of_run[-1].label}) − {first_run} ({first[-1].label})"
            pairs += _pairs(label, first[-1], of_run[-1], shown)
        example = next(iter(found.values()))[0]
        count = example.largest_k
        samples = f"{len(example.tasks)} tasks, {count} sample{'s' if count != 1 else ''} each"
        drawn = ", ".join(f"{key} {value}" for key, value in example.sampling.items())
        about = f"{samples}; {drawn}"
        tables.append({"name": name, "about": about, "ks": shown, "rows": rows, "pairs": pairs})
    return tables


def by_step(results: Mapping[str, Sequence[SuiteResult]], ks: Sequence[int]) -> dict[str, Any]:
    """pass@k of each suite against the step of training, as ``curves.curves`` gives curves, with
    the ends of the intervals under ``bands``: name -> (lows, highs). A suite is shown if a run has
    more than two results of it.

    results: of each run by its name.
    """
    suites = dict.fromkeys(
        found[0].suite
        for of_run in results.values()
        for found in by_suite(of_run)
        if len(found) > 2
    )
    steps = sorted({r.step for of_run in results.values() for r in of_run if r.suite in suites})
    series, bands = {}, {}
    for run, of_run in results.items():
        points = {f"{r.suite}/pass@{k}": {} for r in of_run if r.suite in suites for k in ks}
        for result in of_run:
            for k in ks:
                name = f"{result.suite}/pass@{k}"
                if name in points and k <= result.largest_k:
                    points[name][result.step] = result.interval(k)
        series[run], bands[run] = _lines({name: at for name, at in points.items() if at}, steps)
    names = list(dict.fromkeys(name for of_run in series.values() for name in of_run))
    none = [None] * len(steps)
    series = {run: {name: found.get(name, none) for name in names} for run, found in series.items()}
    charts = [
        {
            "title": suite,
            "fraction": True,
            "names": [name for name in names if name.startswith(f"{suite}/")],
        }
        for suite in suites
    ]
    first, *others = results
    return {
        "steps": steps,
        "every": 1,
        "run": first if others else "",
        "series": series[first],
        "bands": bands[first],
        "others": [{"run": run, "series": series[run]} for run in others],
        "charts": charts,
        "rest": [],
        "times": [],
    }


def _lines(
    points: Mapping[str, Mapping[int, Interval]], steps: Sequence[int]
) -> tuple[dict[str, list[float | None]], dict[str, tuple[list[float | None], ...]]]:
    """Means and ends of intervals at the steps; None where there is no result."""

    def line(at: Mapping[int, Interval], field: str) -> list[float | None]:
        return [getattr(at[step], field) if step in at else None for step in steps]

    series = {name: line(at, "mean") for name, at in points.items()}
    return series, {name: (line(at, "low"), line(at, "high")) for name, at in points.items()}


def _row(result: SuiteResult, label: str, ks: Sequence[int]) -> dict[str, Any]:
    known = result.knows_first_edits
    return {
        "label": label,
        "step": result.step,
        "cells": [_cell(result.interval(k)) if k <= result.largest_k else None for k in ks],
        "first_edit": _cell(result.interval(1, first_edit=True)) if known else None,
        "gain": signed(whole_against_first_edit(result)) if known else "",
        "malformed": f"{result.per_episode('malformed'):.2f}",
        "tokens": f"{result.per_episode('tokens'):.0f}",
        "calls": _mean(result, "calls", "{:.1f}"),
        "seconds": _mean(result, "seconds", "{:.2f}"),
        "cheats": _mean(result, "cheats", "{:.1%}"),
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
    """A difference of shares in percentage points, with its interval, as text."""
    mean, low, high = (
        f"{100 * value:+.1f}".replace("-", "−") for value in dataclasses.astuple(interval)
    )
    return f"{mean} points [{low}, {high}]"


def _mean(result: SuiteResult, field: str, form: str) -> str:
    value = result.per_episode(field)
    return "" if value is None else form.format(value)
