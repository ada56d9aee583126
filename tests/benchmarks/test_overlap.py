"""The bench of two phases prints what they gain; its profile is read rightly."""

from __future__ import annotations

import json

import pytest

from benchmarks.overlap import union_length
from tests.benchmarks import small_bench


@pytest.mark.parametrize(
    "intervals, length",
    [
        ([], 0.0),
        ([(1, 3)], 2.0),
        ([(4, 6), (1, 3)], 4.0),
        ([(1, 5), (2, 3), (4, 7)], 6.0),
        ([(1, 3), (3, 4)], 3.0),
    ],
)
def test_the_length_of_a_union(intervals, length):
    assert union_length(intervals) == length


@pytest.mark.long
def test_a_short_run(tmp_path):
    small = [
        "--model=tiny",
        "--workload=smoke",
        "--residuals=everything kept",
        "--steps=1",
        "--warmup=1",
    ]
    done = small_bench.run("overlap", *small, "--wait_s=0.02", f"--json={tmp_path / 'a.json'}")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert set(rows) == {"everything kept"}
    row = rows["everything kept"]
    # nothing works while one phase waits; the prompts are computed while two do
    assert row["busy_one_phase"] < 0.05 < row["busy_two_phases"] <= 1.0
    assert row["one_phase_s"] > 0.02 and row["two_phases_s"] > 0.02 and row["residual_mib"] > 0
