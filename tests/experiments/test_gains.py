"""Updates to a gain, and the table of a sweep's runs."""

from __future__ import annotations

import json

import pytest

from experiments.gains import report
from rl_code.evaluation.suite import SuiteResult, TaskResult


def evaluated(workdir, scores, signals):
    for step, correct in scores.items():
        task = TaskResult("a", 10, correct, None, 0, 5.0)
        SuiteResult("held_out", f"step_{step}", step, {}, (task,)).save(workdir)
    rows = [{"step": i, "reward/signal_groups": share} for i, share in enumerate(signals)]
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_updates_lie_on_straight_lines_between_evaluations():
    points = [(0, 0.4), (4, 0.5), (8, 0.7)]
    assert report.updates_to(points, 0.1) == pytest.approx(4)
    assert report.updates_to(points, 0.2) == pytest.approx(6)
    assert report.updates_to(points, 0.31) is None


def test_a_gain_that_is_lost_again_was_reached():
    assert report.updates_to([(0, 0.4), (2, 0.8), (4, 0.2)], 0.2) == pytest.approx(1)


def test_a_row_for_each_variant(tmp_path):
    for seed, correct in ((0, 8), (1, 5)):
        folder = tmp_path / f"variant=code,seed={seed}"
        folder.mkdir()
        evaluated(folder, {0: 4, 4: correct}, [0.5, 1.0])
        assert report.variant_of(folder) == "code"
    view = report.gains({"code": sorted(tmp_path.iterdir())}, 20)
    (row,) = zip(*(column.cells for column in view.columns), strict=True)
    assert row[:3] == ("code", "held_out", "2")
    assert row[3] == "40.0 [40.0, 40.0]" and row[4] == "65.0 [50.0, 80.0]"
    assert row[5:7] == ("2, never", "80.0 at 4, 50.0 at 4") and row[7].startswith("25.0%")
