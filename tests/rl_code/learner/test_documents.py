"""Batches with documents: packed rows are the same contexts one by one, under every method."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention.blocks import aligned, entries
from rl_code.environment.documents import PADDING, DocumentsConfig, place, rope_positions, seen_as
from rl_code.learner.batching import PackConfig, empty_batch, pack, tokens_of
from rl_code.learner.logprobs import batch_logprobs, target_logprobs
from rl_code.learner.row_slots import cut_documents
from rl_code.learner.supervised_batching import Demonstrated, pack_supervised
from rl_code.learner.update import supervised_loss
from tests.rl_code.learner.conftest import (
    METHODS,
    VOCAB,
    make_attending,
    make_model,
    make_trajectory,
)
from tests.rl_code.learner.steps import ONE, advantages_of, assert_close, first_step

DOCUMENTS = dataclasses.replace(DocumentsConfig(longest=16, shortest=2), page=8)
PACK = PackConfig(
    rows=4,
    slots=400,
    targets=120,
    max_staleness=0,
    drop_uninformative=False,
    runs=8,
    documents=DOCUMENTS,
)
# The same rows, which eight devices share.
CUT = dataclasses.replace(PACK, parts=8)
SIZES = (3, 1, 2)
PAD = 0
# Every method that treats documents in a way of its own.
METHODS_OF_DOCUMENTS = (*METHODS["moba-documents"], *METHODS["nsa"])


def make_choosing():
    """A small model of three layers that choose blocks or attend to documents apart."""
    return make_model(attention=METHODS_OF_DOCUMENTS, num_layers=3, num_heads=4)


def context_of(pieces):
    """(tokens, sampled, what each place is) of [(tokens, whether a document, whether sampled)]."""
    tokens: list[int] = []
    kinds: list[int] = []
    sampled: list[bool] = []
    for ids, is_document, chosen in pieces:
        more, what = place([(ids, is_document)], len(tokens), max([0, *kinds]), DOCUMENTS, PAD)
        tokens += more
        kinds += what
        sampled += [chosen] * len(more)
    return np.array(tokens), np.array(sampled), np.array(kinds, np.int32)


def with_kinds(trajectory, kinds):
    (context,) = trajectory.contexts
    return dataclasses.replace(
        trajectory, contexts=(dataclasses.replace(context, documents=kinds),)
    )


def make_groups(build, sizes, *, seed=0, documents=True):
    """Groups whose prompts hold two or three documents, one of which may be split, and whose
    completions read some more: one of them twice, one at the end of a page.
    """
    rng = np.random.default_rng(seed)

    def text(low, high):
        return rng.integers(1, VOCAB, rng.integers(low, high)).tolist()

    groups = []
    for number, size in enumerate(sizes):
        prompt = [(text(1, 12), False, False)]
        for _ in range(rng.integers(2, 4)):
            prompt += [(text(3, 30), documents, False), (text(1, 5), False, False)]
        again = text(5, 12)
        members = []
        for index in range(size):
            pieces = [*prompt, (text(1, 9), False, True), (text(1, 3), False, False)]
            for read in (again, text(8, 9), again)[: rng.integers(1, 4)]:
                pieces += [(read, documents, False), (text(1, 3), False, False)]
                pieces += [(text(1, 9), False, True)]
            tokens, sampled, kinds = context_of(pieces)
            length = len(context_of(prompt)[0])
            made = make_trajectory(tokens, sampled, prompt_length=length, group=number, index=index)
            members.append(with_kinds(made, kinds))
        groups.append(build.group(members, number))
    return groups


def apart(trajectory_contexts):
    """A batch with one context in a row, which holds the padding of documents too: every place is a
    slot, so that whole blocks and pages lie in the row as in a cache.
    """
    rows = len(trajectory_contexts)
    longest = max(len(t.whole(index)) for t, index in trajectory_contexts)
    config = dataclasses.replace(PACK, rows=rows, slots=-(-longest // 32) * 32)
    batch = empty_batch(config, rows, rows)
    for row, (trajectory, index) in enumerate(trajectory_contexts):
        tokens = trajectory.whole(index)
        kinds = trajectory.whole_documents(index)
        span = (row, slice(len(tokens)))
        batch.tokens[span] = tokens
        batch.segments[span], batch.documents[span] = seen_as(kinds)
        batch.positions[span] = rope_positions(kinds, DOCUMENTS.longest)
        batch.order[row] = np.arange(config.slots)
        own = trajectory.contexts[index]
        at = own.kept + np.flatnonzero(own.sampled)
        targets = (row, slice(len(at)))
        batch.sources[targets] = at - 1
        batch.targets[targets] = tokens[at]
        batch.mask[targets] = 1.0
        batch.trajectories[targets] = row
    return batch


@functools.partial(jax.jit, static_argnames="runs")
def logprobs_of(model, batch, runs):
    """runs: None for rows of ``apart``."""
    if runs is not None:
        return batch_logprobs(model, batch, 1.0, runs=runs)[0]
    where = tokens_of(batch)
    hidden = model.hidden(batch.tokens, batch.positions, where, align=DOCUMENTS.page)
    hidden = jnp.take_along_axis(hidden, batch.sources[..., None], axis=1)
    return target_logprobs(model, hidden, batch.targets, 1.0)[0]


@functools.partial(jax.jit, static_argnames="runs")
def _with_gradient(model, batch, weights, runs):
    def weighed(model):
        values = logprobs_of(model, batch, runs)
        return jnp.sum(weights * values), values

    return jax.grad(weighed, has_aux=True)(model)


def with_gradient(model, batch, runs, weights=None):
    """(``logprobs_of``, the gradient of their sum, weighed)."""
    weights = np.asarray(batch.mask) if weights is None else weights
    gradient, values = _with_gradient(model, batch, weights, runs)
    return values, gradient


def by_trajectory(values, batch):
    """The values of the targets, those of the first trajectory first."""
    numbers = np.asarray(batch.trajectories)
    mask = np.asarray(batch.mask) > 0
    values = np.asarray(values)
    return np.concatenate([values[mask & (numbers == one)] for one in np.unique(numbers[mask])])


@pytest.mark.long
def test_packed_rows_equal_the_contexts_one_by_one(build):
    model = make_choosing()
    groups = make_groups(build, SIZES)
    packed, _ = pack(groups, advantages_of(SIZES), PACK, version=0)
    alone = apart([(t, 0) for group in groups for t in group.trajectories])
    # with empty slots in front of documents that devices would share
    cut, metrics = pack(groups, advantages_of(SIZES), CUT, version=0)
    assert metrics["pack/documents_cut"] == 0 and np.any(cut.segments != packed.segments)
    ways = ((packed, PACK.runs), (alone, None), (cut, PACK.runs))

    # every sampled token has a weight of its own, the same in both batches
    def weights(batch):
        counted = np.cumsum(batch.mask, axis=1) + 7 * batch.trajectories
        first = {n: counted[batch.trajectories == n].min() for n in np.unique(batch.trajectories)}
        within = counted - np.vectorize(first.get)(batch.trajectories)
        return (batch.mask * np.cos(within + batch.trajectories)).astype(np.float32)

    found = [with_gradient(model, batch, runs, weights(batch)) for batch, runs in ways]
    values = [by_trajectory(x, batch) for (x, _), (batch, _) in zip(found, ways, strict=True)]
    assert len(values[0]) == sum(t.sampled.sum() for group in groups for t in group.trajectories)
    weighed = [by_trajectory(weights(batch), batch) for batch, _ in ways]
    for other in (1, 2):
        np.testing.assert_allclose(values[0], values[other], rtol=0, atol=2e-5)
        assert_close(weighed[0], weighed[other])
        assert_close(found[0][1], found[other][1], rtol=1e-4, floor=1e-3)

    # whatever stands in padding, nobody sees it
    spoiled = np.where(alone.segments > 0, alone.tokens, 1 + alone.order % (VOCAB - 1))
    spoiled = dataclasses.replace(alone, tokens=spoiled.astype(np.int32))
    again = by_trajectory(with_gradient(model, spoiled, None)[0], alone)
    assert np.any(spoiled.tokens != alone.tokens) and np.array_equal(values[1], again)


def test_no_block_and_no_stretch_has_tokens_of_two_documents(build):
    size = DOCUMENTS.page
    cut = jax.jit(lambda tokens: aligned(tokens, size, PACK.runs, documents=True))
    for seed, config in itertools.product(range(3), (PACK, CUT)):
        groups = make_groups(build, SIZES, seed=seed)
        batch, _ = pack(groups, advantages_of(SIZES), config, version=0)
        tokens = tokens_of(batch)
        blocks = cut(tokens)
        stretched = entries(blocks, 4, 2)
        names = ("segments", "branches", "documents")
        for row in range(PACK.rows):
            slots = np.asarray(blocks.slots[row]).reshape(-1, size)
            full = slots >= 0
            for name in names:
                own = np.asarray(getattr(blocks.tokens, name)[row]).reshape(-1, size)
                assert np.all((own == own[:, :1]) | ~full)
            order = np.asarray(blocks.tokens.order[row]).reshape(-1, size)
            assert np.all((order % size == np.arange(size)) | ~full)
            # every slot is in a block of its own branch once; copies are in those of others
            real = np.flatnonzero(batch.segments[row])
            branch = np.asarray(blocks.tokens.branches[row]).reshape(-1, size)
            mine = full & (branch == batch.branches[row][np.maximum(slots, 0)])
            assert sorted(slots[mine].tolist()) == real.tolist()
            # a stretch of places p to p + 3 is whole if all four hold neighbours of one document
            whole = np.flatnonzero(np.asarray(stretched.tokens.segments[row]))
            assert len(whole) or not len(real)
            flat = slots.ravel()
            for start in 2 * whole:
                kinds = batch.documents[row][flat[start : start + 4]]
                assert np.all(flat[start : start + 4] >= 0) and np.all(kinds == kinds[0])


@pytest.mark.long
def test_demonstrations_with_documents_equal_the_contexts_one_by_one(build):
    model = make_choosing()
    groups = make_groups(build, SIZES)
    contexts = [t.contexts[0] for group in groups for t in group.trajectories]
    batch, taken = pack_supervised(
        [Demonstrated(c.tokens, c.sampled, c.documents) for c in contexts],
        rows=3,
        slots=512,
        align=model.config.alignment,
        longest=DOCUMENTS.longest,
        parts=8,
    )
    assert taken == len(contexts) and not cut_documents(batch.where, 8)
    alone = apart([(t, 0) for group in groups for t in group.trajectories])
    values = by_trajectory(with_gradient(model, alone, None)[0], alone)
    loss, _ = jax.jit(supervised_loss)(model, batch)
    np.testing.assert_allclose(loss, -np.mean(values), rtol=1e-5)


def test_documents_of_a_prompt_stand_in_a_batch_once(build):
    (group,) = make_groups(build, (3,))
    batch, metrics = pack([group], advantages_of((3,)), PACK, version=0)
    prompt, own, documents = 0, 0, 0
    for trajectory in group.trajectories:
        (context,) = trajectory.contexts
        kinds = context.documents
        last = np.flatnonzero(context.sampled)[-1]  # nothing is predicted from it
        real = kinds[:last] != PADDING
        prompt = real[: trajectory.prompt_length].sum()
        own += real[trajectory.prompt_length :].sum()
        documents += (kinds[trajectory.prompt_length : last] > 0).sum()
    documents += (kinds[: trajectory.prompt_length] > 0).sum()
    assert metrics["pack/tokens"] == prompt + own == np.sum(batch.segments > 0)
    assert metrics["pack/document_tokens"] == documents == np.sum(batch.documents > 0)
    # places count padding, of which the batch has none
    assert np.all(np.isin(batch.tokens[batch.segments > 0], [PAD], invert=True))


def test_without_documents_a_batch_has_no_array_more(build):
    groups = build.turns(SIZES, seed=1)
    batch, metrics = pack(groups, advantages_of(SIZES), ONE, version=0)
    assert batch.documents is None and batch.order is None and len(jax.tree.leaves(batch)) == 12
    assert "pack/document_tokens" not in metrics
    with_section = dataclasses.replace(ONE, documents=DOCUMENTS)
    assert len(jax.tree.leaves(empty_batch(with_section, 1))) == 14


@pytest.mark.long
def test_contexts_without_a_document_are_as_without_the_section(build):
    """Their positions all start later, which RoPE does not see."""
    model = make_choosing()
    groups = make_groups(build, SIZES, documents=False)
    plain = [
        build.group([with_kinds(t, None) for t in group.trajectories], number)
        for number, group in enumerate(groups)
    ]
    without = dataclasses.replace(PACK, documents=None)
    batch, _ = pack(groups, advantages_of(SIZES), PACK, version=0)
    other, _ = pack(plain, advantages_of(SIZES), without, version=0)
    assert np.array_equal(batch.tokens, other.tokens)
    here, _ = with_gradient(model, batch, PACK.runs)
    there = logprobs_of(model, other, PACK.runs)
    np.testing.assert_allclose(here, there, rtol=0, atol=2e-5)


@pytest.mark.parametrize("methods", ["dense-window", "choosing"])
@pytest.mark.quick(first=1)
def test_a_document_is_read_by_what_follows_and_by_nothing_else(build, methods):
    model = make_choosing() if methods == "choosing" else make_attending(methods)
    (group,) = make_groups(build, (2,))
    batch, _ = pack([group], advantages_of((2,)), PACK, version=0)
    row = 0
    number = batch.documents[row][batch.branches[row] == 0].max()  # the prompt's last
    changed = np.array(batch.tokens)
    inside = (batch.documents[row] == number) & (batch.branches[row] == 0)
    changed[row, inside] = changed[row, inside] % (VOCAB - 1) + 1

    @jax.jit
    def hidden(tokens):
        where = tokens_of(batch)
        return model.hidden(tokens, batch.positions, where, PACK.runs, documents=True)

    before, after = (np.asarray(hidden(x))[row] for x in (np.asarray(batch.tokens), changed))
    moved = np.any(before != after, axis=-1)
    real = batch.segments[row] > 0
    others = real & (batch.documents[row] > 0) & ~inside
    first = batch.order[row][inside].min()
    ahead = real & (batch.documents[row] < 0) & (batch.order[row] < first)
    assert ahead.any() and others.any() and not moved[others | ahead].any()
    # what follows at once sees it in every method, in a window too
    follows = np.flatnonzero(inside)[-1] + 1
    assert batch.documents[row, follows] < 0 and moved[follows] and moved[inside].any()


@pytest.mark.long
def test_contexts_of_a_tree_share_documents_and_equal_themselves_alone(build):
    model = make_attending("dense-window")
    (group,) = make_groups(build, (2,), seed=3)
    first = group.trajectories[0]
    (context,) = first.contexts
    rng = np.random.default_rng(5)
    # a context that keeps the prompt and the first message, and another that reads what it read
    kept = first.prompt_length + 1
    tail = np.concatenate([context.documents[:kept], [0]])
    text = rng.integers(1, VOCAB, 9).tolist()
    read, kinds = place([(text, True)], len(tail), tail.max(), DOCUMENTS, PAD)
    own = np.array([3, *read, 5, 6, 7])
    kinds = np.array([0, *kinds, 0, 0, 0], np.int32)
    sampled = np.arange(len(own)) >= len(own) - 2

    def later(tokens, kinds, sampled, parent, kept):
        other = make_trajectory(tokens, sampled, prompt_length=1)
        return dataclasses.replace(
            other.contexts[0], parent=parent, kept=kept, documents=np.asarray(kinds, np.int32)
        )

    contexts = (
        context,
        later(own, kinds, sampled, 0, kept),
        later([*own[:-2], 9, 8], kinds, sampled, 0, kept),
    )
    tree = dataclasses.replace(first, contexts=contexts)
    pack_deep = dataclasses.replace(PACK, runs=0)
    batch, metrics = pack([build.group([tree])], [[1.0]], pack_deep, version=0)
    assert metrics["pack/saved"] > 0.5
    here = by_trajectory(logprobs_of(model, batch, 0), batch)
    alone = apart([(tree, index) for index in range(3)])
    there = by_trajectory(logprobs_of(model, alone, None), alone)
    np.testing.assert_allclose(here, there, rtol=0, atol=2e-5)


@pytest.mark.long
def test_an_update_trains_on_documents_in_micro_batches_as_at_once(build):
    groups = make_groups(build, SIZES)
    batch, _ = pack(groups, advantages_of(SIZES), PACK, version=0)
    model = build.toy()
    whole = first_step(model, batch, runs=PACK.runs)
    parts = first_step(model, batch, micro_batches=4, runs=PACK.runs)
    assert_close(whole[0], parts[0])
    assert whole[1]["train/finite"] == 1.0


def test_trajectories_that_do_not_fit_the_section_are_refused(build):
    (group,) = make_groups(build, (1,))
    (trajectory,) = group.trajectories
    kinds = trajectory.contexts[0].documents
    advantages = [[1.0]]
    without = dataclasses.replace(PACK, documents=None)
    with pytest.raises(ValueError, match="it has documents, and the config has no such section"):
        pack([group], advantages, without, version=0)
    plain = build.group([with_kinds(trajectory, None)])
    with pytest.raises(ValueError, match="the config has documents, so every token"):
        pack([plain], advantages, PACK, version=0)
    before = trajectory.prompt_length - 1
    shifted = np.concatenate([np.roll(kinds[:before], 1), kinds[before:]])
    moved = build.group([with_kinds(trajectory, shifted)])
    with pytest.raises(ValueError, match="which is no multiple of page=8"):
        pack([moved], advantages, PACK, version=0)
    inside = np.where(trajectory.contexts[0].sampled, 1, kinds).astype(np.int32)
    with pytest.raises(ValueError, match="a sampled token stands in a document"):
        pack([build.group([with_kinds(trajectory, inside)])], advantages, PACK, version=0)
    pieces = [([1, 2], False, False), ([3, 4, 5], True, False), ([6], False, True)]
    tokens, sampled, kinds = context_of(pieces)
    bare = with_kinds(make_trajectory(tokens, sampled, prompt_length=2), kinds)
    with pytest.raises(ValueError, match="or right behind one"):
        pack([build.group([bare])], advantages, PACK, version=0)
