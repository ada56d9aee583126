"""The reward of the Tab experiment, and what is read from its episodes."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.tab import calibration as calibrate
from experiments.tab import report
from experiments.tab.asked import Asked, calibrated, suggested
from experiments.tab.metrics import Shown, Tab, shown
from models.tokenizer import Tokenizer
from rl_code.config.named import Named
from rl_code.environment.protocols.infill import Infill
from rl_code.tasks import infill
from rl_code.types import Group
from tests.experiments.suggesting import suggest

TOKENIZER = Tokenizer.train(["return x"] * 8, 330, Infill.SPECIAL_TOKENS)
TASK = infill.generate("train", 0, 1, (2,))
ASKED = Named("experiments.tab.asked:Asked")


def episode(text: str, index: int = 0, task=TASK):
    return suggest(text, task, ASKED, TOKENIZER, index)


def test_an_episode_of_one_message_is_paid_by_what_the_person_does():
    rewards = [episode(TASK.meta["wanted"], index).reward.total for index in range(40)]
    assert set(rewards) == {0.75, -0.25}
    chance = Asked().chance(TASK, TASK.meta["wanted"])
    assert abs(np.mean([reward > 0 for reward in rewards]) - chance) < 0.3


def test_nothing_is_shown_by_an_empty_message_and_costs_nothing():
    trajectory = episode("")
    assert suggested(trajectory) == ""
    assert trajectory.status == "submitted" and trajectory.reward.total == 0.0
    assert trajectory.sampled.sum() == 1
    assert shown(Group(TASK, (trajectory,)), trajectory) is None


def test_the_same_episode_is_always_paid_the_same():
    first = [episode("return x", index).reward.total for index in range(8)]
    assert first == [episode("return x", index).reward.total for index in range(8)]


def test_showing_pays_where_the_chance_is_above_a_quarter():
    for text in (TASK.meta["wanted"], "import os"):
        rewards = [episode(text, index).reward.total for index in range(60)]
        chance = Asked().chance(TASK, text)
        if abs(chance - 0.25) > 0.15:
            assert (np.mean(rewards) > 0) == (chance > 0.25)


@pytest.mark.parametrize("wrong", [{"habits": "bored"}, {"people": 0}])
def test_wrong_settings_are_named(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"{name}={value!r}"):
        Asked(**wrong)


def test_metrics_count_what_was_shown():
    texts = (TASK.meta["wanted"], "import os", "", " ")
    group = Group(TASK, tuple(episode(text, index) for index, text in enumerate(texts)))
    found = Tab()([group], {})
    assert found["tab/shown"] == 0.5
    assert found["tab/needless"] == 0.25
    accepted = sum(one.reward.total > 0 for one in group.trajectories)
    assert found["tab/accepted"] == accepted / 4
    assert found["tab/accept_rate"] == accepted / 2
    one = shown(group, group.trajectories[0])
    assert one.confidence == pytest.approx(np.exp(-0.5))


def made(run: int, step: int, shown_count: int, accepted: int) -> list[report.Played]:
    """Ten groups of ten episodes."""
    ones = tuple(Shown(0.5, i < accepted, True) if i < shown_count else None for i in range(10))
    return [report.Played(run, step, f"kind {number % 2}", ones) for number in range(10)]


def test_the_report_compares_shares_and_draws_them(tmp_path):
    found = [one for run in (0, 1) for one in (*made(run, 0, 8, 3), *made(run, 1, 6, 4))]
    before, after, steps = report.periods(found)
    assert steps == 1 and {one.step for one in before} == {0} and {one.step for one in after} == {1}
    assert report.shares(before) == pytest.approx([80, 30, 37.5])
    view = report.changes(found)
    changes, each = (list(column.cells) for column in view.columns[-2:])
    assert changes[0].startswith("-25 %") and changes[1].startswith("+33 %")
    assert each[0] == "-25, -25"
    assert list(report.kinds(found).columns[2].cells) == ["80.0 %", "80.0 %"]
    report.draw(found, tmp_path / "tab.png")
    assert (tmp_path / "tab.png").stat().st_size > 10_000
    few = report.Played(0, 0, "kind 0", (Shown(0.9, True, True),))
    report.draw([few, *made(0, 1, 6, 4)], tmp_path / "few.png")


def test_the_kind_of_a_hole_is_what_can_be_seen():
    silent = infill.generate("train", 0, 1, (2,), 1.0)
    kinds = {report.kind(infill.generate("train", 0, i, (1, 2, 3), 0.5)) for i in range(60)}
    assert report.kind(silent).startswith("silent, ")
    said = ("stated", "open", "silent")
    assert kinds == {f"{each}, {hole}" for each in said for hole in ("line", "rest")}


def test_a_calibration_accepts_the_recorded_share():
    tasks = [infill.generate("train", 1, i, (1, 2)) for i in range(12)]
    right = [(task, task.meta["wanted"]) for task in tasks]
    shown_ = [*right, *((task, "import os") for task in tasks)]
    found = calibrate.reading(shown_)
    assert found.matches[0] == 0.0 and found.matches[-1] == 1.0
    assert abs(calibrate.rate(shown_, found) - calibrate.RECORDED) < 0.01
    assert calibrate.rate(right, found) > calibrate.RECORDED
    assert calibrated().matches[-1] == 1.0
