"""Arms are sticky, have their shares, and Thompson sampling finds the one that earns most."""

import collections

import numpy as np
import pytest

from people.serving.router import Controlled, Shares, Thompson, arm_of, draw_mean
from rl_code.run.serving import AutoConfig

USERS = [f"{number:032x}" for number in range(4000)]
SHARES = {"old@1": 0.7, "new@2": 0.2, "other@3": 0.1}


def test_shares_are_met_and_users_stay():
    counts = collections.Counter(arm_of(user, "first", SHARES) for user in USERS)
    for arm, share in SHARES.items():
        assert abs(counts[arm] / len(USERS) - share) < 4 * (share * (1 - share) / len(USERS)) ** 0.5
    router = Shares("first", SHARES)
    assert [router.choose(user, "a") for user in USERS] == [
        arm_of(user, "first", SHARES) for user in USERS
    ]


def test_a_copy_that_never_changes_has_the_same_users_in_every_experiment():
    first = Controlled("old@0", 0.2, Shares("first", {"old@1": 0.5, "new@2": 0.5}))
    second = Controlled("old@0", 0.2, Shares("second", {"new@2": 1.0}))
    assert list(first.arms) == ["old@1", "new@2", "old@0"]
    users = {user for user in USERS if first.choose(user, "a") == "old@0"}
    assert abs(len(users) / len(USERS) - 0.2) < 0.03
    assert users == {user for user in USERS if second.choose(user, "b") == "old@0"}
    others = collections.Counter(first.choose(user, "a") for user in set(USERS) - users)
    assert abs(others["old@1"] / sum(others.values()) - 0.5) < 0.04
    with pytest.raises(ValueError, match="share"):
        Controlled("old@0", 0.0, Shares("first", SHARES))


def test_another_experiment_assigns_independently():
    half = {"a@1": 0.5, "b@2": 0.5}
    first = np.array([arm_of(user, "first", half) == "a@1" for user in USERS])
    second = np.array([arm_of(user, "second", half) == "a@1" for user in USERS])
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.06


def test_a_growing_share_moves_users_one_way_only():
    before = [arm_of(user, "first", {"old@1": 0.9, "new@2": 0.1}) for user in USERS]
    after = [arm_of(user, "first", {"old@1": 0.6, "new@2": 0.4}) for user in USERS]
    moves = collections.Counter(zip(before, after, strict=True))
    assert moves["new@2", "old@1"] == 0 and moves["old@1", "new@2"] > 0


@pytest.mark.parametrize("shares", [{}, {"a@1": 0.5}, {"a@1": 1.5, "b@2": -0.5}])
def test_wrong_shares_are_refused(shares):
    with pytest.raises(ValueError, match="shares="):
        Shares("first", shares)


def test_thompson_sampling_finds_the_arm_that_earns_most():
    rng = np.random.default_rng(0)
    means = {"a@1": 0.1, "b@2": 0.4, "c@3": 0.2}
    router = Thompson(list(means), AutoConfig(seed=1))
    counts = collections.Counter()
    for number in range(3000):
        arm = router.choose("user", f"session {number}")
        counts[arm] += 1
        router.reward(arm, rng.normal(means[arm], 0.5))
    assert counts["b@2"] > 2400 and min(counts.values()) > 5


def test_a_session_stays_with_its_arm():
    router = Thompson(["a@1", "b@2"], AutoConfig(seed=1))
    arms = {session: router.choose("user", session) for session in map(str, range(50))}
    assert set(arms.values()) == {"a@1", "b@2"}
    for _ in range(100):
        router.reward("a@1", 1.0)
        router.reward("b@2", -1.0)
    assert {session: router.choose("user", session) for session in arms} == arms
    assert router.choose("user", "a new one") == "a@1"
    # whose sessions were forgotten begins as everybody does
    router.forget("another user")
    assert {session: router.choose("user", session) for session in arms} == arms
    router.forget("user")
    assert {router.choose("user", session) for session in arms} == {"a@1"}


def test_rewards_of_no_arm_and_no_number_are_refused():
    router = Thompson(["a@1"], AutoConfig(seed=0))
    with pytest.raises(ValueError, match="no arm 'b@2'; there are a@1"):
        router.reward("b@2", 1.0)
    with pytest.raises(ValueError, match="nan"):
        router.reward("a@1", float("nan"))
    with pytest.raises(ValueError, match="all different"):
        Thompson(["a@1", "a@1"], AutoConfig(seed=0))


def test_a_mean_is_drawn_from_the_posterior():
    class Told:
        def gamma(self, shape):
            assert shape == 1 + 3 / 2
            return 2.75

        def normal(self, center, deviation):
            return center, deviation

    # of three rewards with mean 2 and sum of squares 6, with a prior reward of 0: the variance is
    # (1 + (6 + 3/4 * 4) / 2) / 2.75 = 2, and that of the mean a quarter of it
    drawn = draw_mean(Told(), AutoConfig(), 3, 2.0, 6.0)
    assert drawn == pytest.approx((1.5, 0.5**0.5))


def test_sessions_spread_over_the_arms_while_their_rewards_wait():
    router = Thompson(["a@1", "b@2"], AutoConfig())
    counts = collections.Counter(router.choose("user", str(number)) for number in range(400))
    assert 160 <= counts["a@1"] <= 240
    # a few rewards tell of all that wait
    for _ in range(30):
        router.reward("a@1", 0.0)
        router.reward("b@2", 1.0)
    counts = collections.Counter(router.choose("other", str(number)) for number in range(400))
    assert counts["b@2"] > 390


def test_the_same_record_gives_the_same_choices():
    one, other = (Thompson(["a@1", "b@2", "c@3"], AutoConfig(seed=7)) for _ in range(2))
    another = Thompson(["a@1", "b@2", "c@3"], AutoConfig(seed=8))
    found = []
    for number in range(60):
        user, session = f"user {number % 5}", str(number)
        arm = one.choose(user, session)
        for extra in range(number % 3):  # of sessions that the other router never hears of
            one.choose("somebody else", f"{number} {extra}")
        found.append((arm, other.choose(user, session), another.choose(user, session)))
        value = number % 7 / 7
        for router in (one, other, another):
            router.reward(arm, value)
    assert all(mine == theirs for mine, theirs, _ in found)
    assert any(mine != theirs for mine, _, theirs in found)


def test_an_arm_that_breaks_loses_its_sessions(caplog):
    routers = {
        false_alarm: Thompson(["a@1", "b@2"], AutoConfig(false_alarm=false_alarm))
        for false_alarm in (0.02, None)
    }
    for router in routers.values():
        for number in range(400):
            router.reward("b@2", 0.8 + 0.4 * (number % 2))
        for number in range(60):
            router.reward("a@1", 0.4 + 0.2 * (number % 2))
        assert router.choose("user", "before") == "b@2"
        for _ in range(60):
            router.reward("b@2", 0.0)
    new = {key: {one.choose("user", str(i)) for i in range(20)} for key, one in routers.items()}
    # 400 of mean 1 and 60 of 0 are still better than 0.5
    assert new == {0.02: {"a@1"}, None: {"b@2"}}
    assert "the rewards of b@2 have changed: only the last" in caplog.text


@pytest.mark.parametrize(
    "wrong, why",
    [
        (dict(seed=-1), "seed=-1 must be at least 0"),
        (dict(wait_s=0.0), "wait_s=0.0 must be positive and finite"),
        (dict(weight=0.0), "weight=0.0 must be positive"),
        (dict(scale=-1.0), "scale=-1.0 must be positive"),
        (dict(mean=float("inf")), "mean=inf must be finite"),
        (dict(false_alarm=1.0), "false_alarm=1.0 must be above 0 and below 1, or None"),
    ],
)
def test_wrong_settings_are_refused(wrong, why):
    with pytest.raises(ValueError, match=why):
        AutoConfig(**wrong)
