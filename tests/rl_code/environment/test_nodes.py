"""Lists and trees of nodes cross the wire as their values, whatever their size."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies as st

from rl_code.environment.sandbox.inside import nodes, wire
from rl_code.environment.sandbox.inside.nodes import ListNode, TreeNode, build, values_of


def over_the_wire(value):
    return wire.loads(wire.dumps(value))


@hypothesis.given(st.lists(st.integers(), min_size=1))
def test_a_list_comes_back(values):
    record = over_the_wire(build("ListNode", values))
    assert record.values == values and record.__dict__["__kind__"] == "ListNode"


def trees():
    """Trees as (value, left, right) or None."""
    leaf = st.none()
    return st.recursive(
        leaf, lambda inner: st.tuples(st.integers(0, 9), inner, inner), max_leaves=20
    )


def made(tree):
    return None if tree is None else TreeNode(tree[0], made(tree[1]), made(tree[2]))


def shape(node):
    return None if node is None else (node.val, shape(node.left), shape(node.right))


@hypothesis.given(trees().filter(lambda tree: tree is not None))
def test_a_tree_comes_back(tree):
    record = over_the_wire(made(tree))
    assert shape(build("TreeNode", record.values)) == tree


def test_depth_is_no_limit_and_circles_are_refused():
    deep = build("ListNode", list(range(50_000)))
    assert len(over_the_wire(deep).values) == 50_000
    circle = ListNode(1)
    circle.next = circle
    with pytest.raises(wire.WireError, match="a ListNode without end"):
        wire.dumps([circle])
    root = TreeNode(1)
    root.left = root
    with pytest.raises(wire.WireError, match="a TreeNode without end"):
        wire.dumps({"root": root})
    assert build("ListNode", []) is None and build("TreeNode", [None]) is None


def test_what_only_has_the_name_is_no_node():
    class ListNode:
        pass

    assert not nodes.is_node(ListNode())
    with pytest.raises(wire.WireError, match="not a plain value"):
        wire.dumps(ListNode())
    assert values_of(build("TreeNode", [1, None, 2]), 10) == [1, None, 2]
    assert values_of(build("ListNode", [1, 2, 3]), 2) is None
