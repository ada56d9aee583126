"""Experts that are cut over devices: rows travel to the device of their expert, and their results
travel back.

Every device has some of the experts, and rows for all of them, sorted by expert. All devices learn
how many rows each has for each expert, so each can work out where every row goes. The rows of an
expert arrive in one stretch, those of the first device first, as the grouped products want them.

Nothing is dropped. How many rows come to a device is known only when the program runs, and shapes
are fixed, so there is room for a multiple of the mean (``room``). What does not fit comes in
further rounds, which are made only when some device gets more than that. Rows are computed alone,
so a result does not depend on the round. In the backward pass the further rounds are made again.

The exchange is that of ``ragged_exchange``. Experts that are cut so are those of GShard
(2006.16668); that nothing is dropped is as in MegaBlocks (2211.15841).

Dimensions: n devices, E experts on all of them, e = E / n, P rows of a device, C rows that a device
has room for, D model.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from models.ragged_exchange import Stretches, exchange

# Rooms are multiples of it, as are the blocks of the kernels.
_BLOCK = 128

# (The matrices of a device's experts, rows sorted by expert [C, D], rows of each expert [e]) ->
# [C, D]; rows behind the last expert's are 0.
Products = Callable[[Any, jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Way:
    """Over which devices experts are cut, and how many rows one has room for."""

    axes: tuple[str, ...]
    room: int


def room(rows: int, most: int, multiple: float) -> int:
    """C: the rows that a device has room for.

    rows: of one device, which is also the mean of what comes to a device. most: the most that can
    come to one. multiple: of the mean.
    """
    wanted = -(-int(multiple * rows) // _BLOCK) * _BLOCK
    return max(1, min(most, max(wanted, _BLOCK)))


def through_experts(
    products: Products,
    matrices: Any,
    x: Float[Array, "P D"],
    sizes: Int[Array, " E"],
    way: Way,
) -> Float[Array, "P D"]:
    """The results of rows that are sorted by expert, whose experts are on other devices.

    Call it within ``jax.shard_map``. products: a function of the module, so that it is the same
    object for each call. matrices: of this device's experts. sizes: how many of the rows each
    expert has, from row 0 on; rows behind them have the result 0.
    """
    counts = jax.lax.all_gather(sizes, way.axes)
    there, back, groups = _round(counts, 0, way)
    arrived = _travel(x, there, back, _Trip(way.axes, len(x), way.room))
    done = products(matrices, arrived, groups)
    first = _travel(done, back, there, _Trip(way.axes, way.room, len(x)))
    return first + _further(products, way, matrices, x, counts)


def _round(
    counts: Int[Array, "n E"], number: jax.Array | int, way: Way
) -> tuple[Stretches, Stretches, Int[Array, " e"]]:
    """(What this device sends to experts in a round, what it sends back, rows of its experts).

    counts: how many rows each device has for each expert.
    """
    devices, experts = counts.shape
    own = experts // devices
    me = jax.lax.axis_index(way.axes)
    # Of each device the rows for an expert begin here.
    starts = jnp.cumsum(counts, axis=1) - counts
    # On the expert's device they begin here, of all rows that come to it: by expert, then by
    # device.
    by_device = counts.T.reshape(devices, own * devices)
    arrive = (jnp.cumsum(by_device, axis=1) - by_device).reshape(experts, devices).T
    # Of these rows a round takes the next C.
    first = number * way.room
    begin = jnp.clip(arrive, first, first + way.room)
    sizes = jnp.clip(arrive + counts, first, first + way.room) - begin
    sources = starts + begin - arrive
    targets = begin - first

    def of_own_experts(x):
        """[n, E] -> [n * e] of this device's experts."""
        return jax.lax.dynamic_slice_in_dim(x, me * own, own, axis=1).reshape(-1)

    there = Stretches(sources[me], sizes[me], targets[me], of_own_experts(sizes))
    back = Stretches(
        of_own_experts(targets), of_own_experts(sizes), of_own_experts(sources), sizes[me]
    )
    return there, back, jnp.sum(of_own_experts(sizes).reshape(devices, own), axis=0)


@dataclasses.dataclass(frozen=True)
class _Trip:
    """Number of rows of a device before and after an exchange."""

    axes: tuple[str, ...]
    before: int
    after: int


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _travel(x, there: Stretches, back: Stretches, trip: _Trip):
    """The rows that come to this device, in the places where they are sent, 0 elsewhere.

    back: of the same rows the way back, which their gradients take.
    """
    return exchange(x, jnp.zeros((trip.after, x.shape[1]), x.dtype), there, trip.axes)


def _travel_forward(x, there: Stretches, back: Stretches, trip: _Trip):
    return _travel(x, there, back, trip), (there, back)


def _travel_backward(trip: _Trip, kept, gradient):
    there, back = kept
    home = _Trip(trip.axes, trip.after, trip.before)
    return _travel(gradient, back, there, home), None, None


_travel.defvjp(_travel_forward, _travel_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _further(products: Products, way: Way, matrices, x, counts):
    """The results of those rows that do not come in the first round, 0 for the others."""

    def one(number, out):
        there, back, groups = _round(counts, number, way)
        arrived = exchange(x, _room_for(x, way), there, way.axes)
        return exchange(products(matrices, arrived, groups), out, back, way.axes)

    return jax.lax.fori_loop(1, _rounds(counts, way), one, jnp.zeros_like(x))


def _further_forward(products: Products, way: Way, matrices, x, counts):
    return _further(products, way, matrices, x, counts), (matrices, x, counts)


def _further_backward(products: Products, way: Way, kept, gradient):
    matrices, x, counts = kept

    def one(number, so_far):
        of_matrices, of_x = so_far
        there, back, groups = _round(counts, number, way)
        empty = _room_for(x, way)
        arrived = exchange(x, empty, there, way.axes)
        _, pull = jax.vjp(lambda m, a: products(m, a, groups), matrices, arrived)
        more, of_arrived = pull(exchange(gradient, empty, there, way.axes))
        of_x = exchange(of_arrived, of_x, back, way.axes)
        return jax.tree.map(jnp.add, of_matrices, more), of_x

    zeros = jax.tree.map(jnp.zeros_like, (matrices, x))
    return *jax.lax.fori_loop(1, _rounds(counts, way), one, zeros), None


_further.defvjp(_further_forward, _further_backward)


def _rounds(counts: Int[Array, "n E"], way: Way) -> jax.Array:
    """Number of rounds, the same on all devices that exchange rows."""
    devices = len(counts)
    busiest = jnp.max(jnp.sum(counts, axis=0).reshape(devices, -1).sum(axis=1))
    return -(-busiest // way.room)


def _room_for(x: jax.Array, way: Way) -> jax.Array:
    return jnp.zeros((way.room, x.shape[1]), x.dtype)
