"""Losses of scores on numbers worked out by hand, of whole texts and of turn borders; and rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention.methods.dense import Dense
from models.scalar_head import with_head
from models.sharding import MeshConfig, make_mesh
from rl_code.learner.optimizer import OptimizerConfig
from rl_code.learner.scored import Text, make_scored_update, pack_scored, scored_loss, scores_in
from rl_code.learner.update import init_state
from rl_code.rewards.reward_model_fit import FitConfig, Outcome, fit, scores_of, units_of
from tests.models.small import small_model
from tests.rl_code.learner.conftest import VOCAB
from tests.rl_code.learner.steps import OPTIMIZER, assert_close, fresh


def test_the_logistic_loss_of_outcomes():
    texts = [[Text.whole([1], 1.0)], [Text.whole([2], 0.0)], [Text.whole([3], 1.0)]]
    batch, places = pack_scored(texts, rows=1, slots=4, most=4)
    assert places == [[(0, 0)], [(0, 1)], [(0, 2)]]
    scores = jnp.array([[2.0, 2.0, 0.0, 9.0]])
    loss, metrics = scored_loss(scores, batch, "outcomes", jnp.float32(3))
    # log(1 + e^-2) + log(1 + e^2) + log 2, over 3
    assert float(loss) == pytest.approx((0.126928 + 2.126928 + 0.693147) / 3, abs=1e-5)
    assert float(metrics["train/accuracy"]) == pytest.approx(1 / 3)


def test_the_loss_of_bradley_and_terry():
    pairs = [(Text.whole([1], 1.0), Text.whole([2])), (Text.whole([3], 1.0), Text.whole([4]))]
    batch, _ = pack_scored(pairs, rows=1, slots=4, most=6)
    scores = jnp.array([[3.0, 1.0, -1.0, 0.0, 7.0, 5.0]])
    loss, metrics = scored_loss(scores, batch, "pairs", jnp.float32(2))
    # margins 2 and -1: log(1 + e^-2) = 0.126928, log(1 + e) = 1.313262
    assert float(loss) == pytest.approx((0.126928 + 1.313262) / 2, abs=1e-5)
    assert metrics.keys() == {"train/accuracy"} and float(metrics["train/accuracy"]) == 0.5
    shifted, _ = scored_loss(scores + 5.0, batch, "pairs", jnp.float32(2))
    assert float(shifted) == pytest.approx(float(loss), abs=1e-5)


def test_units_stand_in_one_row_and_what_does_not_fit_waits():
    pairs = [(Text.whole([1, 2, 3], 1.0), Text.whole([4, 5]))] * 3
    batch, places = pack_scored(pairs, rows=2, slots=6, most=4)
    assert places == [[(0, 0), (0, 1)], [(1, 0), (1, 1)]]
    assert batch.tokens.tolist() == [[1, 2, 3, 4, 5, 0]] * 2
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 0]] * 2
    assert batch.where.segments.tolist() == [[1, 1, 1, 2, 2, 0]] * 2
    assert batch.at.tolist() == [[2, 4, 0, 0]] * 2
    assert batch.labels.tolist() == [[1, 0, 0, 0]] * 2
    aligned, _ = pack_scored(pairs[:1], rows=1, slots=8, most=2, align=4)
    assert aligned.at.tolist() == [[2, 5]]
    with pytest.raises(ValueError, match="do not fit into a row of 4 slots"):
        pack_scored(pairs, rows=2, slots=4, most=4)


OUTCOMES = [
    Outcome(f"t{i % 3}", tuple([i % 7 + 1, 30 if good else 29, 31]), good)
    for i in range(12)
    for good in (i % 2 == 0,)
]


def test_pairs_are_of_one_task_and_bounded():
    rng = np.random.default_rng(0)
    units = units_of(OUTCOMES, FitConfig(kind="pairs", pairs=3), rng)
    # each of three tasks has two good and two bad ones, four pairs
    assert len(units) == 9
    by_tokens = {one.tokens: one for one in OUTCOMES}
    for good, bad in units:
        one, other = by_tokens[good.tokens], by_tokens[bad.tokens]
        assert one.good and not other.good and one.task == other.task
    assert len(units_of(OUTCOMES, FitConfig(), rng)) == 12
    assert units_of([one for one in OUTCOMES if one.good], FitConfig(kind="pairs"), rng) == []


@pytest.mark.long
def test_micro_batches_do_not_change_an_update_of_pairs():
    """Micro-batches of outcomes are below, with a row of several."""
    texts = [Text.whole(one.tokens, float(one.good)) for one in OUTCOMES]
    units = list(zip(texts[0::2], texts[1::2], strict=True))
    batch, places = pack_scored(units, rows=4, slots=12, most=4)
    assert len(places) == len(units)
    optimizer = OptimizerConfig(learning_rate=0.1)
    made = []
    with jax.set_mesh(make_mesh(MeshConfig())):
        for micro_batches in (1, 4):
            model = with_head(small_model((Dense(),), num_layers=1))
            model.head.weight[...] = jnp.linspace(-1, 1, 16)
            state = init_state(model, optimizer)
            state, metrics = make_scored_update(optimizer, "pairs", micro_batches)(state, batch)
            made.append((float(metrics["train/loss"]), float(metrics["train/grad_norm"])))
    assert made[1] == pytest.approx(made[0], rel=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["outcomes", "pairs"])
def test_a_model_learns_what_tells_outcomes_apart_and_again_the_same_bits(kind):
    model = with_head(small_model((Dense(),), num_layers=1))
    config = FitConfig(
        updates=40, kind=kind, rows=2, texts=4, optimizer=OptimizerConfig(learning_rate=0.02)
    )
    mesh = make_mesh(MeshConfig())
    way = dict(slots=4, mesh=mesh)
    first, metrics = fit(model, OUTCOMES, config, seed=[0, 1], **way)
    again, _ = fit(model, OUTCOMES, config, seed=[0, 1], **way)
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)
    scores = scores_of(first, [one.tokens for one in OUTCOMES], **way)
    good = np.array([one.good for one in OUTCOMES])
    assert scores[good].min() > scores[~good].max() and metrics["train/accuracy"] == 1.0
    same, nothing = fit(model, [], config, seed=[0], **way)
    assert same is model and nothing == {}


# --- Turn borders ----------------------------------------------------------------------------------


def borders(seed, size, places, labels=None, weights=None):
    tokens = np.random.default_rng(seed).integers(0, VOCAB, size)
    labels = labels or (0.5,) * len(places)
    return Text(tokens, places, labels, weights or (1.0,) * len(places))


EXAMPLES = [
    borders(0, 9, (3, 8), (0.25, 1.0)),
    borders(1, 12, (11,), (0.0,)),
    borders(2, 7, (2, 4, 6), (1.0, 0.5, 0.0), (1.0, 0.5, 2.0)),
    borders(3, 5, (), ()),
]
UNITS = [[example] for example in EXAMPLES]


def test_examples_are_packed_in_order_by_first_fit():
    batch, places = pack_scored(UNITS, rows=2, slots=21, most=4)
    assert places == [[(0, 0)], [(0, 2)], [(1, 0)], [(1, 3)]]
    assert batch.where.segments[0].tolist() == [1] * 9 + [2] * 12
    assert batch.positions[1, :12].tolist() == [*range(7), *range(5)]
    assert batch.at.tolist() == [[3, 8, 20, 0], [2, 4, 6, 0]]
    np.testing.assert_array_equal(batch.labels, [[0.25, 1, 0, 0], [1, 0.5, 0, 0]])
    np.testing.assert_array_equal(batch.mask, [[1, 1, 1, 0], [1, 0.5, 2, 0]])
    aligned, _ = pack_scored(UNITS, rows=1, slots=64, most=8, align=8)
    assert aligned.at[0].tolist() == [3, 8, 27, 34, 36, 38, 0, 0]
    _, taken = pack_scored(UNITS, rows=1, slots=21, most=4)
    assert len(taken) == 2
    for slots, most in ((8, 4), (21, 1)):
        with pytest.raises(ValueError, match=r"texts of \[9\] tokens with 2 places do not fit"):
            pack_scored(UNITS, rows=1, slots=slots, most=most)


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
        Text(**{**dict(tokens=range(9), places=(1,), labels=(1.0,), weights=(1.0,)), **changes})


def test_the_loss_of_labels_that_are_shares():
    batch, _ = pack_scored(UNITS, rows=2, slots=21, most=4)
    scores = jnp.log(jnp.array([[3.0, 1.0, 1.0, 99.0], [1.0, 3.0, 1.0, 99.0]]))
    loss, metrics = scored_loss(scores, batch, "outcomes", jnp.float32(6.5))
    # sigmoid(log 3) = 3/4: a quarter of -log 3/4 and three of -log 1/4, and so on
    border = -(0.25 * np.log(0.75) + 0.75 * np.log(0.25))
    half = -0.5 * (np.log(0.75) + np.log(0.25))
    expected = border + 2 * np.log(2) + np.log(2) + 0.5 * half + 2 * np.log(2)
    np.testing.assert_allclose(loss, expected / 6.5, rtol=1e-6)
    np.testing.assert_allclose(metrics["scores/label"], (0.25 + 1 + 1 + 0.25) / 6.5, rtol=1e-6)


@pytest.mark.long
def test_a_row_of_several_gives_the_scores_and_the_update_of_each_alone(build):
    model = with_head(build.model())
    head = jax.tree.map(lambda x: x + 0.3 * jnp.cos(jnp.arange(x.size)), model.head)
    model.head = head
    together, places = pack_scored(UNITS, rows=4, slots=40, most=8)
    apart, alone = pack_scored(UNITS, rows=4, slots=12, most=3)
    assert {row for [(row, _)] in places} == {0} and len({row for [(row, _)] in alone}) > 1
    scores = [
        [
            np.asarray(scores_in(model, batch))[row, first : first + len(one.places)]
            for one, [(row, first)] in zip(EXAMPLES, found, strict=True)
        ]
        for batch, found in ((together, places), (apart, alone))
    ]
    for one, other in zip(*scores, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    results = [
        make_scored_update(OPTIMIZER, "outcomes", parts)(init_state(fresh(model), OPTIMIZER), batch)
        for batch, parts in ((together, 1), (apart, 4))
    ]
    assert_close(results[0][0].model, results[1][0].model)
    assert_close(results[0][1], results[1][1])
    assert results[0][1]["train/labels"] == 6.5


@pytest.mark.long
def test_a_model_learns_labels_that_its_tokens_tell(build):
    rng = np.random.default_rng(0)
    examples = []
    for _ in range(32):
        tokens = rng.integers(0, VOCAB, 8)
        examples.append(Text(tokens, (7,), (float(tokens[7] % 2),), (1.0,)))
    batch, places = pack_scored([[one] for one in examples], rows=8, slots=32, most=4)
    state = init_state(fresh(with_head(build.model())), OPTIMIZER)
    update = make_scored_update(OPTIMIZER, "outcomes")
    first = None
    for _ in range(60):
        state, metrics = update(state, batch)
        first = float(metrics["train/loss"]) if first is None else first
    assert first == pytest.approx(np.log(2), rel=1e-5)
    found = np.asarray(scores_in(state.model, batch))
    right = [
        (found[at] > 0.0) == (one.labels[0] > 0.5)
        for [at], one in zip(places, examples, strict=True)
    ]
    assert np.mean(right) > 0.9
