"""The pages that a kernel reads: lists made from tables or picks, cut into splits, with who sees
what of them.

A unit is what attends together: a row with all its new tokens, or, where pages are picked, one
token. A unit has one list of pages for all key/value heads, or one for each list of picks. The list
goes in order through the pages that some query of the unit sees. Other pages between them stay in
the list as holes, which a kernel does not read. To close the holes would take a sort.

Dimensions: U units, Q queries of a unit, C lists of a unit, n pages of a list, B rows, T queries, P
pages of a table.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.cost import Cost
from pallas_kernels.tuned import check_positive

_FAR = jnp.iinfo(jnp.int32).max


@dataclasses.dataclass(frozen=True)
class TuningConfig:
    """Sizes of the paged kernels."""

    # Parts of a list that are attended to separately, and then merged.
    splits: int
    # Tokens that a step fetches.
    keys: int
    # Steps in flight on GPU; on TPU there are always two.
    steps: int = 3
    # On GPU, "wgmma" (Hopper) or "tcgen05" (Blackwell).
    matrix_unit: str = "wgmma"
    # Whether the thread blocks of a list's splits on GPU are a cluster, which merges their results.
    # The interpreter runs all of a cluster at the same time, and hangs with fewer threads.
    cluster: bool = True

    def __post_init__(self) -> None:
        check_positive(self)


# Streaming multiprocessors of a GPU. The ring of one thread block fills the shared memory of one.
_PROCESSORS = {"hopper": 132, "blackwell": 148}
# Tokens of a step on GPU. Each is a row of a product.
GPU_KEYS = 128
# The time to start and end a thread block, in steps.
_BLOCK_STEPS = 3
# Most bytes of keys and values that a TPU fetches in a step.
_STEP_BYTES = 2**21
# Query rows of a thread block on GPU: a multiple of COLUMNS, and at most MAX_COLUMNS.
COLUMNS = 16
MAX_COLUMNS = 64


def columns(rows: int) -> int:
    """Query rows of a thread block on GPU, where ``rows`` of them share keys."""
    return min(-(-rows // COLUMNS) * COLUMNS, MAX_COLUMNS)


def heuristic(
    device: str, lists: int, rows: int, places: int, place_bytes: int, page: int
) -> TuningConfig:
    """Sizes for a device, chosen by reasoning and not by timing.

    device: "tpu", "hopper" or "blackwell".
    lists: lists that are gone through separately, before they are split.
    rows: query rows that share a key.
    places: most tokens of a list.
    place_bytes: bytes of the keys and values of one token, of all heads that are fetched together.
    page: tokens of a page.
    """
    if device == "tpu":
        keys = max(min(512, _STEP_BYTES // place_bytes), 128) // page * page or page
        return TuningConfig(min(2, -(-places // keys)), keys)  # two cores at most share a kernel
    blocks = lists * -(-rows // columns(rows))
    return TuningConfig(
        splits=splits_for(device, blocks, -(-places // GPU_KEYS)),
        keys=GPU_KEYS,
        steps=3 if columns(rows) == COLUMNS else 2,
        matrix_unit="wgmma" if device == "hopper" else "tcgen05",
    )


def splits_for(device: str, blocks: int, steps: int) -> int:
    """Splits of lists of so many steps on "hopper" or "blackwell", with so many thread blocks for
    each split.
    """

    # in steps: thread blocks run in waves of one for each processor
    def time(splits: int) -> int:
        waves = -(-blocks * splits // _PROCESSORS[device])
        return waves * (-(-steps // splits) + _BLOCK_STEPS)

    return min(range(1, min(steps, _PROCESSORS[device]) + 1), key=time)


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of a kernel: the pages that each unit reads, and what its queries see of them."""

    # int32 [U, C, 2 splits + n], and n more if ``numbered``, and n more if ``padded``. A list has
    # up to four parts: for each split, where it begins and ends among the pages; then the pages;
    # then, if ``numbered``, the pages' numbers in the sequence; then, if ``padded``, how many
    # places at the start of each page hold a token. A hole, a page that no query needs, is ~p,
    # where p is some page of the list. It is negative, so that a kernel can skip it, and a kernel
    # that copies all the same can copy p.
    lists: jax.Array
    # int32 [U, 2, Q]: the first and the last place that each query sees. For a query that sees none
    # the last is less than the first.
    bounds: jax.Array
    # int32 [U, 4], over the queries of a unit that see any place. Elements 0 and 1 are the greatest
    # first place and the least last place: from the one to the other every query sees every place,
    # and no mask is needed. Elements 2 and 3 are the least first place and the greatest last place:
    # outside of them no query sees anything.
    spans: jax.Array
    # Parts into which every list is cut.
    splits: int
    # Whether pages carry their numbers, as under selection. Otherwise a page's place in the list is
    # its number.
    numbered: bool
    # Whether pages may end in padding, which nobody sees. Otherwise every place is a token's.
    padded: bool = False

    @property
    def pages(self) -> int:
        """n, the pages of a list."""
        parts = 1 + self.numbered + self.padded
        return (self.lists.shape[2] - 2 * self.splits) // parts

    @property
    def seeing(self) -> jax.Array:
        """bool [U, Q], whether a query sees any place by its bounds."""
        return self.bounds[:, 0] <= self.bounds[:, 1]


def dense_work(
    tables: jax.Array,
    q_places: jax.Array,
    lengths: jax.Array,
    window: int | None,
    page: int,
    tuning: TuningConfig,
    filled: jax.Array | None = None,
) -> Work:
    """The work of rows that attend to all their pages: a unit is a row.

    tables: int32 [B, P]. q_places: int32 [B, T]. lengths: int32 [B]. filled: int32 [B, P] or None.
    See ``api.paged_attention``.
    """
    bounds, spans = _bounds(q_places, lengths, window)
    numbers = jnp.broadcast_to(jnp.arange(tables.shape[1], dtype=jnp.int32), tables.shape)
    lists = _lists(tables[:, None], numbers[:, None], spans, page, tuning)
    if filled is not None:
        lists = jnp.concatenate([lists, filled[:, None]], axis=2)
    padded = filled is not None
    return Work(lists, bounds, spans, tuning.splits, numbered=False, padded=padded)


def selected_work(
    picks: jax.Array,
    tables: jax.Array,
    q_places: jax.Array,
    lengths: jax.Array,
    page: int,
    tuning: TuningConfig,
    filled: jax.Array | None = None,
) -> Work:
    """The work of tokens that attend to picked pages: a unit is a token.

    picks: int32 [B, T, C, n]. The other arguments are those of ``dense_work``.
    """
    units = q_places.size
    (queries, lists, count) = picks.shape[1:]
    bounds, spans = _bounds(q_places.reshape(units, 1), jnp.repeat(lengths, queries), None)
    ids = lookup(tables, picks).reshape(units, lists, count)
    # 0 for a pick that is none: its place in the list is a hole
    fields = [] if filled is None else [jnp.maximum(lookup(filled, picks), 0).reshape(ids.shape)]
    picks = picks.reshape(ids.shape)
    found = _lists(ids, picks, spans, page, tuning)
    found = jnp.concatenate([found, picks, *fields], axis=2)
    padded = filled is not None
    return Work(found, bounds, spans, tuning.splits, numbered=True, padded=padded)


def divided(parts: int, part: int, tables, picks, filled):
    """Tables, picks and filled of pages that are cut into ``parts`` parts of ``part`` tokens, as if
    each part were a page: part i of page p is page p parts + i.

    Their last axis becomes ``parts`` times as long. picks and filled may be None.
    """
    at = jnp.arange(parts, dtype=jnp.int32)

    def split(x, value):
        return None if x is None else value(x[..., None]).reshape(*x.shape[:-1], -1)

    def numbers(x):
        return jnp.where(x < 0, -1, x * parts + at)

    return (
        split(tables, numbers),
        split(picks, numbers),
        split(filled, lambda x: jnp.clip(x - at * part, 0, part)),
    )


def lookup(tables: jax.Array, index: jax.Array) -> jax.Array:
    """The entries of each row's table [B, P] at index [B, ...]; -1 for an index outside of it."""
    inside = (index >= 0) & (index < tables.shape[1])
    flat = jnp.where(inside, index, 0).reshape(index.shape[0], -1)
    return jnp.where(inside, jnp.take_along_axis(tables, flat, axis=1).reshape(index.shape), -1)


def cost(q_shape: tuple[int, ...], places: int, itemsize: int, splits: int) -> Cost:
    """The cost of attention of q [U, K', R, H] to lists of ``places`` tokens each.

    The real cost depends on the lengths.
    """
    units, heads, rows, head_dim = q_shape
    pairs = units * heads * rows * places
    size = units * heads * rows * head_dim
    moved = 2 * units * heads * places * head_dim * itemsize + size * (itemsize + 4 * splits)
    return Cost(2 * 2 * head_dim * pairs, pairs, moved)


def _bounds(
    q_places: jax.Array, lengths: jax.Array, window: int | None
) -> tuple[jax.Array, jax.Array]:
    first = jnp.zeros_like(q_places) if window is None else jnp.maximum(q_places - window + 1, 0)
    last = jnp.minimum(q_places, lengths[:, None] - 1)
    seeing = first <= last
    spans = (
        jnp.max(jnp.where(seeing, first, 0), axis=1),
        jnp.min(jnp.where(seeing, last, _FAR), axis=1),
        jnp.min(jnp.where(seeing, first, _FAR), axis=1),
        jnp.max(jnp.where(seeing, last, -1), axis=1),
    )
    return jnp.stack([first, last], axis=1).astype(jnp.int32), jnp.stack(spans, axis=1).astype(
        jnp.int32
    )


def _lists(
    ids: jax.Array, numbers: jax.Array, spans: jax.Array, page: int, tuning: TuningConfig
) -> jax.Array:
    """``Work.lists`` without the numbers, int32 [U, C, 2 splits + n].

    ids, numbers: [U, C, n], the pages in memory and their numbers in the sequence, -1 for none.
    """
    low = spans[:, 2, None, None]
    high = spans[:, 3, None, None]
    # the pages that hold a place which some query of the unit sees
    needed = (ids >= 0) & (numbers >= low // page) & (numbers <= high // page)
    at = jnp.arange(ids.shape[2], dtype=jnp.int32)
    end = jnp.max(jnp.where(needed, at + 1, 0), axis=2, keepdims=True)
    start = jnp.minimum(jnp.min(jnp.where(needed, at, _FAR), axis=2, keepdims=True), end)
    # The splits cover the list from the first needed page to the last. Each is a whole number of
    # steps of ``width`` pages, so that only the last split ends within a step.
    width = tuning.keys // page
    each = -(-(end - start) // (tuning.splits * width)) * width
    begins = jnp.minimum(start + jnp.arange(tuning.splits, dtype=jnp.int32) * each, end)
    ranges = jnp.stack([begins, jnp.minimum(begins + each, end)], axis=-1).reshape(
        *ids.shape[:2], -1
    )
    # any page of the list, to stand behind the holes
    some = jnp.take_along_axis(ids, jnp.minimum(start, ids.shape[2] - 1), axis=2)
    return jnp.concatenate([ranges, jnp.where(needed, ids, ~jnp.maximum(some, 0))], axis=2).astype(
        jnp.int32
    )
