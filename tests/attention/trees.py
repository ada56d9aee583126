"""Packed rows whose segments are trees of any depth."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from pallas_kernels.tokens import Tokens, branch_of


@dataclasses.dataclass(frozen=True)
class Node:
    """A run of ``length`` tokens and the nodes that continue it."""

    length: int
    children: tuple[Node, ...] = ()

    @property
    def descendants(self) -> int:
        return sum(1 + child.descendants for child in self.children)


# Two trees of depths 4 and 1; the first has a node without tokens of its own.
TREES = (
    Node(11, (Node(7, (Node(5), Node(0, (Node(4), Node(6))))), Node(3), Node(9, (Node(2),)))),
    Node(13),
)


def pack_trees(trees: Sequence[Node], size: int) -> tuple[Tokens, list[np.ndarray]]:
    """One row of trees, and the slots of every path from a root to a node, in order."""
    fields = np.zeros((4, size), np.int32)
    paths = []
    at = 0

    def write(node: Node, segment: int, number: int, path: np.ndarray) -> int:
        """Writes a node and those below it; the number of the next node."""
        nonlocal at
        own = np.arange(at, at + node.length)
        at += node.length
        assert at <= size
        fields[0, own] = segment
        fields[1, own] = branch_of(number, node.descendants)
        fields[3, own] = len(path) + np.arange(node.length)
        path = np.concatenate([path, own])
        paths.append(path)
        number += 1
        for child in node.children:
            number = write(child, segment, number, path)
        return number

    for segment, tree in enumerate(trees, start=1):
        write(tree, segment, 0, np.zeros(0, int))
    return Tokens(*map(jnp.asarray, fields[:, None])), paths


def random_tree(rng: np.random.Generator, nodes: int) -> Node:
    """A tree of random shape and lengths, some 0."""
    below: list[list[int]] = [[] for _ in range(nodes)]
    for node in range(1, nodes):
        below[rng.integers(0, node)].append(node)

    def build(node: int) -> Node:
        length = int(rng.integers(0, 5)) if node else int(rng.integers(1, 5))
        return Node(length, tuple(build(child) for child in below[node]))

    return build(0)
