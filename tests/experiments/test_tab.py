"""The reward of the Tab experiment, and what is read from its episodes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from experiments.tab import report
from experiments.tab.asked import Asked, suggested
from experiments.tab.metrics import Shown, Tab, shown
from models.tokenizer import Tokenizer
from rl_code.environment.episode import Episode
from rl_code.environment.protocols.infill import Infill
from rl_code.environment.tools.api import find_tools
from rl_code.named import Named
from rl_code.rewards.combine import RewardConfig, SignalConfig, find_signals
from rl_code.tasks import infill
from rl_code.types import Group, Limits

LIMITS = Limits(turns=1, tokens=512, turn_tokens=64, test_runs=0, command_s=5.0)
TOKENIZER = Tokenizer.train(["return x"] * 8, 330, Infill.SPECIAL_TOKENS)
TASK = infill.generate("train", 0, 1, (2,))
ASKED = Named("experiments.tab.asked:Asked")


def episode(text: str, index: int = 0, task=TASK):
    """A whole episode that suggests a text, without any sandbox."""
    signals = find_signals(RewardConfig((SignalConfig(ASKED, label="asked"),)))
    one = Episode(
        task, group=0, index=index, protocol=Infill(), tools=find_tools([Named("suggest")]),
        tokenizer=TOKENIZER, pool=None, limits=LIMITS, reward=signals,
    )  # fmt: skip
    one.start()
    tokens = [*TOKENIZER.encode(text), TOKENIZER.token_id("<|eot|>")]
    assert one.step(tokens, [-0.5] * len(tokens), [0] * len(tokens)) is None
    return one.finish()


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


def made(shown_count: int, accepted: int) -> report.Period:
    """Ten groups of ten episodes."""
    ones = [Shown(0.5, i < accepted, True) if i < shown_count else None for i in range(10)]
    return report.Period([(0, number, one) for number in range(10) for one in ones])


def test_the_report_compares_shares_and_draws_them(tmp_path):
    before, after = made(8, 3), made(6, 4)
    assert before.shares() == pytest.approx([80, 30, 37.5])
    view = report.table(before, after, 2)
    changes = list(view.columns[-1].cells)
    assert changes[0].startswith("-25 %") and changes[1].startswith("+33 %")
    report.draw(before, after, tmp_path / "tab.png")
    assert (tmp_path / "tab.png").stat().st_size > 10_000
    few = dataclasses.replace(Shown(0.5, True, True), confidence=0.9)
    report.draw(report.Period([(0, 0, few)]), after, tmp_path / "few.png")
