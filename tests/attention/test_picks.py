"""Blocks that a sampler noted, in the packed rows of the trainer."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention.blocks import sees
from attention.layout import lay_out
from attention.methods.nsa import NSA
from attention.methods.window import Window
from attention.picks import Noted, agreement, compact, narrowest, numbers, placed
from pallas_kernels.tokens import TAIL, Tokens
from tests.attention.rows import Piece, pack

SPARSE = NSA(length=8, stride=4, block=8, picks=3, initial=1, local=1, window=10)
SHARED = pack([Piece(9), Piece(40, (20, 1, 17)), Piece(5, (30, 8)), Piece(16, (3, 9))], 192)[0]


def with_documents() -> Tokens:
    """Prompts that end in and outside of documents, completions with documents of their own."""
    runs = [
        # segment, branch, document, first order, tokens
        (1, 0, 1, 0, 13), (1, 0, 2, 16, 8), (1, 0, TAIL, 24, 5),
        (1, 1, TAIL, 29, 9), (1, 1, 3, 40, 11), (1, 1, TAIL, 56, 4),
        (1, 2, TAIL, 29, 2), (1, 2, 3, 32, 7), (1, 2, TAIL, 40, 6),
        (2, 0, TAIL, 0, 10), (2, 1, TAIL, 10, 12),
    ]  # fmt: skip
    rows = [
        np.stack(
            [np.full(n, segment), np.full(n, branch), np.full(n, document), first + np.arange(n)]
        )
        for segment, branch, document, first, n in runs
    ]
    fields = np.concatenate(rows, axis=1)
    fields = np.pad(fields, ((0, 0), (0, 192 - fields.shape[1])))
    return Tokens(*(jnp.asarray(x[None].astype(np.int32)) for x in fields))


@pytest.mark.parametrize("documents", [True, False])
@pytest.mark.quick(first=1)
def test_a_block_by_order_is_the_one_that_the_query_sees(documents):
    where = with_documents() if documents else SHARED
    lay = functools.partial(lay_out, (SPARSE,), runs=14, documents=documents)

    @jax.jit
    def run(where):
        """(the blocks found for every number, which each query sees, their orders)."""
        layout = lay(where)
        blocks = layout.blocks[SPARSE.block]
        heads = blocks.heads
        wanted = jnp.arange(-1, heads.shape[1])
        shape = (1, where.shape[1], 1, len(wanted))
        slots = jnp.arange(where.shape[1])[None]
        found = placed(layout, blocks, slots, jnp.broadcast_to(wanted, shape))
        return found, sees(where, blocks.own_from, heads, heads.order), heads.order

    found, seen, orders = (np.asarray(x)[0] for x in run(where))
    found = found[:, 0]
    wanted = np.arange(-1, len(orders))
    by_order = orders // SPARSE.block
    several = 0
    for slot in np.flatnonzero(np.asarray(where.segments)[0]):
        expected = {int(by_order[at]): at for at in np.flatnonzero(seen[slot])}
        assert len(expected) == seen[slot].sum()  # no two blocks of the same number are seen
        given = dict(zip(wanted.tolist(), found[slot].tolist(), strict=True))
        assert {number: given[number] for number in expected} == expected
        assert given[-1] == -1
        several += len(expected) > 2
    assert several > 20


def test_a_tree_of_two_branches_finds_the_copies_of_each():
    """What is found for a completion's first block is its own copy, not the prompt's block."""
    where = pack([Piece(20, (7, 7))], 64)[0]

    @jax.jit
    def run(where, slots, wanted):
        layout = lay_out((SPARSE,), where, runs=3)
        return placed(layout, layout.blocks[SPARSE.block], slots, wanted)

    wanted = np.tile(np.arange(3, dtype=np.int32), (1, 3, 1, 1))
    found = np.asarray(run(where, np.array([[19, 21, 28]], np.int32), wanted))[0, :, 0]
    assert found[0].tolist() == [0, 1, 2]  # the prompt's last token sees the prompt's blocks
    # completions have copies from one block before the one in which they start
    assert found[1].tolist()[0] == found[2].tolist()[0] == 0
    assert not set(found[1].tolist()[1:]) & set(found[2].tolist()[1:])
    assert min(found[1].tolist()[1:]) > 2


def test_picks_are_noted_in_the_smallest_numbers_that_fit():
    assert [narrowest(blocks) for blocks in (1, 255, 256, 65535, 65536)] == [
        *(np.uint8, np.uint8),
        *(np.uint16, np.uint16),
        np.uint32,
    ]
    picks = jnp.array([[254, 0, -1], [7, -1, -1]])
    noted = compact(picks, 4, narrowest(255))
    assert noted.dtype == np.uint8
    assert numbers(noted).tolist() == [[254, 0, -1, -1], [7, -1, -1, -1]]


def test_agreement_is_the_share_of_the_given_picks():
    given = np.array([[4, 1, 2], [4, 1, -1], [4, 1, 2], [-1, -1, -1], [5, 6, -1]])
    own = np.array([[2, 4, 1], [1, 4, -1], [1, 7, 8], [1, 2, 3], [5, 6, 7]])
    found = jax.jit(agreement)(own[None, :, None], given[None, :, None])
    found = np.asarray(found)[0, :, 0]
    expected = [[1, 1], [1, 1], [1 / 3, 0], [0, 0], [1, 0]]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_layers_of_a_period_get_their_own_picks():
    few = dataclasses.replace(SPARSE, picks=2)
    picks = jnp.arange(6, dtype=jnp.uint8)[None, None, :, None, None]
    picks = jnp.broadcast_to(picks, (1, 5, 6, 1, 3))
    noted = Noted(picks, jnp.zeros((1, 5), int), False)
    first, none, second = noted.by_layer((SPARSE, Window(4), few))
    assert none is None and first.shape == (3, 1, 5, 1, 3) and second.shape == (3, 1, 5, 1, 2)
    assert first[:, 0, 0, 0, 0].tolist() == [0, 2, 4]  # layers 0, 3 and 6
    assert second[:, 0, 0, 0, 0].tolist() == [1, 3, 5]
