"""NSA with its history on host and disk computes what it computes with everything on the device."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention.cache.paged import attend, init_cache, write
from attention.cache.storage import CorruptedFile
from attention.cache.tables import Pages, Tables
from attention.cache.tiers import TierConfig, TieredCache
from attention.methods.nsa import NSA
from pallas_kernels.tokens import sequences
from tests.attention.rows import normal, relative

METHOD = NSA(length=8, stride=4, block=16, picks=3, initial=1, local=1, window=10)
LAYERS, ROWS, PAGES, CHUNK, HEADS, KV_HEADS, SIZE = 2, 2, 10, 2, 4, 2, 8
BLOCK = 2 * KV_HEADS * 16 * SIZE * 4
# compressed keys, windows, prefetched blocks and a batch; then slots
FIXED = LAYERS * 2 * KV_HEADS * SIZE * 4 * (ROWS * PAGES * 4 + ROWS * 2 * (16 + 16)) + 8 * BLOCK
TABLES = (LAYERS + 1) * ROWS * PAGES * 4
FIXED += TABLES


def rotate(k, positions):
    """Some turning by position; the tests have no RoPE of their own."""
    angle = positions[..., None, None] / 10.0
    first, second = jnp.split(k, 2, axis=-1)
    return jnp.concatenate(
        [
            first * jnp.cos(angle) - second * jnp.sin(angle),
            second * jnp.cos(angle) + first * jnp.sin(angle),
        ],
        axis=-1,
    )


def mlps(seed: int):
    shapes = [(METHOD.length, SIZE), (METHOD.length, SIZE, SIZE), (SIZE, SIZE)]
    names = [f"{name}_{part}" for name in "kv" for part in ("positions", "first", "second")]
    return dict(zip(names, normal(seed, *shapes, *shapes), strict=True))


@functools.cache
def inputs(seed: int, chunk: int = CHUNK):
    """(q, new keys and values, gates) of a chunk."""
    kv = (ROWS, chunk, KV_HEADS, SIZE)
    q, gates, *kvs = normal(seed, (ROWS, chunk, HEADS, SIZE), (ROWS, chunk, HEADS, 3), *[kv] * 6)
    new = {"main": tuple(kvs[:2]), "raw": tuple(kvs[2:4]), "window": tuple(kvs[4:])}
    return q, new, jax.nn.sigmoid(gates)


@functools.partial(jax.jit, static_argnames="layer", donate_argnums=0)
def everything(cache, layer, lengths, places, q, new, gates, parameters):
    tables = Tables.same(jnp.arange(ROWS * PAGES).reshape(ROWS, PAGES))
    tokens = sequences(lengths, PAGES * METHOD.block)
    pages = Pages(tables, tokens, tokens.order)
    cache = write(
        cache,
        layer,
        tables,
        places,
        new,
        parameters=parameters,
        rotate=rotate,
    )
    return cache, attend(cache, layer, q, pages.at(places)[0], pages, inputs=gates)


def tiered(tmp_path, slots: int = 7, host_blocks: int = 100, **changes) -> TieredCache:
    sizes = dict(
        layers=LAYERS,
        rows=ROWS,
        pages=PAGES,
        chunk=CHUNK,
        kv_heads=KV_HEADS,
        head_dim=SIZE,
        dtype="float32",
    )
    budgets = dict(
        device_bytes=FIXED + slots * LAYERS * BLOCK,
        host_bytes=host_blocks * BLOCK,
        prefetch=4,
        batch=4,
    )
    return TieredCache(METHOD, TierConfig(**(sizes | budgets | changes)), tmp_path, rotate)


def chunks(lengths, chunk: int = CHUNK):
    """Places of every step, row by row from 0, the last of a row perhaps half full."""
    for at in range(0, max(lengths), chunk):
        places = np.broadcast_to(np.arange(at, at + chunk, dtype=np.int32), (ROWS, chunk))
        yield np.where(places < np.array(lengths)[:, None], places, -1)


def compare(small: TieredCache, lengths, seed: int = 0) -> int:
    """Steps through the chunks of rows; a chunk whose step fails is given again, to all layers.

    Returns how many failed.
    """
    cache = init_cache((METHOD,) * LAYERS, ROWS * PAGES, KV_HEADS, SIZE, jnp.float32)
    parameters = [mlps(seed + 100 + layer) for layer in range(LAYERS)]
    chunk = small.config.chunk
    reached = np.zeros(ROWS, np.int32)
    failed = 0
    for number, places in enumerate(chunks(lengths, chunk)):
        reached = np.maximum(reached, places.max(axis=1) + 1)
        q, new, gates = inputs(seed + number, chunk)

        def step(q=q, new=new, places=places, gates=gates):
            return [
                small.step(layer, q, new, places, gates, parameters[layer])
                for layer in range(LAYERS)
            ]

        outs = None
        while outs is None:
            try:
                outs = step()
            except CorruptedFile:
                failed += 1
        real = places >= 0
        for layer, out in enumerate(outs):
            cache, wanted = everything(
                cache, layer, reached, places, q, new, gates, parameters[layer]
            )
            assert relative(np.asarray(out)[real], np.asarray(wanted)[real]) < 1e-6
    return failed


@pytest.mark.long
def test_tiers_change_nothing_and_keep_to_their_budgets(tmp_path):
    small = tiered(tmp_path, host_blocks=5)
    compare(small, (150, 101))
    small.close()
    metrics = small.metrics()
    assert metrics["tiers/device_bytes"] == FIXED + 7 * LAYERS * BLOCK
    arrays = sum(x.nbytes for cache in small._caches for x in jax.tree.leaves(cache))
    assert arrays + 8 * BLOCK + TABLES == metrics["tiers/device_bytes"]
    assert metrics["tiers/host_bytes"] == 5 * BLOCK
    # every block travels once it is complete, and again only when it was written after that
    assert metrics["tiers/to_host_bytes"] >= LAYERS * (9 + 6) * BLOCK
    moved = metrics["tiers/to_device_bytes"] // BLOCK
    arrived = metrics["tiers/prefetched"] + metrics["tiers/missing"] + metrics["tiers/sent_in_vain"]
    assert 0 <= moved - arrived <= 4  # those sent ahead for a step that never came
    assert (
        min(
            metrics[f"tiers/{name}"]
            for name in ("present", "prefetched", "missing", "from_disk_bytes")
        )
        > 0
    )


def test_a_table_that_changes_does_not_change_for_a_program_that_still_waits(tmp_path):
    """On CPU a program reads numpy arrays where they lie if they are aligned to 64 bytes."""
    small = tiered(tmp_path)
    places = np.zeros((ROWS, CHUNK), np.int32)
    size = ROWS * PAGES

    def aligned():
        raw = np.zeros(4 * size + 64, np.uint8)
        first = -raw.ctypes.data % 64
        return raw[first : first + 4 * size].view(np.int32).reshape(ROWS, PAGES)

    @jax.jit
    def slow(x):
        return jax.lax.fori_loop(0, 20, lambda _, x: x @ x / 300, x)

    @jax.jit
    def read(x, *tables):
        return [table + (0 * x[0, 0]).astype(jnp.int32) for table in tables]

    x = jnp.ones((300, 300))
    jax.block_until_ready(read(slow(x), *[np.zeros((ROWS, PAGES), np.int32)] * 2))
    for _ in range(10):
        small._slots[0], small._documents = aligned(), aligned()
        small._sent_slots[0] = small._sent_documents = None
        waiting = slow(x)
        rows = small._rows(0, places)
        found = read(waiting, rows.slots, rows.documents)
        small._slots[0][:] = small._documents[:] = 7
        assert not np.any(found)
    small.close()


@pytest.mark.long
@pytest.mark.parametrize("chunk", [6, CHUNK])
def test_a_chunk_whose_blocks_could_not_be_read_can_be_given_again(tmp_path, monkeypatch, chunk):
    # six tokens overwrite some that their own stretches need, in a ring of eight
    small = tiered(tmp_path, host_blocks=2, chunk=chunk)
    read = small._host._disk.read
    failed = set()

    def once_in_a_chunk(key):
        """Fails at the first read of a block in each chunk, so that every attempt gets further."""
        first = (key, tuple(small._lengths)) not in failed
        failed.add((key, tuple(small._lengths)))
        if first:
            raise CorruptedFile(f"{key} is damaged")
        return read(key)

    monkeypatch.setattr(small._host._disk, "read", once_in_a_chunk)
    assert compare(small, (150, 101)) > 5
    small.close()


def test_a_row_serves_another_sequence_after_a_reset(tmp_path):
    small = tiered(tmp_path)
    compare(small, (60, 40))
    for row in range(ROWS):
        small.reset(row)
    assert small.metrics()["tiers/host_bytes"] == 0
    compare(small, (35, 70), seed=7)
    small.close()


def test_a_budget_that_holds_all_moves_nothing_to_the_device(tmp_path):
    small = tiered(tmp_path, slots=ROWS * PAGES)
    compare(small, (60, 40))
    assert small.metrics()["tiers/to_device_bytes"] == small.metrics()["tiers/missing"] == 0
    small.close()


def test_errors_name_the_values(tmp_path):
    with pytest.raises(ValueError, match=f"device_bytes={FIXED} hold no block: {FIXED} go to"):
        tiered(tmp_path, slots=0)
    small = tiered(tmp_path, slots=1)
    q, new, gates = inputs(0)
    with pytest.raises(
        ValueError, match="a step needs 2 blocks of layer 0, slots=1 fit in device_bytes="
    ):
        small.step(0, q, new, next(chunks((2, 2))), gates, mlps(100))
    with pytest.raises(ValueError, match="3 tokens in a step, at most chunk=2"):
        small.step(0, q, new, np.zeros((ROWS, 3), np.int32), gates, mlps(100))
    small.close()
