"""Intervals, tables and figures that reports of experiments share."""

from __future__ import annotations

import numpy as np
import pytest
import scipy

from experiments import report
from experiments.report import Estimate


def test_students_interval_is_that_of_scipy_and_a_single_value_has_none():
    values = np.array([0.1, 0.4, 0.2])
    found = report.student(values)
    ends = scipy.stats.t.interval(0.95, 2, values.mean(), scipy.stats.sem(values))
    assert (found.low, found.high) == pytest.approx(ends)
    assert found.told(".2f") == f"0.23 [{ends[0]:.2f}, {ends[1]:.2f}]"
    assert report.student([0.1]).told() == "+0.100"


def test_a_bootstrap_covers_the_mean_as_often_as_it_says():
    rng = np.random.default_rng(0)
    values = rng.normal(0, 1, 200)
    found = report.resampled(lambda chosen: values[chosen].mean(), 200)
    assert found.mean == values.mean()
    widths = (found.high - found.mean, found.mean - found.low)
    assert widths == pytest.approx([1.96 / 200**0.5] * 2, rel=0.2)
    never = report.resampled(lambda chosen: np.inf, 3)
    assert never.mean == never.low == never.high == np.inf


def test_shares_of_nothing_and_of_everything_have_a_width():
    for happened in (np.zeros(16), np.ones(16)):
        assert report.share(happened).errors() == pytest.approx([1.96 * 0.5 / 16] * 2)


def test_what_is_drawn_is_what_is_given(tmp_path):
    with report.figure(tmp_path / "a.png", 6, 3, 2, 1) as (left, right):
        report.band(left, [0, 1], report.spread([[1.0, 2.0], [3.0, 4.0]]), label="mean")
        report.calibration(right, np.linspace(0, 1, 64), np.arange(64) % 2, label="even")
        report.calibration(right, np.zeros(3), np.ones(3), label="too few")
    (line,) = left.lines
    assert list(line.get_ydata()) == [2.0, 3.0]
    assert right.containers[0].lines[0].get_ydata() == pytest.approx([0.5] * 8)
    assert right.get_legend_handles_labels()[1] == ["too few", "even"]
    assert (tmp_path / "a.png").stat().st_size > 5_000


def test_text_stands_left_and_numbers_right():
    view = report.table(["a", "b", "n"], [("x", "y", "1")], texts=2)
    assert [column.justify for column in view.columns] == ["left", "left", "right"]
    assert [list(column.cells) for column in view.columns] == [["x"], ["y"], ["1"]]
    assert Estimate(1.0, 0.5, 2.0).told(".1f", " %") == "1.0 % [0.5, 2.0]"
