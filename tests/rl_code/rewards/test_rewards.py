"""Rewards: only work that was handed in and passes everything is paid in full."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs import quickstart, smollm2_mbpp
from rl_code.config import read_config
from rl_code.config.read_config import ConfigError
from rl_code.environment.finished import CHEATS, FinishedEpisode, Grade, Usage
from rl_code.environment.sandbox.errors import SandboxFault
from rl_code.rewards.combine import SIGNAL_ERROR, SIGNALS, RewardConfig, combine, find_signals
from rl_code.run.config import RunConfig
from rl_code.types import Context, Limits, Reward, Task, Tests, ToolCall, Trajectory, Turn
from tests.rl_code.signals import signals

TASK = Task("t", (), {}, "a.py", "f", Tests(), Tests(), {})
LIMITS = Limits(turns=2, tokens=100, turn_tokens=8, test_runs=1, command_s=1.0)


def finished(grade: Grade, malformed: int = 0) -> FinishedEpisode:
    """An episode of two messages that ended with this grade."""
    tokens = np.arange(9, dtype=np.int32)
    calls = (ToolCall("run_tests", {}), ToolCall("submit", {}), ToolCall("", {}, "no call"))
    trajectory = Trajectory(
        task_id="t",
        group=0,
        index=0,
        contexts=(Context(tokens, tokens > 4, np.zeros(9, np.float32), np.zeros(9, np.int32)),),
        prompt_length=5,
        turns=(
            Turn("prompt", 0, 5, ""),
            Turn("assistant", 5, 7, "", calls=(ToolCall("run_tests", {}),)),
            Turn("tool", 7, 7, ""),
            Turn("assistant", 7, 9, "", calls=calls),
        ),
        status="submitted",
        reward=Reward(0.0, {}, grade.flags),
        malformed_calls=malformed,
        scores={"reward": 0.0, "format": 0.5},
    )
    usage = Usage.of(trajectory)
    return FinishedEpisode(TASK, trajectory, {}, {}, grade, usage, limits=LIMITS)


marks = st.lists(st.booleans(), max_size=4).map(tuple)
flags = st.lists(st.sampled_from(["timeout", "killed", *CHEATS]), max_size=2, unique=True)
grades = st.builds(Grade, st.booleans(), marks, marks, flags.map(tuple))
episodes = st.builds(finished, grades, st.integers(0, 5))
# Those that a config may name without settings.
BARE = [name for name in SIGNALS if name not in ("rubric", "process", "reward_model")]
# Weights of tests, partial, malformed, integrity, quality, similarity, tested, score and overlong.
weights = st.tuples(
    st.floats(1, 2),
    st.floats(0, 0.45),
    st.floats(0, 1),
    st.floats(0.01, 1),
    st.floats(0, 0.5),
    st.floats(0, 0.45),
    st.floats(0, 0.5),
    st.floats(0, 0.5),
    st.floats(0, 0.5),
)


@dataclasses.dataclass(frozen=True)
class Heavy:
    """A signal with a setting that a config could not tell from its own."""

    weight: float = 1.0

    def __call__(self, episode) -> float:
        return self.weight


def weighted(values) -> tuple:
    return signals(*(dict(name=n, weight=w) for n, w in zip(BARE, values, strict=True)))


@given(episodes, weights)
def test_the_total_is_the_sum_of_the_named_components(episode, values):
    reward = combine(episode, weighted(values))
    assert list(reward.components) == BARE and reward.flags == episode.grade.flags
    assert reward.total == pytest.approx(sum(reward.components.values()))


def test_a_score_is_what_the_environment_says():
    episode = finished(Grade(submitted=True))
    (score,) = signals(dict(name="score", of="format", weight=2.0))
    assert score(episode) == 1.0
    (unknown,) = signals(dict(name="score", of="style"))
    with pytest.raises(ValueError, match=r"score\(of='style'\): task t has reward, format"):
        unknown(episode)

    def without(status):
        changed = dataclasses.replace(episode.trajectory, scores=None, status=status)
        return dataclasses.replace(episode, trajectory=changed)

    assert score(without("time_limit")) == 0.0
    with pytest.raises(ValueError, match="has none: the work is graded by tests"):
        score(without("submitted"))


@given(episodes, weights)
def test_full_reward_exactly_when_every_required_test_passes(episode, values):
    grade = episode.grade
    passed = grade.visible + grade.hidden
    solved = grade.submitted and len(passed) > 0 and all(passed) and not CHEATS & set(grade.flags)
    assert grade.solved == solved
    assert combine(episode, weighted(values)).components["tests"] == (values[0] if solved else 0.0)


@given(marks, marks, weights)
def test_unsubmitted_work_earns_nothing(visible, hidden, values):
    assert combine(finished(Grade(False, visible, hidden)), weighted(values)).total == 0.0


@given(episodes, weights)
def test_a_partial_solution_earns_less_than_a_full_one(episode, values):
    assert episode.grade.solved or combine(episode, weighted(values)).total < values[0]


@given(marks, marks, st.integers(0, 5), weights)
def test_a_proven_cheat_earns_less_than_an_honest_failure(visible, hidden, malformed, values):
    cheat = finished(Grade(True, visible, hidden, (sorted(CHEATS)[0],)), malformed)
    failure = finished(Grade(True, (False,) * 2, (False,) * 2, ("timeout",)), malformed)
    active = weighted(values)
    assert not cheat.grade.solved
    assert combine(cheat, active).total < combine(failure, active).total


def test_partial_reward_is_the_fraction_of_hidden_tests():
    active = signals("tests", dict(name="partial", weight=0.5), dict(name="malformed", weight=0.25))
    reward = combine(finished(Grade(True, (False,), (True, True, False, False)), 1), active)
    assert reward.components == {"tests": 0.0, "partial": 0.25, "malformed": -0.25}
    assert reward.total == 0.0


def test_a_task_without_tests_is_never_solved():
    assert not Grade(True).solved


def test_caps_hold_after_the_weight_and_labels_name_components():
    active = signals("tests", dict(name="malformed", weight=0.25, cap=(-0.5, 0.0), label="form"))
    totals = [combine(finished(Grade(True), n), active).components["form"] for n in range(4)]
    assert totals == [0.0, -0.25, -0.5, -0.5]


def test_usage_counts_messages_tokens_and_calls():
    usage = finished(Grade(True), 1).usage
    assert (usage.turns, usage.tokens_sampled, usage.tokens_total) == (2, 4, 9)
    assert usage.calls == {"run_tests": 2, "submit": 1} and usage.malformed_calls == 1


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ((dict(name="tests"), dict(name="partial", weight=1.0)), "below that of tests"),
        ((dict(name="tests", weight=-0.1),), "at least 0"),
        ((dict(name="tests", weight=math.inf),), "finite"),
        (("tests", "tests"), "names of their own"),
        ((), "names of their own"),
        ((dict(name="malformed", cap=(0.0, -1.0)),), "must be"),
        ((dict(weight=1.0),), "expected a name"),
    ],
)
def test_signals_that_invert_the_order_of_outcomes_or_say_nothing_are_refused(sections, named):
    with pytest.raises(ConfigError, match=named):
        read_config.build(RewardConfig, {"signals": sections})


@pytest.mark.parametrize(
    ("signal", "named"),
    [
        ("test", "reward.signals.0. = 'test'.*Did you mean 'tests'"),
        (dict(name="tests", full=2.0), "tests takes no settings, found full"),
        ("json:nothing", "json has no 'nothing'"),
        ("math:pi", "cannot be called"),
        ("tests.rl_code.rewards.test_rewards:Heavy", "its settings weight would be taken"),
    ],
)
def test_a_wrong_signal_is_found_when_the_config_is_built(signal, named):
    config = quickstart.get_config()
    config.reward.signals = ("malformed", signal)[1:]
    with pytest.raises(ConfigError, match=named):
        read_config.build(RunConfig, config)


def raising(error):
    def signal(episode):
        raise error

    return signal


ERRORS = [
    RecursionError("deep"),
    MemoryError(),
    KeyError("f"),
    SyntaxError("no"),
    TypeError("none"),
    SystemExit(2),
]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_what_a_signal_raises_is_an_outcome_that_pays_no_more_than_a_failure(error, caplog):
    active = signals(
        "tests", dict(name="malformed", weight=0.25), dict(name="json:dumps", label="x")
    )
    active = (*active[:2], dataclasses.replace(active[2], signal=raising(error)))
    solved = finished(Grade(True, (True,), (True,), ("timeout",)), 2)
    reward = combine(solved, active)
    assert reward.components == {"tests": 0.0, "malformed": -0.5, "x": 0.0}
    assert reward.total == -0.5 and reward.flags == ("timeout", SIGNAL_ERROR)
    assert "'x' of task t failed" in caplog.text
    # a key says that it ends the run instead
    stopping = (*active[:2], dataclasses.replace(active[2], stops=True))
    with pytest.raises(type(error)):
        combine(solved, stopping)


def test_the_log_holds_no_more_of_an_exception_than_a_page(caplog):
    (one,) = signals("tests")
    long = raising(ValueError("begin" + "x" * 10**6 + "end"))
    combine(finished(Grade(True)), (dataclasses.replace(one, signal=long),))
    assert "begin" in caplog.text and "end" in caplog.text and "Traceback" in caplog.text
    assert len(caplog.text) < 10_000


@pytest.mark.parametrize("value", [np.float32(0.5), np.array(0.5), np.float16(0.5), np.bool(True)])
def test_components_are_plain_numbers_that_records_can_hold(value):
    (one,) = signals("tests")
    reward = combine(finished(Grade(True)), (dataclasses.replace(one, signal=lambda _: value),))
    assert type(reward.components["tests"]) is type(reward.total) is float
    assert json.loads(json.dumps(reward.components)) == {"tests": float(value)}


@pytest.mark.parametrize("value", [None, "0.5x", [0.5], 1j, math.nan, 10**400])
def test_what_is_no_number_is_an_outcome(value):
    (one,) = signals("tests")
    reward = combine(finished(Grade(True)), (dataclasses.replace(one, signal=lambda _: value),))
    assert reward.total == 0.0 and reward.flags == (SIGNAL_ERROR,)


@pytest.mark.parametrize("error", [SandboxFault("gone"), ConfigError("wrong")], ids=repr)
def test_faults_and_wrong_configs_are_no_outcomes(error):
    (one,) = signals("tests")
    with pytest.raises(type(error)):
        combine(finished(Grade(True)), (dataclasses.replace(one, signal=raising(error)),))


def test_a_config_says_whether_errors_of_signals_stop_the_run():
    for value, stops in (("count", False), ("stop", True)):
        config = read_config.build(RewardConfig, {"signals": ["tests"], "on_error": value})
        assert [one.stops for one in find_signals(config)] == [stops]
    with pytest.raises(ConfigError, match="on_error='ignore' must be 'count' or 'stop'"):
        read_config.build(RewardConfig, {"signals": ["tests"], "on_error": "ignore"})


def test_a_signal_that_is_not_finite_is_an_error():
    episode = finished(Grade(True), math.inf)
    assert combine(episode, signals("malformed")).flags == (SIGNAL_ERROR,)
    (stopping,) = signals("malformed")
    with pytest.raises(ValueError, match="'malformed' is -inf"):
        combine(episode, (dataclasses.replace(stopping, stops=True),))


@pytest.mark.parametrize(("weight", "most"), [(0.1, 1.0), (1.0, 1.0), (3.0, 3.0)])
def test_the_penalties_of_an_episode_have_a_bound(weight, most):
    episode = finished(Grade(True), 368)
    assert combine(episode, signals(dict(name="malformed", weight=weight))).total == -most
    # another one where the config says so
    given = signals(dict(name="malformed", weight=0.5, cap=(-50.0, 0.0)))
    assert combine(episode, given).total == -50.0


def test_the_config_comes_back_from_json():
    section = {"signals": ["tests", {"name": "malformed", "weight": 0.5, "cap": [-1.0, 0.0]}]}
    config = read_config.build(RewardConfig, section)
    assert read_config.build(RewardConfig, json.loads(read_config.to_json(config))) == config


def test_the_rewards_of_todays_configs_have_their_numbers():
    solved = finished(Grade(True, (True,), (True,)), 3)
    failed = dataclasses.replace(solved, grade=Grade(True, (True,), (False, True)))
    for module, penalty in ((quickstart, 0.1), (smollm2_mbpp, 0.0)):
        config = read_config.build(RunConfig, module.get_config())
        active = signals(*read_config.to_dict(config.reward)["signals"])
        totals = [combine(episode, active).total for episode in (solved, failed)]
        assert totals == [1.0 - penalty * 3, 0.0 - penalty * 3]
