"""The training steps: (state, batch) -> (state, metrics), each a jitted function that donates the
state.

A batch is cut into micro-batches of equal shape, each sharded over the mesh axes of rows.
Micro-batches after the last one with a target are not computed, so a batch may be sized for the
worst case. Gradients are added in float32, and losses are divided by counts of the whole batch, so
neither the number of micro-batches nor the number of devices changes the update. Under a mesh, call
inside ``jax.set_mesh``.

Of a model with adapters (``models.lora``) these alone have gradients and moments.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from attention.layout import Before
from models.casts import casts_of, with_casts
from models.lora import trained, with_trained
from models.padding import gradient_norm, tied
from models.scalar_head import ScalarHead
from models.sharding import constrain
from models.transformer import LayerTerms
from rl_code.learner import balance, distillation, indexing, layouts, offload, picks
from rl_code.learner.batch import Batch
from rl_code.learner.distillation import Taught, TeacherConfig, head_of
from rl_code.learner.layouts import float32
from rl_code.learner.logprobs import (
    Model,
    batch_logprobs,
    logprobs_of,
    target_hidden,
    target_logits,
    target_logprobs,
)
from rl_code.learner.objective import (
    Denominators,
    LossConfig,
    Terms,
    policy_loss,
    policy_metrics,
    real_slots,
)
from rl_code.learner.optimizer import OptimizerConfig, learning_rate, make_optimizer
from rl_code.learner.supervised_batching import SupervisedBatch
from rl_code.learner.value_config import ValueConfig
from rl_code.learner.value_function import (
    abstract_value,
    head_stepped,
    init_value,
    scaled_gradient,
    value_loss,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that an update changes."""

    # The parameters.
    model: Any
    # Of those that are trained.
    opt_state: Any
    # int32 scalar, the number of updates made.
    step: jax.Array
    # The value function, a ``value_function.ValueState``; None for none.
    value: Any = None
    # The moving average of what is trained, which teaches (``teacher.first_state``); None for none.
    # An update does not see it.
    average: Any = None


def init_state(
    model: Model, config: OptimizerConfig, value: ValueConfig | None = None
) -> TrainState:
    """The state before the first update. Moments are float32 for parameters of every dtype, and
    sharded like the parameters.

    The first update donates the state, and ``model`` with it. Keep a copy if it is needed later.
    value: the value function that is trained too; None for none.
    """
    state = TrainState(model, *_init(model, config))
    state = layouts.placed(state, config)
    return dataclasses.replace(state, value=value and init_value(model, value))


def abstract_state(
    model: Model, config: OptimizerConfig, value: ValueConfig | None = None
) -> TrainState:
    """Shapes, dtypes and layouts of ``init_state``, of an abstract model whose leaves say their
    shardings. Nothing is allocated.
    """
    opt_state, step = layouts.of_results(_init.lower(model, config))
    opt_state = layouts.offloaded(opt_state, config)
    return TrainState(model, opt_state, step, value and abstract_value(model, value))


@functools.partial(jax.jit, static_argnums=1)
def _init(model: Model, config: OptimizerConfig) -> tuple[Any, jax.Array]:
    moments = make_optimizer(config).init(float32(trained(model)))
    return layouts.pinned((moments, jnp.zeros((), jnp.int32)))


def make_token_logprobs(
    temperature: float, micro_batches: int, runs: int = 0, replay: bool = False
) -> Callable[[Model, Batch], jax.Array]:
    """A jitted (model, batch) -> log-probabilities of its targets, float32 [R, M], for reference
    and prox.

    0 in micro-batches without targets. runs, replay: as for ``batch_logprobs``.
    """

    @jax.jit
    def token_logprobs(model: Model, batch: Batch) -> jax.Array:
        micro = split(batch, micro_batches)

        def body(i: jax.Array, logp: jax.Array) -> jax.Array:
            part = take(micro, i)
            found, _ = batch_logprobs(model, part, temperature, runs=runs, replay=replay)
            return logp.at[i].set(found)

        logp = jax.lax.fori_loop(0, used(micro.mask), body, jnp.zeros(micro.mask.shape))
        return constrain(logp.reshape(batch.targets.shape), "batch", None)

    return token_logprobs


def make_update(
    loss: LossConfig,
    optimizer: OptimizerConfig,
    micro_batches: int,
    runs: int = 0,
    replay: bool = False,
    teacher: TeacherConfig | None = None,
    value: ValueConfig | None = None,
) -> Callable[..., tuple]:
    """An update(state, batch, prox=None, ref=None, taught=None, guide=None) -> (state, metrics);
    the state passed in is donated.

    prox, ref: float32 [R, M], as ``objective.policy_loss`` takes them. taught: a teacher's words
    on the targets, with the config ``teacher``; guide: as for ``distillation.head_of``. Metrics are
    float32 scalars.
    The state comes back as it was, bit for bit, in two cases. When the loss or a gradient is not
    finite, train/finite is 0. When the gradient is 0, train/no_signal is 1: no group says in which
    direction to go, and only momentum, weight decay and the schedule would move the parameters.
    Parts of the loss beside the policy's (the divergence from a reference or a teacher, the
    entropy, the load of experts) have gradients of their own, so that an update with them is made
    as ever.
    runs, replay: as for ``batch_logprobs``. value: of a value function with a shared backbone,
    which is updated too, from ``batch.returns``; None for none, or for one with updates of its own
    (``value_update``).

    Raises (at the first call with such a batch):
      ValueError: the rows do not divide into micro-batches, kl_coef is not 0 without ref, or as
      ``batch_logprobs``.
    """

    def update(
        state: TrainState,
        batch: Batch,
        prox: jax.Array | None = None,
        ref: jax.Array | None = None,
        taught: Taught | None = None,
        guide: Any = None,
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        total = Denominators.of(batch.mask, batch.lengths, batch.segments)
        micro = split((batch, prox, ref), micro_batches)
        words = split(taught, micro_batches)
        # The head comes once for each micro-batch, so that each has a gradient for it. It is small.
        heads = value and jax.tree.map(
            lambda x: jnp.broadcast_to(x, (micro_batches, *x.shape)), state.value.critic.head
        )

        def share(model: Model, head: ScalarHead | None, i: jax.Array) -> tuple[jax.Array, Terms]:
            lesson = None
            if teacher is not None:
                lesson = teacher, take(words, i), head_of(teacher, state.model, guide)
            of_value = None if value is None else (value, head)
            part = take(micro, i)
            return loss_share(loss, runs, total, model, part, None, replay, lesson, of_value)

        count = used(micro[0].mask)
        found, terms, grads, of_heads = accumulate(
            share, state.model, heads, count, several=micro_batches > 1
        )
        terms, load = balance.finished(picks.finished(terms))
        metrics = policy_metrics(terms) | counts(batch, total)
        if value is None:
            return apply(state, grads, found, optimizer, metrics, load)
        # the head's gradient has the weight 1, and the objective has the loss with its own
        found = found - (1.0 - value.coef) * metrics["value/loss"]
        of_head = jax.tree.map(lambda x: jnp.sum(x, axis=0), of_heads)
        sound = jnp.isfinite(optax.tree.norm(of_head))
        found = jnp.where(sound, found, jnp.nan)
        state, metrics = apply(state, grads, found, optimizer, metrics, load)
        finite = metrics["train/finite"] > 0.0
        after, of_value = head_stepped(state.value, of_head, value.optimizer, finite)
        return dataclasses.replace(state, value=after), metrics | of_value

    return jit_step(update)


def loss_share(
    loss: LossConfig,
    runs: int,
    total: Denominators,
    model: Model,
    micro: tuple,
    before: Before | None = None,
    replay: bool = False,
    teacher: tuple[TeacherConfig, Taught, Model] | None = None,
    value: tuple[ValueConfig, ScalarHead] | None = None,
) -> tuple[jax.Array, Terms]:
    """Share that a micro-batch adds to the loss and the metrics of the whole batch.

    micro: (Batch, prox, ref). total: counts of the whole batch. replay: as for ``batch_logprobs``.
    teacher: its config, its words on the targets, and the model whose ``logits`` are its own.
    value: a value function with a shared backbone, and its head. Its loss is added with the weight
    1, but passes only ``coef`` times its gradient on to the model.
    """
    batch, prox, ref = micro
    hidden, shares, layers = target_hidden(model, batch, runs, before, replay)
    rewards_entropy = loss.entropy_coef != 0.0
    policy = lesson = None
    if teacher is not None and teacher[0].form.reads_policy:
        logits = target_logits(model, hidden, loss.temperature)
        logp, entropy = logprobs_of(logits, batch.targets, rewards_entropy)
        policy = jax.nn.log_softmax(logits)
    else:
        given = (batch.targets, loss.temperature, rewards_entropy)
        logp, entropy = target_logprobs(model, hidden, *given)
    if teacher is not None:
        config, taught, head = teacher
        lesson = distillation.lesson(
            config,
            taught,
            policy=policy,
            chosen=logp,
            prox=prox,
            advantages=batch.advantages,
            mask=batch.mask,
            teacher=lambda: jax.nn.log_softmax(
                target_logits(head, taught.hidden, loss.temperature)
            ),
        )
    found, terms = policy_loss(
        loss, batch, total, logp=logp, entropy=entropy, prox=prox, ref=ref, lesson=lesson
    )
    if value is not None:
        of_value, value_head = value
        values = value_head(scaled_gradient(hidden, of_value.coef))
        given = (batch.values, batch.returns, batch.mask, total.tokens, of_value.clip)
        more, of_values = value_loss(values, *given)
        found = found + more
        terms = dataclasses.replace(terms, means=terms.means | of_values)
    terms = picks.with_agreement(terms, batch, shares, layers.routing, total.tokens)
    return with_layers(found, terms, model, layers, total.slots)


def with_layers(
    value: jax.Array, terms: Terms, model: Model, layers: LayerTerms, tokens: jax.Array
) -> tuple[jax.Array, Terms]:
    """The loss and the terms of a micro-batch with those of its experts and indexers added.

    tokens: of the whole batch, all that are no padding.
    """
    found = balance.with_load(value, terms, model, layers.routing, tokens)
    return indexing.with_divergence(*found, model, layers.divergence, tokens)


def counts(batch: Batch, total: Denominators) -> dict[str, jax.Array]:
    """Metrics of what the batch holds."""
    return {"train/tokens": jnp.sum(batch.mask), "train/trajectories": total.trajectories}


def supervised_loss(
    model: Model,
    batch: SupervisedBatch,
    tokens: jax.Array | None = None,
    slots: jax.Array | None = None,
) -> tuple[jax.Array, Terms]:
    """Mean negative log-likelihood in nats of the tokens that the mask selects, each predicted from
    the slot before.

    tokens: the denominator, the selected tokens of the whole batch; None counts those given. slots:
    all its tokens but padding, as ``Denominators.slots``. A segment's first token is never
    predicted. Returns the loss, with that of experts added, and the metric policy/entropy.

    Raises:
      ValueError: a layer chooses blocks of a size of which ``batch.align`` is no multiple.
    """
    hidden, layers = model.hidden_routed(
        batch.tokens, batch.positions, batch.where, align=batch.align
    )
    logp, entropy = target_logprobs(model, hidden[:, :-1], batch.tokens[:, 1:], 1.0)
    mask = _predicted(batch)
    tokens = jnp.maximum(jnp.sum(mask), 1.0) if tokens is None else tokens
    slots = real_slots(batch.where.segments) if slots is None else slots
    loss = -jnp.sum(mask * logp) / tokens
    terms = Terms({"policy/entropy": jnp.sum(mask * entropy) / tokens}, {})
    return with_layers(loss, terms, model, layers, slots)


def next_token_loss(model: Model, batch: SupervisedBatch) -> tuple[jax.Array, jax.Array]:
    """(The sum of the negative log-likelihoods, in nats, of the tokens that ``supervised_loss``
    counts, each times its weight; the sum of these weights).
    """
    hidden, _ = model.hidden_routed(batch.tokens, batch.positions, batch.where, align=batch.align)
    logp, _ = target_logprobs(model, hidden[:, :-1], batch.tokens[:, 1:], 1.0)
    mask = _predicted(batch)
    return -jnp.sum(mask * logp), jnp.sum(mask)


def make_sft_update(optimizer: OptimizerConfig, micro_batches: int) -> Callable[..., tuple]:
    """An update(state, SupervisedBatch) -> (state, metrics) of ``supervised_loss``; otherwise as
    make_update.
    """

    def update(
        state: TrainState, batch: SupervisedBatch
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        tokens = jnp.maximum(jnp.sum(_predicted(batch)), 1.0)
        slots = real_slots(batch.where.segments)
        micro = split(batch, micro_batches)

        def share(model: Model, _: None, i: jax.Array) -> tuple[jax.Array, Terms]:
            return supervised_loss(model, take(micro, i), tokens, slots)

        value, terms, grads, _ = accumulate(
            share, state.model, None, used(micro.mask), several=micro_batches > 1
        )
        terms, load = balance.finished(terms)
        metrics = terms.means | {"train/tokens": tokens}
        return apply(state, grads, value, optimizer, metrics, load)

    return jit_step(update)


def jit_step(step: Callable[..., tuple]) -> Callable[..., tuple]:
    """Jits (state, ...) -> (state, metrics). The state is donated, and the new one has its layout.

    The layout of the new state is given and not left to XLA. A layout that XLA infers may mean the
    same and be written differently, and the next call would then compile again. The result has the
    methods ``lower`` and ``trace`` of ``jax.jit``.
    """

    @functools.cache
    def compiled(layouts: tuple, tree: Any) -> Callable[..., tuple]:
        return jax.jit(
            step, donate_argnums=0, out_shardings=(jax.tree.unflatten(tree, layouts), None)
        )

    def program(state: TrainState) -> Callable[..., tuple]:
        leaves, tree = jax.tree.flatten(state)
        return compiled(tuple(leaf.sharding for leaf in leaves), tree)

    def call(state: TrainState, *args: Any, **named: Any) -> tuple:
        return program(state)(state, *args, **named)

    call.lower = lambda state, *args, **named: program(state).lower(state, *args, **named)
    call.trace = lambda state, *args, **named: program(state).trace(state, *args, **named)
    return call


def _predicted(batch: SupervisedBatch) -> Float[Array, "R S-1"]:
    """1 where slot s + 1 is selected and follows slot s in the same segment."""
    segments = batch.where.segments
    same = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    return jnp.where(same, batch.mask[:, 1:], 0.0)


def split(tree: Any, micro_batches: int) -> Any:
    """Leaves [R, ...] -> [micro_batches, R / micro_batches, ...]."""

    def cut(x: jax.Array) -> jax.Array:
        rows = x.shape[0]
        if rows % micro_batches:
            raise ValueError(f"{rows=} must be divisible by {micro_batches=}")
        x = x.reshape(micro_batches, rows // micro_batches, *x.shape[1:])
        return constrain(x, None, "batch", *(None,) * (x.ndim - 2))

    return jax.tree.map(cut, tree)


def take(micro: Any, i: jax.Array) -> Any:
    """Micro-batch i."""
    return jax.tree.map(lambda x: x[i], micro)


def used(mask: jax.Array) -> jax.Array:
    """Number of micro-batches up to the last one with a target; mask: [micro_batches,
    ...].
    """
    # The last one, not their number: an empty micro-batch may stand before a filled one.
    filled = jnp.any(mask > 0, axis=tuple(range(1, mask.ndim)))
    return jnp.max(jnp.where(filled, jnp.arange(1, mask.shape[0] + 1), 0))


def accumulate(
    loss: Callable[[Any, Any, jax.Array], tuple[jax.Array, Terms]],
    model: Any,
    parts: Any,
    count: jax.Array,
    several: bool = False,
) -> tuple[jax.Array, Terms, Any, Any]:
    """Sums loss(model, part, i), its terms and its float32 gradients over the first ``count``
    micro-batches.

    Gradients are those of what is ``trained``. parts: what the loss is differentiated by beside it,
    [micro_batches, ...]. The last result holds the gradient with respect to each part. several:
    whether there may be more than one micro-batch, for which matrices are cast once.
    """

    changed = trained(model)
    casts = casts_of(model) if several else {}
    leaves, tree = jax.tree.flatten(changed)
    # The backward pass adds to these sums in place, layer by layer: there is no second stack of the
    # gradients of a micro-batch.
    sums = [jax.new_ref(jnp.zeros(x.shape, jnp.float32)) for x in leaves]

    def body(i: jax.Array, carry: tuple) -> tuple:
        value, terms, part_grads = carry

        def of_trained(some: Any, part: Any) -> tuple[jax.Array, Terms]:
            return loss(with_casts(with_trained(model, some), casts), part, i)

        part = take(parts, i)
        more, backward, more_terms = jax.vjp(of_trained, changed, part, has_aux=True)
        # of parameters in another dtype, the sums of this micro-batch alone
        own = [
            whole if x.dtype == jnp.float32 else jax.new_ref(jnp.zeros_like(x))
            for whole, x in zip(sums, leaves, strict=True)
        ]
        of_part = jax.tree.map(lambda x: jax.new_ref(jnp.zeros_like(x)), part)
        backward.with_refs(jax.tree.unflatten(tree, own), of_part)(jnp.ones_like(more))
        for whole, one in zip(sums, own, strict=True):
            if one is not whole:
                whole[...] += jax.freeze(one).astype(jnp.float32)
        part_grads = jax.tree.map(
            lambda whole, ref: whole.at[i].set(jax.freeze(ref)), part_grads, of_part
        )
        return value + more, terms.merge(more_terms), part_grads

    shapes = jax.eval_shape(loss, model, take(parts, 0), jnp.int32(0))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (shapes, parts))
    value, terms, part_grads = jax.lax.fori_loop(0, count, body, (*zeros[0], zeros[1]))
    grads = jax.tree.unflatten(tree, [jax.freeze(x) for x in sums])
    return value, terms, grads, part_grads


def apply(
    state: TrainState,
    grads: Any,
    value: jax.Array,
    config: OptimizerConfig,
    metrics: dict[str, jax.Array],
    load: jax.Array | None = None,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Makes one optimizer step, or none if the loss or the gradient is not finite or the gradient
    is 0. Returns the state, and the metrics with those of the step added.

    load: of experts, from ``balance.finished``, which moves their ranking biases.
    """
    grads = tied(grads)
    norm = gradient_norm(grads)
    finite = jnp.isfinite(value) & jnp.isfinite(norm)
    signal = norm > 0.0
    moves = finite & signal
    old = trained(state.model)
    # This is decided within the jitted step, so that the host need not wait for the loss.
    if offload.is_offloaded(state.opt_state):
        optimizer = make_optimizer(config, lambda _: norm)
        part, moments = offload.update_by_layers(optimizer, grads, state.opt_state, old, moves)
        model = with_trained(state.model, part)
        # only the biases of experts are not chosen yet
        moved = jax.tree.map(
            lambda after, before: after if after is before else jnp.where(moves, after, before),
            balance.moved(model, load),
            model,
        )
        new = dataclasses.replace(state, model=moved, opt_state=moments, step=state.step + moves)
    else:
        optimizer = make_optimizer(config, gradient_norm)
        updates, opt_state = optimizer.update(grads, state.opt_state, float32(old))
        model = with_trained(state.model, optax.apply_updates(old, updates))
        new = TrainState(balance.moved(model, load), opt_state, state.step + 1)
        policy = dataclasses.replace(state, value=None)
        new = jax.tree.map(lambda after, before: jnp.where(moves, after, before), new, policy)
        new = dataclasses.replace(new, value=state.value)
    metrics = metrics | {
        "train/loss": value,
        "train/grad_norm": norm,
        "train/learning_rate": learning_rate(config, state.step),
        "train/finite": finite.astype(jnp.float32),
        "train/no_signal": (finite & ~signal).astype(jnp.float32),
    }
    return new, metrics
