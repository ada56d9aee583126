"""Attention over rows whose tokens are cut over devices: the mesh axis ``context``.

Every device has the queries of its own slots, and the keys and values of its own slots or places.
The keys go round in a ring (2310.01889): in each of n steps a device attends with its queries to
the keys that have just come by, and hands them on. The results of the steps are over different
keys, so they are merged by their log-sum-exps. No device ever holds the keys of a whole row.

Who sees whom is known everywhere: the numbers that say so are small, and every device has those of
whole rows. Parts of the ring that no query of a device sees cost it next to nothing, since
attention visits only blocks with something to see.

The backward pass goes round once more, with the gradients of keys and values beside them. It keeps
no keys of other devices. What a step computed is computed again, and its cotangents follow from the
merged result: with w = exp(lse_i - lse),

    d out_i = w d out,    d lse_i = w (d out . (out_i - out) + d lse).

Dimensions: B rows, T queries and S keys of one device, N query heads, K key/value heads, H head
size, n devices.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.finite import cleaned
from pallas_kernels.saved import attended
from pallas_kernels.softmax import merge
from pallas_kernels.tokens import Tokens

# A function of (q, k, v, number of the part of the row whose keys these are) -> (out, lse).
Part = Callable[..., tuple[jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Ring:
    """The devices over which the tokens of rows are cut, from inside their ``shard_map``."""

    # The axis of the mesh.
    axis: str
    # How many devices it has.
    parts: int

    def mine(self, x: Shaped[Array, "B T *rest"]) -> Shaped[Array, "B T/n *rest"]:
        """This device's part of an array of whole rows."""
        return self.part(x, jax.lax.axis_index(self.axis))

    def part(
        self, x: Shaped[Array, "B T *rest"], number: Int[Array, ""]
    ) -> Shaped[Array, "B T/n *rest"]:
        """One device's part of an array of whole rows."""
        size = x.shape[1] // self.parts
        return jax.lax.dynamic_slice_in_dim(x, number * size, size, axis=1)

    def turned(self, tree):
        """The arrays of the device before this one in the ring."""
        there = [(i, (i + 1) % self.parts) for i in range(self.parts)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.axis, there), tree)

    def handed_on(self, x: jax.Array) -> jax.Array:
        """The array of the device before this one, for the first one zeros."""
        there = [(i, i + 1) for i in range(self.parts - 1)]
        return jax.lax.ppermute(x, self.axis, there)

    def after(self, x: jax.Array) -> jax.Array:
        """The beginning of the next device's part, for the last one zeros."""
        there = [(i + 1, i) for i in range(self.parts - 1)]
        return jax.lax.ppermute(x, self.axis, there)

    def whole(self, x: Shaped[Array, "B S *rest"]) -> Shaped[Array, "B n*S *rest"]:
        """The parts of all devices, side by side."""
        return jax.lax.all_gather(x, self.axis, axis=1, tiled=True)

    def take(
        self, x: Shaped[Array, "B T *rest"], slots: Int[Array, "B S"]
    ) -> Shaped[Array, "B S *rest"]:
        """x at slots of whole rows, zeros where a slot is -1. x goes round; nobody holds all."""
        size = x.shape[1]

        def step(carry, turn):
            x, found = carry
            at = slots - self._source(turn) * size
            at = jnp.where((slots < 0) | (at < 0), size, at)
            here = jax.vmap(lambda row, at: row.at[at].get(mode="fill", fill_value=0))(x, at)
            # a place is read from one part alone; not a sum, since 0 plus NaN would be NaN
            owned = (at < size).reshape(*at.shape, *(1 for _ in x.shape[2:]))
            return (self.turned(x), jnp.where(owned, here, found)), None

        found = jnp.zeros((*slots.shape, *x.shape[2:]), x.dtype)
        (_, found), _ = jax.lax.scan(step, (x, found), jnp.arange(self.parts))
        return found

    def attend(
        self,
        part: Part,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B S K H"],
        v: Float[Array, "B S K H"],
        rest: tuple,
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
        """(out, lse) of attention to the keys of all devices, differentiable in q, k and v.

        part: a function of (q, k, v, number, *rest), of which ``number`` says whose keys these are;
        it may close over no arrays. rest: arrays without gradient.
        """
        return _ring(q, k, v, rest, part, self)

    def _source(self, turn: jax.Array) -> jax.Array:
        """Number of the device whose part is here after so many turns."""
        return (jax.lax.axis_index(self.axis) - turn) % self.parts


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _ring(q, k, v, rest, part: Part, ring: Ring):
    return _forward(q, k, v, rest, part, ring)[0]


def _forward(q, k, v, rest, part: Part, ring: Ring):
    wide = jnp.promote_types(jnp.float32, v.dtype)

    def step(carry, turn):
        keys, out, lse = carry
        found, found_lse = part(q, *keys, ring._source(turn), *rest)
        out, lse = merge([out, found.astype(wide)], [lse, found_lse])
        return (ring.turned(keys), out, lse), None

    # the first part is the device's own: it gives the results' types
    out, lse = part(q, k, v, ring._source(0), *rest)
    start = (ring.turned((k, v)), out.astype(wide), lse)
    (_, out, lse), _ = jax.lax.scan(step, start, jnp.arange(1, ring.parts))
    out, lse = attended(out.astype(v.dtype), lse)
    return (out, lse), (q, k, v, rest, out, lse)


def _backward(part: Part, ring: Ring, residuals, given):
    q, k, v, rest, out, lse = residuals
    d_out, d_lse = given
    wide = jnp.promote_types(jnp.float32, v.dtype)

    def step(carry, turn):
        keys, sums, dq = carry
        run = functools.partial(_of_keys, part, ring._source(turn), rest)
        (found, found_lse), pull = jax.vjp(run, q, *keys)
        more, *gradients = pull(_shares(found, found_lse, out, lse, d_out, d_lse))
        sums = tuple(x + y.astype(wide) for x, y in zip(sums, gradients, strict=True))
        # the sums travel with their keys, and after n turns both are at home
        return (*ring.turned((keys, sums)), dq + more.astype(wide)), None

    start = ((k, v), tuple(jnp.zeros(x.shape, wide) for x in (k, v)), jnp.zeros(q.shape, wide))
    (_, (dk, dv), dq), _ = jax.lax.scan(step, start, jnp.arange(ring.parts))
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_ring.defvjp(_forward, _backward)


def _of_keys(part: Part, number, rest: tuple, q, k, v):
    return part(q, k, v, number, *rest)


def _shares(found, found_lse, out, lse, d_out, d_lse):
    """The cotangents of one step's (out, lse) from those of the merged ones."""
    # -inf where the step, or all of them, saw nothing
    weight = jnp.where(jnp.isneginf(found_lse), 0.0, jnp.exp(found_lse - lse))
    wide = weight.dtype
    # what a step saw must show in its own results alone
    moved = cleaned(found.astype(wide)) - cleaned(out.astype(wide))
    d_part = jnp.sum(d_out.astype(wide) * moved, axis=-1) + d_lse
    return (weight[..., None] * d_out.astype(wide)).astype(found.dtype), weight * d_part


def parts_of(ring: Ring, tokens: Tokens, number: jax.Array) -> Tokens:
    """One device's part of the tokens of whole rows."""
    return tokens.map(lambda x: ring.part(x, number))
