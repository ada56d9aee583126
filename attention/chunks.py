"""Rows cut into chunks of one run each, for methods that pass a state from token to token.

A run is a stretch of tokens of one segment and branch. It begins with the state at the end of the
run that it continues, and every run has chunks of its own. Where the tokens of rows are cut over
devices (the mesh axis ``context``), a run that lies on several devices is cut at their borders. A
device computes the chunks of its own slots; the states that its tokens need from the devices before
it are those *open* at its first slot. Every device works out all of it, from numbers of whole rows.

At a border each open run has a run of its own behind it: itself, if the border cuts it, or one that
continues it. So at most half of the runs of a row, rounded up, are open at once.

Dimensions: B rows, T tokens, P parts of a row (devices), L = T / P tokens of a part, N chunks of a
part, C tokens of a chunk, J runs of a row, M open runs, w tokens of a convolution.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from attention.ring import Ring
from pallas_kernels.tokens import Tokens, nodes

# Tokens of a chunk in rows, and at most in pages.
CHUNK = 64


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chunks:
    """Parts of rows cut into chunks of one run each; one part without the axis P (``part``)."""

    # The slot of the part of every place of a chunk, -1 for none.
    slots: Int[Array, "B P N*C"]
    # The place of every slot, past the last one for padding.
    places: Int[Array, "B P L"]
    # The number before each token on its path, of w - 1 numbers of each open run and then the slots
    # of the part; -1 for none.
    previous: Int[Array, "B P M*(w-1)+L"]
    # The chunk from whose last state each chunk begins, counted from 1; 0 for the state before all
    # chunks.
    parents: Int[Array, "B P N"]
    # The open run from whose state the runs before each chunk begin, -1 for a state of zeros.
    roots: Int[Array, "B P N"]
    # Of the open runs at the border of a part, the slots of the row of their last tokens, -1 for
    # none.
    tails: Int[Array, "B P M w-1"]
    # Of the open runs at the next border: the chunk with whose state they end, counted from 1, or 0
    # for a run that ends before the part.
    exits: Int[Array, "B P M"]
    # The open run from whose state that chunk's runs begin, -1 for a state of zeros. For a run that
    # ends before the part: its own number there.
    sources: Int[Array, "B P M"]

    def part(self, ring: Ring | None) -> Chunks:
        """The part of this device."""
        number = 0 if ring is None else jax.lax.axis_index(ring.axis)
        return jax.tree.map(
            lambda x: jax.lax.dynamic_index_in_dim(x, number, axis=1, keepdims=False), self
        )


def cut_rows(tokens: Tokens, runs: int, parts: int, align: int, width: int) -> Chunks:
    """The chunks of rows.

    runs: J. parts: P, of which T must be a multiple. align: the number of which the first slot of
    every run is a multiple. width: w.
    """
    size = tokens.shape[1] // parts
    count = -(-size // CHUNK)
    # where runs begin at multiples of a chunk none is cut by the border of another, but for the
    # first one of a part that begins at no such slot
    count += runs if align % CHUNK else int(size % CHUNK > 0 and parts > 1)
    most = (runs + 1) // 2 if parts > 1 else 0
    tokens, last = nodes(tokens)
    fields = tokens.segments, tokens.branches, last, tokens.order

    def of_row(*fields):
        found = _runs(*fields, runs)
        opened = jax.vmap(lambda number: _opened(found, number * size, most))
        begins = jnp.arange(parts)
        # behind the last part nothing is open
        ahead = jnp.where((begins < parts - 1)[:, None], opened(begins + 1), -1)
        of_part = jax.vmap(lambda *given: _part(found, *given, size, count, width))
        return of_part(begins, opened(begins), ahead)

    return jax.tree.map(lambda x: x.astype(jnp.int32), jax.vmap(of_row)(*fields))


@dataclasses.dataclass(frozen=True)
class _Runs:
    """The runs of a row."""

    # The run of every slot, J or more for padding behind the last one.
    of_slot: Int[Array, " T"]
    # Which slots hold a token.
    real: Bool[Array, " T"]
    # The first slot of every run, and the one behind its last; equal for a run of padding.
    first: Int[Array, " J"]
    end: Int[Array, " J"]
    # The run that each one continues, -1 for none.
    parent: Int[Array, " J"]
    # The slot of the token before each one on its path, -1 for none.
    previous: Int[Array, " T"]


def _runs(segments, branches, last, order, runs: int) -> _Runs:
    """The runs of a row, of which the arguments [T] are."""
    size = order.shape[0]
    slots = jnp.arange(size)
    changes = (segments != jnp.roll(segments, 1)) | (branches != jnp.roll(branches, 1))
    changes = changes.at[0].set(True)
    run = jnp.cumsum(changes) - 1
    (first,) = jnp.nonzero(changes, size=runs, fill_value=size)

    def of_run(x):
        return x.at[first].get(mode="fill", fill_value=0)

    segment, branch, until, start = map(of_run, (segments, branches, last, order))
    length = jax.ops.segment_sum(jnp.ones_like(slots), run, num_segments=runs)
    length = jnp.where(segment > 0, length, 0)
    # the run that each one continues: of those that it sees the one that ends last
    before = (length > 0)[None] & (segment[None] == segment[:, None])
    before &= (branch[None] < branch[:, None]) & (branch[:, None] <= until[None])
    ends = jnp.where(before, (start + length)[None], -1)
    parent = jnp.where(jnp.any(before, axis=1), jnp.argmax(ends, axis=1), -1)
    own = jnp.minimum(run, runs - 1)
    final = jnp.where(parent >= 0, first[parent] + length[parent] - 1, -1)
    previous = jnp.where(slots == first[own], final[own], slots - 1)
    real = segments > 0
    return _Runs(run, real, first, first + length, parent, jnp.where(real, previous, -1))


def _opened(runs: _Runs, border, most: int):
    """The runs [M] whose states before a border some token behind it needs, -1 for none."""
    count = runs.first.shape[0]
    behind = (runs.first >= border) & (runs.end > runs.first) & (runs.parent >= 0)
    parents = jnp.where(behind, runs.parent, count)
    continued = jnp.zeros((count,), bool).at[parents].set(True, mode="drop")
    opened = (runs.first < border) & ((runs.end > border) | continued)
    (found,) = jnp.nonzero(opened, size=most, fill_value=-1)
    return found


def _part(runs: _Runs, number, opened, ahead, size: int, count: int, width: int) -> Chunks:
    """One part of a row. opened, ahead: the open runs [M] at its border and at the next one."""
    begin, most = number * size, opened.shape[0]
    first = jnp.clip(runs.first, begin, begin + size)
    end = jnp.clip(runs.end, first, begin + size)
    length = end - first
    # every run has chunks of its own
    chunks = -(-length // CHUNK)
    behind = jnp.cumsum(chunks)
    start = behind - chunks
    # the run with whose state each one begins: its own where a border cuts it
    source = jnp.where(runs.first < begin, jnp.arange(first.shape[0]), runs.parent)
    here = (source >= 0) & (runs.first >= begin) & (length[source] > 0)
    roots = jnp.where((source >= 0) & ~here, _place(opened, source), -1)
    roots = _of_first(jnp.where(here, source, jnp.arange(first.shape[0])), roots)

    chunk = jnp.arange(count)
    filled = chunk < behind[-1]
    run = jnp.minimum(jnp.searchsorted(behind, chunk, side="right"), first.shape[0] - 1)
    before = jnp.where(here, behind[source], 0)
    parents = jnp.where(chunk == start[run], before[run], chunk)
    inside = (chunk - start[run])[:, None] * CHUNK + jnp.arange(CHUNK)
    there = (inside < length[run][:, None]) & filled[:, None]
    chunk_slots = jnp.where(there, (first[run] - begin)[:, None] + inside, -1).reshape(-1)

    slots = begin + jnp.arange(size)
    run_of_slot, real, previous = (x[slots] for x in (runs.of_slot, runs.real, runs.previous))
    own = jnp.minimum(run_of_slot, first.shape[0] - 1)
    places = start[own] * CHUNK + slots - first[own]
    places = jnp.where(real & (run_of_slot < first.shape[0]), places, count * CHUNK)
    # in front of the part's own slots stand the last tokens of the open runs
    tail = width - 1
    open_numbers = jnp.arange(most * tail)
    open_previous = jnp.where(open_numbers % max(tail, 1) > 0, open_numbers - 1, -1)
    from_open = (_place(opened, source) * tail + tail - 1)[own]
    own_previous = jnp.where(previous >= begin, previous - begin + most * tail, from_open)
    own_previous = jnp.where(previous >= 0, own_previous, -1)
    steps = [jnp.where(opened >= 0, jnp.minimum(runs.end[opened], begin) - 1, -1)]
    for _ in range(tail - 1):
        steps.insert(0, jnp.where(steps[0] >= 0, runs.previous[steps[0]], -1))
    tails = jnp.stack(steps[:tail], axis=-1) if tail else jnp.zeros((most, 0), int)

    ends_here = (ahead >= 0) & (length[ahead] > 0)
    exits = jnp.where(ends_here, behind[ahead], 0)
    passed = jnp.where(ahead >= 0, _place(opened, ahead), -1)
    return Chunks(
        slots=chunk_slots,
        places=places,
        previous=jnp.concatenate([open_previous, own_previous]),
        parents=jnp.where(filled, parents, 0),
        roots=jnp.where(filled, roots[run], -1),
        tails=tails,
        exits=exits,
        sources=jnp.where(ends_here, roots[ahead], passed),
    )


def _place(opened, runs):
    """The places of runs [J] among the open ones, -1 for those that are not."""
    if not opened.shape[0]:
        return jnp.full_like(runs, -1)
    equal = opened[None] == runs[:, None]
    return jnp.where(jnp.any(equal, axis=1), jnp.argmax(equal, axis=1), -1)


def _of_first(before, values):
    """The values [J] of the first run on the path to each one. before: the run before each, its own
    number for a first one.
    """
    # each round doubles how far a run looks back
    for _ in range(math.ceil(math.log2(max(before.shape[0], 2)))):
        before = before[before]
    return values[before]
