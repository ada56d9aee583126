"""Stretches of rows that devices send each other, as many rows each as there happen to be.

On TPU and GPU it is XLA's ragged all-to-all (``jax.lax.ragged_all_to_all``). XLA on CPU has none;
there every device gathers the rows of all and takes those that are for it.

Dimensions: P rows that a device has, R rows that it has room for, n devices, K stretches that each
device sends: the first K / n to the first device, and so on.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.choice import here


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stretches:
    """The part that one device sends and receives. Where a device sends, another one receives as
    much.
    """

    # Where each stretch that it sends begins in its rows, how many rows it has, and where it begins
    # in the rows of the device that receives it.
    starts: Int[Array, " K"]
    sizes: Int[Array, " K"]
    targets: Int[Array, " K"]
    # How many rows each stretch has that it receives: those of the first device first.
    received: Int[Array, " K"]


def exchange(
    x: Float[Array, "P D"], into: Float[Array, "R D"], sent: Stretches, axes: tuple[str, ...]
) -> Float[Array, "R D"]:
    """``into`` with the rows that the devices along the mesh axes ``axes`` send to this one.

    Call it within ``jax.shard_map`` over these axes. No two stretches may have the same target.
    """
    if here() == "cpu":
        return by_gathering(x, into, sent, axes)
    return native(x, into, sent, axes)


def native(x, into, sent: Stretches, axes: tuple[str, ...]):
    """``exchange`` by the collective of TPU and GPU."""
    return jax.lax.ragged_all_to_all(
        x, into, sent.starts, sent.sizes, sent.targets, sent.received, axis_name=axes
    )


def by_gathering(x, into, sent: Stretches, axes: tuple[str, ...]):
    """``exchange`` as every backend can do it, in n times the memory."""
    devices = jax.lax.axis_size(axes)
    me = jax.lax.axis_index(axes)
    rows = jax.lax.all_gather(x, axes)
    table = jnp.stack([sent.starts, sent.sizes, sent.targets])
    # [n, 3, devices, stretches of a device] -> those for this device
    table = jax.lax.all_gather(table, axes).reshape(devices, 3, devices, -1)
    starts, sizes, targets = jnp.moveaxis(table[:, :, me], 1, 0)
    # in the rows of all devices
    starts = (starts + jnp.arange(devices)[:, None] * len(x)).reshape(-1)
    sizes, targets = sizes.reshape(-1), targets.reshape(-1)
    behind = jnp.arange(len(into))[:, None] - targets
    inside = (behind >= 0) & (behind < sizes)
    source = jnp.sum(jnp.where(inside, starts + behind, 0), axis=1)
    found = rows.reshape(-1, x.shape[1])[source]
    return jnp.where(jnp.any(inside, axis=1)[:, None], found, into)
