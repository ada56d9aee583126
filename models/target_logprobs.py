"""Log-probabilities of given tokens from hidden states, without an array of all logits.

The logits of many targets over a large vocabulary are the largest array of a training step: 6,144
targets of 151,936 tokens take 3.7 GB in float32, and a plain gradient has a second one. Here the
vocabulary is taken in parts, of which the logits take at most ``AT_ONCE`` bytes. The forward pass
keeps the log-sum-exp of each target. The backward pass makes the logits of a part again, which is
one more product (Cut Cross-Entropy, 2411.09009, has the same recomputation in one kernel).
Logits of at most ``KEPT`` bytes are kept instead: there the product costs more than the memory.

Parts of the vocabulary and not of the targets: the gradient of the matrix is then written once, and
what is added up over the parts is the gradient of the hidden states, which is smaller.

The gradient of the logits is made in one pass, softmax and chosen token together, and rounded to
the dtype of the products. Products add in float32.

Dimensions: R rows, M targets of a row, P = R M targets of a device, D model, V vocabulary of a
device, C tokens of a part of it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from models.functions import NEVER
from models.sharding import (
    context_size,
    cuts_parameters,
    gathered_part,
    per_shard,
    scattered_gradient,
    shared_by,
    sum_parts,
)

# Bytes of the logits of a part of the vocabulary.
AT_ONCE = 2**29
# Bytes up to which a device keeps all its logits for the backward pass.
KEPT = 2**27
# A part of the vocabulary is a multiple of it.
_TILE = 128


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
      tokens of the vocabulary whose logits are in memory at a time; None chooses.
    """
    # targets are cut like the tokens of rows, where they can be
    places = None if hidden.shape[1] % context_size() else "slots"
    of_targets = ("batch", places)
    in_parts = cuts_parameters()

    def on_device(matrix: jax.Array, hidden: jax.Array, targets: jax.Array) -> tuple:
        size = chunk or chunk_size(targets.size, matrix.shape[head.axes.index("vocab")])
        how = _How(head.axes, head.tokens, temperature, entropy_gradient, in_parts, size)
        found = _logprobs(how, matrix, hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1))
        return tuple(x.reshape(targets.shape) for x in found)

    mapped = per_shard(
        on_device,
        (head.axes, (*of_targets, None), of_targets),
        (of_targets, of_targets),
        whole=not in_parts,
    )
    return mapped(head.matrix, hidden, targets)


def chunk_size(targets: int, vocabulary: int) -> int:
    """Tokens of a device's vocabulary whose logits it has in memory at a time; all of them where it
    keeps the logits for the backward pass.
    """
    whole = 4 * targets * vocabulary
    if whole <= KEPT:
        return vocabulary
    parts = -(-whole // AT_ONCE)
    # products of whole tiles
    return min(vocabulary, -(-vocabulary // parts // _TILE) * _TILE)


@dataclasses.dataclass(frozen=True)
class _How:
    """Static arguments of ``_logprobs``."""

    axes: tuple[str, str]
    tokens: int
    temperature: float
    entropy_gradient: bool
    # True if the matrix is a part along ``fsdp``.
    in_parts: bool
    # Tokens of a part of the vocabulary.
    size: int

    def whole(self, matrix: jax.Array, dtype: Any) -> jax.Array:
        """The matrix in the dtype of the products, whole along ``fsdp``."""
        if self.in_parts:
            return gathered_part(matrix, self.axes, dtype)
        return matrix.astype(dtype)

    @property
    def axis(self) -> int:
        """The matrix's axis of the vocabulary."""
        return self.axes.index("vocab")

    @property
    def spec(self) -> str:
        """The matrix in an einsum."""
        return "VD" if self.axis == 0 else "DV"

    def parts(self, matrix: jax.Array) -> Int[Array, " parts"]:
        """First tokens of the parts, the last part first."""
        return jnp.arange(-(-matrix.shape[self.axis] // self.size))[::-1] * self.size

    def part(self, matrix: jax.Array, first: jax.Array | int) -> _Part:
        """The part that begins with token ``first`` of this device's vocabulary.

        A last part that would be smaller begins earlier, in the one before it. Its first tokens do
        not count, and the part before it comes later and replaces what it wrote of them.
        """
        vocabulary = matrix.shape[self.axis]
        if self.size >= vocabulary:
            begin, own = 0, matrix
        else:
            begin = jnp.minimum(first, vocabulary - self.size)
            own = jax.lax.dynamic_slice_in_dim(matrix, begin, self.size, self.axis)
        ids = begin + jnp.arange(own.shape[self.axis])
        counts = None if vocabulary % own.shape[self.axis] == 0 else ids >= first
        device = 0
        for name in shared_by("vocab"):
            device = device * jax.lax.axis_size(name) + jax.lax.axis_index(name)
        ids = device * vocabulary + ids
        if vocabulary * _devices("vocab") > self.tokens:
            exists = ids < self.tokens
            counts = exists if counts is None else counts & exists
        return _Part(own, begin, ids, counts)

    def logits(self, hidden: Float[Array, "P D"], part: _Part) -> Float[Array, "P C"]:
        """Float32 logits / temperature; NEVER for tokens that do not count."""
        spec = f"PD,{self.spec}->PV"
        found = jnp.einsum(spec, hidden, part.matrix, preferred_element_type=jnp.float32)
        if part.counts is not None:
            found = jnp.where(part.counts, found, NEVER)
        return found / self.temperature if self.temperature != 1.0 else found


class _Part(NamedTuple):
    """A part of the vocabulary of a device."""

    # As the whole matrix.
    matrix: jax.Array
    # Place of the first token in the vocabulary of the device.
    begin: jax.Array | int
    # The tokens.
    ids: Int[Array, " C"]
    # False for tokens that do not exist or that stand in another part; None where all count.
    counts: Bool[Array, " C"] | None

    def is_chosen(self, targets: Int[Array, " P"]) -> Bool[Array, "P C"]:
        """True at the target of each place."""
        found = targets[:, None] == self.ids
        return found if self.counts is None else found & self.counts


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _logprobs(
    how: _How, matrix: jax.Array, hidden: Float[Array, "P D"], targets: Int[Array, " P"]
) -> tuple[Float[Array, " P"], Float[Array, " P"]]:
    return _forward(how, matrix, hidden, targets)[0]


def _forward(how: _How, matrix, hidden, targets):
    whole = how.whole(matrix, hidden.dtype)

    # below the running maximum ``top``: the sum of weights, and of weights times logits
    def add(carry, part: _Part):
        top, mass, mean, chosen = carry
        logits = how.logits(hidden, part)
        new = jnp.maximum(top, jnp.max(logits, axis=-1))
        mass, mean = _lowered(top - new, mass, mean)
        below = logits - new[:, None]
        weights = jnp.exp(below)
        mass = mass + jnp.sum(weights, axis=-1)
        mean = mean + jnp.sum(weights * below, axis=-1)
        place = targets - part.ids[0]
        inside = (place >= 0) & (place < len(part.ids))
        place = jnp.where(inside, place, 0)
        if part.counts is not None:
            inside &= part.counts[place]
        own = jnp.take_along_axis(logits, place[:, None], axis=-1)[:, 0]
        return (new, mass, mean, chosen + jnp.where(inside, own, 0.0)), logits

    nothing = jnp.zeros(targets.shape, jnp.float32)
    start = (jnp.full_like(nothing, NEVER), nothing, nothing, nothing)
    logits = None
    parts = how.parts(whole)
    if len(parts) == 1:
        found, logits = add(start, how.part(whole, 0))
    else:

        def step(carry, first):
            return add(carry, how.part(whole, first))[0], None

        found, _ = jax.lax.scan(step, start, parts)
    top, mass, mean, chosen = found
    if names := shared_by("vocab"):
        most = jax.lax.pmax(top, names)
        mass, mean = _lowered(top - most, mass, mean)
        mass, mean, chosen = (jax.lax.psum(x, names) for x in (mass, mean, chosen))
        top = most
    total = jnp.log(mass)
    lse = top + total
    entropy = total - mean / mass
    return (chosen - lse, entropy), (matrix, hidden, targets, lse, entropy, logits)


def _lowered(by: jax.Array, mass: jax.Array, mean: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sums of weights, and of weights times logits, after the logits became lower by ``-by``."""
    shrink = jnp.exp(by)
    return mass * shrink, (mean + by * mass) * shrink


def _backward(how: _How, kept, given):
    matrix, hidden, targets, lse, entropy, logits = kept
    # each device that shares the vocabulary has its part of what the results' gradients are
    of_logp, of_entropy = (sum_parts(x, "vocab")[:, None] for x in given)
    whole = how.whole(matrix, hidden.dtype)
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

    def gradients(part: _Part, logits):
        if logits is None:
            logits = how.logits(hidden, part)
        logs = logits - lse[:, None]
        weights = jnp.exp(logs)
        of_logits = jnp.where(part.is_chosen(targets), of_logp, 0.0) - weights * of_logp
        if how.entropy_gradient:
            of_logits = of_logits - weights * (logs + entropy[:, None]) * of_entropy
        of_logits = (of_logits / how.temperature).astype(hidden.dtype)
        of_hidden = product(f"PV,{how.spec}->PD", of_logits, part.matrix)
        return of_hidden, product(f"PV,PD->{how.spec}", of_logits, hidden)

    def step(carry, first):
        part = how.part(whole, first)
        of_hidden, own = gradients(part, None)
        put = jax.lax.dynamic_update_slice_in_dim
        return (carry[0] + of_hidden, put(carry[1], own, part.begin, how.axis)), None

    parts = how.parts(whole)
    if len(parts) == 1:
        of_hidden, of_matrix = gradients(how.part(whole, 0), logits)
    else:
        start = tuple(jnp.zeros(x.shape, jnp.float32) for x in (hidden, whole))
        (of_hidden, of_matrix), _ = jax.lax.scan(step, start, parts)
    if how.in_parts:
        of_matrix = scattered_gradient(of_matrix, how.axes)
    return of_matrix.astype(matrix.dtype), of_hidden.astype(hidden.dtype), None


_logprobs.defvjp(_forward, _backward)


def _devices(logical_axis: str) -> int:
    """Devices that share a logical axis, inside a ``per_shard`` function."""
    return math.prod(jax.lax.axis_size(name) for name in shared_by(logical_axis))
