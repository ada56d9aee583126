"""Groups that part in the middle of an episode, as the learner gets them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from rl_code.learner.advantages import RLOO, per_turn
from rl_code.learner.batching import pack
from rl_code.learner.continuations import own_part, with_continuations
from rl_code.learner.monte_carlo import MonteCarlo
from rl_code.types import Context, Fork, Turn
from tests.rl_code.learner.conftest import VOCAB, make_group, make_trajectory
from tests.rl_code.learner.steps import assert_close, first_step, loss_of
from tests.rl_code.learner.test_trees import ANY_DEPTH, TWO_LEVELS, one_by_one
from tests.rl_code.trajectories import with_context

PROMPT, MESSAGE, ANSWER = 4, 3, 2
LENGTHS = [PROMPT + turn * (MESSAGE + ANSWER) for turn in range(4)]


def tokens_of(rng, turns):
    parts = [np.zeros(PROMPT, bool)]
    for turn in range(turns):
        parts += [np.ones(MESSAGE, bool), np.zeros(ANSWER if turn < turns - 1 else 0, bool)]
    sampled = np.concatenate(parts)
    return rng.integers(0, VOCAB, len(sampled)), sampled


def make_parted(continuations=2, mains=3):
    """A group whose first trajectory has two borders."""
    rng = np.random.default_rng(8)
    prompt = rng.integers(0, VOCAB, PROMPT)
    members = []
    for index in range(mains):
        tokens, sampled = tokens_of(rng, 3)
        tokens[:PROMPT] = prompt
        way = dict(prompt_length=PROMPT, index=index, reward=float(index == 0))
        members.append(make_trajectory(tokens, sampled, **way))
    found = []
    for turn in (1, 2):
        for at in range(continuations):
            tokens, sampled = tokens_of(rng, 3)
            tokens[: LENGTHS[turn]] = members[0].tokens[: LENGTHS[turn]]
            index = mains + len(found)
            made = make_trajectory(tokens, sampled, prompt_length=PROMPT, index=index, reward=at)
            found.append(dataclasses.replace(made, fork=Fork(0, turn, (LENGTHS[turn],))))
    return dataclasses.replace(make_group(members), continuations=tuple(found))


@pytest.fixture(scope="module")
def parted():
    return make_parted()


def test_only_the_tokens_behind_the_fork_are_trained_on(parted):
    for one in parted.continuations:
        own = own_part(one)
        length = one.fork.lengths[0]
        assert own.tokens is one.tokens
        assert not own.sampled[:length].any()
        assert (own.sampled[length:] == one.sampled[length:]).all()
        assert not own.logprobs[:length].any() and (own.versions[:length] == -1).all()
        assert own.logprobs[length:].tolist() == one.logprobs[length:].tolist()
    noted = np.arange(18, dtype=np.uint8).reshape(9, 2)
    own = own_part(with_context(parted.continuations[0], choices={"experts": noted}))
    assert own.contexts[0].choices["experts"].tolist() == noted[3:].tolist()
    # a sub-agent that was asked before the fork is of the other trajectory, too
    sub = Context(*(np.ones(2, kind) for kind in (np.int32, bool, np.float32, np.int32)))
    one = parted.continuations[0]
    tree = dataclasses.replace(one, contexts=(*one.contexts, sub, sub))
    tree = dataclasses.replace(tree, fork=Fork(0, 1, (LENGTHS[1], 2)))
    assert [own.sampled.sum() for own in own_part(tree).contexts] == [6, 0, 2]
    assert own_part(parted.trajectories[0]) is parted.trajectories[0]


def test_continuations_of_a_border_are_a_group_with_the_trajectory_that_was_forked(parted):
    group, credits = with_continuations(parted, [0.1, 0.2, 0.3], RLOO())
    assert [t.index for t in group.trajectories] == [0, 3, 4, 5, 6, 1, 2]
    # returns 1, 0 and 1 from each border, each against the mean of the others
    np.testing.assert_allclose(credits, [0.1, -1, 0.5, -1, 0.5, 0.2, 0.3], rtol=1e-6)
    bad = dataclasses.replace(parted.continuations[0], status="fault")
    broken = dataclasses.replace(parted, continuations=(bad, *parted.continuations[1:]))
    _, credits = with_continuations(broken, [0.1, 0.2, 0.3], RLOO())
    np.testing.assert_allclose(credits[1:3], [0, 0])
    plain = dataclasses.replace(parted, continuations=None)
    assert with_continuations(plain, [1, 2, 3], RLOO())[1] == [1, 2, 3]


def test_credit_of_single_tokens_is_cut_to_those_behind_the_fork(parted):
    def by_turn(group):
        return [per_turn(with_turns(t), range(3)) for t in group.trajectories]

    _, credits = with_continuations(parted, MonteCarlo()(parted), by_turn)
    assert [np.size(credit) for credit in credits] == [9, 6, 6, 3, 3, 1, 1]
    assert credits[1].tolist() == [1, 1, 1, 2, 2, 2] and credits[3].tolist() == [2, 2, 2]


def with_turns(t):
    spans = [(start, start + MESSAGE) for start in LENGTHS[:3]]
    return dataclasses.replace(t, turns=tuple(Turn("assistant", *span, "") for span in spans))


def test_what_continuations_share_stands_once(parted):
    group, credits = with_continuations(parted, [0.1, 0.2, 0.3], RLOO())
    config = dataclasses.replace(ANY_DEPTH, rows=1)
    batch, metrics = pack([group], [credits], config, version=0)
    prefixes = {
        tuple(t.tokens[: at + 1])
        for t in group.trajectories
        for at in range(np.flatnonzero(t.sampled)[-1])
    }
    assert metrics["pack/tokens"] == len(prefixes) == (batch.segments > 0).sum()
    assert batch.mask.sum() == 3 * 9 + 2 * 6 + 2 * 3
    _, repeated = pack([group], [credits], TWO_LEVELS, version=0)
    assert repeated["pack/tokens"] > metrics["pack/tokens"]


@pytest.mark.parametrize("levels", ["any", "two"])
@pytest.mark.parametrize("loss", ["ppo", "gspo"])
@pytest.mark.quick(each=True)
def test_a_batch_of_continuations_equals_its_trajectories_one_by_one(build, parted, levels, loss):
    group, credits = with_continuations(parted, [0.1, 0.2, 0.3], RLOO())
    credits = [
        np.full(t.sampled.sum(), c) for t, c in zip(group.trajectories, credits, strict=True)
    ]
    config = ANY_DEPTH if levels == "any" else TWO_LEVELS
    batch, _ = pack([group], [credits], dataclasses.replace(config, rows=8, slots=480), version=0)
    together = first_step(build.toy(), batch, loss_of(loss))
    apart = first_step(build.toy(), one_by_one([group], [credits]), loss_of(loss))
    assert_close(together[0], apart[0])
    assert_close(together[1], apart[1])
