"""Products on the matrix units of Hopper (wgmma) and of Blackwell (tcgen05), as the GPU kernels
need them.

A unit is a class. It says how many rows a warpgroup multiplies (``tile``), how many warpgroups
compute (``compute``), in which layout registers hold a result (``layout``), and what scratch memory
it needs (``scratch``). Running sums are in registers on Hopper, and in tensor memory on Blackwell.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

# Bytes of a row of shared memory whose parts are permuted, so that columns have no bank conflicts.
SWIZZLE = 128
# Columns of tensor memory that pass through registers together. Head sizes are multiples of it.
COLUMNS = 64
# Kernels compute powers of 2 in place of powers of e: e^x = 2^(x LOG2_E).
LOG2_E = math.log2(math.e)


def tiles(shape: tuple[int, ...], dtype):
    """A type of shared memory in the tiled and swizzled layout of matrix units and copy engine."""
    width = SWIZZLE // jnp.dtype(dtype).itemsize
    transforms = (plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(SWIZZLE))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def spread(x, shape: tuple[int, ...], axis: int):
    """The vector x along ``axis`` of an array of ``shape``, repeated along the others."""
    return jax.lax.broadcast_in_dim(x, shape, [axis])


def full(shape: tuple[int, ...], value: float, layout):
    """A float32 array of one value in registers."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


class Wgmma:
    """Hopper: two warpgroups of 64 rows each, with results in registers.

    The interpreter has no wgmma; there jnp multiplies.
    """

    tile = 64
    compute = 2
    layout = plgpu.Layout.WGMMA
    # registers per thread of warpgroups that compute and of the one that fetches
    registers = (232, 40)

    def __init__(self, refs: tuple, lanes: int, interpret: bool):
        self.lanes, self.interpret = lanes, interpret

    @staticmethod
    def scratch(columns: int, lanes: int, sums: int, dtype) -> list:
        """Types of the references that ``__init__`` gets as ``refs``.

        columns: of a product. lanes: columns of a running sum. sums: how many running sums there
        are, perhaps none. dtype: of the left side of what is added to a running sum.
        """
        return []

    def product(self, a, b):
        """a @ b in float32, where a and b are references to shared memory."""
        if self.interpret:
            return jnp.dot(a[...], b[...], preferred_element_type=jnp.float32)

        def multiply(acc):
            plgpu.wgmma(acc, a, b)
            return acc[...]

        return pl.run_scoped(multiply, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))

    def shrink_and_add(self, acc, shrink, a, b):
        """The first running sum, times shrink [rows], with a @ b added.

        a is in registers, b a reference to shared memory.
        """
        return self.add(acc * spread(shrink, acc.shape, 0), a, b, 0)

    def zero(self, index: int):
        """The ``index``-th running sum [tile, lanes], empty."""
        return full((self.tile, self.lanes), 0.0, self.layout)

    def add(self, acc, a, b, index: int):
        """The running sum with a @ b added; a in registers or a reference to shared memory."""
        if self.interpret:
            return acc + jnp.dot(a[...], b[...], preferred_element_type=jnp.float32)
        return pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))(plgpu.ACC.init(acc))

    def value(self, acc, index: int):
        """The running sum in registers."""
        return acc


class Tcgen05:
    """Blackwell: one warpgroup of 128 rows, with results and running sums in tensor memory.

    A left side that is in registers is first written to shared memory (``_stage``).
    """

    tile = 128
    compute = 1
    layout = plgpu.Layout.TCGEN05
    registers = None

    def __init__(self, refs: tuple, lanes: int, interpret: bool):
        self.result, self.done, *running = refs
        if running:
            self.staged, self.sums = running
        self.lanes = lanes
        # whole in the interpreter, which has no registers to save and was seen to hang on parts
        self.columns = lanes if interpret else COLUMNS

    @staticmethod
    def scratch(columns: int, lanes: int, sums: int, dtype) -> list:
        """As for ``Wgmma``."""
        running = [tiles((128, columns), dtype), plgpu.TMEM((128, sums * lanes), jnp.float32)]
        product = [plgpu.TMEM((128, columns), jnp.float32), plgpu.Barrier(orders_tensor_core=True)]
        return product + (running if sums else [])

    def product(self, a, b):
        """As for ``Wgmma``."""
        self._multiply(self.result, a, b, False)
        return self._load(self.result)

    def shrink_and_add(self, acc, shrink, a, b):
        """As for ``Wgmma``.

        The sum passes through registers in parts: all of it would not fit them beside the scores.
        """
        self._stage(a)
        for first in range(0, self.lanes, self.columns):
            part = self.sums.at[:, pl.ds(first, self.columns)]
            found = self._load(part)
            plgpu.async_store_tmem(part, found * spread(shrink, found.shape, 0))
        plgpu.commit_tmem()
        self._multiply(self._sum(0), self.staged, b, True)
        return acc

    def zero(self, index: int):
        """As for ``Wgmma``. The sum is in tensor memory; the value that is returned and carried on
        in its place means nothing.
        """
        plgpu.async_store_tmem(self._sum(index), full((self.tile, self.lanes), 0.0, self.layout))
        plgpu.commit_tmem()
        return jnp.int32(0)

    def add(self, acc, a, b, index: int):
        """As for ``Wgmma``."""
        self._stage(a)
        self._multiply(self._sum(index), self.staged, b, True)
        return acc

    def value(self, acc, index: int):
        """As for ``Wgmma``."""
        return self._load(self._sum(index))

    def _sum(self, index: int):
        return self.sums.at[:, pl.ds(index * self.lanes, self.lanes)]

    def _stage(self, a) -> None:
        self.staged[...] = a
        plgpu.commit_smem()

    def _multiply(self, acc, a, b, accumulate) -> None:
        plgpu.tcgen05_mma(acc, a, b, self.done, accumulate=accumulate)
        plgpu.barrier_wait(self.done)

    def _load(self, ref):
        found = plgpu.async_load_tmem(ref, layout=self.layout)
        plgpu.wait_load_tmem()
        return found


class WgmmaKeys(Wgmma):
    """Hopper with keys as rows and queries as columns: one warpgroup multiplies ``keys`` rows."""

    keys, compute, registers = 128, 1, None
    transposed = plgpu.Layout.WGMMA_TRANSPOSED

    def __init__(self, refs: tuple, interpret: bool):
        (self.staged,), self.interpret = refs, interpret

    @staticmethod
    def scratch(columns: int, rows: int, dtype) -> list:
        """Types of the references in ``refs``, for running sums [rows, columns]."""
        return [tiles((columns, WgmmaKeys.keys), dtype)]

    def shrink_and_add(self, acc, shrink, a, b):
        """acc * shrink + a.T @ b, where acc is [rows, columns] and shrink [columns].

        a: a reference [keys, rows] to shared memory. b: [keys, columns] in registers.
        """
        return self.add(
            acc * spread(shrink, acc.shape, 1), a.transpose((1, 0)), _staged(self, b), 0
        )


class Tcgen05Keys(Tcgen05):
    """Blackwell with keys as rows and queries as columns; a running sum has 128 rows too."""

    keys = 128
    transposed = plgpu.Layout.TCGEN05_TRANSPOSED

    def __init__(self, refs: tuple, interpret: bool):
        (self.staged, self.result, self.sums, self.done), self.interpret = refs, interpret

    @staticmethod
    def scratch(columns: int, rows: int, dtype) -> list:
        """As for ``WgmmaKeys``."""
        return [
            tiles((columns, Tcgen05Keys.keys), dtype),
            plgpu.TMEM((Tcgen05Keys.keys, columns), jnp.float32),
            plgpu.TMEM((rows, columns), jnp.float32),
            plgpu.Barrier(orders_tensor_core=True),
        ]

    def shrink_and_add(self, acc, shrink, a, b):
        """As for ``WgmmaKeys``."""
        self._multiply(self.sums, a.transpose((1, 0)), _staged(self, b), False)
        return acc * spread(shrink, acc.shape, 1) + self._load(self.sums)


def _staged(unit, x):
    """x [keys, columns] in registers as the right side of a product, in shared memory.

    It lies there transposed, with the keys side by side.
    """
    if unit.interpret:
        unit.staged[...] = x.T
    else:
        unit.staged.transpose((1, 0))[...] = plgpu.layout_cast(x, unit.transposed)
    plgpu.commit_smem()
    return unit.staged.transpose((1, 0))


UNITS = {"wgmma": Wgmma, "tcgen05": Tcgen05}
KEY_UNITS = {"wgmma": WgmmaKeys, "tcgen05": Tcgen05Keys}
