"""Trees of any depth in packed rows: a token sees its own path and nothing else."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention.blockwise import blockwise_attention
from pallas_kernels.tokens import (
    MAX_NODES,
    bounds,
    branch_of,
    may_see,
    must_see,
    visible,
)
from tests.attention.rows import Piece, defined_by, normal, pack, relative, results
from tests.attention.trees import TREES, Node, pack_trees, random_tree
from tests.pallas_kernels.test_flash import GPU, TPU, check

SIZE = 64


def seen_by_path(paths: list[np.ndarray], size: int) -> np.ndarray:
    """bool [size, size]: each slot sees those that do not come after it on its path."""
    seen = np.zeros((size, size), bool)
    for path in paths:
        for place, slot in enumerate(path):
            seen[slot, path[: place + 1]] = True
    return seen


@jax.jit
def seen(tokens):
    return visible(tokens, tokens)


@jax.jit
def compared(tokens):
    """(what a token sees, what blocks of four may see, what they must)."""
    block = bounds(tokens, 4)
    return visible(tokens, tokens), may_see(block, block), must_see(block, block)


def test_a_token_sees_its_path_and_nothing_else():
    rng = np.random.default_rng(0)
    for nodes in (1, 2, 3, 5, 8, 13):
        trees = [random_tree(rng, nodes), random_tree(rng, 3)]
        tokens, paths = pack_trees(trees, 80)
        assert np.array_equal(np.asarray(seen(tokens))[0], seen_by_path(paths, 80))


def test_a_prompt_with_completions_is_written_as_plain_numbers():
    tree, _ = pack_trees([Node(20, (Node(7), Node(1), Node(12)))], SIZE)
    packed, _ = pack([Piece(20, (7, 1, 12))], SIZE)
    for one, other in zip(jax.tree.leaves(tree), jax.tree.leaves(packed), strict=True):
        assert np.array_equal(one, other)


def test_bounds_neither_hide_a_visible_pair_nor_show_a_hidden_one():
    rng = np.random.default_rng(1)
    whole = 0
    for nodes in (1, 4, 9, 14):
        tokens, _ = pack_trees([random_tree(rng, nodes), random_tree(rng, 2)], SIZE)
        pairs, may, must = map(np.asarray, compared(tokens))
        pairs = pairs.reshape(1, 16, 4, 16, 4)
        assert not (pairs.any(axis=(2, 4)) & ~may).any()
        real = (np.asarray(tokens.segments) > 0).reshape(1, 16, 4).all(axis=2)
        sure = must & real[:, :, None] & real[:, None]
        assert not (sure & ~pairs.all(axis=(2, 4))).any()
        whole += sure.sum()
    assert whole  # blocks that need no mask do occur


def test_a_tree_with_more_nodes_than_a_branch_holds_is_refused():
    assert branch_of(MAX_NODES - 1, 0) == MAX_NODES - 1
    with pytest.raises(ValueError, match=f"may have {MAX_NODES} nodes"):
        branch_of(1, MAX_NODES - 1)


@pytest.mark.parametrize("block", [8, 16])
@pytest.mark.quick(first=1)
def test_attention_over_a_tree_is_attention_to_paths(x64, block):
    tokens, paths = pack_trees(TREES, SIZE)
    qkv = normal(0, (1, SIZE, 4, 8), *[(1, SIZE, 2, 8)] * 2, dtype=jnp.float64)
    weights = normal(1, qkv[0].shape, qkv[0].shape[:3], dtype=jnp.float64)

    def packed(q, k, v):
        return blockwise_attention(q, k, v, tokens, tokens, None, block)

    (out, lse), gradients = results(packed, qkv, *weights)
    wanted = defined_by(seen_by_path(paths, SIZE)[None], qkv, *weights)
    (expected, expected_lse), wanted_gradients = wanted
    assert relative(out, expected) < 1e-10
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-10, atol=1e-10)
    for one, other in zip(gradients, wanted_gradients, strict=True):
        assert relative(one, other) < 1e-10


@pytest.mark.long
def test_the_kernel_for_tpus_equals_the_definition_on_trees(x64):
    tokens, _ = pack_trees(TREES, SIZE)
    check((tokens, tokens), 2, 1, **TPU)


@pytest.mark.long
def test_the_kernel_for_gpus_equals_the_definition_on_trees(x64):
    def longer(node: Node) -> Node:
        return Node(4 * node.length, tuple(map(longer, node.children)))

    tokens, _ = pack_trees([longer(tree) for tree in TREES], 4 * SIZE)
    check((tokens, tokens), 2, 1, size=16, dtype=jnp.bfloat16, **GPU)
