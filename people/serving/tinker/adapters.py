"""Adapters in training: their state, the gradients of many of them in one batch, and AdamW.

Each row of a batch is computed with the adapter of its own (``models.adapter_rows``), and the
gradient comes for each row: [L, B, D, R]. So a row's numbers do not depend on whose rows are beside
it, and an adapter's gradient is the sum over its own rows. All adapters are padded to one rank, so
a batch of given shape is one program, whichever adapters are in it: with the same rows in the same
places a batch gives the same bits, which is what replay stands on.

Dimensions: L layers of a stack, B rows, T tokens, K targets of a token, R rank.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from models.adapter_rows import for_rows, with_several
from models.lora import ATTENTION_TARGETS, TARGETS, Adapters, LoRA, new_adapters
from models.transformer import Transformer
from pallas_kernels.tokens import sequences
from people.serving.tinker.losses import Terms, token_losses
from rl_code.learner.logprobs import target_logits

# PEFT's alpha: what an adapter adds is multiplied by 32 / rank.
ALPHA = 32.0
_PART = "part"
# Fields of AdamParams that a step reads, in the order of ``stepped``.
ADAM = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")


@dataclasses.dataclass(frozen=True)
class AdapterSettings:
    """The choices of a client for an adapter (its ``LoraConfig``)."""

    rank: int
    seed: int
    mlp: bool
    attention: bool

    def lora(self, experts: bool) -> LoRA:
        """The adapter's config. experts: whether the model has experts, which get none."""
        targets = [
            name
            for name in TARGETS
            if (self.attention if name in ATTENTION_TARGETS else self.mlp and not experts)
        ]
        return LoRA(self.rank, ALPHA, tuple(targets))


@dataclasses.dataclass
class State:
    """An adapter in training. Arrays are float32."""

    settings: AdapterSettings
    # Adapters by their stack, as ``lora.trained`` gives them.
    part: dict[str, Adapters]
    # Moments and count of AdamW.
    moments: Any
    # The sum of gradients since the last step; None where there is none.
    gradient: dict[str, Adapters] | None = None
    steps: int = 0


def begin(base: Transformer, settings: AdapterSettings) -> State:
    """An adapter that computes nothing yet. Raises ValueError where no matrix would have one."""
    lora = settings.lora(base.config.moe is not None)
    part = new_adapters(base, lora, nnx.Rngs(settings.seed))
    part = jax.tree.map(lambda x: x.astype(jnp.float32), part)
    return State(settings, part, optax.scale_by_adam().init(part))


def padded(part: Mapping[str, Adapters], like: Mapping[str, Adapters]) -> dict[str, Adapters]:
    """Adapters with the rank and the matrices of ``like``, which are at least as many. What is
    added is zero, and the products are the same.
    """
    copy = jax.tree.map(jnp.zeros_like, dict(like))
    for stack, whole in copy.items():
        whole.scale = part[stack].scale
        for name, x in _arrays(part[stack]).items():
            into = getattr(whole, name)
            into = into[...].at[tuple(slice(size) for size in x.shape)].set(x)
            setattr(whole, name, getattr(whole, name).replace(into))
    return copy


def _arrays(module: Any) -> dict[str, jax.Array]:
    """The parameters of adapters of one stack, by name."""
    return {
        name: x[...]
        for name, x in sorted(vars(module).items())
        if name.endswith(("_a", "_b")) and isinstance(x, nnx.Variable)
    }


# --- Gradients ----------------------------------------------------------------------------------


class Programs:
    """The compiled programs of a base model.

    rank: the greatest an adapter may have. Shapes of batches are the caller's.
    """

    def __init__(self, base: Transformer, rank: int):
        self.base, self.rank = base, rank
        widest = AdapterSettings(rank, 0, True, True).lora(base.config.moe is not None)
        zeros = jax.tree.map(
            lambda x: jnp.zeros(x.shape, jnp.float32), new_adapters(base, widest, nnx.Rngs(0))
        )
        # Adapters of the greatest shape that add nothing.
        self.nothing: dict[str, Adapters] = zeros

    def run(
        self,
        adapters: Sequence[Mapping[str, Adapters] | None],
        tokens: Int[Array, "B T"],
        lengths: Int[Array, " B"],
        terms: Terms,
        *,
        backward: bool,
    ) -> tuple[np.ndarray, np.ndarray, Any]:
        """(log-probabilities of the targets float32 [B, T, K], the loss of each row [B], the
        gradient of each row), the last one None without ``backward``. adapters: of each row; None
        for the base model alone.
        """
        # The first one stands for the shapes: it makes every batch have those of the widest.
        several = [self.nothing, *(each or self.nothing for each in adapters)]
        model = with_several(self.base, several)
        model = for_rows(model, jnp.arange(1, len(several), dtype=jnp.int32))
        logp, losses, gradient = _computed(model, tokens, lengths, terms, backward)
        return np.asarray(logp), np.asarray(losses), gradient

    def gradient_of(
        self, state: State, gradient: Any, rows: Sequence[int], batch: int
    ) -> dict[str, Adapters]:
        """The sum of the gradients of some rows, in the shapes of an adapter."""
        chosen = np.zeros(batch + 1, bool)
        chosen[[row + 1 for row in rows]] = True  # before them stands the one for the shapes
        found = jax.tree.map(lambda x: x, state.part)
        for stack, module in found.items():
            for name, x in _arrays(module).items():
                whole = _summed(gradient[stack][name], chosen)
                whole = whole[tuple(slice(size) for size in x.shape)]
                setattr(module, name, getattr(module, name).replace(whole))
        return found


@jax.jit
def _summed(gradient: Float[Array, "L N *D"], rows: Array) -> Array:
    """The sum over chosen rows. What is not finite in another row does not get here."""
    rows = rows.reshape(1, -1, *(1,) * (gradient.ndim - 2))
    return jnp.sum(jnp.where(rows, gradient, 0.0), axis=1)


@functools.partial(jax.jit, static_argnames="backward")
def _computed(model: Transformer, tokens, lengths, terms: Terms, backward: bool):
    """As ``Programs.run``, of a model with an adapter for each row."""
    stacks = [name for name in ("first_layers", "layers") if hasattr(model, name)]
    parts = {stack: _arrays(getattr(model, stack).lora) for stack in stacks}

    def loss(parts: Mapping[str, Mapping[str, jax.Array]]) -> tuple[jax.Array, tuple]:
        copy = jax.tree.map(lambda x: x, model)
        for stack, arrays in parts.items():
            rows = getattr(copy, stack).lora
            for name, x in arrays.items():
                setattr(rows, name, getattr(rows, name).replace(x))
        places = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        where = sequences(lengths, tokens.shape[1])
        hidden, _ = copy.hidden_routed(tokens, places, where, align=0)
        logits = target_logits(copy, hidden, 1.0)
        chosen = jnp.take_along_axis(logits, terms.targets, axis=-1)
        logp = chosen - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        losses = jnp.sum(token_losses(logp, terms), axis=(1, 2))
        return jnp.sum(losses), (logp, losses)

    if backward:
        (_, (logp, losses)), gradient = jax.value_and_grad(loss, has_aux=True)(parts)
        return logp, losses, gradient
    _, (logp, losses) = loss(parts)
    return logp, losses, None


def added(one: dict[str, Adapters] | None, other: dict[str, Adapters]) -> dict[str, Adapters]:
    """The sum of two gradients; None counts as zero."""
    return other if one is None else jax.tree.map(jnp.add, one, other)


# --- Steps --------------------------------------------------------------------------------------


def step(state: State, params: Mapping[str, float]) -> tuple[State, dict[str, float]]:
    """One step of AdamW with decoupled weight decay (1711.05101), the gradient clipped by its norm
    where grad_clip_norm > 0; (the state without gradient, metrics).

    Raises ValueError where there is no gradient, or one that is not finite.
    """
    if state.gradient is None:
        raise ValueError(
            "optim_step without a gradient: no forward_backward has succeeded since the last one"
        )
    numbers = np.asarray([params[name] for name in ADAM], np.float32)
    part, moments, norm = _stepped(state.part, state.moments, state.gradient, numbers)
    if not math.isfinite(float(norm)):
        raise ValueError(f"the gradient has the norm {float(norm)}; the step is not made")
    after = State(state.settings, part, moments, None, state.steps + 1)
    return after, {"grad_norm": float(norm), "step": float(after.steps)}


@jax.jit
def _stepped(part, moments, gradient, numbers: Float[Array, " 6"]):
    rate, beta1, beta2, eps, decay, clip = numbers
    norm = optax.tree.norm(gradient)
    scale = jnp.where((clip > 0) & (norm > clip), clip / norm, 1.0)
    gradient = jax.tree.map(lambda x: x * scale, gradient)
    updates, moments = optax.scale_by_adam(beta1, beta2, eps).update(gradient, moments)
    part = jax.tree.map(lambda x, u: x - rate * (u + decay * x), part, updates)
    return part, moments, norm


# --- Bytes --------------------------------------------------------------------------------------


def digest(state: State) -> str:
    """SHA-256 of the adapter's weights."""
    found = hashlib.sha256()
    for stack, module in sorted(state.part.items()):
        for name, x in _arrays(module).items():
            found.update(f"{stack}.{name}".encode())
            found.update(np.ascontiguousarray(x).tobytes())
    return found.hexdigest()


def dump(state: State, *, moments: bool) -> bytes:
    """The state without its gradient as a file of numpy. moments: with those of AdamW."""
    arrays = _named(_PART, state.part)
    if moments:
        arrays |= _named("mu", state.moments.mu) | _named("nu", state.moments.nu)
        arrays["count"] = np.asarray(state.moments.count)
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    return file.getvalue()


def load(base: Transformer, settings: AdapterSettings, data: bytes, steps: int) -> State:
    """The state of a file that ``dump`` wrote; new moments where it has none."""
    state = begin(base, settings)
    with np.load(io.BytesIO(data)) as found:
        state.part = _filled(_PART, state.part, found)
        if "count" in found:
            fresh = state.moments
            state.moments = fresh._replace(
                count=jnp.asarray(found["count"]),
                mu=_filled("mu", fresh.mu, found),
                nu=_filled("nu", fresh.nu, found),
            )
    state.steps = steps
    return state


def _named(kind: str, part: Mapping[str, Adapters]) -> dict[str, np.ndarray]:
    return {
        f"{kind}/{stack}/{name}": np.asarray(x)
        for stack, module in part.items()
        for name, x in _arrays(module).items()
    }


def _filled(kind: str, part: dict[str, Adapters], found: Mapping[str, np.ndarray]) -> Any:
    for stack, module in part.items():
        for name in _arrays(module):
            value = jnp.asarray(found[f"{kind}/{stack}/{name}"])
            setattr(module, name, getattr(module, name).replace(value))
    return part
