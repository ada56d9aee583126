"""The losses that the client ``tinker`` names, as sums over tokens.

p is the log-probability of a target under the adapter, q the sampler's (``logprobs``), A the
advantage, r = exp(p - q), and clip keeps r within [low, high], which are ratios and no distances
from 1:

    cross_entropy         -w p
    importance_sampling   -r A
    ppo                   -min(r A, clip(r) A)                    (1707.06347, eq. 7)
    cispo                 -sg(clip(r)) A p                        (2506.13585, eq. 4)
    dro                   -(p A - beta/2 (p - q)^2)               (2405.19107)

As the client's documentation defines them, nothing is divided by a count of tokens: losses and
gradients are sums. ``gspo``, ``stable_reinforce`` and ``custom``, whose definitions the client's
package does not give, are refused by name; the client computes custom losses itself instead.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from people.serving.tinker.wire import Datum, Forward
from rl_code.learner.losses import ratio

# The inputs of each loss; its place here is its number in a batch.
LOSSES: dict[str, tuple[str, ...]] = {
    "cross_entropy": ("target_tokens", "weights"),
    "importance_sampling": ("target_tokens", "logprobs", "advantages"),
    "ppo": ("target_tokens", "logprobs", "advantages"),
    "cispo": ("target_tokens", "logprobs", "advantages"),
    "dro": ("target_tokens", "logprobs", "advantages"),
}
# Defaults of settings, and the losses that have them.
_SETTINGS = {
    "clip_low_threshold": (0.8, ("ppo", "cispo")),
    "clip_high_threshold": (1.2, ("ppo", "cispo")),
    "beta": (0.05, ("dro",)),
}
_REFUSED = ("gspo", "stable_reinforce", "custom")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Terms:
    """Inputs of the losses of a batch, [B, T, K] each, but for ``kinds`` and ``beta``, [B]."""

    # int32, the places of the rows' losses in LOSSES.
    kinds: jax.Array
    # int32.
    targets: jax.Array
    # float32; 0 at padding, as everything else. A loss other than cross_entropy has the weights 1.
    weights: jax.Array
    logprobs: jax.Array
    advantages: jax.Array
    low: jax.Array
    high: jax.Array
    beta: jax.Array


def token_losses(p: Float[Array, "B T K"], terms: Terms) -> Float[Array, "B T K"]:
    """The loss of each target. p: float32, with gradient."""
    a, delta = terms.advantages, p - terms.logprobs
    r = ratio(delta)
    clipped = jnp.clip(r, terms.low, terms.high)
    # a choice and no minimum, which shares the gradient of equal values among them
    surrogate = jnp.where(clipped * a < r * a, clipped * a, r * a)
    each = (
        -p,
        -r * a,
        -surrogate,
        -jax.lax.stop_gradient(clipped) * a * p,
        -(p * a - terms.beta[:, None, None] / 2 * delta**2),
    )
    found = jnp.zeros_like(p)
    for kind, loss in enumerate(each):
        found = jnp.where(terms.kinds[:, None, None] == kind, loss, found)
    return jnp.where(terms.weights != 0, found * terms.weights, 0.0)


def check(asked: Forward, vocab: int, longest: int) -> None:
    """Raises ValueError for a request that no loss can be computed of."""
    if asked.loss in _REFUSED or asked.loss not in LOSSES:
        raise ValueError(f"loss_fn={asked.loss!r} is not served here; {', '.join(LOSSES)} are")
    for name, value in asked.config.items():
        known = [each for each, (_, losses) in _SETTINGS.items() if asked.loss in losses]
        if name not in known:
            allowed = ", ".join(known) or "nothing"
            raise ValueError(f"loss_fn_config has {name!r}; {asked.loss} has {allowed}")
        if not isinstance(value, float) or not math.isfinite(value):
            raise ValueError(f"loss_fn_config[{name!r}]={value!r} must be a finite number")
    if not asked.data:
        raise ValueError("data is empty")
    for index, datum in enumerate(asked.data):
        _check_datum(asked.loss, datum, f"data[{index}]", vocab, longest)


def _check_datum(loss: str, datum: Datum, where: str, vocab: int, longest: int) -> None:
    count = len(datum.tokens)
    if not 1 <= count <= longest:
        raise ValueError(f"{where} has {count} tokens; there must be 1 to {longest}")
    needed = LOSSES[loss]
    allowed = {*needed, *(k for k, (_, losses) in _SETTINGS.items() if loss in losses)} - {"beta"}
    if not set(needed) <= datum.inputs.keys() <= allowed:
        raise ValueError(
            f"{where}.loss_fn_inputs has {sorted(datum.inputs)}; {loss} needs {list(needed)} and "
            f"may have {sorted(allowed - set(needed))}"
        )
    shape = datum.inputs["target_tokens"].shape
    widths = len(shape) == 1 or (len(shape) == 2 and loss == "cross_entropy" and shape[1] > 0)
    if not widths or shape[0] != count:
        forms = f"[{count}] or [{count}, K]" if loss == "cross_entropy" else f"[{count}]"
        raise ValueError(f"{where}: target_tokens has the shape {list(shape)}, not {forms}")
    for name, values in datum.inputs.items():
        if values.shape != shape:
            raise ValueError(
                f"{where}: {name} has the shape {list(values.shape)}, and target_tokens "
                f"{list(shape)}"
            )
        if not np.isfinite(values).all():
            raise ValueError(f"{where}: {name} has values that are not finite")
    for name, tokens in (("model_input", datum.tokens), ("target_tokens", _targets(datum))):
        if tokens.dtype.kind != "i" or tokens.min() < 0 or tokens.max() >= vocab:
            raise ValueError(f"{where}: {name} must hold tokens from 0 to {vocab - 1}")


def width(datum: Datum) -> int:
    """K, how many targets each position of a datum has."""
    targets = _targets(datum)
    return targets.shape[1] if targets.ndim == 2 else 1


def _targets(datum: Datum) -> np.ndarray:
    return datum.inputs["target_tokens"]


def terms_of(
    rows: list[tuple[Forward, Datum] | None], length: int, targets: int
) -> tuple[jax.Array, jax.Array, Terms]:
    """(tokens int32 [B, T], lengths int32 [B], the terms of the losses) of the rows of a batch;
    None is padding.
    """
    shape = len(rows), length, targets
    tokens = np.zeros(shape[:2], np.int32)
    lengths = np.zeros(len(rows), np.int32)
    kinds = np.zeros(len(rows), np.int32)
    beta = np.zeros(len(rows), np.float32)
    wide = {name: np.zeros(shape, np.float32) for name in ("weights", "logprobs", "advantages")}
    low, high = np.zeros(shape, np.float32), np.ones(shape, np.float32)
    chosen = np.zeros(shape, np.int32)
    for row, found in enumerate(rows):
        if found is None:
            continue
        asked, datum = found
        count = len(datum.tokens)
        tokens[row, :count], lengths[row] = datum.tokens, count
        kinds[row] = list(LOSSES).index(asked.loss)

        def put(into: np.ndarray, values: np.ndarray, row: int = row, count: int = count) -> None:
            values = values.reshape(count, -1)
            into[row, :count, : values.shape[1]] = values

        put(chosen, _targets(datum))
        # all that is no padding has a weight, for losses that have none
        put(wide["weights"], np.ones(_targets(datum).shape, np.float32))
        for name, into in wide.items():
            if name in datum.inputs:
                put(into, datum.inputs[name])
        for name, into in (("clip_low_threshold", low), ("clip_high_threshold", high)):
            default = asked.config.get(name, _SETTINGS[name][0])
            put(into, datum.inputs.get(name, np.full((count,), default, np.float32)))
        beta[row] = asked.config.get("beta", _SETTINGS["beta"][0])
    ordered = kinds, chosen, *wide.values(), low, high, beta
    terms = Terms(*map(jnp.asarray, ordered))
    return jnp.asarray(tokens), jnp.asarray(lengths), terms
