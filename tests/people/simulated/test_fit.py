"""The fit finds what made the data, and does not see what is not there."""

from __future__ import annotations

import random

import numpy as np
import pytest

from people.simulated.fit import Acceptance, Fit, Parts, Share, Survival, Timing, embedded
from people.simulated.regression import fit_linear, mean_chance
from people.simulated.telemetry import Decision, Seen
from tests.late import Late

special, stats = Late("scipy.special"), Late("scipy.stats")


LEANINGS = {person: leaning for person, leaning in enumerate(np.linspace(-1.5, 1.5, 10))}


def decisions(count: int, seed: int, people=LEANINGS) -> list[Decision]:
    """Of people who accept what is confident, each with a leaning of their own."""
    rng = random.Random(seed)
    found = []
    for i in range(count):
        person = rng.choice(list(people))
        confidence = rng.random()
        seconds = rng.lognormvariate(0.5 + 0.4 * people[person], 0.8)
        chance = special.expit(4 * confidence - 2 + people[person])
        seen = Seen(confidence, rng.randint(4, 80), 1, rng.randint(0, 40), "other")
        accepted = rng.random() < chance
        alive = rng.choice(((1.0,) * 5, (1.0, 1.0, 0.5, 0.5, 0.0))) if accepted else ()
        found.append(Decision(person, float(i), seen, seconds, accepted, alive))
    return found


@pytest.fixture(scope="module")
def train():
    return decisions(600, 0)


@pytest.fixture(scope="module")
def held():
    return decisions(600, 1)


def test_acceptance_predicts_held_out_decisions_better_than_their_share(train, held):
    share = np.mean([one.accepted for one in train])
    constant = np.mean([np.log(share if one.accepted else 1 - share) for one in held])
    plain = Acceptance.fit(train, Parts(bends=False, persons=False)).log_likelihoods(held).mean()
    whole = Acceptance.fit(train, Parts(bends=False)).log_likelihoods(held).mean()
    assert constant < plain < whole


def test_effects_of_persons_are_found_and_have_their_spread(train):
    fit = Acceptance.fit(train, Parts(bends=False))
    effects = fit.posterior.mean[-len(LEANINGS) :]
    assert np.corrcoef(effects, list(LEANINGS.values()))[0, 1] > 0.9
    assert 0.5 < fit.person_scale < 2.0


def test_no_effect_of_persons_is_found_where_there_is_none():
    alike = decisions(600, 2, dict.fromkeys(LEANINGS, 0.0))
    assert Acceptance.fit(alike, Parts(bends=False)).person_scale < 0.3


def test_a_stranger_is_predicted_with_less_certainty(train):
    fit = Acceptance.fit(train, Parts(bends=False))
    sure = Seen(0.99, 20, 1, 10, "other")
    known = [Decision(9, 0.0, sure, 1.0, True, ()), Decision(99, 0.0, sure, 1.0, True, ())]
    average = special.expit(fit.logit(sure, 1.0))
    chances = fit.chances(known)
    assert chances[0] > average > chances[1]


def test_times_have_the_density_that_made_them(train, held):
    fit = Timing.fit(train, Parts(bends=False))
    assert abs(fit.posterior.noise - 0.8) < 0.08
    constant = Timing.fit(train, Parts(plain=False, bends=False, persons=False))
    assert fit.log_likelihoods(held).mean() > constant.log_likelihoods(held).mean()


def test_a_linear_regression_with_wide_priors_is_least_squares():
    rng = np.random.default_rng(0)
    rows = np.c_[np.ones(200), rng.normal(size=(200, 3))]
    values = rows @ [1.0, 2.0, -3.0, 0.5] + rng.normal(size=200) * 0.1
    wanted = np.linalg.lstsq(rows, values, rcond=None)[0]
    assert np.allclose(fit_linear(rows, values, [-1, 0, 0, 0]).mean, wanted, atol=0.01)


def test_the_average_of_the_logistic_function_is_that_of_draws():
    draws = special.expit(1.0 + 2.0 * np.random.default_rng(0).normal(size=200_000))
    assert abs(mean_chance(np.array([1.0]), np.array([4.0]))[0] - draws.mean()) < 0.01


def test_a_share_has_its_masses_and_moments():
    rng = random.Random(0)
    made = Share(0.2, 0.5, 2.0, 3.0)
    found = Share.fit([made.draw(rng) for _ in range(4000)])
    assert abs(found.none - 0.2) < 0.03 and abs(found.whole - 0.5) < 0.03
    assert abs(found.a / (found.a + found.b) - 0.4) < 0.03
    inside = stats.beta.cdf(0.999, 2, 3) - stats.beta.cdf(0.001, 2, 3)
    grid = np.linspace(0.001, 0.999, 2001)
    density = np.exp([made.log_likelihood(x) for x in grid])
    assert abs(np.trapezoid(density, grid) - 0.3 * inside) < 1e-3


def test_what_lives_mostly_stays_alive(train):
    survival = Survival.fit(train)
    rng = random.Random(0)
    drawn = [survival.draw(rng) for _ in range(2000)]
    assert abs(survival.stays[0] - 1.0) < 0.02
    assert abs(np.mean([one[0] == 1.0 for one in drawn]) - survival.first.whole) < 0.05
    assert abs(np.mean([one[1] == one[2] for one in drawn]) - survival.stays[1]) < 0.05


def test_a_fit_that_was_written_down_draws_the_same_strangers(train):
    fit = Fit.of(train)
    again = Fit.from_json(fit.to_json())
    seen = Seen(0.7, 30, 2, 8, "blank")
    assert again.acceptance.logit(seen, 2.0) == pytest.approx(
        fit.acceptance.logit(seen, 2.0), abs=1e-3
    )
    assert again.timing.log_mean(seen) == pytest.approx(fit.timing.log_mean(seen), abs=1e-3)
    assert again.acceptance.person_scale == pytest.approx(fit.acceptance.person_scale, abs=1e-4)
    assert again.timing.person_scale == pytest.approx(fit.timing.person_scale, abs=1e-4)
    assert again.survival == fit.survival


def test_what_is_no_fit_is_refused(train):
    with pytest.raises(ValueError, match="this is no fit"):
        Fit.from_json("{}")
    with pytest.raises(ValueError, match="needs both kinds"):
        Fit.of([one for one in train if one.accepted])


def test_the_fit_that_is_here_rises_with_confidence():
    fit = embedded()
    low, high = (fit.acceptance.logit(Seen(c, 20, 1, 10, "other"), 2.0) for c in (0.1, 0.9))
    assert low < high
