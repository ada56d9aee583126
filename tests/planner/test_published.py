"""launch.plan --published: bounds of other systems' published rows."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from models.families import PRESETS
from planner import published

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def made():
    return [published.bound(row) for row in published.ROWS]


def test_no_system_is_faster_than_the_bound(made):
    for one in made:
        assert 0.05 < one.ratio < 1.0, one.row
        # the published rate and time of a step are one fact, but for averages of five steps
        tokens = one.row.rate * one.row.step_s * one.row.devices / one.row.sequences
        assert tokens == pytest.approx(one.row.tokens, rel=0.15)


def test_the_bound_of_30b_on_32_h100_is_that_of_hand(made):
    """On policy: 3,203 tokens a sequence, 128 of which decode on two devices."""
    one = made[0]
    assert (one.row.rate, one.row.devices, one.together) == (1102, 32, 128)
    # all experts are read: with 128 sequences of 8 of 128 experts next to none is left out
    tables = 151_936 * 2048
    weights = 2 * (30.5e9 - tables) / 2
    keys = 128 * 3203 / 2 * 48 * 2 * 4 * 128 * 2 / 2
    assert one.sampling_s == pytest.approx(3203 * (weights + keys) / 3352e9, rel=0.02)
    # three billion parameters compute a token, twice for log-probabilities
    attended = 3203 / 2 * 32 * 2 * 128 * 48
    active = 3.35e9 - tables + attended
    tokens = 2048 * 3203
    assert one.forward_s == pytest.approx(2 * 2 * active * tokens / 32 / 989e12, rel=0.03)
    assert one.step_s == one.sampling_s + one.forward_s + one.updates_s
    behind = made[1]
    assert behind.step_s == max(behind.sampling_s, behind.forward_s + behind.updates_s)


def test_more_sequences_decode_together_where_samples_may_be_older(made):
    eight = made[2]
    assert eight.together == 576 == 2048 * 9 // 32
    fresh = published.bound(dataclasses.replace(eight.row, behind=0))
    assert fresh.together == 64 and fresh.sampling_s > 2 * eight.sampling_s
    most = published.bound(dataclasses.replace(eight.row, behind=10**4))
    size = 2 * 48 * 2 * 4 * 128 * most.together * eight.row.tokens / 2 / 2
    assert 0.9 * (0.92 * 85e9 - 30.6e9) < size <= 0.92 * 85e9 - 30.5e9


def test_the_page_has_the_numbers_of_the_command(made):
    page = (ROOT / "docs" / "benchmarks" / "published.md").read_text()
    for one in made:
        parts = f"{one.sampling_s:.1f}, {one.forward_s:.1f}, {one.updates_s:.1f} | {one.step_s:.1f}"
        rates = f"{one.rate:,.0f} | {one.row.rate:,.0f} | {one.ratio:.2f}"
        assert f"| {parts} | {rates} |" in page


def test_rows_name_models_that_are_known():
    assert {row.model for row in published.ROWS} <= set(PRESETS)
    assert all(row.devices > row.samplers >= 0 for row in published.ROWS)
