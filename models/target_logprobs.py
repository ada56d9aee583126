"""Log-probabilities of given tokens from hidden states, without an array of all logits.

The logits of many targets over a large vocabulary are the largest array of a training step: 6,144
targets of 151,936 tokens take 3.7 GB in float32, and a plain gradient has a second one. Here
targets are taken ``CHUNK`` at a time. The forward pass keeps the log-sum-exp of each target. The
backward pass makes the logits of a chunk again, which is one more product (Cut Cross-Entropy,
2411.09009, has the same recomputation in one kernel). Logits of at most ``KEPT`` bytes are kept
instead, since there the product costs more than the memory.

The gradient of the logits is made in one pass, softmax and chosen token together, and rounded to
the dtype of the products. Products add in float32, and so does the gradient of the matrix over
chunks.

Dimensions: R rows, M targets of a row, D model, V vocabulary, n chunks of C targets.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from models.padding import NEVER
from models.sharding import (
    context_size,
    cuts_parameters,
    gathered_part,
    per_shard,
    scattered_gradient,
    shared_by,
    sum_parts,
)

# Targets whose logits are in memory at a time.
CHUNK = 1024
# Bytes up to which a device keeps all its logits for the backward pass.
KEPT = 2**27


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Head:
    """The matrix from hidden states to logits."""

    # As the model keeps it: [V, D] where embeddings are tied, else [D, V].
    matrix: jax.Array
    # Its logical axes.
    axes: tuple[str, str] = dataclasses.field(metadata=dict(static=True))
    # Tokens that exist; those behind them pad the vocabulary and have no probability.
    tokens: int = dataclasses.field(metadata=dict(static=True))


def target_logprobs(
    head: Head,
    hidden: Float[Array, "R M D"],
    targets: Int[Array, "R M"],
    temperature: float = 1.0,
    entropy_gradient: bool = False,
    *,
    chunk: int | None = None,
) -> tuple[Float[Array, "R M"], Float[Array, "R M"]]:
    """Log-probability of each target and entropy of its distribution, float32 in nats, of
    softmax(logits / temperature).

    Differentiable in the matrix and the hidden states; the entropy carries a gradient only when
    asked to. Under a mesh each device has its own targets and its part of the vocabulary.

    hidden: the states that the targets are predicted from, in the dtype of the products. chunk:
      targets whose logits are in memory at a time; None chooses.
    """
    # targets are cut like the tokens of rows, where they can be
    places = None if hidden.shape[1] % context_size() else "slots"
    of_targets = ("batch", places)
    in_parts = cuts_parameters()

    def on_device(matrix: jax.Array, hidden: jax.Array, targets: jax.Array) -> tuple:
        shape = targets.shape
        how = _How(head.axes, head.tokens, temperature, entropy_gradient, in_parts)
        size = chunk or _chunk(targets.size, matrix.shape[head.axes.index("vocab")])
        chunks = -(-targets.size // size)
        # chunks of equal size, of which the last has a few targets that nobody asks for
        size = -(-targets.size // chunks)
        more = chunks * size - targets.size
        hidden = jnp.pad(hidden.reshape(-1, hidden.shape[-1]), ((0, more), (0, 0)))
        targets = jnp.pad(targets.reshape(-1), (0, more)).reshape(chunks, size)
        found = _logprobs(how, matrix, hidden.reshape(chunks, size, -1), targets)
        return tuple(x.reshape(-1)[: x.size - more].reshape(shape) for x in found)

    mapped = per_shard(
        on_device,
        (head.axes, (*of_targets, None), of_targets),
        (of_targets, of_targets),
        whole=not in_parts,
    )
    return mapped(head.matrix, hidden, targets)


def _chunk(targets: int, vocabulary: int) -> int:
    """Targets whose logits over so many tokens a device has in memory at a time."""
    return targets if 4 * targets * vocabulary <= KEPT else CHUNK


@dataclasses.dataclass(frozen=True)
class _How:
    """Static arguments of ``_logprobs``."""

    axes: tuple[str, str]
    tokens: int
    temperature: float
    entropy_gradient: bool
    # True if the matrix is a part along ``fsdp``.
    in_parts: bool

    def whole(self, matrix: jax.Array, dtype: Any) -> jax.Array:
        """The matrix in the dtype of the products, whole along ``fsdp``."""
        if self.in_parts:
            return gathered_part(matrix, self.axes, dtype)
        return matrix.astype(dtype)

    @property
    def spec(self) -> str:
        """The matrix in an einsum."""
        return "VD" if self.axes[0] == "vocab" else "DV"

    def ids(self, size: int) -> Int[Array, " V"]:
        """The tokens of this device's part of the vocabulary."""
        first = 0
        for name in shared_by("vocab"):
            first = first * jax.lax.axis_size(name) + jax.lax.axis_index(name)
        return first * size + jnp.arange(size)

    def logits(self, hidden: Float[Array, "C D"], matrix: jax.Array) -> Float[Array, "C V"]:
        """Float32 logits / temperature over this device's part of the vocabulary."""
        spec = f"CD,{self.spec}->CV"
        found = jnp.einsum(spec, hidden, matrix, preferred_element_type=jnp.float32)
        size = found.shape[-1]
        if size * _devices("vocab") > self.tokens:
            found = jnp.where(self.ids(size) < self.tokens, found, NEVER)
        return found / self.temperature if self.temperature != 1.0 else found


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _logprobs(
    how: _How, matrix: jax.Array, hidden: Float[Array, "n C D"], targets: Int[Array, "n C"]
) -> tuple[Float[Array, "n C"], Float[Array, "n C"]]:
    return _forward(how, matrix, hidden, targets)[0]


def _forward(how: _How, matrix, hidden, targets):
    whole = how.whole(matrix, hidden.dtype)

    def chunk(hidden, targets):
        logits = how.logits(hidden, whole)
        top = jnp.max(logits, axis=-1)
        if names := shared_by("vocab"):
            top = jax.lax.pmax(top, names)
        below = logits - top[:, None]
        weights = jnp.exp(below)
        mass = sum_parts(jnp.sum(weights, axis=-1), "vocab")
        mean = sum_parts(jnp.sum(weights * below, axis=-1), "vocab") / mass
        total = jnp.log(mass)
        place = targets - how.ids(logits.shape[-1])[0]
        own = (place >= 0) & (place < logits.shape[-1])
        chosen = jnp.take_along_axis(logits, jnp.where(own, place, 0)[:, None], axis=-1)[:, 0]
        chosen = sum_parts(jnp.where(own, chosen, 0.0), "vocab")
        lse = top + total
        return (chosen - lse, total - mean, lse), logits

    if len(hidden) == 1:
        found, logits = chunk(hidden[0], targets[0])
        logp, entropy, lse = (x[None] for x in found)
    else:
        logp, entropy, lse = jax.lax.map(lambda x: chunk(*x)[0], (hidden, targets))
        logits = None
    return (logp, entropy), (matrix, hidden, targets, lse, entropy, logits)


def _backward(how: _How, kept, given):
    matrix, hidden, targets, lse, entropy, logits = kept
    # each device that shares the vocabulary has its part of what the results' gradients are
    given = tuple(sum_parts(x, "vocab") for x in given)
    whole = how.whole(matrix, hidden.dtype)
    to_hidden, to_matrix = f"CV,{how.spec}->CD", f"CV,CD->{how.spec}"

    def chunk(hidden, targets, lse, entropy, of_logp, of_entropy, logits):
        if logits is None:
            logits = how.logits(hidden, whole)
        chosen = targets[:, None] == how.ids(logits.shape[-1])
        logs = logits - lse[:, None]
        weights = jnp.exp(logs)
        of_logits = jnp.where(chosen, of_logp[:, None], 0.0) - weights * of_logp[:, None]
        if how.entropy_gradient:
            of_logits = of_logits - weights * (logs + entropy[:, None]) * of_entropy[:, None]
        of_logits = (of_logits / how.temperature).astype(hidden.dtype)
        product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
        of_hidden = product(to_hidden, of_logits, whole).astype(hidden.dtype)
        return of_hidden, product(to_matrix, of_logits, hidden)

    each = (hidden, targets, lse, entropy, *given)
    if len(hidden) == 1:
        of_hidden, of_matrix = chunk(*(x[0] for x in each), logits)
        of_hidden = of_hidden[None]
    else:

        def step(total, x):
            of_hidden, of_matrix = chunk(*x, None)
            return total + of_matrix, of_hidden

        of_matrix, of_hidden = jax.lax.scan(step, jnp.zeros(whole.shape, jnp.float32), each)
    if how.in_parts:
        of_matrix = scattered_gradient(of_matrix, how.axes)
    return of_matrix.astype(matrix.dtype), of_hidden, None


_logprobs.defvjp(_forward, _backward)


def _devices(logical_axis: str) -> int:
    """Devices that share a logical axis, inside a ``per_shard`` function."""
    size = 1
    for name in shared_by(logical_axis):
        size *= jax.lax.axis_size(name)
    return size
