"""The cycle's reward model judges answers before it learns from them, and pays silent ones."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from attention.methods.dense import Dense
from models.sharding import MeshConfig, make_mesh
from people.feedback.records import Event
from people.feedback.rewards.answered import Answered
from people.realtime.learned import LearnedReward, RewardModels
from rl_code.learner.optimizer import OptimizerConfig
from rl_code.rewards.reward_model_fit import FitConfig
from tests.models.small import small_model
from tests.people.realtime.test_training import ANSWER

EOS = 31
FIT = FitConfig(updates=30, rows=2, texts=4, optimizer=OptimizerConfig(learning_rate=0.02))
CONFIG = LearnedReward(tokens=12, fit=FIT)


def answer(number: int, good: bool, silent: bool = False, following: Answered | None = None):
    """An answer whose second token says whether it is good."""
    record = dataclasses.replace(
        ANSWER,
        id=f"a{number}",
        session=f"s{number}",
        given=(5, 6, number % 5),
        tokens=(7, 29 if good else 28, 8),
    )
    kind = "accepted" if good else "rejected"
    events = () if silent else (Event("k", record.id, kind, 1.0),)
    return Answered(record, events, following)


GIVEN = [answer(number, number % 2 == 0) for number in range(16)]
# good answers have 0.9 or 1.0, bad ones -0.3 or -0.1
TOTALS = np.array([(1.0 if n % 4 else 0.9) if n % 2 == 0 else -0.3 + 0.2 * (n % 4 == 1)
                   for n in range(16)])  # fmt: skip


def models(folder, config: LearnedReward = CONFIG) -> RewardModels:
    mesh = make_mesh(MeshConfig(), jax.local_devices()[:1])
    return RewardModels(config, folder, lambda: small_model((Dense(),), num_layers=1), mesh, EOS, 0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A workdir whose first cycle has trained a model."""
    folder = tmp_path_factory.mktemp("cycle")
    one = models(folder)
    paid, told = one.pay(1, GIVEN, TOTALS)
    assert paid is TOTALS and told == {}  # there is no model yet
    assert one.train(1, GIVEN, TOTALS, "data")["reward_model/accuracy"] == 1.0
    return folder


@pytest.mark.long
def test_silent_answers_are_paid_between_the_levels_of_bad_and_good(trained):
    silent = [answer(0, True, silent=True), answer(1, False, silent=True), GIVEN[0]]
    paid, told = models(trained).pay(2, silent, np.array([0.0, 0.0, 0.9]))
    # the means of good and of bad answers are 0.95 and -0.2
    assert -0.2 < paid[1] < 0.1 < 0.6 < paid[0] < 0.95 and paid[2] == 0.9
    assert told["reward_model/of_cycle"] == 1.0
    assert told["reward_model/silent"] == pytest.approx(2 / 3)


@pytest.mark.long
def test_all_answers_are_paid_a_mixture_where_asked_for(trained):
    half = dataclasses.replace(CONFIG, pays="all", weight=0.5)
    whole = dataclasses.replace(CONFIG, pays="all")
    predicted, told = models(trained, whole).pay(2, GIVEN, TOTALS)
    mixed, _ = models(trained, half).pay(2, GIVEN, TOTALS)
    assert mixed == pytest.approx((predicted + TOTALS) / 2)
    assert told["reward_model/auc"] == 1.0 and 0 <= told["reward_model/ece"] < 0.3
    judged = dataclasses.replace(CONFIG, pays="all", weight=0.0)
    assert models(trained, judged).pay(2, GIVEN, TOTALS)[0] == pytest.approx(TOTALS)


@pytest.mark.long
def test_a_cycle_that_is_repeated_comes_to_the_same_and_other_data_to_another(trained):
    silent = [answer(0, True, silent=True)]
    nothing = np.zeros(1)
    one = models(trained)
    second = one.train(2, GIVEN, -TOTALS, "other")
    assert one.train(2, [], np.zeros(0), "other") == second  # it is there already
    third = one.pay(3, silent, nothing)[0]
    assert third != pytest.approx(one.pay(2, silent, nothing)[0])
    # whoever was killed begins again, from the model of the cycle before
    again = models(trained)
    assert again.train(2, GIVEN, -TOTALS, "taken back") == second
    assert again.pay(3, silent, nothing)[0] == third


def test_answers_of_one_kind_teach_nothing(tmp_path):
    one = models(tmp_path)
    assert one.train(1, GIVEN, np.ones(16), "data") == {}
    silent = [answer(number, number % 2 == 0, silent=True) for number in range(4)]
    assert one.train(1, silent, np.array([1.0, -1.0, 1.0, -1.0]), "data") == {}
    assert one.pay(2, GIVEN, TOTALS)[1] == {}


def test_a_model_with_sight_reads_the_next_message_and_all_keep_the_answer(tmp_path):
    following = answer(3, True)
    given = answer(0, True, following=following)
    blind, sees = models(tmp_path), models(tmp_path, dataclasses.replace(CONFIG, sees_next=True))
    assert blind._ids(given) == [5, 6, 0, 7, 29, 8, EOS]
    assert sees._ids(given) == [5, 6, 0, 7, 29, 8, 5, 6, 3, EOS]
    long = dataclasses.replace(given.answer, given=tuple(range(20)), tokens=tuple(range(40, 60)))
    cut = blind._ids(dataclasses.replace(given, answer=long))
    # the end of the request, the beginning of the answer
    assert cut == [*range(15, 20), *range(40, 46), EOS]


@pytest.mark.parametrize(
    "wrong", [dict(tokens=2), dict(weight=1.5), dict(fit=FitConfig(kind="pairs"))]
)
def test_wrong_settings_are_named(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        LearnedReward(**wrong)
