"""A trajectory is a tree of contexts, and reads as one list where it is linear."""

from __future__ import annotations

import dataclasses

import numpy as np

from rl_code.run.trajectory_log import read_trajectories
from rl_code.store import serialization
from rl_code.types import Context, Turn
from tests.rl_code.learner.conftest import make_group, make_trajectory
from tests.rl_code.trajectories import read_with, record_step


def context(tokens, sampled, parent, kept):
    tokens = np.array(tokens, np.int32)
    sampled = np.array(sampled, bool)
    logprobs = np.where(sampled, -0.5, 0.0).astype(np.float32)
    versions = np.where(sampled, 3, -1).astype(np.int32)
    return Context(tokens, sampled, logprobs, versions, parent, kept)


def tree():
    """A prompt of two tokens and an answer; a summary that keeps the prompt; what continues a part
    of the summary; a sub-agent.
    """
    linear = make_trajectory([1, 2, 3, 4], [0, 0, 1, 1], prompt_length=2, version=3)
    contexts = (
        *linear.contexts,
        context([5, 6, 7], [0, 1, 1], 0, 2),
        context([8], [1], 1, 3),
        context([9, 10], [0, 1], -1, 0),
        context([11], [1], 2, 1),
    )
    turns = (
        Turn("prompt", 0, 2, ""),
        Turn("assistant", 2, 4, ""),
        Turn("assistant", 1, 3, "", context=1),
    )
    return dataclasses.replace(linear, contexts=contexts, turns=turns)


def test_a_linear_trajectory_reads_as_its_context_without_copies():
    trajectory = make_trajectory([1, 2, 3], [0, 0, 1], prompt_length=2)
    (only,) = trajectory.contexts
    for name in ("tokens", "sampled", "logprobs", "versions"):
        assert getattr(trajectory, name) is getattr(only, name)
    assert trajectory.whole(0) is only.tokens or (trajectory.whole(0) == only.tokens).all()


def test_every_token_of_a_tree_is_read_once_and_contexts_as_they_were_seen():
    trajectory = tree()
    assert trajectory.tokens.tolist() == list(range(1, 12))
    assert trajectory.tokens[trajectory.sampled].tolist() == [3, 4, 6, 7, 8, 10, 11]
    assert (trajectory.versions[trajectory.sampled] == 3).all()
    assert [trajectory.whole(index).tolist() for index in range(5)] == [
        [1, 2, 3, 4],
        [1, 2, 5, 6, 7],
        [1, 2, 5, 8],
        [9, 10],
        [1, 11],
    ]


def test_a_tree_comes_back_from_the_store_and_is_read_whole(tmp_path, monkeypatch):
    group = make_group([tree()])
    again = serialization.loads(serialization.dumps(group))
    assert serialization.dumps(again) == serialization.dumps(group)
    assert [c.parent for c in again.trajectories[0].contexts] == [-1, 0, 1, -1, 2]
    read_with(monkeypatch, lambda ids: "".join(chr(96 + id) for id in ids))
    record_step(tmp_path, 0, [group])
    (record,) = read_trajectories(tmp_path, 0)
    (logged,) = record["trajectories"]
    # after the prompt, contexts one behind the other
    assert logged["ids"] == list(range(3, 12))
    assert [(c["start"], c["parent"], c["kept"]) for c in logged["contexts"]] == [
        (0, -1, 0),
        (2, 0, 2),
        (5, 1, 3),
        (6, -1, 0),
        (8, 2, 1),
    ]
    spans = [(turn["start"], turn["end"]) for turn in logged["turns"]]
    assert spans == [(0, 2), (3, 5)]
    assert [logged["ids"][start:end] for start, end in spans] == [[3, 4], [6, 7]]
