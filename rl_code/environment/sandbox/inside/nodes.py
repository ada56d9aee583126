"""Linked lists and binary trees across the border of a process: as flat lists of values.

A list node or a tree node is written as a record of its class's name and its values; those of a
tree level by level, None for a child that is not there. The candidate's process makes real nodes of
it, of the candidate's own class where its file defines one.

Runs inside the sandbox: standard library only.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator
from typing import Any

LIST, TREE = "ListNode", "TreeNode"
# The one field of a record that stands for nodes.
VALUES = "values"


class ListNode:
    """A node of a linked list."""

    def __init__(self, val=0, next=None):
        self.val = val
        self.next = next


class TreeNode:
    """A node of a binary tree."""

    def __init__(self, val=0, left=None, right=None):
        self.val = val
        self.left = left
        self.right = right


CLASSES: dict[str, type] = {LIST: ListNode, TREE: TreeNode}
_FIELDS = {LIST: ("val", "next"), TREE: ("val", "left", "right")}


def is_node(value: Any) -> bool:
    """True if a value is a node, whichever class of such a name it has."""
    names = _FIELDS.get(type(value).__name__)
    return names is not None and all(hasattr(value, name) for name in names)


def values_of(node: Any, most: int) -> list[Any] | None:
    """The values of a list or a tree; None for more than ``most`` nodes, as in a circle."""
    is_list = type(node).__name__ == LIST
    items = _list_values(node) if is_list else _tree_values(node)
    values = list(itertools.islice(items, most + 1))
    if len(values) > most:
        return None
    while not is_list and values and values[-1] is None:
        values.pop()
    return values


def build(kind: str, values: list[Any], made: Any = None) -> Any:
    """The first node of a list or the root of a tree; None where there are no values.

    made: the class of the nodes; unless given the one of this file.
    """
    made = made or CLASSES[kind]
    return _list(values, made) if kind == LIST else _tree(values, made)


def _list(values: list[Any], made: Any) -> Any:
    head = None
    for value in reversed(values):
        head = made(value, head)
    return head


def _tree(values: list[Any], made: Any) -> Any:
    if not values or values[0] is None:
        return None
    root = made(values[0])
    waiting = collections.deque([root])
    rest = iter(values[1:])
    while waiting:
        node = waiting.popleft()
        for side in ("left", "right"):
            value = next(rest, None)
            if value is not None:
                child = made(value)
                setattr(node, side, child)
                waiting.append(child)
    return root


def _list_values(node: Any) -> Iterator[Any]:
    while node is not None:
        yield node.val
        node = node.next


def _tree_values(root: Any) -> Iterator[Any]:
    waiting = collections.deque([root])
    while waiting:
        node = waiting.popleft()
        yield None if node is None else node.val
        if node is not None:
            waiting += (node.left, node.right)
