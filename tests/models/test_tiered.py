"""The model over a cache in tiers computes what it computes over one that is all on the device."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention.cache.documents import Fingerprint, StaleDocument, assemble, document_pages
from attention.cache.pages import PageAllocator
from attention.methods.dense import Dense
from models.paged import document_encoder
from models.tiered import TieredModel
from models.transformer import abstract_model
from tests.attention.cache.model import PAGE, SPARSE, cache, feed, model, random_tokens
from tests.attention.rows import relative

METHODS = (SPARSE,) * 2
PAGES = 10
CHUNK = 3
KV_HEADS = model(METHODS).config.num_kv_heads
SIZE = model(METHODS).config.head_dim
# The budget of the device in blocks, of which some hold compressed keys, windows and what moves.
DEVICE = 28
BLOCK = 2 * KV_HEADS * PAGE * SIZE * 4
A, B, C = (random_tokens(seed, length) for seed, length in ((1, 48), (2, 16), (3, 48)))
TAIL = random_tokens(4, 30)


@contextlib.contextmanager
def tiered(folder) -> Iterator[TieredModel]:
    sizes = dict(rows=1, pages=PAGES, chunk=CHUNK, prefetch=2, batch=4)
    small = TieredModel(
        model(METHODS), folder, device_bytes=DEVICE * BLOCK, host_bytes=5 * BLOCK, **sizes
    )
    try:
        yield small
    finally:
        small.cache.close()


def advance(
    small: TieredModel, tokens: list[list[int]], starts: list[int], chunk: int
) -> list[np.ndarray]:
    """Hidden states of every row's tokens, ``chunk`` at a time from the places ``starts`` on."""
    outs = [[] for _ in tokens]
    most = max(map(len, tokens))
    for at in range(0, most, chunk):
        ids = np.zeros((len(tokens), chunk), np.int32)
        places = np.full((len(tokens), chunk), -1, np.int32)
        for row, (own, start) in enumerate(zip(tokens, starts, strict=True)):
            part = own[at : at + chunk]
            ids[row, : len(part)] = part
            places[row, : len(part)] = start + at + np.arange(len(part))
        hidden = np.asarray(small.forward(ids, places))
        for out, row, real in zip(outs, hidden, places >= 0, strict=True):
            out.append(row[real])
    return [np.concatenate(out) for out in outs]


def behind(documents: list[list[int]], tail: list[int]) -> np.ndarray:
    """Hidden states of a tail behind documents in a cache without tiers."""
    encode = document_encoder(model(METHODS))
    allocator = PageAllocator(PAGES, PAGE)
    encoded = [encode(document) for document in documents]
    paged, assembly = assemble(
        cache(PAGES, False, METHODS), allocator, encoded, tail_pages=-(-len(tail) // PAGE)
    )
    start = assembly.tail_place

    def pages_of(reached):
        return document_pages([assembly], [reached[0] - start], PAGES)

    return feed(model(METHODS), paged, pages_of, [tail], [start], CHUNK)[0][0]


@pytest.mark.long
def test_prefill_in_chunks_and_decoding_equal_a_cache_without_tiers(tmp_path):
    tokens = random_tokens(5, 110)
    with tiered(tmp_path) as small:
        found = [
            advance(small, [tokens[:70]], [0], CHUNK)[0],
            advance(small, [tokens[70:]], [70], 1)[0],
        ]
        metrics = small.cache.metrics()
    assert relative(np.concatenate(found), behind([], tokens)) < 1e-5
    assert (
        metrics["tiers/device_bytes"] <= DEVICE * BLOCK and metrics["tiers/host_bytes"] == 5 * BLOCK
    )
    assert (
        min(metrics[f"tiers/{name}"] for name in ("missing", "to_device_bytes", "from_disk_bytes"))
        > 0
    )


@pytest.mark.long
def test_documents_loaded_equal_documents_in_a_cache_without_tiers(tmp_path):
    encode = document_encoder(model(METHODS))
    start = len(A + B + C)
    with tiered(tmp_path) as small:
        for document in (A, B, C):
            small.cache.load(0, encode(document))
        metrics = small.cache.metrics()
        found = [
            advance(small, [TAIL[:20]], [start], CHUNK)[0],
            advance(small, [TAIL[20:]], [start + 20], 1)[0],
        ]
        after = small.cache.metrics()
    assert metrics["tiers/to_host_bytes"] == start // PAGE * len(METHODS) * BLOCK
    assert metrics["tiers/host_bytes"] == 5 * BLOCK and metrics["tiers/to_device_bytes"] == 0
    assert metrics["tiers/disk_blocks"] == start // PAGE * len(METHODS) - 5
    assert after["tiers/from_disk_bytes"] > 0
    assert relative(np.concatenate(found), behind([A, B, C], TAIL)) < 1e-5
    # so that the comparison can fail
    assert relative(np.concatenate(found), behind([A, C, B], TAIL)) > 1e-3


def test_a_document_that_could_not_be_kept_can_be_loaded_again(tmp_path, monkeypatch):
    encode = document_encoder(model(METHODS))
    with tiered(tmp_path) as small:
        small.cache.load(0, encode(A))
        disk = small.cache._host._disk

        def full(key, arrays):
            if key[0] == 1:  # the first layer's blocks still found room
                raise OSError("no space left on device")
            return type(disk).write(disk, key, arrays)

        monkeypatch.setattr(disk, "write", full)
        with pytest.raises(OSError, match="no space left"):
            small.cache.load(0, encode(C))
        monkeypatch.undo()
        small.cache.load(0, encode(C))
        found = advance(small, [TAIL], [len(A + C)], CHUNK)[0]
    assert relative(found, behind([A, C], TAIL)) < 1e-5


def test_one_document_loaded_equals_its_prefill(tmp_path):
    with tiered(tmp_path / "loaded") as loaded, tiered(tmp_path / "prefilled") as prefilled:
        loaded.cache.load(0, document_encoder(model(METHODS))(C))
        advance(prefilled, [C], [0], CHUNK)
        # what the last tokens of C would share a stretch with is cut off by the document's end, so
        # the layers' arrays are compared and not what follows
        for one, other in zip(loaded.cache._caches, prefilled.cache._caches, strict=True):
            for name in ("compressed", "window"):
                for x, y in zip(one.layers[0][name], other.layers[0][name], strict=True):
                    assert relative(x, y) < 1e-5, name
        keys = [
            (layer, 0, block) for layer in range(len(METHODS)) for block in range(len(C) // PAGE)
        ]
        for one, other in zip(
            *(each.cache._host.read(keys) for each in (loaded, prefilled)), strict=True
        ):
            for x, y in zip(one, other, strict=True):
                assert relative(x, y) < 1e-5


def test_a_row_holds_other_documents_after_a_reset(tmp_path):
    encode = document_encoder(model(METHODS))
    with tiered(tmp_path) as small:
        poisoned = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), encode(A))
        small.cache.load(0, poisoned)
        assert np.isnan(advance(small, [TAIL[:5]], [len(A)], CHUNK)[0]).all()
        small.cache.reset(0)
        small.cache.load(0, encode(B))
        found = advance(small, [TAIL], [len(B)], CHUNK)[0]
        assert small.cache.metrics()["tiers/host_bytes"] <= 5 * BLOCK
    assert relative(found, behind([B], TAIL)) < 1e-5


def test_nothing_is_compiled_after_the_first_tokens(tmp_path):
    compiled: list[str] = []

    def listen(event: str, seconds: float, **details) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    with tiered(tmp_path) as small:
        for document in (A, C):
            small.cache.load(0, document_encoder(model(METHODS))(document))
        start = len(A + C)
        advance(small, [TAIL[:4]], [start], 1)
        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            advance(small, [TAIL[4:]], [start + 4], 1)  # completes a block
            assert compiled == []
            jax.jit(lambda x: x + len(compiled) + 12345)(jnp.zeros(3))
            assert compiled  # the event has this name
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)


def test_errors_name_the_values(tmp_path):
    dense = abstract_model(dataclasses.replace(model(METHODS).config, attention=(Dense(),)))
    with pytest.raises(
        ValueError,
        match=r"attention=\(Dense\(\),\): a cache in tiers needs one method in every layer",
    ):
        TieredModel(dense, tmp_path, rows=1, pages=1, chunk=1, device_bytes=1, host_bytes=1)
    encode = document_encoder(model(METHODS))
    short = dataclasses.replace(encode(B), length=10)
    others = dataclasses.replace(encode(B), fingerprint=Fingerprint("", "others"))
    with tiered(tmp_path) as small:
        with pytest.raises(
            ValueError, match="a document of 10 tokens in 2 layers with page=16 does not fill"
        ):
            small.cache.load(0, short)
        for _ in range(3):
            small.cache.load(0, encode(A))
        with pytest.raises(StaleDocument, match="weights='others', those before it have"):
            small.cache.load(0, others)
        with pytest.raises(ValueError, match="3 blocks after 9 do not fit in pages=10"):
            small.cache.load(0, encode(A))
        advance(small, [TAIL[:1]], [9 * PAGE], 1)
        with pytest.raises(
            ValueError, match="row=0 has 145 tokens, of which the last are in no document"
        ):
            small.cache.load(0, encode(B))
