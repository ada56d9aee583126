"""The software pipeline of the GPU kernels: one warpgroup copies tiles into a ring of buffers in
shared memory, with the copy engine, while the others compute on the tiles that have arrived.

Step s uses buffer, or slot, s modulo the number of buffers. Every buffer has two barriers. "filled"
completes when all its copies have arrived, and "emptied" when all warpgroups that compute are done
with it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


def barriers(steps: int, compute: int, arrays: int) -> list:
    """The barriers of a ring of buffers: (filled, emptied).

    steps: buffers of the ring. compute: warpgroups that compute; each of them reports that it is
    done with a buffer. arrays: copies that fill one buffer.
    """
    return [
        plgpu.Barrier(num_arrivals=arrays, num_barriers=steps),
        plgpu.Barrier(num_arrivals=compute, num_barriers=steps),
    ]


def named(kind: Any, arguments: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    """(the first references that a kernel gets, as a named tuple of this kind; the rest)."""
    count = len(kind._fields)
    return kind(*arguments[:count]), arguments[count:]


def specialise_warps(wg, unit, compute: Callable, fetch: Callable) -> None:
    """The last warpgroup calls ``fetch``; the others call ``compute``.

    Copying needs few registers, so that the others can have most of them. wg: the number of the
    warpgroup. unit: one of ``matrix_units``.
    """

    @pl.when(wg < unit.compute)
    def _():
        if unit.registers:
            plgpu.set_max_registers(unit.registers[0], action="increase")
        compute()

    @pl.when(wg == unit.compute)
    def _():
        if unit.registers:
            plgpu.set_max_registers(unit.registers[1], action="decrease")
        fetch()


def fetch(
    count,
    sources: Callable,
    rings,
    filled,
    emptied,
    steps: int,
    after: Callable = lambda step: None,
) -> None:
    """Copies what every step needs into the rings, as far ahead as they have room.

    It returns when everything has been used.

    count: steps. sources: a function from a step to what is copied, one array for each of
    ``rings``; vectors must lie within their array. steps: buffers of a ring. after: called with
    each step when its copies have been started.
    """

    # There are ``steps`` more turns than steps that copy. They only wait until the last buffers are
    # emptied, since a thread block must not end while others read its buffers.
    @pl.loop(0, count + steps)
    def _(step):
        slot = jax.lax.rem(step, jnp.int32(steps))

        # the first turn of each buffer finds it empty
        @pl.when(step >= steps)
        def _():
            plgpu.barrier_wait(emptied.at[slot])

        @pl.when(step < count)
        def _():
            for source, ring in zip(sources(step), rings, strict=True):
                # A vector may begin at any 16 bytes of shared memory only by a plain copy, which
                # does not check bounds. Copies of other arrays begin at whole 128 bytes.
                mode = plgpu.OOBFillMode.PROMISE_IN_BOUNDS if len(source.shape) == 1 else None
                plgpu.copy_gmem_to_smem(source, ring.at[slot], filled.at[slot], oob_mode=mode)
            after(step)


def visits(first, last, filled, emptied, visit: Callable, carry, steps: int):
    """Calls ``carry = visit(slot, carry)`` for the steps from ``first`` to before ``last``.

    The buffers of a step are in ``slot`` of the rings. Returns the last carry.
    """

    def one(step, carry):
        slot = jax.lax.rem(step, jnp.int32(steps))
        plgpu.barrier_wait(filled.at[slot])
        carry = visit(slot, carry)
        # what was read by loads may be overwritten by the copy engine only after a fence
        plgpu.commit_smem()
        plgpu.barrier_arrive(emptied.at[slot])
        return carry

    return jax.lax.fori_loop(first, last, one, carry)


def consume(count, whole, filled, emptied, visit: Callable, carry, steps: int):
    """Calls ``carry = visit(slot, carry, masked)`` for ``count`` steps; returns the last carry.

    The first ``whole`` steps need no mask, and the others do.
    """
    # two loops, so that the program of the first has no masks in it
    unmasked, masked = (functools.partial(visit, masked=x) for x in (False, True))
    carry = visits(0, whole, filled, emptied, unmasked, carry, steps)
    return visits(whole, count, filled, emptied, masked, carry, steps)
