"""Metrics of a step: signals, endings of episodes, first edits, and what is said where nothing teaches."""

from __future__ import annotations

import dataclasses
import types as types_lib

import pytest

from rl_code.run.journal import Journal
from rl_code.run.step_metrics import episode_metrics, has_signal, taught
from rl_code.types import Reward
from tests.rl_code.trajectories import group_of_one


def test_a_group_has_a_signal_if_its_rewards_differ_by_more_than_rounding():
    group = group_of_one()
    (one,) = group.trajectories

    def of(*totals, status="submitted"):
        made = (dataclasses.replace(one, reward=Reward(x, {})) for x in totals)
        fault = dataclasses.replace(one, reward=Reward(9.0, {}), status=status)
        return dataclasses.replace(group, trajectories=(*made, fault))

    assert has_signal(of(0.0, 1.0, status="fault"))
    assert not has_signal(of(0.3, 0.1 + 0.2, status="fault"))
    assert not has_signal(of(status="fault")) and has_signal(of(0.0))
    found = episode_metrics([of(0.0), of(1.0, status="fault")], 7)
    assert found["reward/signal_groups"] == 0.5


def test_ways_in_which_episodes_end_are_counted():
    group = group_of_one()
    (one,) = group.trajectories
    ways = ("agent_ended", "agent_ended", "token_limit", "submitted")
    group = dataclasses.replace(
        group, trajectories=tuple(dataclasses.replace(one, status=way) for way in ways)
    )
    found = episode_metrics([group], 7)
    ended = {way: found[f"episode/{way}"] for way in (*ways, "turn_limit", "time_limit")}
    assert ended == dict(
        agent_ended=0.5, token_limit=0.25, submitted=0.25, turn_limit=0.0, time_limit=0.0
    )


def test_steps_without_a_signal_are_told_in_the_line_of_training():
    notes = []
    journal = Journal.__new__(Journal)
    journal._silent = 0
    journal.progress = types_lib.SimpleNamespace(note=notes.append)
    row = {"reward/solved": 0.0, "reward/total": -0.2, "episode/malformed_calls": 2.0}
    counts = []
    for signal in [0.0] * 7 + [0.5] + [0.0] * 3:
        journal._warn_of_silence(row | {"reward/signal_groups": signal})
        counts.append(len(notes))
    assert counts == [0, 0, 1, 1, 1, 2, 2, 2, 2, 2, 3]
    assert notes[0].startswith("training learns nothing: in 3 steps no group had rewards that")
    assert "2.0 malformed calls per episode" in notes[0] and "docs/no_reward.md" in notes[0]


def test_what_teaches_is_credit_where_it_is_known():
    equal = {"reward/signal_groups": 0.0}
    assert not taught(equal) and taught({"reward/signal_groups": 0.1})
    # of tokens of an earlier step, or of turns
    assert taught(equal | {"train/credited": 0.01}) and not taught(equal | {"train/credited": 0.0})
    # groups that differ in a trajectory that is not trained on
    assert not taught({"reward/signal_groups": 0.1, "train/credited": 0.0})


@pytest.mark.parametrize(
    ("passed", "mean"), [((True, False), 0.5), ((None, None), None), ((True, None), None)]
)
def test_first_edits_have_a_mean_where_they_are_known(passed, mean):
    group = group_of_one()
    (one,) = group.trajectories
    several = tuple(dataclasses.replace(one, first_edit_passed=x) for x in passed)
    found = episode_metrics([dataclasses.replace(group, trajectories=several)], 7)
    assert found.get("reward/first_edit") == mean
