"""The value function: an estimate of the reward that is still to come, before each sampled token.

A linear map with a bias from the hidden state of the place that a token is sampled from, in float32
(``ScalarHead``). The hidden states are those of the policy itself, or of a copy of it that is
trained as a value function alone (``ValueConfig.backbone``).

Of a policy with adapters the copy has adapters of its own over the policy's frozen parameters. Of a
model with experts the copy has no loss that evens out their load.

Both begin as zeros: the first values are 0, and the first advantages are returns.

Dimensions: R rows, M targets of a row, D model.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from models.lora import trained, with_trained
from models.padding import gradient_norm, tied
from models.scalar_head import ScalarHead
from rl_code.learner import layouts, offload
from rl_code.learner.batch import Batch
from rl_code.learner.logprobs import Model, target_hidden
from rl_code.learner.objective import Tokens
from rl_code.learner.optimizer import OptimizerConfig, learning_rate, make_optimizer
from rl_code.learner.value_config import ValueConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Critic:
    """The parameters of a value function."""

    head: ScalarHead
    # What is trained of the policy's copy: all its parameters but the matrix of logits, or its
    # adapters by their stack. None with a shared backbone.
    backbone: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ValueState:
    """Everything that an update of the value function changes."""

    critic: Critic
    # The optimizer's state.
    opt_state: Any
    # int32 scalar, the number of updates made.
    updates: jax.Array


def backbone_of(model: Any) -> Any:
    """The part of a policy that a separate backbone begins as; its arrays are the policy's own."""
    part = trained(model)
    if part is not model or not hasattr(model, "unembed"):
        return part
    copy = jax.tree.map(lambda x: x, model)
    del copy.unembed
    return copy


def init_value(model: Any, config: ValueConfig) -> ValueState:
    """The value function that training beside a policy begins with. They share no array."""
    own = None
    if config.backbone == "separate":
        # a copy, since the first update of either donates its arrays
        own = jax.tree.map(lambda x: jax.device_put(x.copy(), x.sharding), backbone_of(model))
    head, moments, updates = _init(own, model.config.embed_dim, config.optimizer)
    return layouts.placed(ValueState(Critic(head, own), moments, updates), config.optimizer)


def carried(value: ValueState | None, model: Any, config: ValueConfig | None) -> ValueState | None:
    """The value function of a config that goes on from the state of another, as a fork does: the
    one that is there if it has the config's shapes, a new one beside ``model`` if not.
    """
    if config is None:
        return None
    new = init_value(model, config)
    return value if _shapes(value) == _shapes(new) else new


def _shapes(tree: Any) -> Any:
    """Structure, shapes and dtypes of a pytree, to be compared."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(x.shape, x.dtype) for x in leaves]


def abstract_value(model: Any, config: ValueConfig) -> ValueState:
    """Shapes, dtypes and layouts of ``init_value``; model: as for ``update.abstract_state``."""
    own = None if config.backbone == "shared" else backbone_of(model)
    lowered = _init.lower(own, model.config.embed_dim, config.optimizer)
    head, moments, updates = layouts.of_results(lowered)
    moments = layouts.offloaded(moments, config.optimizer)
    return ValueState(Critic(head, own), moments, updates)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _init(
    backbone: Any, embed_dim: int, config: OptimizerConfig
) -> tuple[ScalarHead, Any, jax.Array]:
    """(head, moments, number of updates) of a value function."""
    head = ScalarHead(embed_dim)
    moments = make_optimizer(config).init(layouts.float32(Critic(head, backbone)))
    return layouts.pinned((head, moments, jnp.zeros((), jnp.int32)))


def critic_values(
    model: Model, critic: Critic, batch: Batch, runs: int, replay: bool
) -> Float[Array, "R M"]:
    """V before each target, differentiable in the critic and in the model.

    runs, replay: as for ``logprobs.batch_logprobs``; a separate backbone makes its own choices.
    """
    if critic.backbone is not None:
        model = with_trained(model, critic.backbone)
        batch = dataclasses.replace(batch, choices=None)
    hidden, _, _ = target_hidden(model, batch, runs, None, replay)
    return critic.head(hidden)


def scaled_gradient(hidden: Float[Array, "R M D"], coef: float) -> Float[Array, "R M D"]:
    """The same hidden states, bit for bit, that pass ``coef`` times their gradient on."""
    still = jax.lax.stop_gradient(hidden)
    return still if coef == 0.0 else still + coef * (hidden - still)


def value_loss(
    values: Tokens,
    old: Tokens,
    returns: Tokens,
    mask: Tokens,
    tokens: jax.Array,
    clip: float | None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """A micro-batch's share of the mean over sampled tokens of (V - G)^2 / 2, and of its metrics.

    With a clip the loss of a token is the greater one of V and of V brought to within ``clip`` of
    the old value, as in the published code of PPO (1707.06347 has no such clip).

    old: the values when the step began. tokens: the sampled tokens of the whole batch. Values where
    mask is 0 do not matter, even NaN.
    """
    old, returns = jax.lax.stop_gradient((old, returns))
    loss = 0.5 * jnp.square(values - returns)
    cut = jnp.zeros(values.shape, bool)
    if clip is not None:
        near = old + jnp.clip(values - old, -clip, clip)
        bounded = 0.5 * jnp.square(near - returns)
        # a choice and not ``jnp.maximum``, which shares the gradient of equal losses; and within
        # the clip the two differ by rounding alone
        cut = (jnp.abs(values - old) > clip) & (bounded > loss)
        loss = jnp.where(cut, bounded, loss)
    sums = {"value/loss": loss, "value/clip_fraction": cut}
    sums = {name: jnp.sum(jnp.where(mask > 0.0, x, 0.0)) / tokens for name, x in sums.items()}
    return sums["value/loss"], jax.lax.stop_gradient(sums)


def critic_norm(gradients: Critic) -> jax.Array:
    """The global norm of a critic's gradients, as it is without padding."""
    head = optax.tree.norm(gradients.head)
    if gradients.backbone is None:
        return head
    return jnp.hypot(gradient_norm(gradients.backbone), head)


def stepped(
    value: ValueState, gradients: Critic, config: OptimizerConfig, finite: jax.Array
) -> tuple[ValueState, dict[str, jax.Array]]:
    """One optimizer step of a value function, and its metrics. Parameters and moments stay as they
    are, bit for bit, where ``finite`` is false or the gradient is not finite or 0.
    """
    # pytrees, which optax's types do not know
    change: Any = Critic(gradients.head, tied(gradients.backbone))
    old: Any = value.critic
    norm = critic_norm(change)
    moves = finite & jnp.isfinite(norm) & (norm > 0.0)
    optimizer = make_optimizer(config, lambda _: norm)
    if offload.is_offloaded(value.opt_state):
        given = change, value.opt_state, old, moves
        critic, opt_state = offload.update_by_layers(optimizer, *given)
    else:
        changes, opt_state = optimizer.update(change, value.opt_state, layouts.float32(old))
        critic, opt_state = jax.tree.map(
            lambda after, before: jnp.where(moves, after, before),
            (optax.apply_updates(old, changes), opt_state),
            (old, value.opt_state),
        )
    metrics = {
        "value/grad_norm": norm,
        "value/learning_rate": learning_rate(config, value.updates),
    }
    return ValueState(critic, opt_state, value.updates + 1), metrics


def head_stepped(
    value: ValueState, gradients: ScalarHead, config: OptimizerConfig, finite: jax.Array
) -> tuple[ValueState, dict[str, jax.Array]]:
    """``stepped`` with a shared backbone, whose gradients are the policy's."""
    return stepped(value, Critic(gradients), config, finite)
