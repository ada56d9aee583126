"""True satisfaction beside rewards: read as it grows, correlated, kept for cycles that are over."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from people.realtime.satisfaction import LEAST, Curve, Rewarded, TruthFile, correlation
from tests.late import Late

stats = Late("scipy.stats")


def line(answers: list[str], satisfaction: float) -> str:
    told = {"answers": answers, "right": satisfaction > 0.5, "satisfaction": satisfaction}
    return json.dumps(told) + "\n"


def test_the_file_is_read_on_as_it_grows_and_lines_of_killed_processes_are_left_out(tmp_path):
    path = tmp_path / "people.truth.jsonl"
    file = TruthFile(path)
    assert file.turns() == {}
    whole = line(["c"], 0.0)
    path.write_text(line(["a", "b"], 1.0) + whole[:7])
    assert set(file.turns()) == {"a", "b"} and file.turns()["a"] == file.turns()["b"]
    # the rest of a line that was being written
    path.write_text(line(["a", "b"], 1.0) + whole)
    assert file.turns()["c"].satisfaction == 0.0 and not file.turns()["c"].right
    # a process that was killed, and the next one, which appends
    with path.open("a") as more:
        more.write('{"answers": ["cut' + line(["lost"], 1.0) + line(["d"], 0.25))
    assert set(file.turns()) == {"a", "b", "c", "d"}
    assert len({one.name for one in file.turns().values()}) == 3


def test_the_correlation_and_its_interval_are_those_of_scipy():
    rng = np.random.default_rng(0)
    turns = rng.normal(size=(40, 2)) @ np.array([[1.0, 0.6], [0.0, 0.8]])
    value, low, high = correlation(turns)
    expected = stats.pearsonr(*turns.T)
    assert value == pytest.approx(expected.statistic)
    interval = expected.confidence_interval(0.95)
    assert (low, high) == pytest.approx((interval.low, interval.high), abs=1e-4)
    assert all(map(math.isnan, correlation(turns[: LEAST - 1])))
    assert all(map(math.isnan, correlation(np.ones((40, 2)))))


def test_a_curve_has_a_point_for_each_cycle_and_reads_no_cycle_again_that_is_over(tmp_path):
    """Three cycles of 20 turns of two answers each: paid as people are content, the other way
    round, and not at all yet.
    """
    path = tmp_path / "people.truth.jsonl"
    answers, lines = [], []
    for number in range(40):
        cycle, content = number // 20, number % 2
        ids = [f"{number}-a", f"{number}-b"]
        lines.append(line(ids, float(content)))
        paid = content if cycle == 0 else 1 - content
        answers += [Rewarded(id, cycle, 100.0 * (cycle + 1) + number % 20, paid) for id in ids]
    # of an answer that nobody has told of yet
    answers.append(Rewarded("unknown", 0, 105.0, 0.0))
    path.write_text("".join(lines))
    asked = []

    def rewards(versions, since):
        asked.append((set(versions), since))
        return [one for one in answers if one.version in versions and one.asked_at >= since]

    curve = Curve(path, rewards, anchor=0)
    cycles = [
        SimpleNamespace(number=number, base=base, began_at=100.0 * number)
        for number, base in ((1, 0), (2, 1), (3, 1))
    ]
    shown = curve.read(cycles)
    assert shown["file"] == path.name
    first, second, third = shown["points"]
    assert (first["cycle"], first["version"], first["turns"]) == (1, 0, 20)
    assert first["satisfaction"] == first["reward"] == 0.5
    assert first["correlation"]["mean"] == pytest.approx(1.0)
    assert second["correlation"]["mean"] == pytest.approx(-1.0) and second["turns"] == 20
    assert third["turns"] == 0 and math.isnan(third["correlation"]["mean"])
    assert asked == [({0}, 100.0), ({0, 1}, 200.0), ({0, 1}, 300.0)]
    asked.clear()
    assert curve.read(cycles)["points"][0] == first
    assert [since for _, since in asked] == [200.0, 300.0]
