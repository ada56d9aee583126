"""Scores of turn borders: packed as alone, and the cross-entropy of labels that are shares."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.scalar_head import with_head
from rl_code.learner.step_scores import (
    Steps,
    border_scores,
    make_step_update,
    pack_steps,
    step_loss,
)
from rl_code.learner.update import init_state
from tests.rl_code.learner.conftest import VOCAB
from tests.rl_code.learner.steps import OPTIMIZER, assert_close, fresh


def steps_of(seed, size, places, labels=None, weights=None):
    tokens = np.random.default_rng(seed).integers(0, VOCAB, size)
    labels = labels or (0.5,) * len(places)
    return Steps(tokens, places, labels, weights or (1.0,) * len(places))


EXAMPLES = [
    steps_of(0, 9, (3, 8), (0.25, 1.0)),
    steps_of(1, 12, (11,), (0.0,)),
    steps_of(2, 7, (2, 4, 6), (1.0, 0.5, 0.0), (1.0, 0.5, 2.0)),
    steps_of(3, 5, (), ()),
]


def test_examples_are_packed_in_order_by_first_fit():
    batch, places = pack_steps(EXAMPLES, rows=2, slots=21, most=4)
    assert places == [(0, 0), (0, 2), (1, 0), (1, 3)]
    assert batch.where.segments[0].tolist() == [1] * 9 + [2] * 12
    assert batch.positions[1, :12].tolist() == [*range(7), *range(5)]
    assert batch.at.tolist() == [[3, 8, 20, 0], [2, 4, 6, 0]]
    np.testing.assert_array_equal(batch.labels, [[0.25, 1, 0, 0], [1, 0.5, 0, 0]])
    np.testing.assert_array_equal(batch.mask, [[1, 1, 1, 0], [1, 0.5, 2, 0]])
    aligned, _ = pack_steps(EXAMPLES, rows=1, slots=64, most=8, align=8)
    assert aligned.at[0].tolist() == [3, 8, 27, 34, 36, 38, 0, 0]
    _, taken = pack_steps(EXAMPLES, rows=1, slots=21, most=4)
    assert len(taken) == 2
    for slots, most in ((8, 4), (21, 1)):
        with pytest.raises(ValueError, match="9 tokens with 2 borders do not fit into a row"):
            pack_steps(EXAMPLES, rows=1, slots=slots, most=most)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(places=(9,)), r"places \(9,\) must be in \[0, 9\)"),
        (dict(places=(1, 2)), "2 places, 1 labels and 1 weights"),
        (dict(labels=(1.5,)), r"labels \(1.5,\) must be in \[0, 1\]"),
    ],
)
def test_borders_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Steps(**{**dict(tokens=range(9), places=(1,), labels=(1.0,), weights=(1.0,)), **changes})


def test_the_loss_equals_hand_computed_numbers():
    batch, _ = pack_steps(EXAMPLES, rows=2, slots=21, most=4)
    scores = jnp.log(jnp.array([[3.0, 1.0, 1.0, 99.0], [1.0, 3.0, 1.0, 99.0]]))
    loss, metrics = step_loss(scores, batch, jnp.float32(6.5))
    # sigmoid(log 3) = 3/4: a quarter of -log 3/4 and three of -log 1/4, and so on
    border = -(0.25 * np.log(0.75) + 0.75 * np.log(0.25))
    half = -0.5 * (np.log(0.75) + np.log(0.25))
    expected = border + 2 * np.log(2) + np.log(2) + 0.5 * half + 2 * np.log(2)
    np.testing.assert_allclose(loss, expected / 6.5, rtol=1e-6)
    np.testing.assert_allclose(metrics["scores/label"], (0.25 + 1 + 1 + 0.25) / 6.5, rtol=1e-6)


def test_a_row_of_several_gives_the_scores_and_the_update_of_each_alone(build):
    model = with_head(build.model())
    head = jax.tree.map(lambda x: x + 0.3 * jnp.cos(jnp.arange(x.size)), model.head)
    model.head = head
    together, places = pack_steps(EXAMPLES, rows=4, slots=40, most=8)
    apart, alone = pack_steps(EXAMPLES, rows=4, slots=12, most=3)
    assert {row for row, _ in places} == {0} and len({row for row, _ in alone}) > 1
    scores = [
        [
            np.asarray(border_scores(model, batch))[row, first : first + len(one.places)]
            for one, (row, first) in zip(EXAMPLES, found, strict=True)
        ]
        for batch, found in ((together, places), (apart, alone))
    ]
    for one, other in zip(*scores, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    results = [
        make_step_update(OPTIMIZER, parts)(init_state(fresh(model), OPTIMIZER), batch)
        for batch, parts in ((together, 1), (apart, 4))
    ]
    assert_close(results[0][0].model, results[1][0].model)
    assert_close(results[0][1], results[1][1])
    assert results[0][1]["train/borders"] == 6.5


def test_a_model_learns_labels_that_its_tokens_tell(build):
    rng = np.random.default_rng(0)
    examples = []
    for _ in range(32):
        tokens = rng.integers(0, VOCAB, 8)
        examples.append(Steps(tokens, (7,), (float(tokens[7] % 2),), (1.0,)))
    batch, places = pack_steps(examples, rows=8, slots=32, most=4)
    state = init_state(with_head(build.model()), OPTIMIZER)
    update = make_step_update(OPTIMIZER)
    first = None
    for _ in range(60):
        state, metrics = update(state, batch)
        first = float(metrics["train/loss"]) if first is None else first
    assert first == pytest.approx(np.log(2), rel=1e-5)
    found = np.asarray(border_scores(state.model, batch))
    right = [
        (found[at] > 0.5) == (one.labels[0] > 0.5) for at, one in zip(places, examples, strict=True)
    ]
    assert np.mean(right) > 0.9
