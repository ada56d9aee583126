"""Trajectories that are trees of contexts: packed with every shared prefix once, they give the loss
and the gradient of the same contexts one by one. Layers of every kind have theirs in
test_value_layouts.py.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from rl_code.learner.batching import PackConfig, empty_batch, pack
from rl_code.learner.two_phase_batching import pack_completions
from rl_code.types import Context
from tests.rl_code.learner.conftest import VOCAB
from tests.rl_code.learner.steps import TWO, assert_close, first_step, laid_out, loss_of
from tests.rl_code.trajectories import with_context

ANY_DEPTH = PackConfig(rows=4, slots=240, targets=120, max_staleness=0, drop_uninformative=False)
TWO_LEVELS = dataclasses.replace(ANY_DEPTH, slots=480, runs=60)
ALONE = dataclasses.replace(ANY_DEPTH, rows=1, slots=480)
SIZES = (3, 2, 2)


def context(rng, parent, kept, given, sampled, more=0):
    """A context of random tokens: ``given`` ones, ``sampled`` ones, then an observation."""
    count = given + sampled + more
    tokens = rng.integers(0, VOCAB, count).astype(np.int32)
    chosen = (np.arange(count) >= given) & (np.arange(count) < given + sampled)
    logprobs = np.where(chosen, -3.4 - 0.3 * np.sin(tokens), 0.0).astype(np.float32)
    versions = np.where(chosen, 0, -1).astype(np.int32)
    return Context(tokens, chosen, logprobs, versions, parent, kept)


def as_tree(rng, linear, brief):
    """A linear trajectory with more contexts behind it, three levels below the prompt.

    A summary that keeps the prompt, a message that continues it, another that continues a part of
    it, a sub-agent that starts from nothing with a ``brief`` that others have too, and a context
    that keeps only a part of the prompt.
    """
    prompt = linear.prompt_length
    first = len(linear.contexts[0].tokens)
    summary = context(rng, 0, prompt, 4, 3, 2)
    longer = context(rng, 1, prompt + 6, 2, 4)
    other = context(rng, 2, prompt + 8, 0, 5)
    sub_agent = context(rng, -1, 0, 6, 4)
    sub_agent.tokens[:5] = brief
    part = context(rng, 0, prompt - 1, 3, 2)
    end = context(rng, 0, first, 3, 2)
    return dataclasses.replace(
        linear, contexts=(*linear.contexts, summary, longer, other, sub_agent, part, end)
    )


@pytest.fixture(scope="module")
def trees(build):
    """(groups of trees, an advantage for every sampled token of each trajectory)."""
    rng = np.random.default_rng(5)
    brief = rng.integers(0, VOCAB, 5)
    groups = [
        build.group([as_tree(rng, t, brief) for t in group.trajectories], number)
        for number, group in enumerate(build.groups(SIZES, seed=3))
    ]
    advantages = [
        [rng.standard_normal(t.sampled.sum()).astype(np.float32) for t in group.trajectories]
        for group in groups
    ]
    return groups, advantages


def one_by_one(groups, advantages, slots=480):
    """A row for each trajectory, in which every context stands whole in a segment of its own."""
    batch = empty_batch(dataclasses.replace(ALONE, rows=8, slots=slots), 8, sum(SIZES))
    pairs = [
        pair
        for group, values in zip(groups, advantages, strict=True)
        for pair in zip(group.trajectories, values, strict=True)
    ]
    for row, (t, advantage) in enumerate(pairs):
        slot = target = 0
        for index, own in enumerate(t.contexts):
            whole = t.whole(index)
            span = (row, slice(slot, slot + len(whole)))
            batch.tokens[span] = whole
            batch.positions[span] = np.arange(len(whole))
            batch.segments[span] = 1 + index
            for at in np.flatnonzero(own.sampled):
                place = (row, target)
                batch.sources[place] = slot + own.kept + at - 1
                batch.targets[place] = own.tokens[at]
                batch.logprobs[place] = own.logprobs[at]
                batch.advantages[place] = advantage[target]
                batch.mask[place] = 1.0
                batch.trajectories[place] = row
                batch.lengths[place] = t.sampled.sum()
                target += 1
            slot += len(whole)
    return batch


def read(t):
    """Tokens that the contexts of a trajectory read, each context alone."""
    return sum(
        own.kept + np.flatnonzero(own.sampled)[-1] for own in t.contexts if own.sampled.any()
    )


def test_every_prefix_stands_once(trees):
    groups, advantages = trees
    batch, metrics = pack(groups, advantages, ANY_DEPTH, version=0)
    # all distinct prefixes of what is read; whole groups stand in a row
    prefixes = {
        (number, tuple(t.whole(index)[: length + 1]))
        for number, group in enumerate(groups)
        for t in group.trajectories
        for index, own in enumerate(t.contexts)
        for length in range(own.kept + np.flatnonzero(own.sampled)[-1])
    }
    # first contexts stand apart behind the prompt, even where they begin alike
    assert len(prefixes) <= metrics["pack/tokens"] <= len(prefixes) + 3
    assert metrics["pack/tokens"] == (batch.segments > 0).sum()
    unshared = sum(read(t) for group in groups for t in group.trajectories)
    assert metrics["pack/saved"] == pytest.approx(1 - metrics["pack/tokens"] / unshared)
    assert metrics["pack/saved"] > 0.35
    _, repeated = pack(groups, advantages, TWO_LEVELS, version=0)
    assert metrics["pack/tokens"] < repeated["pack/tokens"] < unshared


@pytest.mark.parametrize("align", [1, 8])
@pytest.mark.parametrize("levels", ["any", "two"])
@pytest.mark.parametrize("loss", ["ppo", "gspo"])
@pytest.mark.quick(each=True)
def test_a_batch_of_trees_equals_its_contexts_one_by_one(build, trees, levels, loss, align):
    groups, advantages = trees
    config = ANY_DEPTH if levels == "any" else TWO_LEVELS
    config = dataclasses.replace(config, align=align, rows=8, slots=480)
    batch, _ = pack(groups, advantages, config, version=0)
    together = first_step(build.toy(), batch, loss_of(loss))
    apart = first_step(build.toy(), one_by_one(groups, advantages), loss_of(loss))
    assert_close(together[0], apart[0])
    assert_close(together[1], apart[1])


def test_two_phases_repeat_what_is_deeper_than_the_prompt(build, trees):
    groups, advantages = trees
    two = dataclasses.replace(TWO, rows=8, slots=480, runs=80)
    completions, metrics = pack_completions(groups, advantages, laid_out(groups), two, version=0)
    apart = first_step(build.toy(), one_by_one(groups, advantages))
    phases = first_step(build.toy(), completions, prompts=laid_out(groups))
    assert_close(phases[0], apart[0])
    assert phases[1].pop("train/residual_mib") > 0
    assert_close(phases[1], apart[1])
    assert metrics["pack/saved"] > 0


@pytest.mark.long
def test_groups_that_fit_no_row_are_split_into_trees_of_whole_trajectories(build, trees):
    groups, advantages = trees
    small = dataclasses.replace(ANY_DEPTH, rows=8, slots=70)
    batch, metrics = pack(groups, advantages, small, version=0)
    assert metrics["pack/rows"] > len(SIZES)
    for row in range(8):
        numbers = batch.trajectories[row][batch.mask[row] > 0]
        assert (np.diff(np.flatnonzero(np.diff(numbers))) > 0).all()
        others = batch.trajectories[np.arange(8) != row]
        assert not set(numbers) & set(others[batch.mask[np.arange(8) != row] > 0])
    whole, _ = pack(groups, advantages, ANY_DEPTH, version=0)
    assert batch.mask.sum() == whole.mask.sum()
    one, other = (first_step(build.toy(), b, loss_of("gspo"))[0] for b in (batch, whole))
    assert_close(one, other)


@pytest.mark.parametrize(
    "index, change, message",
    [
        (1, dict(parent=1), r"context 1: parent=1 must be -1 or an earlier context"),
        (1, dict(parent=-2), r"parent=-2"),
        (2, dict(kept=99), r"context 2: kept=99 must be in \[0, \d+\], with parent=1"),
        (4, dict(kept=1), r"context 4: kept=1 must be in \[0, 0\], with parent=-1"),
        (4, dict(sampled=np.ones(10, bool)), "context 4: its first token is sampled"),
        (3, dict(versions=np.zeros(2, np.int32)), "context 3: lengths differ: .*'versions': 2"),
    ],
)
def test_contexts_that_are_no_tree_are_named(build, trees, index, change, message):
    groups, advantages = trees
    first, *others = groups[0].trajectories
    group = build.group([with_context(first, index, **change), *others])
    with pytest.raises(ValueError, match=f"task0.*trajectory 0 {message}|{message}"):
        pack([group], advantages[:1], ANY_DEPTH, version=0)


def test_a_chain_of_contexts_may_be_as_long_as_a_row(build):
    rng = np.random.default_rng(0)
    length = 1500
    start = context(rng, -1, 0, 3, 1)
    chain = [context(rng, index, 4 + index, 0, 1) for index in range(length)]
    t = build.trajectory([1, 2], [0, 1], prompt_length=1)
    t = dataclasses.replace(t, contexts=(start, *chain), prompt_length=3)
    config = PackConfig(1, 2000, 2000, 0, False)
    batch, metrics = pack([build.group([t])], [[1.0]], config, version=0)
    assert len(t.whole(length)) == length + 4
    assert metrics["pack/tokens"] == length + 3 and batch.mask.sum() == length + 1
    np.testing.assert_array_equal(batch.sources[0, : length + 1], np.arange(2, length + 3))
