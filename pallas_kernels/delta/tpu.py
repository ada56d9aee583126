"""The gated delta rule by chunks on TPU (Mosaic), forward and backward.

The grid goes through the chunks of a head one after another. What a chunk is made of (its system,
the inverse, scores) is computed in VMEM from q, k, v, decays and rates, and backward once more, so
that none of it is in HBM. A core keeps the head's state in VMEM. States go to HBM by copies that
the kernel makes itself, while it computes the next chunk. From there a chunk that does not continue
the one just before reads its first state.

Backward, the chunks are gone through in reverse. The cotangent of a state comes from the chunk
right behind it, which leaves it in VMEM, and from others that begin with it, which leave theirs in
HBM (``blocks.continued``).

Dimensions: B rows, N chunks, C tokens of a chunk, K key heads, R value heads of a key head, M = K R
value heads, H key size, W columns of a state.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.delta.blocks import continued, cost

DTYPES = ("float32",)
# Rows of a tile of float32.
_SUBLANES = 8
# Elements of a state that fit into VMEM several times, beside what a chunk reads and writes.
_LARGEST = 256 * 512


def obstacle(platform: str, tokens: int, sizes: tuple[int, int]) -> str | None:
    """Reason why a state of ``sizes`` [H, W] cannot be passed over chunks of ``tokens`` tokens, or
    None.
    """
    size, columns = sizes
    if tokens % _SUBLANES or size % _SUBLANES:
        return (
            f"{tokens} tokens of a chunk and the key size {size} must be multiples of {_SUBLANES}"
        )
    if size * columns > _LARGEST:
        return f"a state of {size} by {columns} elements is more than {_LARGEST}"
    return None


class Heads(NamedTuple):
    """Tokens of chunks, by heads."""

    q: jax.Array  # [B, N, K, C, H]
    k: jax.Array  # [B, N, K, C, H]
    v: jax.Array  # [B, N, M, C, W]
    # The logarithm of the decay from the chunk's first token to each, both included.
    total: jax.Array  # [B, N, M, 1, C]
    rates: jax.Array  # [B, N, M, 1, C]


def prepared(q, k, v, g, beta, columns: int) -> Heads:
    """The arguments of the kernels; its own are those of ``reference.parts``."""
    q, k = (x.swapaxes(2, 3) for x in (q, k))
    v = jnp.pad(v, [*((0, 0),) * 5, (0, columns - v.shape[-1])])
    v = v.reshape(*v.shape[:3], -1, columns).swapaxes(2, 3)
    numbers = (x.reshape(*x.shape[:3], -1) for x in (jnp.cumsum(g, axis=2), beta))
    return Heads(q, k, v, *(x.swapaxes(2, 3)[:, :, :, None] for x in numbers))


def forward(
    first: jax.Array, parents: jax.Array, heads: Heads, *, interpret: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(results [B, N, K, R, C, W], the states behind chunks [B, N, K, R, H, W], what ``backward``
    needs: these with the state 0).
    """
    shape = first.shape
    first = first.reshape(shape[0], -1, *shape[3:])
    batch, chunks, count, tokens, columns = heads.v.shape
    state = first.shape[2:]
    out, states = pl.pallas_call(
        _forward_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, count, chunks),
            in_specs=[*_of_chunk(heads), _in_hbm()],
            out_specs=[_block(heads.v), _in_hbm()],
            scratch_shapes=[
                # the states behind this chunk and the one before, and one that was read back
                pltpu.VMEM((3, *state), jnp.float32),
                # of both states that are written, and of the one that is read
                pltpu.SemaphoreType.DMA((3,)),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(heads.v.shape, jnp.float32),
            jax.ShapeDtypeStruct((batch, chunks + 1, count, *state), jnp.float32),
        ],
        compiler_params=_params(),
        interpret=interpret,
        cost_estimate=_estimate("forward", heads),
        name="delta_forward",
    )(parents.astype(jnp.int32), *heads, first)
    out = out.reshape(batch, chunks, *shape[1:3], tokens, columns)
    states = states.reshape(batch, chunks + 1, *shape[1:])
    return out, states[:, 1:], states


def backward(
    states: jax.Array,
    parents: jax.Array,
    heads: Heads,
    d_out: jax.Array,
    d_states: jax.Array | None,
    *,
    interpret: Any,
) -> tuple[jax.Array, Heads]:
    """(the gradient of ``first``, those of ``heads``).

    states: the last result of ``forward``. d_out, d_states: cotangents of the others; None for
      states that nobody uses.
    """
    batch, chunks, count, *_ = heads.v.shape
    parents = parents.astype(jnp.int32)
    shape = states.shape
    states = states.reshape(*shape[:2], count, *shape[4:])
    state = states.shape[3:]

    def begin(b, m, i, parents, *_):
        return b, parents[b, chunks - 1 - i], m, 0, 0

    d_out = d_out.reshape(heads.v.shape)
    arrays = [states, *heads, d_out]
    specs = [pl.BlockSpec((1, 1, 1, *state), begin), *_of_chunk(heads, True), _block(d_out, True)]
    if d_states is not None:
        arrays.append(d_states.reshape(batch, chunks, count, *state))
        specs.append(_block(arrays[-1], True))
    # every value head has a gradient of its own of what it shares with others
    own = [jax.ShapeDtypeStruct((*x.shape[:2], count, *x.shape[3:]), jnp.float32) for x in heads]
    *d_heads, d_first, _ = pl.pallas_call(
        functools.partial(_backward_kernel, used=d_states is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(batch, count, chunks),
            in_specs=specs,
            out_specs=[
                *(_block(x, True) for x in own),
                pl.BlockSpec((1, 1, *state), lambda b, m, i, *_: (b, m, 0, 0)),
                _in_hbm(),
            ],
            scratch_shapes=[
                pltpu.VMEM(state, jnp.float32),
                pltpu.VMEM(state, jnp.float32),
                pltpu.SemaphoreType.DMA,
            ],
        ),
        out_shape=[
            *own,
            jax.ShapeDtypeStruct((batch, count, *state), jnp.float32),
            # written and read for some chunks only
            jax.ShapeDtypeStruct((batch, chunks, count, *state), jnp.float32),
        ],
        compiler_params=_params(),
        interpret=interpret,
        cost_estimate=_estimate("backward", heads),
        name="delta_backward",
    )(parents, *continued(parents), *arrays)
    d_heads = [
        jnp.sum(x.reshape(*y.shape[:3], -1, *y.shape[3:]), axis=3)
        for x, y in zip(d_heads, heads, strict=True)
    ]
    return d_first.reshape(batch, *shape[2:]), Heads(*d_heads)


# --- Kernels --------------------------------------------------------------------------------------


# The memory of ``_forward_kernel``.
_ForwardRefs = collections.namedtuple(
    "_ForwardRefs",
    # In scalar memory: the states that chunks begin with.
    "parents "
    # ``Heads`` of the chunk.
    "q k v total rates "
    # In HBM: the state 0.
    "first "
    # The results of the chunk; in HBM: the states.
    "out states "
    "kept semaphores",
)


def _forward_kernel(*arguments):
    refs = _ForwardRefs(*arguments)
    row, head, chunk = (pl.program_id(axis) for axis in range(3))
    last = pl.num_programs(2) - 1
    # the chunks take turns with the first two places of ``kept``; the third is of what is read back
    slot = chunk % 2
    before = refs.parents[row, chunk]
    near = (before == chunk) & (chunk > 0)

    def write(chunk):
        """The copy of the state behind a chunk to HBM."""
        there = refs.states.at[row, chunk + 1, head]
        return pltpu.make_async_copy(refs.kept.at[chunk % 2], there, refs.semaphores.at[chunk % 2])

    def copy(source, there):
        done = pltpu.make_async_copy(source, there, refs.semaphores.at[2])
        done.start()
        done.wait()

    @pl.when(chunk == 0)
    def _():
        copy(refs.first.at[row, head], refs.kept.at[2])
        copy(refs.kept.at[2], refs.states.at[row, 0, head])

    # Its place is needed. A chunk that is read back lies before the last one, and so has arrived.
    @pl.when(chunk >= 2)
    def _():
        write(chunk - 2).wait()

    @pl.when((chunk > 0) & (before != chunk))
    def _():
        copy(refs.states.at[row, before, head], refs.kept.at[2])

    state = refs.kept[jnp.where(near, 1 - slot, 2)]
    parts = _parts(*_chunk(refs))
    inverse = _inverse(parts.system)
    corrections = _dot(inverse, parts.keys)
    changes = _dot(inverse, parts.values) - _dot(corrections, state)
    refs.out[0, 0, 0] = _dot(parts.queries, state) + _dot(parts.scores, changes)
    refs.kept[slot] = parts.decay * state + _dot(parts.to_end, changes, (0, 0))
    write(chunk).start()

    @pl.when(chunk == last)
    def _():
        pl.when(chunk > 0)(lambda: write(chunk - 1).wait())
        write(chunk).wait()


# The memory of ``_backward_kernel``, as of ``_ForwardRefs``.
_BackwardRefs = collections.namedtuple(
    "_BackwardRefs",
    "parents "
    # ``blocks.continued``.
    "chunks starts "
    # The state that the chunk begins with.
    "begin "
    "q k v total rates "
    # Cotangents of the results, and of the state behind the chunk or None.
    "d_out d_state "
    "d_q d_k d_v d_total d_rates d_first "
    # In HBM: cotangents of the states that chunks begin with.
    "begins "
    # Cotangent of the state between this chunk and the one before, and what was read from
    # ``begins``.
    "carry landed semaphore",
)


def _backward_kernel(*arguments, used: bool):
    arguments = list(arguments)
    if not used:
        arguments.insert(_BackwardRefs._fields.index("d_state"), None)
    refs = _BackwardRefs(*arguments)
    row, head, step = (pl.program_id(axis) for axis in range(3))
    chunk = pl.num_programs(2) - 1 - step

    def copy(source, there):
        done = pltpu.make_async_copy(source, there, refs.semaphore)
        done.start()
        done.wait()

    def add(number):
        """Adds what came back to a state from chunks that are not right behind it."""

        @pl.loop(refs.starts[row, number], refs.starts[row, number + 1])
        def _(at):
            copy(refs.begins.at[row, refs.chunks[row, at], head], refs.landed)
            refs.carry[...] += refs.landed[...]

    @pl.when(step == 0)
    def _():
        refs.carry[...] = jnp.zeros(refs.carry.shape, jnp.float32)

    add(chunk + 1)
    behind = refs.carry[...]
    if used:
        behind = behind + refs.d_state[0, 0, 0]
    state = refs.begin[0, 0, 0]
    d_out = refs.d_out[0, 0, 0]
    parts, pull = jax.vjp(_parts, *_chunk(refs))
    inverse = _inverse(parts.system)
    values, corrections = _dot(inverse, parts.values), _dot(inverse, parts.keys)
    changes = values - _dot(corrections, state)
    d_changes = _dot(parts.scores, d_out, (0, 0)) + _dot(parts.to_end, behind)
    d_values = _dot(inverse, d_changes, (0, 0))
    d_keys = -_dot(inverse, _dot(d_changes, state, (1, 1)), (0, 0))
    slopes = pull(
        _Parts(
            system=-_dot(d_values, values, (1, 1)) - _dot(d_keys, corrections, (1, 1)),
            values=d_values,
            keys=d_keys,
            scores=_dot(d_out, changes, (1, 1)),
            queries=_dot(d_out, state, (1, 1)),
            to_end=_dot(changes, behind, (1, 1)),
            decay=_sum(_sum(state * behind, 1), 0),
        )
    )
    for ref, slope in zip(
        (refs.d_q, refs.d_k, refs.d_v, refs.d_total, refs.d_rates), slopes, strict=True
    ):
        ref[0, 0, 0] = slope
    before = _dot(parts.queries, d_out, (0, 0)) - _dot(corrections, d_changes, (0, 0))
    refs.carry[...] = parts.decay * behind + before

    @pl.when(refs.parents[row, chunk] != chunk)
    def _():
        copy(refs.carry, refs.begins.at[row, chunk, head])
        refs.carry[...] = jnp.zeros(refs.carry.shape, jnp.float32)

    @pl.when(chunk == 0)
    def _():
        add(0)
        refs.d_first[0, 0] = refs.carry[...]


def _chunk(refs) -> list[jax.Array]:
    """``Heads`` of a chunk."""
    return [x[0, 0, 0] for x in (refs.q, refs.k, refs.v, refs.total, refs.rates)]


class _Parts(NamedTuple):
    """``reference.Parts`` of one chunk, before its system is solved."""

    system: jax.Array  # [C, C]
    # The right sides.
    values: jax.Array  # [C, W]
    keys: jax.Array  # [C, H]
    scores: jax.Array  # [C, C]
    queries: jax.Array  # [C, H]
    to_end: jax.Array  # [C, H]
    # Over the whole chunk.
    decay: jax.Array  # [1, 1]


def _parts(q, k, v, total, rates) -> _Parts:
    """The parts of a chunk, as ``reference.parts``."""
    size = q.shape[0]
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))

    def upright(x):
        """[1, C] -> [C, 1]."""
        return _sum(jnp.where(row == column, x, 0.0), 1)

    along, rates = upright(total), upright(rates)
    decay = jnp.exp(jnp.where(row >= column, along - total, -jnp.inf))
    grown = jnp.exp(along)
    end = _sum(jnp.where(column[:1] == size - 1, total, 0.0), 1)
    return _Parts(
        system=jnp.where(row > column, rates * _dot(k, k, (1, 1)) * decay, 0.0),
        values=rates * v,
        keys=rates * grown * k,
        scores=_dot(q, k, (1, 1)) * decay,
        queries=q * grown,
        to_end=jnp.exp(end - along) * k,
        decay=jnp.exp(end),
    )


def _inverse(system):
    """The inverse of 1 + system [C, C], by blocks of 1, 2, 4, ... rows (``reference.solve``)."""
    count = system.shape[0]
    row, column = (jax.lax.broadcasted_iota(jnp.int32, system.shape, axis) for axis in (0, 1))
    inverse = jnp.where(row == column, 1.0, 0.0)
    size = 1
    while size < count:
        # of each pair of blocks on the diagonal the one that lies below the first
        below = (row // (2 * size) == column // (2 * size)) & (row // size > column // size)
        # [[A, 0], [B, D]]: below the inverses of A and D stands -D^-1 B A^-1
        added = jnp.where(below, system, 0.0)
        inverse = inverse - (added if size == 1 else _dot(inverse, _dot(added, inverse)))
        size *= 2
    return inverse


def _sum(x, axis: int):
    return jnp.sum(x, axis=axis, keepdims=True)


def _dot(a, b, axes: tuple[int, int] = (1, 0)):
    """a and b multiplied and summed over an axis of each, in float32."""
    left, right = axes
    # without it the matrix unit rounds operands to bfloat16
    return jax.lax.dot_general(
        a,
        b,
        (((left,), (right,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


# --- How arrays lie in memory ---------------------------------------------------------------------


def _of_chunk(heads: Heads, reverse: bool = False) -> list[pl.BlockSpec]:
    """The blocks of a chunk; value heads share q and k."""
    count = heads.v.shape[2]
    return [_block(x, reverse, count // x.shape[2]) for x in heads]


def _block(x: jax.Array | jax.ShapeDtypeStruct, reverse: bool = False, each: int = 1):
    """The block of a chunk of x [B, N, heads, ...]; ``each`` value heads share one of its heads."""
    chunks = x.shape[1]

    def index(b, m, i, *_):
        return b, chunks - 1 - i if reverse else i, m // each, 0, 0

    return pl.BlockSpec((1, 1, 1, *x.shape[3:]), index)


def _in_hbm() -> pl.BlockSpec:
    return pl.BlockSpec(memory_space=pl.ANY)


def _params() -> pltpu.CompilerParams:
    return pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary"))


def _estimate(kernel: str, heads: Heads) -> pl.CostEstimate:
    found = cost(kernel, heads.v.shape, heads.k.shape[-1])
    return pl.CostEstimate(**dataclasses.asdict(found))
