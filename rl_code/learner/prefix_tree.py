"""The trees of tokens that a row of a batch holds: what contexts have in common stands once.

The contexts of a group's trajectories share prefixes: all start from the group's prompt, and within
a trajectory a context continues another one. ``share`` turns the contexts to train on into trees
whose nodes are runs of tokens, and ``RowWriter`` lays the nodes out depth first, as
``pallas_kernels.tokens`` needs it to say who sees whom.

A linear group gives one tree of two levels: the prompt, and a node for each trajectory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from pallas_kernels.tokens import branch_of
from rl_code.learner import picks
from rl_code.learner.batch import Batch
from rl_code.learner.examples import Example
from rl_code.learner.row_slots import Slots


@dataclasses.dataclass(eq=False)
class Node:
    """A run of tokens and the runs that continue it."""

    # int32 [n], or [n, 4] with documents: what rows hold of each token (``Example.own``). It may be
    # empty.
    tokens: np.ndarray
    # Position of its first token in the contexts that it belongs to, padding of documents not
    # counted.
    start: int
    parent: Node | None
    children: list[Node] = dataclasses.field(default_factory=list)
    # Slots of its tokens in the row, int [n], once it is written.
    slots: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, int))

    @property
    def end(self) -> int:
        """Position behind its last token."""
        return self.start + len(self.tokens)

    @property
    def documents(self) -> np.ndarray:
        """int32 [n], the ``documents`` of a Batch of its tokens; zeros without documents."""
        return self.tokens[:, 1] if self.tokens.ndim == 2 else np.zeros(len(self.tokens), np.int32)

    @property
    def places(self) -> int:
        """Places of a context that the node reaches over, padding of documents between its tokens
        included.
        """
        if self.tokens.ndim == 1 or not len(self.tokens):
            return len(self.tokens)
        order = self.tokens[:, 3]
        return int(order[-1] - order[0]) + 1

    def add(self, tokens: np.ndarray, start: int | None = None) -> Node:
        """A new child; start: its position, by default this node's end."""
        child = Node(tokens, self.end if start is None else start, self)
        self.children.append(child)
        return child

    def split(self, position: int) -> Node:
        """Cuts the node in two at a position and returns the new first part.

        This object stays the last part: where it was noted as the end of a context, that stays
        right.
        """
        count = position - self.start
        head = Node(self.tokens[:count], self.start, self.parent, [self])
        self.parent.children[self.parent.children.index(self)] = head
        self.parent = head
        self.tokens = self.tokens[count:]
        self.start = position
        return head

    def ending_at(self, position: int) -> Node:
        """The node that ends at a position: this one, or one that it continues. If none ends
        there, the node that holds the position is cut.
        """
        node = self
        while node.start >= position and node.parent is not None:
            node = node.parent
        return node if node.end <= position else node.split(position)

    def below(self) -> list[Node]:
        """The nodes that continue this one, depth first, in order."""
        nodes = []
        # A stack: its last entry is visited next, so children are put onto it in reverse.
        waiting = self.children[::-1]
        while waiting:
            nodes.append(waiting.pop())
            waiting += nodes[-1].children[::-1]
        return nodes


@dataclasses.dataclass
class Piece:
    """Examples of one group that stand in one row, and the trees of the tokens they read."""

    examples: list[Example]
    # The parent of all trees. It has no tokens itself.
    forest: Node
    # The root of the tree that begins with the group's prompt; None if no context continues the
    # prompt.
    prompt: Node | None
    # For each example and each of its contexts: the node with which the tokens that are read of the
    # context end; None if none are read.
    ends: list[list[Node | None]]

    @property
    def nodes(self) -> list[Node]:
        """All nodes, depth first."""
        return self.forest.below()

    @property
    def tokens(self) -> int:
        """Tokens of all nodes."""
        return sum(len(node.tokens) for node in self.nodes)

    @property
    def document_tokens(self) -> int:
        """Tokens of all nodes that stand in documents."""
        return sum(int(np.sum(node.documents > 0)) for node in self.nodes)

    @property
    def targets(self) -> int:
        """Sampled tokens of all examples."""
        return sum(example.targets for example in self.examples)


def share(examples: Sequence[Example], *, levels: int | None, align: int, held: int = 0) -> Piece:
    """Builds the trees of the tokens that examples of one group read.

    Args:
      examples: examples of one group, in order.
      levels: None for trees of any depth. 2 if only the group's prompt may be shared; every later
        context is then written as if it were a trajectory of its own.
      align: a later context shares the start of an earlier one if they have at least this many
        tokens in common.
      held: how many last tokens of the prompt stand at the start of everything that continues it,
        instead of in the prompt's node. 0 in one phase. In two phases the rest of the prompt is
        computed elsewhere, and the prompt's node is empty here.
    """
    forest = Node(np.zeros(0, np.int32), 0, None)
    ends: list[list[Node | None]] = []
    first = examples[0].trajectory
    prompt_length = first.prompt_length
    prompt = examples[0].own[0][:prompt_length]
    shared: Node | None = None

    def continued(tokens: np.ndarray) -> Node:
        """A new node of a whole context behind the prompt."""
        nonlocal shared
        if shared is None:
            shared = forest.add(prompt[:0] if held else prompt)
        return shared.add(tokens[prompt_length - held :], prompt_length - held)

    for example in examples:
        t = example.trajectory
        own: list[Node | None] = []
        ends.append(own)
        for index, read in enumerate(example.read):
            if not read:
                own.append(None)
            elif index == 0 and shared is not None and t.fork is not None and levels is None:
                # a continuation shares more than the prompt, with the trajectory that it continues
                own.append(_go_down(shared, example.own[0][prompt_length:read], align))
            elif index == 0:
                own.append(continued(example.own[0][:read]))
            elif levels is not None:
                whole = example.whole(index)[:read]
                sampled = example.sampled[index]
                # ``sampled`` counts within the context's own tokens, ``whole`` also has what the
                # context keeps of its parent.
                first_sampled = t.contexts[index].kept + sampled[0] if sampled.size else read
                starts = first_sampled >= prompt_length and np.array_equal(
                    whole[:prompt_length], prompt
                )
                if sampled.size:
                    own.append(continued(whole) if starts else forest.add(whole))
                else:  # read by other contexts only, which here repeat it
                    own.append(None)
            else:
                own.append(_later(forest, own, example, index, align))
    return Piece(list(examples), forest, shared, ends)


def _later(
    forest: Node, own: Sequence[Node | None], example: Example, index: int, align: int
) -> Node:
    """Adds a context that is not the first of its trajectory, and returns the node at which it
    ends.

    own: the nodes at which the earlier contexts of the trajectory end.
    """
    context = example.trajectory.contexts[index]
    read = example.read[index]
    kept = min(context.kept, read)
    # a parent of which nothing is kept is no part of the tree that the context stands in
    node = own[context.parent].ending_at(kept) if kept else forest
    return _go_down(node, example.own[index][: read - kept], align)


def _go_down(node: Node, rest: np.ndarray, align: int) -> Node:
    """Adds tokens behind a node, of which what its children have already is shared; returns the
    node at which they end.
    """
    # Go down along the child that has most tokens in common with what is left of the context. Where
    # the two part within a child, that child is cut. Less than ``align`` tokens in common are not
    # worth a run of their own: runs start at multiples of it, so no slot would be saved.
    while len(rest):
        found = [(_common(child.tokens, rest), child) for child in node.children]
        count, child = max(found, key=lambda pair: pair[0], default=(0, node))
        if count < max(align, 1):
            return node.add(rest)
        node = child if count == len(child.tokens) else child.split(child.start + count)
        rest = rest[count:]
    return node


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """Length of the longest common prefix; with documents, of equal places too."""
    size = min(len(one), len(other))
    unequal = one[:size] != other[:size]
    differ = np.flatnonzero(unequal.any(axis=1) if unequal.ndim == 2 else unequal)
    return int(differ[0]) if differ.size else size


@dataclasses.dataclass
class RowWriter:
    """Fills one row of a batch of numpy arrays in place."""

    batch: Batch
    # The row's index.
    index: int
    # Gives the tokens of nodes their slots.
    slots: Slots
    # The version of the learner's weights.
    version: int
    # The first target that is still free.
    target: int = 0

    def write(
        self, piece: Piece, segments: Iterator[int], prompt_segment: int | None = None
    ) -> None:
        """Writes the trees of a piece and the targets of its examples.

        segments: gives each tree its segment. prompt_segment: the segment of the prompt's tree, if
          the prompt has one already (in two phases).
        """
        for tree in piece.forest.children:
            given = tree is piece.prompt and prompt_segment is not None
            segment = prompt_segment if given else next(segments)
            # Depth first: a node and all that continue it have consecutive numbers, which
            # ``branch_of`` relies on.
            nodes = [tree, *tree.below()]
            sizes: dict[Node, int] = {}  # how many nodes are a node and all below it
            for node in reversed(nodes):  # children come before their parents here
                sizes[node] = 1 + sum(sizes[child] for child in node.children)
            for number, node in enumerate(nodes):
                self._write_tokens(node, segment, branch_of(number, sizes[node] - 1))
        for example, ends in zip(piece.examples, piece.ends, strict=True):
            self._write_targets(example, ends)

    def _write_tokens(self, node: Node, segment: int, branch: int) -> None:
        node.slots = self.slots.take(node.documents)
        at = (self.index, node.slots)
        batch = self.batch
        if batch.documents is None:
            batch.tokens[at] = node.tokens
            batch.positions[at] = np.arange(node.start, node.end)
        elif len(node.tokens):
            fields = (batch.tokens, batch.documents, batch.positions, batch.order)
            for field, column in zip(fields, node.tokens.T, strict=True):
                field[at] = column
        batch.segments[at] = segment
        batch.branches[at] = branch

    def _write_targets(self, example: Example, ends: Sequence[Node | None]) -> None:
        """Writes the targets of a trajectory. Those of all its contexts stand next to each other,
        since losses that sum over a trajectory sum over neighbours.
        """
        batch = self.batch
        first = self.target
        trajectory = example.trajectory
        if trajectory.demonstrated and batch.demonstrated is None:
            raise ValueError(
                f"task {trajectory.task_id!r} trajectory {trajectory.index} is a demonstration; "
                "set config.train.demonstrations"
            )
        for context, indices, end in zip(
            example.trajectory.contexts, example.sampled, ends, strict=True
        ):
            if end is None or not indices.size:
                continue
            span = (self.index, slice(self.target, self.target + len(indices)))
            # A target is predicted from the token before it. This is the position of that token in
            # the whole context; ``indices`` count within the context's own tokens.
            before = context.kept + indices - 1
            # Positions rise along ``before``. The node has those from ``own`` on, and the nodes
            # that it continues have the others.
            sources = np.zeros(len(before), int)
            node = end
            behind = len(before)
            while behind:
                own = int(np.searchsorted(before[:behind], node.start))
                sources[own:behind] = node.slots[before[own:behind] - node.start]
                behind = own
                node = node.parent
            picks.write(batch, span, context, sources)
            batch.sources[span] = sources
            batch.targets[span] = context.tokens[indices]
            batch.logprobs[span] = context.logprobs[indices]
            batch.staleness[span] = self.version - context.versions[indices]
            self.target += len(indices)
        span = (self.index, slice(first, self.target))
        batch.advantages[span] = example.advantage
        batch.mask[span] = 1.0
        batch.trajectories[span] = example.number
        batch.lengths[span] = example.targets
        if batch.demonstrated is not None:
            batch.demonstrated[span] = bool(trajectory.demonstrated)
