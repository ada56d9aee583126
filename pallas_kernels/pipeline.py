"""The software pipeline of the GPU kernels: one warpgroup copies tiles into a ring of buffers in
shared memory, with the copy engine, while the others compute on the tiles that have arrived.

A buffer has two barriers. "filled" says that its copies have arrived, "emptied" that all warpgroups
that compute are done with it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


def barriers(steps: int, compute: int, arrays: int) -> list:
    """The barriers of a ring of buffers.

    steps: buffers of the ring. compute: warpgroups that compute, all of which empty a buffer.
    arrays: copies that fill one.
    """
    return [
        plgpu.Barrier(num_arrivals=arrays, num_barriers=steps),
        plgpu.Barrier(num_arrivals=compute, num_barriers=steps),
    ]


def specialise_warps(wg, unit, compute: Callable, fetch: Callable) -> None:
    """The last warpgroup fetches, with few registers; the others compute, with the rest of the
    registers.
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
    """Copies sources(step) of every step into the rings, as far ahead as they hold, and waits until
    all were used.

    after: called with each step when its copies are started.
    """

    # ``steps`` more turns than there are copies: they only wait until the last buffers are emptied,
    # since a thread block must not end while others read its buffers
    @pl.loop(0, count + steps)
    def _(step):
        slot = jax.lax.rem(step, jnp.int32(steps))

        @pl.when(step >= steps)
        def _():
            plgpu.barrier_wait(emptied.at[slot])

        @pl.when(step < count)
        def _():
            for source, ring in zip(sources(step), rings, strict=True):
                plgpu.copy_gmem_to_smem(source, ring.at[slot], filled.at[slot])
            after(step)


def visits(first, last, filled, emptied, visit: Callable, carry, steps: int):
    """The carry after visit(slot, carry) of the steps from ``first`` to before ``last``."""

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
    """The carry after visit(slot, carry, masked) of every step, the first ``whole`` of them without
    a mask.
    """
    unmasked, masked = (functools.partial(visit, masked=x) for x in (False, True))
    carry = visits(0, whole, filled, emptied, unmasked, carry, steps)
    return visits(whole, count, filled, emptied, masked, carry, steps)
