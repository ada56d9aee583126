"""Confidence sequences hold at every look, and are those of the literature."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import scipy

from configs import realtime
from experiments.ab import simulate, study
from people.realtime import sequential, watching
from people.realtime.parts import Sessions
from people.realtime.sequential import Arm
from people.realtime.watching import Guardrail, WatchConfig
from rl_code.config import read_config

SCALE, ALPHA = 0.3, 0.05


def ratio(difference: float, information: float, one_sided: bool) -> float:
    """The mixture likelihood ratio by its definition: an integral over the effect."""
    score = difference * information
    prior = scipy.stats.halfnorm if one_sided else scipy.stats.norm

    def integrand(effect):
        exponent = effect * score - effect**2 * information / 2
        return math.exp(exponent) * prior.pdf(effect, scale=SCALE)

    span = (0 if one_sided else -8 * SCALE, 8 * SCALE)
    return scipy.integrate.quad(integrand, *span, limit=400)[0]


@pytest.mark.parametrize("information", [3.0, 40.0, 500.0])
def test_the_ends_are_where_the_mixture_reaches_one_over_alpha(information):
    variance = np.float64(1 / information)
    two = float(sequential.radius(variance, SCALE, ALPHA))
    assert ratio(two, information, one_sided=False) == pytest.approx(1 / ALPHA, rel=1e-4)
    one = float(sequential.radius_below(variance, SCALE, ALPHA))
    assert ratio(one, information, one_sided=True) == pytest.approx(1 / ALPHA, rel=1e-4)


def test_the_two_sided_radius_is_that_of_waudby_smith():
    """Theorem 2.2 for n observations of unit variance, with rho = scale there."""
    n = np.array([10.0, 100.0, 10_000.0])
    rho = SCALE
    grown = n * rho**2 + 1
    theirs = np.sqrt(2 * grown / (n**2 * rho**2) * np.log(np.sqrt(grown) / ALPHA))
    np.testing.assert_allclose(sequential.radius(1 / n, rho, ALPHA), theirs, rtol=1e-12)


def test_one_sided_is_tighter_and_both_are_wider_than_a_single_look():
    variance = np.geomspace(1e-6, 1, 50)
    one = sequential.radius_below(variance, SCALE, ALPHA)
    assert (one < sequential.radius(variance, SCALE, ALPHA)).all()
    assert (one > scipy.stats.norm.ppf(1 - ALPHA) * np.sqrt(variance)).all()


def test_no_variance_gives_no_width():
    zero = np.zeros(2)
    assert (sequential.radius(zero, SCALE, ALPHA) == 0).all()
    assert (sequential.radius_below(zero, SCALE, ALPHA) == 0).all()


def test_a_user_counts_once_however_many_sessions():
    users = np.array(["a"] * 98 + ["b", "c"])
    values = np.array([1.0] * 98 + [0.0, np.nan])
    found = sequential.arm(users, values)
    assert (found.users, found.mean) == (2, 0.5)
    assert found.variance == pytest.approx(np.var([0, 1], ddof=1) / 2)


def test_nothing_is_said_before_there_are_enough_users():
    few, many = Arm(29, 0.0, 1e-9), Arm(500, 1.0, 1e-9)
    found = sequential.difference(few, many, scale=1.0)
    assert (found.low, found.high) == (-math.inf, math.inf)
    assert sequential.bound(few, many, scale=1.0) == -math.inf
    assert sequential.bound(many, Arm(30, 2.0, 1e-9), scale=1.0) > 0.9


def test_running_sums_are_what_a_look_computes():
    rng = np.random.default_rng(1)
    (stream,) = simulate.streams(rng, simulate.RETAINED, tests=1, users=40, sessions=300, share=0.4)
    control, treated = simulate.by_user(stream)
    for look in (60, 150, 299):
        for arm, mine in ((control, ~stream.treated), (treated, stream.treated)):
            mine = mine & (np.arange(300) <= look)
            found = sequential.arm(stream.user[mine], stream.value[mine])
            assert arm.count[look] == found.users
            assert arm.mean[look] == pytest.approx(found.mean)
            assert arm.variance[look] == pytest.approx(found.variance)


def test_a_a_tests_looked_at_after_every_session_keep_their_level_and_a_z_test_does_not():
    readers = [
        "z-test, users",
        "confidence sequence, users",
        "one-sided confidence sequence, users",
    ]
    found = study.same_arms(
        np.random.default_rng(2),
        simulate.ACCEPTED,
        readers,
        share=0.5,
        tests=200,
        users=150,
        sessions=1_500,
    )
    rate = {one.reader: one.rate.mean for one in found}
    # of 200 tests at the level 17 or fewer reject with probability 0.98; most users are far below
    assert rate["confidence sequence, users"] <= 17 / 200
    assert rate["one-sided confidence sequence, users"] <= 17 / 200
    assert rate["z-test, users"] > 0.15


def shipped(**changes) -> WatchConfig:
    """What configs/realtime.py ships."""
    watch = read_config.build(WatchConfig, realtime.get_config().cycle.watch)
    return dataclasses.replace(watch, **changes)


def ends(watch: WatchConfig, harm: float, tests: int = 200) -> study.Ends:
    rng = np.random.default_rng(5)
    metrics = simulate.REWARD, simulate.LATENCY
    return study.ends(rng, *metrics, watch, harm=harm, tests=tests, users=96, sessions=600)


def test_the_shipped_rule_keeps_its_level_in_a_a_tests():
    same = ends(shipped(), harm=0.0)
    assert same.worse <= 17 / 200
    # worse by its margin it is seldom promoted by proof, and much worse never
    assert ends(shipped(), harm=0.1).proven <= 17 / 200
    bad = ends(shipped(), harm=0.3)
    assert bad.worse > 0.8 and bad.proven == 0.0
    assert sum((bad.worse, bad.proven, bad.open, bad.few)) == pytest.approx(1.0)


def test_the_study_decides_as_a_look_does():
    """One test, session by session, by the rule of the cycle."""
    watch = shipped(guardrails=(Guardrail("latency", "up", scale=1.0, allowed=2.0),))
    for harm in (-0.4, 0.0, 0.4):
        rng = np.random.default_rng(6)
        (stream,) = simulate.streams(
            rng,
            simulate.REWARD,
            tests=1,
            users=96,
            sessions=600,
            share=watch.share,
            factor=1 - harm / simulate.REWARD.mean,
        )
        decision = "open"
        for until in range(1, 601):
            arms = [
                Sessions(
                    stream.user[:until][mine],
                    stream.user[:until][mine],
                    np.zeros(mine.sum(), int),
                    np.zeros(mine.sum()),
                    {"reward": stream.value[:until][mine], "latency": np.zeros(mine.sum())},
                )
                for mine in (~stream.treated[:until], stream.treated[:until])
            ]
            found = watching.look(watch, *arms, watched_s=0.0)
            if found.decision != "wait":
                decision = {"roll_back": "worse", "promote": "proven"}[found.decision]
                break
        same = study.ends(
            np.random.default_rng(6),
            simulate.REWARD,
            simulate.LATENCY,
            watch,
            harm=harm,
            tests=1,
            users=96,
            sessions=600,
        )
        assert getattr(same, decision) == 1.0, (harm, decision, same)


def test_a_large_effect_is_seen():
    (found,) = study.same_arms(
        np.random.default_rng(3),
        simulate.ACCEPTED,
        ["confidence sequence, users"],
        share=0.5,
        tests=20,
        users=400,
        sessions=4_000,
        factor=2.0,
    )
    assert found.rate.mean == 1.0


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (dict(scale=0.0), "scale=0.0 must be a positive number"),
        (dict(scale=1.0, alpha=0.7), "alpha=0.7 must be between 0 and 0.5"),
    ],
)
def test_a_wrong_scale_or_level_is_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        sequential.difference(Arm(50, 0.0, 1.0), Arm(50, 0.0, 1.0), **wrong)


def test_users_and_values_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match=r"expected one user per value"):
        sequential.arm(np.arange(3), np.zeros(2))
    with pytest.raises(ValueError, match="infinite"):
        sequential.arm(np.arange(2), np.array([0.0, math.inf]))
