"""The update: equal gradients however the batch is packed, cut or sharded; and what must leave the
state alone.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from models.model_config import MoE
from models.sharding import MeshConfig, make_mesh
from models.transformer import Transformer
from pallas_kernels.tokens import packed_rows, sequences
from rl_code.learner.batching import PackConfig, empty_batch, pack
from rl_code.learner.logprobs import batch_logprobs
from rl_code.learner.optimizer import decayed, learning_rate, make_optimizer
from rl_code.learner.supervised_batching import Demonstrated, SupervisedBatch, pack_supervised
from rl_code.learner.update import (
    init_state,
    make_sft_update,
    make_token_logprobs,
    supervised_loss,
)
from tests.models.small import small_config
from tests.rl_code.learner import steps
from tests.rl_code.learner.conftest import METHODS
from tests.rl_code.learner.steps import (
    LOSS,
    OPTIMIZER,
    PACK,
    assert_close,
    assert_left_alone,
    first_step,
    fresh,
    loss_of,
    shuffled_rows,
    without_targets,
)


def packed(build, config=PACK, groups=None):
    groups = build.groups([3, 5, 2, 4, 3, 4, 1, 5], seed=1) if groups is None else groups
    rng = np.random.default_rng(2)
    advantages = [rng.standard_normal(len(group.trajectories)) for group in groups]
    return pack(groups, advantages, config, version=0)[0]


# One compilation per configuration and shape.
sft_update_for = functools.cache(make_sft_update)
token_logprobs_for = functools.cache(make_token_logprobs)
jit_logprobs = jax.jit(batch_logprobs, static_argnums=(2, 3))
jit_supervised = jax.jit(supervised_loss)


@pytest.fixture(scope="module")
def whole(build):
    """Gradient and metrics of the batch in one piece on one device."""
    return first_step(build.toy(), packed(build))


def test_micro_batches_without_targets_are_not_computed(build, whole, monkeypatch):
    """Rows that hold nothing come last; what they hold does not even enter as nan."""
    batch = packed(build)
    rows = int((batch.mask.sum(axis=1) > 0).sum())
    assert rows <= 16
    batch = dataclasses.replace(
        batch, advantages=np.where(np.arange(32)[:, None] < 16, batch.advantages, np.nan)
    )
    model = build.toy()
    gradient, metrics, _ = first_step(model, batch, micro_batches=2)
    assert_close(gradient, whole[0])
    assert_close(metrics, whole[1])

    calls = []
    head = type(model).head

    def counted(self):
        jax.debug.callback(lambda: calls.append(1))
        return head(self)

    monkeypatch.setattr(type(model), "head", counted)
    jax.block_until_ready(make_token_logprobs(0.8, 8)(model, batch))
    jax.effects_barrier()
    assert len(calls) == -(-rows // 4) < 8


def test_neither_micro_batches_nor_devices_change_anything(build, whole):
    """Each of eight devices has one row of each of four micro-batches."""
    mesh = make_mesh(MeshConfig(8, 1))
    with jax.set_mesh(mesh):
        model = jax.device_put(fresh(build.toy()), NamedSharding(mesh, PartitionSpec()))
        batch = jax.device_put(
            shuffled_rows(packed(build)), NamedSharding(mesh, PartitionSpec("data"))
        )
        gradient, metrics, state = first_step(model, batch, micro_batches=4)
        assert_close(gradient, whole[0])
        assert_close(metrics, whole[1])
        assert int(state.step) == 1


def test_the_order_of_groups_and_of_rows_changes_nothing(build, whole):
    groups = build.groups([3, 5, 2, 4, 3, 4, 1, 5], seed=1)
    rng = np.random.default_rng(2)
    advantages = [rng.standard_normal(len(group.trajectories)) for group in groups]
    order = np.random.default_rng(3).permutation(len(groups))
    shuffled, _ = pack([groups[i] for i in order], [advantages[i] for i in order], PACK, version=0)
    for batch in (shuffled, shuffled_rows(packed(build))):
        gradient, metrics, _ = first_step(build.toy(), batch)
        assert_close(gradient, whole[0])
        assert_close(metrics, whole[1])


@pytest.mark.parametrize(
    "kind, loss, aggregation",
    [
        ("toy", "ppo", "token"),
        pytest.param("model", "gspo", "sequence", marks=pytest.mark.long),
        pytest.param("toy", "cispo", "constant", marks=pytest.mark.long),
    ],
)
def test_a_shared_prompt_equals_each_trajectory_alone(build, kind, loss, aggregation):
    loss = loss_of(loss, aggregation=aggregation)
    groups = build.groups([3, 5, 2, 4, 3, 4, 1, 5], seed=1)
    alone = [build.group([t]) for group in groups for t in group.trajectories]
    rng = np.random.default_rng(2)
    advantages = [rng.standard_normal(len(group.trajectories)) for group in groups]
    shared, _ = pack(groups, advantages, PACK, version=0)
    lonely = [a for values in advantages for a in values]
    rows = [
        pack([g], [[a]], PackConfig(1, 40, 32, 0, False), version=0)[0]
        for g, a in zip(alone, lonely, strict=True)
    ]
    rows += [empty_batch(PACK, 1)] * (32 - len(rows))
    separate = jax.tree.map(lambda *x: np.concatenate(x), *rows)  # one trajectory in a row
    model = getattr(build, kind)()
    one = first_step(model, shared, loss)
    two = first_step(model, separate, loss)
    assert_close(one[0], two[0])
    assert_close(one[1], two[1])

    logprobs = [
        np.asarray(token_logprobs_for(0.8, 1)(model, batch)) for batch in (shared, separate)
    ]
    # Groups land in rows largest first, so trajectories are compared in the order of their numbers.
    order = np.argsort(shared.trajectories[shared.mask > 0], kind="stable")
    np.testing.assert_allclose(
        logprobs[0][shared.mask > 0][order], logprobs[1][separate.mask > 0], rtol=1e-5
    )


def test_padding_content_changes_nothing(build, whole):
    batch = packed(build)
    rng = np.random.default_rng(5)
    pad = batch.segments == 0
    targets = batch.mask == 0
    assert pad.any() and targets.any()

    def noise(x, where):
        return np.where(where, rng.integers(0, build.vocab, x.shape), x)

    noisy = dataclasses.replace(
        batch,
        tokens=noise(batch.tokens, pad),
        positions=noise(batch.positions, pad),
        branches=noise(batch.branches, pad),
        sources=noise(batch.sources, targets),
        targets=noise(batch.targets, targets),
        logprobs=np.where(targets, np.nan, batch.logprobs),
        advantages=np.where(targets, np.nan, batch.advantages),
        lengths=np.where(targets, 7.0, batch.lengths).astype(np.float32),
        staleness=noise(batch.staleness, targets),
    )
    gradient, metrics, _ = first_step(build.toy(), noisy)
    assert_close(gradient, whole[0], rtol=1e-6)
    assert_close(metrics, whole[1], rtol=1e-6)


def test_log_probabilities_are_of_the_logits_over_the_temperature(build):
    model = build.toy()
    batch = packed(build)
    forward = jax.jit(
        lambda m: m.logits(
            m.hidden(
                batch.tokens,
                batch.positions,
                packed_rows(batch.segments, batch.branches, batch.positions),
            )
        )
    )
    logits = np.asarray(forward(model), np.float64)
    logits = np.take_along_axis(logits, batch.sources[..., None], axis=1) / 0.5
    reference = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    logp, entropy = jit_logprobs(model, batch, 0.5, False)
    real = batch.mask > 0
    chosen = np.take_along_axis(reference, batch.targets[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(logp[real], chosen[real], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        entropy[real], -(np.exp(reference) * reference).sum(-1)[real], rtol=1e-4, atol=1e-5
    )
    split = token_logprobs_for(0.5, 4)(model, batch)
    np.testing.assert_allclose(split[real], logp[real], rtol=1e-5)


def entropy_loss(coef):
    """Without a part that asks for other log-probabilities than the policy's and the sampler's."""
    terms = dict(kl_coef=0.0, entropy_coef=coef, correction="none")
    return loss_of("ppo", aggregation="token", **terms)


def test_a_policy_on_its_own_samples_has_ratio_one(build):
    model = build.toy()
    batch = packed(build)
    batch = dataclasses.replace(
        batch, logprobs=np.asarray(token_logprobs_for(0.8, 1)(model, batch))
    )
    _, metrics, _ = first_step(model, batch, entropy_loss(0.5), prox=None)
    assert metrics["policy/mismatch_max"] < 1e-5 and metrics["policy/clip_fraction"] == 0.0
    np.testing.assert_allclose(metrics["policy/ess"], 1.0, rtol=1e-5)
    assert metrics["train/tokens"] == batch.mask.sum() and metrics["train/trajectories"] == 27


# With momentum, weight decay and a schedule, each of which moves a state without any gradient.
FALLING = dataclasses.replace(OPTIMIZER, b1=0.9, weight_decay=0.1, schedule="linear")


def test_a_zero_advantage_gives_a_zero_gradient(build):
    plain = dataclasses.replace(LOSS, kl_coef=0.0, entropy_coef=0.0)
    batch = packed(build)
    batch = dataclasses.replace(batch, advantages=np.zeros_like(batch.advantages))
    gradient, metrics, _ = first_step(build.toy(), batch, plain, optimizer=FALLING)
    assert (
        norm_of(gradient) == 0.0
        and metrics["train/grad_norm"] == 0.0
        and metrics["train/finite"] == 1.0
    )
    _, metrics, _ = first_step(build.toy(), empty_batch(PACK, 32), plain, optimizer=FALLING)
    assert all(np.isfinite(value) for value in metrics.values()) and metrics["train/loss"] == 0.0


@pytest.mark.quick(first=1)
def test_an_update_without_a_gradient_changes_no_bit(build):
    """No targets, advantages of 0, or weights of 0: nothing says where to go."""
    loss = dataclasses.replace(LOSS, kl_coef=0.0, entropy_coef=0.0)
    update = steps.update_for(loss, FALLING, 1)
    batch = packed(build)
    others = batch.logprobs, batch.logprobs
    state, metrics = update(init_state(fresh(build.toy()), FALLING), batch, *others)
    assert metrics["train/no_signal"] == 0.0 and int(state.step) == 1
    equal = dataclasses.replace(batch, advantages=np.zeros_like(batch.advantages))
    for idle in (without_targets(batch), equal):
        state = assert_left_alone(update, state, idle, *others)
    # the correction takes the weight of every trajectory away
    state = assert_left_alone(update, state, batch, batch.logprobs - 9.0, batch.logprobs)
    assert int(state.step) == 1
    # as if they had not been
    state, metrics = update(state, batch, *others)
    other, _ = update(init_state(fresh(build.toy()), FALLING), batch, *others)
    other, _ = update(other, batch, *others)
    assert metrics["train/no_signal"] == 0.0 and int(state.step) == 2
    for one, two in zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(two).tobytes()


def test_other_parts_of_the_loss_move_the_state_where_rewards_are_equal(build):
    """The divergence from the reference and the entropy have gradients of their own."""
    batch = packed(build)
    equal = dataclasses.replace(batch, advantages=np.zeros_like(batch.advantages))
    _, metrics, state = first_step(build.toy(), equal)
    assert metrics["train/no_signal"] == 0.0 and metrics["train/grad_norm"] > 0.0
    assert int(state.step) == 1


@pytest.mark.parametrize("entropy_coef", [0.5, -0.5])
@pytest.mark.quick(first=1)
def test_the_gradient_of_the_entropy_term_is_the_slope_of_the_entropy(build, entropy_coef):
    """Advantages of 0 leave the entropy alone in the loss; along its own gradient the loss rises by
    the norm.
    """
    loss = entropy_loss(entropy_coef)
    model = build.toy()
    batch = packed(build)
    batch = dataclasses.replace(batch, advantages=np.zeros_like(batch.advantages))
    gradient, metrics, _ = first_step(model, batch, loss, prox=None)
    np.testing.assert_allclose(
        metrics["train/loss"], -entropy_coef * metrics["policy/entropy"], rtol=1e-6
    )
    norm = norm_of(gradient)
    step = 1e-2
    assert norm > 1e-3

    def moved(by):
        nearby = jax.tree.map(
            lambda x, g: _placed(np.asarray(x) + by / norm * np.asarray(g), x), model, gradient
        )
        return float(first_step(nearby, batch, loss, prox=None)[1]["train/loss"])

    np.testing.assert_allclose((moved(step) - moved(-step)) / (2 * step), norm, rtol=5e-3)


def norm_of(tree):
    """The length of all leaves together, on the host."""
    return np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(jax.device_get(tree))))


def _placed(x, like):
    return jax.device_put(np.asarray(x, like.dtype), like.sharding)


def test_a_loss_that_is_not_finite_leaves_the_state_as_it_was(build):
    batch = packed(build)
    batch.advantages[0, 0] = np.inf
    model = build.toy()
    before = init_state(fresh(model), OPTIMIZER)
    _, metrics, state = first_step(model, batch)
    assert metrics["train/finite"] == 0.0 and not np.isfinite(metrics["train/loss"])
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(old, new)


def test_the_update_is_adamw_on_the_clipped_gradient(build):
    """First step by hand: moments are (1 - b) g and (1 - b) g^2, their bias correction gives g /
    (|g| + eps).
    """
    clip = 1e-3
    optimizer = dataclasses.replace(OPTIMIZER, b1=0.9, b2=0.95, eps=1e-4, clip_norm=clip)
    model = build.toy()
    gradient, metrics, _ = first_step(model, packed(build))
    _, _, state = first_step(model, packed(build), optimizer=optimizer)
    scale = clip / float(metrics["train/grad_norm"])
    assert scale < 1.0
    np.testing.assert_allclose(metrics["train/grad_norm"], norm_of(gradient), rtol=1e-6)

    def by_hand(x, g, decay):
        x, g = np.asarray(x), scale * np.asarray(g)
        return x - 1e-2 * (g / (np.abs(g) + 1e-4) + (0.1 * x if decay else 0.0))

    assert_close(state.model, jax.tree.map(by_hand, model, gradient, decayed(model)))


@pytest.mark.long
def test_muon_moves_matrices_by_orthogonal_steps_and_leaves_the_rest_to_adamw(build):
    """Its Newton-Schulz iteration takes singular values near 1; a matrix then moves by about rate *
    sqrt(out / in).
    """
    model = build.model()
    batch = packed(build)
    muon = dataclasses.replace(OPTIMIZER, weight_decay=0.0, muon_learning_rate=0.1)
    gradient, _, _ = first_step(model, batch)
    prox = batch.logprobs + 0.1 * np.cos(batch.targets)
    ref = batch.logprobs - 0.2 * np.sin(batch.targets)
    state, _ = steps.update_for(LOSS, muon, 1)(init_state(fresh(model), muon), batch, prox, ref)
    for name in ("q", "k", "v", "o", "gate", "up", "down"):
        before, after, slope = (
            getattr(m.layers, name)[...] for m in (model, state.model, gradient)
        )
        embed_first = name not in ("o", "down")
        for step, g in zip(np.asarray(before - after), np.asarray(slope), strict=True):
            # [in, out], whichever axes those are
            step, g = (
                x.reshape((x.shape[0], -1) if embed_first else (-1, x.shape[-1])) for x in (step, g)
            )
            singular = np.linalg.svd(step, compute_uv=False) / (
                0.1 * max(1.0, step.shape[1] / step.shape[0]) ** 0.5
            )
            strong = np.linalg.svd(g, compute_uv=False) > 0.05 * np.linalg.norm(g)
            assert (0.6 < singular[strong]).all() and (singular < 1.3).all(), (name, singular)
            assert np.sum(step * g) > 0
    table = state.model.embed.table[...]
    start = model.embed.table[...]
    # a first step of Adam moves by at most the rate
    assert 0 < np.abs(table - start).max() < 1.01e-2
    assert_left_alone(steps.update_for(LOSS, muon, 1), state, without_targets(batch), prox, ref)


@pytest.mark.long
def test_muon_treats_each_expert_by_itself_however_experts_are_cut():
    """``fold`` says where experts lie, and so changes no update."""
    muon = make_optimizer(dataclasses.replace(OPTIMIZER, muon_learning_rate=0.1, total_steps=None))
    found = {}
    for fold in (False, True):
        moe = MoE(experts=4, active=2, mlp_dim=8, fold=fold)
        model = Transformer(small_config(num_layers=1, moe=moe), nnx.Rngs(0))
        rng = np.random.default_rng(0)
        slopes = jax.tree.map(lambda x, rng=rng: jnp.array(rng.normal(size=x.shape)), model)
        updates, _ = jax.jit(muon.update)(slopes, muon.init(model), model)
        found[fold] = [np.asarray(x) for x in jax.tree.leaves(updates)]
        # singular values near 1 for each expert, which they are not for all in one matrix
        for name in ("expert_gate", "expert_down"):
            steps_of = np.asarray(getattr(updates.layers, name)[...])[0]
            singular = np.linalg.svd(steps_of, compute_uv=False)
            scale = 0.1 * max(1.0, steps_of.shape[2] / steps_of.shape[1]) ** 0.5
            assert (singular > 0.5 * scale).all() and (singular < 1.3 * scale).all()
    for one, two in zip(found[False], found[True], strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-7)


def test_norms_and_biases_do_not_decay(build):
    config = dataclasses.replace(build.model().config, qk_norm=True)
    abstract = jax.eval_shape(lambda: Transformer(config, nnx.Rngs(0)))
    flags = {
        jax.tree_util.keystr(path): flag
        for path, flag in jax.tree_util.tree_leaves_with_path(decayed(abstract))
    }
    free = {name for name, flag in flags.items() if not flag}
    words = (
        "attention_norm",
        "mlp_norm",
        "final_norm",
        "q_norm",
        "k_norm",
        "q_bias",
        "k_bias",
        "v_bias",
    )
    assert len(free) == len(words) and all(any(word in name for name in free) for word in words)
    assert any("table" in name for name in flags.keys() - free)


@pytest.mark.parametrize(
    "schedule, expected",
    [
        ("constant", [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.25, 0.5, 0.75, 1.0, 1.0, 0.5, 0.0]),
        ("cosine", [0.25, 0.5, 0.75, 1.0, 1.0, 0.5, 0.0]),
    ],
)
def test_the_schedule_rises_and_falls_as_configured(schedule, expected):
    config = dataclasses.replace(
        OPTIMIZER, schedule=schedule, warmup_steps=4, total_steps=12, learning_rate=2.0
    )
    steps = [0, 1, 2, 3, 4, 8, 12]
    np.testing.assert_allclose(
        [learning_rate(config, s) for s in steps], 2.0 * np.array(expected), atol=1e-6
    )
    quarter = dataclasses.replace(
        config, schedule="cosine", warmup_steps=0, total_steps=8, learning_rate=1.0
    )
    np.testing.assert_allclose(learning_rate(quarter, 2), 0.5 + 0.5**1.5, rtol=1e-6)
    assert learning_rate(quarter, 0) == 1.0


def test_moments_are_float32_and_parameters_keep_their_dtype(build):
    _, metrics, state = first_step(build.toy("bfloat16"), packed(build), micro_batches=2)
    assert {x.dtype for x in jax.tree.leaves(state.model)} == {jnp.dtype("bfloat16")}
    for name in ("mu", "nu"):
        assert {x.dtype for x in jax.tree.leaves(optax.tree.get(state.opt_state, name))} == {
            jnp.dtype("float32")
        }
    assert metrics["train/finite"] == 1.0


def test_the_state_is_donated(build):
    state = init_state(fresh(build.toy()), OPTIMIZER)
    table = state.model.table
    batch = packed(build)
    steps.update_for(LOSS, OPTIMIZER, 1)(state, batch, batch.logprobs, batch.logprobs)
    assert table.is_deleted()


def test_rows_that_do_not_divide_are_named(build):
    with pytest.raises(ValueError, match="rows=32 must be divisible by micro_batches=3"):
        first_step(build.toy(), packed(build), micro_batches=3)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(schedule="step"), "schedule='step'"),
        (dict(warmup_steps=10), r"warmup_steps=10 must be in \[0, total_steps=10\)"),
        (dict(clip_norm=0.0), "clip_norm=0.0"),
    ],
)
def test_a_wrong_value_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(OPTIMIZER, **changes)


def demonstrations(build, count=11):
    rng = np.random.default_rng(6)
    lengths = rng.integers(6, 15, count)
    return [Demonstrated(rng.integers(0, build.vocab, n), np.arange(n) % 3 > 0) for n in lengths]


def test_supervised_loss_is_the_mean_over_selected_tokens_of_each_example_alone(build):
    model = build.toy()
    examples = demonstrations(build)
    batch, taken = pack_supervised(examples, rows=4, slots=40)
    assert taken == len(examples)
    total = 0.0
    count = 0
    alone = jax.jit(lambda model, *row: model.logits(model.hidden(*row)))
    for example in examples:
        mask = example.mask
        row = np.asarray(example.tokens)[None]
        # one shape; later tokens are not seen
        row, size = np.pad(row, ((0, 0), (0, 15 - row.size))), row.size
        logits = alone(model, row, np.arange(15)[None], sequences(np.array([15]), 15))
        logits = np.asarray(logits, np.float64)
        logits -= np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
        logp = logits[0, np.arange(size - 1), row[0, 1:size]]
        total = total - logp[mask[1:]].sum()
        count = count + mask[1:].sum()
    np.testing.assert_allclose(jit_supervised(model, batch)[0], total / count, rtol=1e-5)


def test_supervised_updates_do_not_depend_on_the_split_and_learn(build):
    batch, _ = pack_supervised(demonstrations(build), rows=4, slots=40)
    results = []
    for micro_batches in (1, 4):
        state = init_state(fresh(build.toy()), OPTIMIZER)
        state, metrics = sft_update_for(OPTIMIZER, micro_batches)(state, batch)
        results.append((optax.tree.get(state.opt_state, "mu"), metrics))
    assert_close(results[0], results[1])
    update = sft_update_for(OPTIMIZER, 1)
    losses = []
    state = init_state(fresh(build.toy()), OPTIMIZER)
    for _ in range(100):
        state, metrics = update(state, batch)
        losses.append(float(metrics["train/loss"]))
    assert losses[-1] < 0.5 * losses[0]


def test_a_segments_first_token_is_never_predicted(build):
    batch, _ = pack_supervised(
        [Demonstrated([1, 2], [1, 0]), Demonstrated([3, 4], [1, 0])], rows=4, slots=40
    )
    loss, _ = jit_supervised(build.toy(), batch)
    assert isinstance(batch, SupervisedBatch) and loss == 0.0


@pytest.mark.long
def test_packed_demonstrations_equal_the_same_alone_for_layers_that_choose_blocks(build):
    """Layers that attend to documents apart are in test_documents.py."""
    methods = (METHODS["moba-documents"][0], *METHODS["nsa"])
    model = build.model(attention=methods, num_heads=4)
    size = model.config.alignment
    assert size == 8
    rng = np.random.default_rng(7)
    lengths = (37, 50, 41)
    examples = [Demonstrated(rng.integers(0, build.vocab, n), np.ones(n, bool)) for n in lengths]
    with pytest.raises(ValueError, match=r"runs=0 must be at least 1: .* or align=1 must be a mul"):
        jax.eval_shape(supervised_loss, model, pack_supervised(examples, rows=1, slots=160)[0])
    batch, taken = pack_supervised(examples, rows=1, slots=160, align=size)
    assert taken == 3
    loss = jax.jit(jax.value_and_grad(lambda model, batch: supervised_loss(model, batch)[0]))
    together, gradient = loss(model, batch)
    # alone: the same rows, one example each, so that one program serves all
    total, gradients = 0.0, None
    for example in examples:
        alone, _ = pack_supervised([example], rows=1, slots=160, align=size)
        count = len(example.tokens) - 1
        value, own = loss(model, alone)
        total = total + count * value
        own = jax.tree.map(lambda x, count=count: count * x, own)
        gradients = own if gradients is None else jax.tree.map(jnp.add, gradients, own)
    predicted = sum(lengths) - len(lengths)
    np.testing.assert_allclose(together, total / predicted, rtol=1e-6)
    assert_close(gradient, jax.tree.map(lambda x: x / predicted, gradients))
    # tokens of one example change nothing of the others, which alone are predicted here
    second = batch.where.segments == 2
    others = dataclasses.replace(batch, mask=np.where(second, 0, batch.mask).astype(np.float32))
    moved = np.where(second, (batch.tokens + 1) % build.vocab, batch.tokens).astype(np.int32)
    clean, changed = (loss(model, x) for x in (others, dataclasses.replace(others, tokens=moved)))
    for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(changed), strict=True):
        assert np.array_equal(a, b)
