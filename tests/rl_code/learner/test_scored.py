"""The losses of a reward model on numbers worked out by hand, and its rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention.methods.dense import Dense
from models.scalar_head import with_head
from models.sharding import MeshConfig, make_mesh
from rl_code.learner.optimizer import OptimizerConfig
from rl_code.learner.scored import Text, make_scored_update, pack_scored, scored_loss
from rl_code.learner.update import init_state
from rl_code.rewards.reward_model_fit import FitConfig, Outcome, fit, scores_of, units_of
from tests.models.small import small_model


def test_the_logistic_loss_of_outcomes():
    texts = [[Text([1], 1.0)], [Text([2], 0.0)], [Text([3], 1.0)]]
    batch, places = pack_scored(texts, rows=1, slots=4, most=4)
    assert places == [[(0, 0)], [(0, 1)], [(0, 2)]]
    scores = jnp.array([[2.0, 2.0, 0.0, 9.0]])
    loss, right = scored_loss(scores, batch, "outcomes", jnp.float32(3))
    # log(1 + e^-2) + log(1 + e^2) + log 2, over 3
    assert float(loss) == pytest.approx((0.126928 + 2.126928 + 0.693147) / 3, abs=1e-5)
    assert float(right) == pytest.approx(1 / 3)


def test_the_loss_of_bradley_and_terry():
    pairs = [(Text([1], 1.0), Text([2])), (Text([3], 1.0), Text([4]))]
    batch, _ = pack_scored(pairs, rows=1, slots=4, most=6)
    scores = jnp.array([[3.0, 1.0, -1.0, 0.0, 7.0, 5.0]])
    loss, right = scored_loss(scores, batch, "pairs", jnp.float32(2))
    # margins 2 and -1: log(1 + e^-2) = 0.126928, log(1 + e) = 1.313262
    assert float(loss) == pytest.approx((0.126928 + 1.313262) / 2, abs=1e-5)
    assert float(right) == 0.5
    shifted, _ = scored_loss(scores + 5.0, batch, "pairs", jnp.float32(2))
    assert float(shifted) == pytest.approx(float(loss), abs=1e-5)


def test_units_stand_in_one_row_and_what_does_not_fit_waits():
    pairs = [(Text([1, 2, 3], 1.0), Text([4, 5]))] * 3
    batch, places = pack_scored(pairs, rows=2, slots=6, most=4)
    assert places == [[(0, 0), (0, 1)], [(1, 0), (1, 1)]]
    assert batch.tokens.tolist() == [[1, 2, 3, 4, 5, 0]] * 2
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 0]] * 2
    assert batch.where.segments.tolist() == [[1, 1, 1, 2, 2, 0]] * 2
    assert batch.last.tolist() == [[2, 4, 0, 0]] * 2
    assert batch.labels.tolist() == [[1, 0, 0, 0]] * 2
    aligned, _ = pack_scored(pairs[:1], rows=1, slots=8, most=2, align=4)
    assert aligned.last.tolist() == [[2, 5]]
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
@pytest.mark.parametrize("kind", ["outcomes", "pairs"])
def test_micro_batches_do_not_change_an_update(kind):
    texts = [Text(one.tokens, float(one.good)) for one in OUTCOMES]
    units = (
        [(x,) for x in texts]
        if kind == "outcomes"
        else list(zip(texts[0::2], texts[1::2], strict=True))
    )
    batch, places = pack_scored(units, rows=4, slots=12, most=4)
    assert len(places) == len(units)
    optimizer = OptimizerConfig(learning_rate=0.1)
    made = []
    with jax.set_mesh(make_mesh(MeshConfig())):
        for micro_batches in (1, 2, 4):
            model = with_head(small_model((Dense(),), num_layers=1))
            model.head.weight[...] = jnp.linspace(-1, 1, 16)
            state = init_state(model, optimizer)
            state, metrics = make_scored_update(optimizer, kind, micro_batches)(state, batch)
            made.append((float(metrics["train/loss"]), float(metrics["train/grad_norm"])))
    assert made[1] == pytest.approx(made[0], rel=1e-4)
    assert made[2] == pytest.approx(made[0], rel=1e-4)


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
