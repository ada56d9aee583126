"""The kernels of compressed attention equal the definition in float64: values, gradients, and the
blocks they pick.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from attention import compressed
from attention.blocks import Blocks, aligned, entries, in_place, sees
from pallas_kernels.compressed import reference
from pallas_kernels.compressed.api import compressed_attention
from pallas_kernels.compressed.blocks import Selection, TuningConfig
from pallas_kernels.flash import blocks as flash
from pallas_kernels.tokens import Tokens, sequences
from tests.attention.rows import Piece, documents, pack, relative
from tests.pallas_kernels.judge import (
    defined,
    judge,
    masked_places_may_hold_anything,
    normal,
    not_finite_reaches_only_those_who_see_it,
    run,
)

SMALL = Selection(length=8, stride=4, block=16, picks=3, initial=1, local=1)
TPU = {
    "implementation": "tpu",
    "interpret": pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan"),
    "tuning": TuningConfig(flash.TuningConfig(16, 24, 24, 16, 16, 24), block_q=24, columns=16),
}
GPU = {
    "implementation": "gpu",
    "interpret": plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan"),
    "tuning": TuningConfig(flash.TuningConfig(128, 64, 128, 64, 64, 128), block_q=128, columns=32),
}


REFERENCE = {"implementation": "reference"}
KERNELS = {"reference": REFERENCE, "tpu": TPU, "gpu": GPU}

# one program each instead of many small ones
jit_sees = jax.jit(sees)
jit_entries = jax.jit(entries, static_argnums=(1, 2))
jit_aligned = jax.jit(aligned, static_argnums=(1, 2))
jit_in_place = jax.jit(in_place, static_argnums=1)


@dataclasses.dataclass(frozen=True)
class Row:
    """Queries' tokens and the blocks of keys of a batch."""

    tokens: Tokens
    blocks: Blocks
    # Whether stretches lie with their last token, as in a cache.
    by_last: bool = False

    def entries(self, selection: Selection):
        found = jit_entries(self.blocks, selection.length, selection.stride)
        return found.by_last(selection.length // selection.stride - 1) if self.by_last else found

    def mask(self, selection: Selection) -> np.ndarray:
        """bool [B, T, E], which stretches a query sees."""
        stretched = self.entries(selection)
        own_from, starts = self.blocks.own_from, stretched.starts
        return np.asarray(jit_sees(self.tokens, own_from, stretched.tokens, starts))

    def attend(self, selection: Selection, **options):
        """``compressed_attention`` as a function of q, k and v."""
        stretched = self.entries(selection)
        return functools.partial(
            compressed_attention,
            q_tokens=self.tokens,
            own_from=self.blocks.own_from,
            k_tokens=stretched.tokens,
            k_starts=stretched.starts,
            heads=self.blocks.heads,
            shadows=self.blocks.shadows,
            selection=selection,
            ahead=stretched.ahead,
            **options,
        )


@functools.cache
def row(kind: str, selection: Selection, scale: int = 1) -> Row:
    """A row ``scale`` times as long."""
    size = selection.block
    if kind == "short":
        tokens = pack([Piece(9), Piece(37, (7, 12))], 66)[0]
        return Row(tokens, jit_aligned(tokens, size, 4))
    if kind == "packed":
        pieces = [
            Piece(9),
            Piece(37 * scale, (24 * scale, 1, 19)),
            Piece(5, (20 * scale,)),
            Piece(16, (2, 11)),
        ]
        tokens = pack(pieces, 150 * scale)[0]
        return Row(tokens, jit_aligned(tokens, size, 10))
    if kind in ("documents", "cached documents"):
        tokens = documents([x * scale for x in (9, 0, 33, 20)], 21 * scale, block=size, prefix=7)
    else:  # of which one ends within a block, and one is empty
        tokens = sequences(jnp.array([97, 0])[: 2 if kind == "single" else 1] * scale, 97 * scale)
    return Row(tokens, jit_in_place(tokens, size), by_last=kind in ("cache", "cached documents"))


def inputs(row: Row, selection: Selection, heads: int, kv_heads: int, size: int, dtype=jnp.float64):
    batch, queries = row.tokens.shape
    keys = row.blocks.heads.shape[1] * selection.ratio
    return normal(
        0, (batch, queries, heads, size), *[(batch, keys, kv_heads, size)] * 2, dtype=dtype
    )


def scores(row: Row, selection: Selection, q, k, lse):
    """What ranks the blocks, in the dtype of q."""
    call = row.attend(selection).keywords
    q_tokens = dataclasses.replace(call["q_tokens"], limits=call["own_from"])
    k_tokens = dataclasses.replace(call["k_tokens"], limits=call["k_starts"])
    heads = dataclasses.replace(call["heads"], limits=call["heads"].order)
    options = dict(selection=selection, ahead=call["ahead"])
    ranks = jax.jit(functools.partial(reference.scores, **options))
    return ranks(q, k, lse, q_tokens, k_tokens, heads, call["shadows"])


def check_picks(picks, ranked, rounding: float):
    """The picked blocks are the best ones, where scores differ by more than rounding."""
    picks = np.asarray(picks)
    ranked = np.asarray(ranked, np.float64)
    names = np.sort(picks, axis=-1)
    assert not np.any((names[..., 1:] == names[..., :-1]) & (names[..., 1:] >= 0))
    assert picks.min() >= -1 and picks.max() < ranked.shape[-1]
    found = np.where(picks >= 0, np.take_along_axis(ranked, np.maximum(picks, 0), axis=-1), -1)
    padded = np.concatenate([ranked, np.full_like(picks, -1, ranked.dtype)], axis=-1)
    wanted = np.sort(padded, axis=-1)[..., : -picks.shape[-1] - 1 : -1]
    assert np.abs(np.sort(found, axis=-1)[..., ::-1] - wanted).max() <= rounding


def check(
    row: Row,
    selection: Selection,
    heads=4,
    kv_heads=2,
    size=8,
    dtype=jnp.float32,
    gradients=False,
    **options,
):
    """Values and picks against the definition, and gradients, which the flash kernels compute."""
    wide = inputs(row, selection, heads, kv_heads, size)
    naive = row.attend(selection, **REFERENCE)
    mask = row.mask(selection)[:, :, None]
    definition = functools.partial(defined, mask=mask)
    kernel = row.attend(selection, **options)
    found, _, lse = judge(kernel, definition, wide, dtype, naive=naive, gradients=gradients)
    assert found[2].dtype == jnp.int32
    q, k = (x.astype(jnp.dtype(dtype)).astype(np.float64) for x in wide[:2])
    check_picks(found[2], scores(row, selection, q, k, lse), 1e-4)
    return found


CONFIGS = [
    SMALL,
    Selection(length=8, stride=8, block=8, picks=2, initial=0, local=1),
    Selection(length=16, stride=4, block=16, picks=100, initial=2, local=2),
]


@pytest.mark.parametrize(
    "kind, selection",
    [("documents", CONFIGS[1]), ("cache", SMALL), ("packed", CONFIGS[2])],
)
@pytest.mark.quick(first=1)
def test_reference_equals_the_definition_in_attention(x64, monkeypatch, kind, selection):
    monkeypatch.setattr(compressed, "SPAN", row(kind, selection).tokens.shape[1] // 2)  # two spans
    rows = row(kind, selection)
    qkv = inputs(rows, selection, 4, 2, 8)
    weights = normal(1, qkv[0].shape, qkv[0].shape[:3], dtype=jnp.float64)
    config = selection
    stretched = rows.entries(selection)

    def theirs(*qkv):
        return compressed.compressed_attention(*qkv, rows.tokens, rows.blocks, stretched, config)

    (out, lse, picks), gradients = run(theirs, qkv, weights)
    found, found_gradients = run(rows.attend(selection, implementation="reference"), qkv, weights)
    assert relative(found[0], out) < 1e-12
    assert np.allclose(found[1], lse, rtol=1e-12)
    assert np.array_equal(np.sort(found[2], axis=-1), np.sort(picks, axis=-1))
    for one, wanted in zip(found_gradients, gradients, strict=True):
        assert one.dtype == jnp.float64 and relative(one, wanted) < 1e-12


def test_shares_are_the_tokens_in_common():
    assert list(Selection().shares.items()) == [(-1, 1), (0, 2), (1, 2), (2, 2), (3, 1)]


@pytest.mark.parametrize(
    "kind, heads, kv_heads, selection, gradients",
    [
        ("documents", 16, 1, CONFIGS[1], False),
        ("cache", 4, 1, CONFIGS[2], False),
        ("packed", 1, 1, SMALL, True),
        ("cached documents", 4, 2, SMALL, False),
    ],
)
@pytest.mark.quick(first=1)
def test_tpu_equals_the_definition(x64, kind, heads, kv_heads, selection, gradients):
    check(row(kind, selection), selection, heads, kv_heads, gradients=gradients, **TPU)


@pytest.mark.long
def test_tpu_in_bfloat16_is_no_worse_than_the_definition_in_bfloat16(x64):
    eager = dataclasses.replace(TPU["interpret"], dma_execution_mode="eager")
    selection = CONFIGS[2]  # more picks than blocks
    found = check(
        row("single", selection), selection, 4, 1, 32, jnp.bfloat16, **TPU | {"interpret": eager}
    )
    assert not np.any(found[0][1]) and np.all(found[2][1] == -1)  # the second row is empty


@pytest.mark.parametrize(
    "unit, kind, heads, kv_heads, selection, scale, gradients",
    [
        ("wgmma", "cache", 4, 2, SMALL, 1, False),
        ("wgmma", "packed", 2, 1, SMALL, 1, True),
        ("tcgen05", "one", 1, 1, CONFIGS[1], 3, False),
    ],
)
@pytest.mark.long
def test_gpu_equals_the_definition_in_bfloat16(
    x64, unit, kind, heads, kv_heads, selection, scale, gradients
):
    attention = dataclasses.replace(GPU["tuning"].attention, matrix_unit=unit)
    tuning = dataclasses.replace(GPU["tuning"], attention=attention)
    options = GPU | {"tuning": tuning}
    check(
        row(kind, selection, scale),
        selection,
        heads,
        kv_heads,
        size=16,
        dtype=jnp.bfloat16,
        gradients=gradients,
        **options,
    )


@functools.cache
def short(kind: str):
    """(a kernel of a short row, its inputs), the same for all tests."""
    rows = row("short", SMALL)
    dtype = jnp.bfloat16 if kind == "gpu" else jnp.float32
    return rows.attend(SMALL, **KERNELS[kind]), inputs(rows, SMALL, 2, 1, 16, dtype=dtype)


# gradients of the kernels are those of the flash kernels, whose tests are the same
@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.quick(first=1)
def test_padding_and_incomplete_stretches_may_hold_anything(kind):
    rows = row("short", SMALL)
    real = [np.asarray(x.segments) > 0 for x in (rows.tokens, rows.entries(SMALL).tokens)]
    assert not any(x.all() for x in real)
    real = [real[0], real[1], real[1]]
    masked_places_may_hold_anything(*short(kind), real, gradients=kind == "reference")


@pytest.mark.parametrize("kind, turn", [("reference", None), ("tpu", 0), ("gpu", 1)])
@pytest.mark.quick(first=1)
def test_values_that_are_not_finite_reach_only_those_who_see_them(kind, turn):
    seen = row("short", SMALL).mask(SMALL)
    key, query = (int(seen[0].sum(axis=axis).argmax()) for axis in (0, 1))
    not_finite_reaches_only_those_who_see_it(
        *short(kind), seen, query, key, turn, gradients=kind == "reference"
    )


@pytest.mark.long
def test_what_comes_later_changes_no_bit_of_what_is_before():
    rows, seen = row("one", SMALL), 57  # within a block, a tile of queries and a tile of keys
    qkv = inputs(rows, SMALL, 2, 1, 8, dtype=jnp.float32)
    attend = jax.jit(rows.attend(SMALL, **TPU))
    # the last stretch that the query sees ends with it
    later = np.arange(qkv[1].shape[1]) * SMALL.stride + SMALL.length > seen
    clean = jax.device_get(attend(*qkv))
    where = (np.arange(97) >= seen, later, later)
    # a value that is not a number leaks from within a tile by a weight of 0
    poisons = [np.float32(x) for x in (np.nan, np.nan, 1e4)]
    poisoned = [
        np.where(x[:, None, None], y, z) for x, y, z in zip(where, poisons, qkv, strict=True)
    ]
    for found, expected in zip(jax.device_get(attend(*poisoned)), clean, strict=True):
        assert np.array_equal(found[:, :seen], expected[:, :seen])
        assert not np.array_equal(found[:, seen:], expected[:, seen:])


def test_without_an_accelerator_the_definition_is_chosen(x64):
    rows = row("short", SMALL)
    qkv = inputs(rows, SMALL, 4, 2, 8)
    # one program, so the same bits
    ours, named = (
        jax.jit(rows.attend(SMALL, **options)).lower(*qkv).as_text() for options in ({}, REFERENCE)
    )
    assert ours == named and "f64" in named


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"implementation": "gpu"}, "backend='cpu' is not 'gpu', and interpret=False"),
        ({"selection": Selection(picks=200), **TPU}, "picks=200 are more than 128"),
        ({"selection": Selection(picks=40), **GPU}, "picks=40 are more than 32"),
        (
            {"selection": Selection(64, 8, 64), **GPU},
            "15 stretches share tokens with a block, more than 8",
        ),
        (
            {"selection": Selection(), "k_starts": jnp.zeros((1, 3), jnp.int32)},
            r"k_starts.shape=\(1, 3\) must be that",
        ),
        (
            {"selection": Selection(), "shadows": jnp.zeros((1, 3), jnp.int32)},
            r"shadows.shape=\(1, 3\) must be that",
        ),
    ],
)
def test_what_cannot_run_is_refused_with_its_values(options, message):
    selection = options.get("selection", SMALL)
    rows = row("one", selection)
    dtype = jnp.bfloat16 if options.get("implementation") == "gpu" else jnp.float32
    with pytest.raises(ValueError, match=message):
        rows.attend(selection)(*inputs(rows, selection, 4, 2, 8, dtype=dtype), **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stride": 5}, "stride=5 must divide length=32 and block=64"),
        ({"picks": 2}, "initial=1 [+] local=2 blocks must fit in picks=2"),
    ],
)
def test_settings_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Selection(**change)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"block_q": 64}, "block_q=64 must be 128 for wgmma"),
        ({"columns": 24}, "columns=24 must be a multiple of 16"),
        ({"steps": 0}, "steps=0 must be positive"),
    ],
)
def test_sizes_that_do_not_fit_the_matrix_unit_are_refused(sizes, message):
    rows = row("one", SMALL)
    with pytest.raises(ValueError, match=message):
        options = GPU | {"tuning": dataclasses.replace(GPU["tuning"], **sizes)}
        jax.eval_shape(
            rows.attend(SMALL, **options), *inputs(rows, SMALL, 4, 2, 8, dtype=jnp.bfloat16)
        )
