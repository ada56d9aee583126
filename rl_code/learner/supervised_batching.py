"""Packs demonstrations into rows of fixed shapes, for training by imitation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from pallas_kernels.tokens import Tokens
from rl_code.environment.documents import rope_positions, seen_as
from rl_code.learner.row_slots import Slots


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SupervisedBatch:
    """Rows of tokens to imitate, [R, S] each."""

    # int32, token ids.
    tokens: jax.Array
    # int32, the positions by which RoPE rotates.
    positions: jax.Array
    # Who sees whom.
    where: Tokens
    # float32, the weight of each token in the loss: 0 for one that is not to be learned.
    mask: jax.Array
    # The first slot of every sequence and document is a multiple of this number, see
    # ``attention.layout.lay_out``.
    align: int = dataclasses.field(default=1, metadata=dict(static=True))


@dataclasses.dataclass(frozen=True)
class Demonstrated:
    """An example to imitate, one context."""

    # Token ids.
    tokens: Sequence[int]
    # The weight of each token in the loss, see ``SupervisedBatch.mask``.
    mask: Sequence[float]
    # What each place is (``types.Context.documents``); None without documents.
    documents: Sequence[int] | None = None

    def cut(self, slots: int) -> Demonstrated:
        """Its first ``slots`` places."""
        documents = None if self.documents is None else self.documents[:slots]
        return Demonstrated(self.tokens[:slots], self.mask[:slots], documents)


def pack_supervised(
    examples: Iterable[Demonstrated],
    *,
    rows: int,
    slots: int,
    align: int = 1,
    longest: int = 0,
    parts: int = 1,
) -> tuple[SupervisedBatch, int]:
    """Packs examples in order into [rows, slots], by first fit, until one does not fit.

    Padding of documents takes slots as tokens do, so that documents start at whole blocks where
    examples do.

    align: every example starts at a slot that is a multiple of it; ``ModelConfig.alignment`` of the
    model that is trained. longest: ``DocumentsConfig.longest``. parts: devices over which the
    slots of a row are cut. Documents then lie on one of them each, where they can.

    Returns the batch as numpy arrays, and how many examples were taken.

    Raises:
      ValueError: an example has more tokens than a row has slots, or a mask of another length.
    """
    # All arrays are filled in place below. ``where`` holds ``marks``, ``numbers`` and ``order``
    # themselves, so it is filled with them. Positions are the order unless documents part the two.
    ids, order, marks, numbers, zeros = (np.zeros((rows, slots), np.int32) for _ in range(5))
    positions = np.zeros((rows, slots), np.int32)
    where = Tokens(segments=marks, branches=zeros, documents=numbers, order=order)
    batch = SupervisedBatch(ids, positions, where, np.zeros((rows, slots), np.float32), align)
    room = slots if parts > 1 else 0  # for empty slots in front of documents
    used = [Slots(align, slots // parts, spare=room) for _ in range(rows)]
    segments = [0] * rows
    taken = 0
    for example in examples:
        count = len(example.tokens)
        if not count == len(example.mask) <= slots:
            raise ValueError(
                f"example {taken}: {count} tokens and a mask of {len(example.mask)} for {slots=}"
            )
        kinds = np.zeros(count, int) if example.documents is None else np.asarray(example.documents)
        fitting = [row for row in range(rows) if used[row].free + count <= slots]
        if not fitting:
            break
        whole = (row for row in fitting if used[row].after([kinds]).end <= slots)
        row = next(whole, fitting[0])
        segments[row] += 1
        used[row].spare = min(room, slots - used[row].free - count)
        span = (row, used[row].take(kinds))
        used[row].spare = room
        batch.tokens[span] = example.tokens
        order[span] = np.arange(count)
        batch.mask[span] = example.mask
        if example.documents is None:
            positions[span] = np.arange(count)
            marks[span] = segments[row]
        else:
            real, numbers[span] = seen_as(kinds)
            positions[span] = rope_positions(kinds, longest)
            marks[span] = segments[row] * real
        taken += 1
    return batch, taken
