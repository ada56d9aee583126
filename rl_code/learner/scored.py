"""Training of a model that gives a text one number (``models.scalar_head``), on labels or on pairs.

- "outcomes": the logistic loss of a label, -log sigmoid(s) for a text with label 1 and
  -log sigmoid(-s) for one with label 0, averaged over texts.
- "pairs": Bradley and Terry's, -log sigmoid(s_better - s_worse) (2203.02155, equation 1), averaged
  over pairs. Both texts of a pair stand in one row, the better one first.

Texts are packed into rows of fixed shapes, and a score is read at the last token of its text. As in
``update``, losses are divided by counts of the whole batch, so that neither the number of
micro-batches nor that of devices changes the update.

Dimensions: R rows, S slots, M texts of a row.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from models.scalar_head import ScoredTransformer
from models.sharding import constrain
from pallas_kernels.tokens import Tokens
from rl_code.learner.objective import Terms
from rl_code.learner.optimizer import OptimizerConfig
from rl_code.learner.row_slots import Slots
from rl_code.learner.update import TrainState, accumulate, apply, jit_step, split, take, used

Kind = Literal["outcomes", "pairs"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScoredBatch:
    """Rows of texts with labels."""

    # int32 [R, S], token ids.
    tokens: jax.Array
    # int32 [R, S], the positions by which RoPE rotates.
    positions: jax.Array
    # Who sees whom.
    where: Tokens
    # int32 [R, M], the slot of each text's last token; 0 where the row has no such text.
    last: jax.Array
    # float32 [R, M], 1 for a good text and 0 for a bad one.
    labels: jax.Array
    # float32 [R, M], 1 where there is a text, else 0.
    mask: jax.Array
    # As of ``SupervisedBatch``.
    align: int = dataclasses.field(default=1, metadata=dict(static=True))


@dataclasses.dataclass(frozen=True)
class Text:
    """A text to score."""

    # Token ids.
    tokens: Sequence[int]
    # 1 for a good one, 0 for a bad one.
    label: float = 0.0


def pack_scored(
    units: Iterable[Sequence[Text]], *, rows: int, slots: int, most: int, align: int = 1
) -> tuple[ScoredBatch, list[list[tuple[int, int]]]]:
    """Packs units in order, by first fit, until one does not fit.

    units: texts that stand in one row: one, or a pair with the better one first. most: texts of a
    row (M). align: ``ModelConfig.alignment``.

    Returns the batch as numpy arrays, and for each unit that was taken the (row, index) of its
    texts. Raises ValueError for a unit that no row holds.
    """
    ids, order, marks, zeros, none = (np.zeros((rows, slots), np.int32) for _ in range(5))
    where = Tokens(segments=marks, branches=zeros, documents=none, order=order)
    last = np.zeros((rows, most), np.int32)
    labels, mask = np.zeros((rows, most), np.float32), np.zeros((rows, most), np.float32)
    batch = ScoredBatch(ids, order, where, last, labels, mask, align)
    used_slots = [Slots(align, slots, spare=0) for _ in range(rows)]
    counts = [0] * rows
    places: list[list[tuple[int, int]]] = []
    for unit in units:
        lengths = [len(text.tokens) for text in unit]
        needed = sum(-(-length // align) * align for length in lengths[:-1]) + lengths[-1]
        if not min(lengths) or needed > slots or len(unit) > most:
            raise ValueError(
                f"{len(unit)} texts of {lengths} tokens do not fit into a row of {slots} slots for "
                f"{most} texts"
            )
        row = next(
            (
                row
                for row in range(rows)
                if used_slots[row].free + needed <= slots and counts[row] + len(unit) <= most
            ),
            None,
        )
        if row is None:
            break
        places.append([])
        for text in unit:
            at = used_slots[row].take(np.zeros(len(text.tokens), int))
            index = counts[row]
            counts[row] += 1
            ids[row, at] = text.tokens
            order[row, at] = np.arange(len(at))
            marks[row, at] = counts[row]
            last[row, index], labels[row, index], mask[row, index] = at[-1], text.label, 1.0
            places[-1].append((row, index))
    return batch, places


def scored_loss(
    scores: Float[Array, "R M"], batch: ScoredBatch, kind: Kind, total: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(The loss, the share of texts or pairs that are on their right side of 0), both as parts of
    means over ``total`` texts or pairs.
    """
    if kind == "pairs":
        margins = scores[:, 0::2] - scores[:, 1::2]
        mask = batch.mask[:, 1::2]
    else:
        margins = (2.0 * batch.labels - 1.0) * scores
        mask = batch.mask
    loss = jnp.sum(mask * jax.nn.softplus(-margins)) / total
    return loss, jnp.sum(mask * (margins > 0)) / total


def make_scored_update(
    optimizer: OptimizerConfig, kind: Kind, micro_batches: int = 1
) -> Callable[..., tuple]:
    """An update(state, ScoredBatch) -> (state, metrics); otherwise as ``update.make_update``."""

    def update(state: TrainState, batch: ScoredBatch) -> tuple[TrainState, dict[str, jax.Array]]:
        mask = batch.mask[:, 1::2] if kind == "pairs" else batch.mask
        total = jnp.maximum(jnp.sum(mask), 1.0)
        micro = split(batch, micro_batches)

        def share(model: ScoredTransformer, _: None, i: jax.Array) -> tuple[jax.Array, Terms]:
            part = take(micro, i)
            loss, right = scored_loss(_scores(model, part), part, kind, total)
            return loss, Terms({"train/accuracy": jax.lax.stop_gradient(right)}, {})

        value, terms, grads, _ = accumulate(share, state.model, None, used(micro.mask))
        return apply(state, grads, value, optimizer, terms.means | {"train/texts": total})

    return jit_step(update)


@functools.cache
def make_scores() -> Callable[[ScoredTransformer, ScoredBatch], jax.Array]:
    """A jitted (model, batch) -> scores, float32 [R, M]; 0 where there is no text."""

    @jax.jit
    def scores(model: ScoredTransformer, batch: ScoredBatch) -> jax.Array:
        return jnp.where(batch.mask > 0, _scores(model, batch), 0.0)

    return scores


def _scores(model: ScoredTransformer, batch: ScoredBatch) -> Float[Array, "R M"]:
    found = model.scores(batch.tokens, batch.positions, batch.where, batch.last, batch.align)
    return constrain(found, "batch", None)
