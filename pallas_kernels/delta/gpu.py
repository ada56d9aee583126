"""The pass over chunks on GPU (Mosaic GPU), for Hopper.

A thread block passes 64 columns of a head's state from chunk to chunk, alone: columns need nothing
of each other. All matrices are cut into tiles of 64 by 64 (``gpu_memory``), which one warpgroup
copies into a ring of buffers in shared memory, in the order in which the other multiplies by them.
The state is kept transposed, so that it and what is made of it are the left sides of products, in
registers.

Float32 is multiplied as six products of parts in bfloat16 (``_split``), which is as precise. The
parts of what is copied are made before the kernel.

Backward, the kernel only does what goes from chunk to chunk: the cotangents of states and of
changes. With these all other gradients are products of every chunk by itself, which are XLA's. What
comes back to a state from chunks that are not right behind it is summed as on TPU
(``delta.tpu``).

Blackwell's matrix unit takes no left side from registers, so there is no kernel for it.

Dimensions: B rows, N chunks, C tokens of a chunk, M value heads, H key size, W columns of a state,
C, H and W filled up to multiples of 64; P = W / 64 parts of the columns.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.delta import reference
from pallas_kernels.delta.blocks import continued
from pallas_kernels.delta.gpu_memory import (
    PARTS,
    STEPS,
    TILE,
    Plan,
    across,
    by_head,
    filled,
    from_tiles,
    in_order,
    in_turn,
    launch,
    planned,
    ring,
)
from pallas_kernels.delta.reference import Parts
from pallas_kernels.matrix_units import full, tiles
from pallas_kernels.pipeline import fetch, named

DTYPES = ("float32",)
# What the kernels take: the work inside of chunks is XLA's.
prepared = reference.parts
# Largest key size: the state of a thread block is in registers.
_LARGEST = 128
# Products of the parts of two numbers that are summed, the smallest first.
_PAIRS = ((2, 0), (0, 2), (1, 1), (1, 0), (0, 1), (0, 0))
_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def obstacle(platform: str, tokens: int, sizes: tuple[int, int]) -> str | None:
    """Reason why a state of ``sizes`` [H, W] cannot be passed over chunks of ``tokens`` tokens, or
    None.
    """
    if platform == "blackwell":
        return "no kernel for Blackwell"
    if tokens > TILE:
        return f"{tokens} tokens of a chunk are more than {TILE}"
    if sizes[0] > _LARGEST:
        return f"key size {sizes[0]} is more than {_LARGEST}"
    return None


def forward(
    first: jax.Array, parents: jax.Array, parts: Parts, *, interpret: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As ``tpu.forward``."""
    shape = parts.values.shape
    sizes = first.shape[-2:]
    values, corrections, scores, queries, to_end, decays = by_head(parts)
    right = [*in_turn(-corrections, queries), scores, *across(to_end)]
    given = in_order(values, right)
    plan = planned(values, corrections, interpret)
    first = filled(first.reshape(shape[0], plan.heads, *sizes)).swapaxes(2, 3)
    batch = shape[0]
    count = batch * plan.heads * plan.columns * TILE
    out, states = plgpu.kernel(
        functools.partial(_forward_kernel, plan=plan),
        kernel_name="delta_forward",
        out_type=[
            jax.ShapeDtypeStruct((count * plan.chunks, TILE), jnp.float32),
            jax.ShapeDtypeStruct((count * (plan.chunks + 1), plan.size), jnp.float32),
        ],
        scratch_types=[
            *ring(plan),
            tiles((TILE, plan.size), jnp.float32),
            tiles((TILE, TILE), jnp.float32),
            plgpu.Barrier(),
        ],
        **launch(plan, batch),
        interpret=interpret or None,
    )(parents.astype(jnp.int32), decays, given, first.reshape(-1, plan.size))
    out = from_tiles(out, plan, shape)
    states = states.reshape(batch, plan.heads, plan.chunks + 1, -1, plan.size)
    # XLA drops it where nobody uses it
    natural = states[:, :, 1:, : sizes[1], : sizes[0]].transpose(0, 2, 1, 4, 3)
    return out, natural.reshape(batch, -1, *shape[2:4], *sizes), states


def backward(
    states: jax.Array,
    parents: jax.Array,
    parts: Parts,
    d_out: jax.Array,
    d_states: jax.Array | None,
    *,
    interpret: Any,
) -> tuple[jax.Array, Parts]:
    """As ``tpu.backward``."""
    shape = parts.values.shape
    batch, chunks = shape[:2]
    parents = parents.astype(jnp.int32)
    values, corrections, scores, queries, to_end, decays = by_head(parts)
    heads = values.shape[1]
    d_out = filled(d_out.reshape(*shape[:2], heads, *shape[4:]).swapaxes(1, 2))
    right = [scores, *across(to_end), *in_turn(queries, -corrections)]
    given = in_order(d_out, right)
    plan = planned(values, corrections, interpret)
    count = batch * heads * plan.columns * TILE
    more = []
    if d_states is not None:
        sizes = d_states.shape[-2:]
        d_states = d_states.reshape(batch, chunks, heads, *sizes)
        d_states = filled(d_states).transpose(0, 2, 1, 4, 3)
        more = [d_states.reshape(-1, plan.size)]
    state = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    d_values, behind, d_first, _ = plgpu.kernel(
        functools.partial(_backward_kernel, plan=plan, used=bool(more)),
        kernel_name="delta_backward",
        out_type=[
            state((count * chunks, TILE)),
            state((count * chunks, plan.size)),
            state((count, plan.size)),
            # written and read for some chunks only
            state((count * chunks, plan.size)),
        ],
        scratch_types=[
            *ring(plan),
            tiles((TILE, plan.size), jnp.float32),
            tiles((TILE, plan.size), jnp.float32),
            tiles((TILE, TILE), jnp.float32),
            plgpu.Barrier(),
        ],
        **launch(plan, batch),
        interpret=interpret or None,
    )(parents, *continued(parents), decays, given, *more)

    # of every chunk by itself, with the state before it and the cotangent of the one behind it
    d_values = d_values.reshape(batch, heads, chunks, -1, TILE)
    behind = behind.reshape(batch, heads, chunks, -1, plan.size)
    before = jax.vmap(lambda x, at: x[:, at])(states, parents)
    changes = values - _einsum("bmnch,bmnwh->bmncw", corrections, before)
    slopes = {
        "values": d_values.swapaxes(3, 4),
        "corrections": -_einsum("bmnwc,bmnwh->bmnch", d_values, before),
        "scores": _einsum("bmncw,bmndw->bmncd", d_out, changes),
        "queries": _einsum("bmncw,bmnwh->bmnch", d_out, before),
        "to_end": _einsum("bmncw,bmnwh->bmnch", changes, behind),
    }
    d_end = decays * jnp.sum(before * behind, axis=(3, 4))
    d_first = d_first.reshape(batch, heads, -1, plan.size)
    size, columns = parts.corrections.shape[-1], shape[-1]
    d_first = d_first[..., :columns, :size].swapaxes(2, 3).reshape(batch, *shape[2:4], size, -1)
    found = {}
    for name, x in slopes.items():
        like = getattr(parts, name).shape
        found[name] = x[..., : like[-2], : like[-1]].swapaxes(1, 2).reshape(like)
    return d_first, Parts(**found, end=d_end.swapaxes(1, 2).reshape(parts.end.shape))


# --- Kernels --------------------------------------------------------------------------------------


# The memory of ``_forward_kernel``.
_ForwardRefs = collections.namedtuple(
    "_ForwardRefs",
    # In HBM: the states that chunks begin with, decays, tiles in the order in which they are used,
    # the state 0.
    "parents decays given first "
    # In HBM: the results.
    "out states "
    # In shared memory: the ring of tiles and its barriers.
    "ring filled emptied "
    # In shared memory: the state, and results before they are copied out.
    "kept own loaded",
)


def _forward_kernel(*arguments, plan: Plan):
    refs, _ = named(_ForwardRefs, arguments)
    row, head, wg = (jax.lax.axis_index(name) for name in ("row", "head", "wg"))
    of_state, of_chunk = (functools.partial(_rows, plan, x) for x in (plan.chunks + 1, plan.chunks))
    parts = _parts_of(plan.size)

    @pl.when(wg == 0)
    def _():
        _read(refs.first.at[_rows(plan, 1, 0)], refs.kept, refs.loaded)
        plgpu.copy_smem_to_gmem(refs.kept, refs.states.at[of_state(0)])

        @pl.loop(0, plan.chunks)
        def _(chunk):
            before = refs.parents[row, chunk]

            @pl.when(before != chunk)
            def _():
                plgpu.wait_smem_to_gmem(0)
                _read(refs.states.at[of_state(before)], refs.kept, refs.loaded)

            tile = _Tiles(refs, plan, chunk)
            decay = refs.decays[row, head, chunk]
            changes = _sum(tile.parts())
            out = full((TILE, TILE), 0.0, plgpu.Layout.WGMMA)
            for part in parts:
                state = _split(_load(refs.kept.at[:, part]))
                changes = tile.add(changes, state, transposed=True)
                out = tile.add(out, state, transposed=True)
            changes = _split(changes)
            out = tile.add(out, changes, transposed=True)
            # what was copied out before has been read, so that its buffers may be written to
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            refs.own[...] = out
            for part in parts:
                kept = refs.kept.at[:, part]
                kept[...] = tile.add(_load(kept) * decay, changes)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(refs.own, refs.out.at[of_chunk(chunk)])
            plgpu.copy_smem_to_gmem(refs.kept, refs.states.at[of_state(chunk + 1)])

        plgpu.wait_smem_to_gmem(0)

    _fetch(refs, plan, wg)


# The memory of ``_backward_kernel``, as of ``_ForwardRefs``.
_BackwardRefs = collections.namedtuple(
    "_BackwardRefs",
    "parents "
    # ``blocks.continued``.
    "chunks starts decays given "
    # In HBM: cotangents of the states behind chunks that were given, or None.
    "d_states "
    # In HBM: cotangents of values, of the states behind chunks, of the state 0, and of those that
    # chunks begin with.
    "d_values behind d_first begins "
    "ring filled emptied "
    # In shared memory: the cotangent of the state between this chunk and the one before, another
    # that was read, and results before they are copied out.
    "kept landed own loaded",
)


def _backward_kernel(*arguments, plan: Plan, used: bool):
    given = list(arguments)
    if not used:
        given.insert(_BackwardRefs._fields.index("d_states"), None)
    refs, _ = named(_BackwardRefs, given)
    row, head, wg = (jax.lax.axis_index(name) for name in ("row", "head", "wg"))
    of_chunk = functools.partial(_rows, plan, plan.chunks)
    parts = _parts_of(plan.size)

    def add(source):
        """Adds a state's cotangent in HBM to ``kept``."""
        plgpu.wait_smem_to_gmem(0)
        _read(source, refs.landed, refs.loaded)
        for part in parts:
            refs.kept.at[:, part][...] = _load(refs.kept.at[:, part]) + _load(
                refs.landed.at[:, part]
            )
        plgpu.commit_smem()

    def add_others(number):
        """Adds what came back to a state from chunks that are not right behind it."""

        @pl.loop(refs.starts[row, number], refs.starts[row, number + 1])
        def _(at):
            add(refs.begins.at[of_chunk(refs.chunks[row, at])])

    def clear():
        for part in parts:
            refs.kept.at[:, part][...] = full((TILE, TILE), 0.0, plgpu.Layout.WGMMA)
        plgpu.commit_smem()

    @pl.when(wg == 0)
    def _():
        clear()

        @pl.loop(0, plan.chunks)
        def _(step):
            chunk = plan.chunks - 1 - step
            add_others(chunk + 1)
            if used:
                add(refs.d_states.at[of_chunk(chunk)])
            plgpu.copy_smem_to_gmem(refs.kept, refs.behind.at[of_chunk(chunk)])
            tile = _Tiles(refs, plan, step)
            decay = refs.decays[row, head, chunk]
            d_out = tile.parts()
            d_changes = tile.add(full((TILE, TILE), 0.0, plgpu.Layout.WGMMA), d_out)
            for part in parts:
                behind = _split(_load(refs.kept.at[:, part]))
                d_changes = tile.add(d_changes, behind, transposed=True)
            # what was copied out before has been read, so that its buffers may be written to
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            refs.own[...] = d_changes
            d_changes = _split(d_changes)
            for part in parts:
                kept = refs.kept.at[:, part]
                before = tile.add(_load(kept) * decay, d_out)
                kept[...] = tile.add(before, d_changes)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(refs.own, refs.d_values.at[of_chunk(chunk)])

            @pl.when(refs.parents[row, chunk] != chunk)
            def _():
                plgpu.copy_smem_to_gmem(refs.kept, refs.begins.at[of_chunk(chunk)])
                # another chunk reads it, and ``kept`` is written to
                plgpu.wait_smem_to_gmem(0)
                clear()

        add_others(0)
        plgpu.copy_smem_to_gmem(refs.kept, refs.d_first.at[_rows(plan, 1, 0)])
        plgpu.wait_smem_to_gmem(0)

    _fetch(refs, plan, wg, reverse=True)


class _Tiles:
    """The tiles of a chunk, one after another as they arrive in the ring."""

    def __init__(self, refs, plan: Plan, turn):
        self.refs, self.plan = refs, plan
        self.step = turn * plan.tiles

    def parts(self) -> list:
        """The parts of the next tile, in registers."""
        found = [_load(part) for part in self._next()]
        self._done()
        return found

    def add(self, total, lefts: Sequence, transposed: bool = False):
        """total + left @ the next tile, or its transpose.

        total: in registers. lefts: the parts of the left side, in registers.
        """
        rights = self._next()
        if transposed:
            rights = [right.transpose((1, 0)) for right in rights]

        def multiply(sums):
            for one, other in _PAIRS:
                plgpu.wgmma(sums, lefts[one], rights[other])

        if self.plan.interpret:  # which has no wgmma
            for one, other in _PAIRS:
                product = jnp.dot(
                    lefts[one], rights[other][...], preferred_element_type=jnp.float32
                )
                total = total + product
        else:
            total = pl.run_state(multiply)(plgpu.ACC.init(total))
        self._done()
        return total

    def _next(self) -> list:
        slot = self._slot()
        plgpu.barrier_wait(self.refs.filled.at[slot])
        return [self.refs.ring.at[slot, pl.ds(part * TILE, TILE)] for part in range(PARTS)]

    def _done(self) -> None:
        # what was read by loads may be overwritten by the copy engine only after a fence
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.refs.emptied.at[self._slot()])
        self.step = self.step + 1

    def _slot(self):
        return jax.lax.rem(self.step, jnp.int32(STEPS))


def _fetch(refs, plan: Plan, wg, reverse: bool = False) -> None:
    """The work of the warpgroup that copies. reverse: the last chunk comes first."""
    row, head, part = (jax.lax.axis_index(name) for name in ("row", "head", "part"))

    def sources(step):
        turn, at = (f(step, jnp.int32(plan.tiles)) for f in (jax.lax.div, jax.lax.rem))
        chunk = plan.chunks - 1 - turn if reverse else turn
        # the first tile is that of the thread block's own columns
        tile = jnp.where(at == 0, part, plan.columns - 1 + at)
        number = (row * plan.heads + head) * plan.chunks + chunk
        first = (number * (plan.columns + plan.tiles - 1) + tile) * (PARTS * TILE)
        return (refs.given.at[pl.ds(pl.multiple_of(first, TILE), PARTS * TILE)],)

    @pl.when(wg == 1)
    def _():
        rings = (refs.ring,)
        fetch(plan.chunks * plan.tiles, sources, rings, refs.filled, refs.emptied, STEPS)


def _rows(plan: Plan, count: int, number):
    """The rows of the thread block's columns in an array [B * M * count * P * 64, ...]: those of
    its head's chunk or state with this number, of ``count``.
    """
    row, head, part = (jax.lax.axis_index(name) for name in ("row", "head", "part"))
    at = ((row * plan.heads + head) * count + number) * plan.columns + part
    return pl.ds(pl.multiple_of(at * TILE, TILE), TILE)


def _read(source, there, loaded) -> None:
    plgpu.copy_gmem_to_smem(source, there, loaded)
    plgpu.barrier_wait(loaded)


def _split(x) -> list:
    """Three numbers in bfloat16 whose sum is x."""
    found = []
    for _ in range(PARTS):
        part = x.astype(jnp.bfloat16)
        found.append(part)
        x = x - part.astype(jnp.float32)
    return found


def _sum(parts: Sequence):
    """The number whose parts these are."""
    high, middle, low = (part.astype(jnp.float32) for part in parts)
    return high + (middle + low)


def _load(ref):
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA)


def _parts_of(size: int) -> list:
    return [pl.ds(at, TILE) for at in range(0, size, TILE)]
