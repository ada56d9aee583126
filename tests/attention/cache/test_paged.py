"""A model over a paged cache equals the model over whole rows, however its tokens are cut and its
pages shared.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from attention.cache.paged import (
    copy_pages,
    init_cache,
    page_bytes,
    page_size,
    write,
)
from attention.cache.pages import PageAllocator
from attention.methods.dense import Dense
from attention.methods.moba import MoBA
from attention.methods.nsa import NSA
from models.paged import model_cache
from models.sharding import MeshConfig, make_mesh, parameter_shardings
from tests.attention.cache.model import (
    METHODS,
    PAGE,
    SPARSE,
    WIDTH,
    cache,
    full,
    model,
    random_tokens,
    run,
)
from tests.attention.rows import relative, separate
from tests.models.small import small_config

LENGTHS = (90, 41)
PAGES = 16
copy = jax.jit(copy_pages)


def rows() -> list[list[int]]:
    return [random_tokens(seed, length) for seed, length in enumerate(LENGTHS)]


def expected(tokens: list[list[int]]) -> list[np.ndarray]:
    """Hidden states without a cache; two rows at a time, so that one shape is compiled."""
    outs = []
    for at in range(0, len(tokens), 2):
        pair = tokens[at : at + 2]
        ids = np.zeros((2, WIDTH * PAGE), np.int32)
        for i, row in enumerate(pair):
            ids[i, : len(row)] = row
        where = separate([len(row) for row in pair], WIDTH * PAGE)
        hidden = full(model(), jnp.asarray(ids), where.order, where)
        outs += [np.asarray(hidden[i, : len(row)]) for i, row in enumerate(pair)]
    return outs


def dirty(paged):
    """A cache whose pages held something else before."""
    return jax.tree.map(lambda x: np.full(x.shape, np.nan, x.dtype), paged)


def tables() -> np.ndarray:
    return (
        np.random.default_rng(0).permutation(PAGES)[: 2 * WIDTH].reshape(2, WIDTH).astype(np.int32)
    )


def alone(allocator: PageAllocator, sequence: int) -> np.ndarray:
    """A sequence's table, and a row of nothing, which keeps the shapes of the programs."""
    return np.concatenate([allocator.tables([sequence], WIDTH), np.full((1, WIDTH), -1, np.int32)])


@pytest.mark.parametrize("chunks", [(1, 30), (30, 1)])
@pytest.mark.long
def test_prefill_in_chunks_and_decoding_equal_the_full_forward(chunks):
    tokens = rows()
    paged = dirty(cache(PAGES))
    starts = [0, 0]
    outs = [[], []]
    # the first sizes of chunk up to the middle of each row, the last one to its end
    for chunk, share in zip(chunks, np.linspace(0, 1, len(chunks) + 1)[1:], strict=True):
        ends = [int(len(row) * share) for row in tokens]
        part = [row[:end] for row, end in zip(tokens, ends, strict=True)]
        found, paged = run(model(), paged, tables(), part, starts, chunk)
        starts = ends
        for out, more in zip(outs, found, strict=True):
            out.append(more)
    for out, wanted in zip(outs, expected(tokens), strict=True):
        assert relative(np.concatenate(out), wanted) < 1e-5


@pytest.mark.long
def test_shared_prefixes_and_copies_on_write_change_nothing():
    allocator = PageAllocator(PAGES, PAGE)
    paged = dirty(cache(PAGES))
    prompt = random_tokens(1, 40)
    first = prompt + random_tokens(2, 50)
    second = prompt + random_tokens(3, 9)

    number, cached = allocator.start(prompt)
    assert cached == 0
    _, paged = run(model(), paged, alone(allocator, number), [prompt, []], [0, 0], 30)
    fork = allocator.fork(number)
    copies = allocator.append(number, first[40:])
    assert len(copies) == 1 and allocator.append(fork, second[40:]) == []
    paged = copy(paged, *(jnp.array(x) for x in zip(*copies, strict=True)))
    found, paged = run(
        model(), paged, allocator.tables([number, fork], WIDTH), [first, second], [40, 40], 30
    )
    wanted = expected([first, second])
    assert relative(found[0], wanted[0][40:]) < 1e-5
    assert relative(found[1], wanted[1][40:]) < 1e-5

    # a third one finds the prompt's full pages by their tokens, and a released one's too
    allocator.release(number)
    third = [*first[:70], *random_tokens(4, 8)]
    again, cached = allocator.start(third)
    assert cached == 64
    found, _ = run(model(), paged, alone(allocator, again), [third, []], [cached, 0], 30)
    assert relative(found[0], expected([third, first])[0][64:]) < 1e-5
    allocator.check()


@pytest.mark.long
def test_heads_may_be_spread_over_devices():
    tokens = [row[:39] for row in rows()]
    mesh = make_mesh(MeshConfig(1, 2))
    wanted, _ = run(model(), dirty(cache(PAGES)), tables(), tokens, [0, 0], 30)
    with jax.set_mesh(mesh):
        spread = jax.device_put(model(), parameter_shardings(model(), mesh))
        paged = jax.device_put(
            dirty(cache(PAGES)), NamedSharding(mesh, PartitionSpec(None, "tensor"))
        )
        found, paged = run(spread, paged, tables(), tokens, [0, 0], 30)
    assert relative(np.concatenate(found), np.concatenate(wanted)) < 1e-5
    # of two heads
    assert {x.sharding.shard_shape(x.shape)[1] for x in jax.tree.leaves(paged)} == {1}


@pytest.mark.long
def test_a_bfloat16_cache_follows_float32():
    methods = (Dense(),)
    tokens = [row[:30] for row in rows()]
    out = {}
    for dtype in ("float32", "bfloat16"):
        paged = dirty(model_cache(model(methods).config, PAGES, dtype, page=PAGE))
        out[dtype], _ = run(model(methods), paged, tables(), tokens, [0, 0], 30)
    assert 0 < relative(out["bfloat16"], out["float32"]) < 0.02


def test_bytes_of_a_page():
    config = small_config(attention=METHODS, num_layers=len(METHODS))
    paged = jax.eval_shape(lambda: model_cache(config, PAGES, page=PAGE))
    one = 2 * 8 * 4  # heads, size, float32
    compressed = PAGE // SPARSE.stride
    recent = SPARSE.length
    assert page_bytes(paged) == one * (2 * PAGE * 6 + 2 * (compressed + recent) + 1)


def test_errors_name_the_values():
    with pytest.raises(ValueError, match=r"page=None, blocks of the layers \[\]"):
        page_size([Dense()])
    with pytest.raises(ValueError, match=r"page=None, blocks of the layers \[32, 64\]"):
        page_size([NSA(), MoBA(block=32)])
    with pytest.raises(ValueError, match=r"page=8, blocks of the layers \[64\]"):
        page_size([NSA()], 8)
    paged = init_cache(METHODS, 2, 1, 4, jnp.float32)
    new = jnp.zeros((1, 1, 1, 4))
    with pytest.raises(ValueError, match=r"layer=1 is NSA\(.*\): new keys lack window"):
        write(
            paged,
            1,
            jnp.zeros((1, 1), int),
            jnp.zeros((1, 1), int),
            {"main": (new, new)},
            parameters={},
            rotate=lambda k, positions: k,
        )
