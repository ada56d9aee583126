"""Training of a model that gives tokens of a text a number each (``models.scalar_head``): a text
as a whole at its last token, or the turn borders of an episode.

- "outcomes": the cross-entropy in nats between the label y of a place and sigmoid(s) of its score,
  -y log sigmoid(s) - (1 - y) log sigmoid(-s) = softplus(s) - y s, as for the steps of a solution in
  Math-Shepherd (2312.08935, equation 2), averaged by weight. Departure: a label may be a share, as
  of the continuations that solved the task (equation 4), and then counts as that share of labels
  of 1.
- "pairs": Bradley and Terry's, -log sigmoid(s_better - s_worse) (2203.02155, equation 1), averaged
  over pairs. Both texts of a pair stand in one row, the better one first.

Texts are packed into rows of fixed shapes; one stands in its row once, with all its places. As in
``update``, losses are divided by counts of the whole batch, so that neither the number of
micro-batches nor that of devices changes the update.

Dimensions: R rows, S slots, M places of a row.
"""

from __future__ import annotations

import dataclasses
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


@dataclasses.dataclass(frozen=True)
class Text:
    """Tokens, and the places among them that are scored."""

    # Token ids.
    tokens: Sequence[int]
    # Places of the tokens at which a score is read.
    places: Sequence[int]
    # Label of each place, from 0 to 1.
    labels: Sequence[float]
    # Weight of each place in the loss.
    weights: Sequence[float]

    def __post_init__(self):
        counts = len(self.places), len(self.labels), len(self.weights)
        if len(set(counts)) > 1:
            raise ValueError(
                f"{counts[0]} places, {counts[1]} labels and {counts[2]} weights must be as many"
            )
        if counts[0] and not 0 <= min(self.places) <= max(self.places) < len(self.tokens):
            raise ValueError(f"places {self.places} must be in [0, {len(self.tokens)})")
        if not all(0.0 <= label <= 1.0 for label in self.labels):
            raise ValueError(f"labels {self.labels} must be in [0, 1]")

    @classmethod
    def whole(cls, tokens: Sequence[int], label: float = 0.0) -> Text:
        """A text that is scored at its last token."""
        return cls(tokens, (len(tokens) - 1,), (label,), (1.0,))


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
    # int32 [R, M], the slot of each place; 0 where the row has no such place.
    at: jax.Array
    # float32 [R, M], from 0 to 1.
    labels: jax.Array
    # float32 [R, M], the weight of each place in the loss; 0 where there is none.
    mask: jax.Array
    # As of ``SupervisedBatch``.
    align: int = dataclasses.field(default=1, metadata=dict(static=True))


def pack_scored(
    units: Iterable[Sequence[Text]], *, rows: int, slots: int, most: int, align: int = 1
) -> tuple[ScoredBatch, list[list[tuple[int, int]]]]:
    """Packs units in order, by first fit, until one does not fit.

    units: texts that stand in one row: one, or a pair with the better one first. most: places of a
    row (M). align: ``ModelConfig.alignment``.

    Returns the batch as numpy arrays, and for each unit that was taken the row of its texts with
    the index of the first place of each. Raises ValueError for a unit that no row holds.
    """
    ids, order, marks, zeros, none = (np.zeros((rows, slots), np.int32) for _ in range(5))
    where = Tokens(segments=marks, branches=zeros, documents=none, order=order)
    at = np.zeros((rows, most), np.int32)
    labels, mask = np.zeros((rows, most), np.float32), np.zeros((rows, most), np.float32)
    batch = ScoredBatch(ids, order, where, at, labels, mask, align)
    used_slots = [Slots(align, slots, spare=0) for _ in range(rows)]
    counts, segments = [0] * rows, [0] * rows
    found: list[list[tuple[int, int]]] = []
    for unit in units:
        lengths = [len(text.tokens) for text in unit]
        needed = sum(-(-length // align) * align for length in lengths[:-1]) + lengths[-1]
        count = sum(len(text.places) for text in unit)
        if not min(lengths) or needed > slots or count > most:
            raise ValueError(
                f"texts of {lengths} tokens with {count} places do not fit into a row of {slots} "
                f"slots for {most} places"
            )
        fitting = (
            row
            for row in range(rows)
            if used_slots[row].free + needed <= slots and counts[row] + count <= most
        )
        row = next(fitting, None)
        if row is None:
            break
        found.append([])
        for text in unit:
            taken = np.asarray(used_slots[row].take(np.zeros(len(text.tokens), int)))
            segments[row] += 1
            ids[row, taken] = text.tokens
            order[row, taken] = np.arange(len(taken))
            marks[row, taken] = segments[row]
            own = slice(counts[row], counts[row] + len(text.places))
            at[row, own] = taken[np.asarray(text.places, int)]
            labels[row, own], mask[row, own] = text.labels, text.weights
            found[-1].append((row, counts[row]))
            counts[row] += len(text.places)
    return batch, found


def scored_loss(
    scores: Float[Array, "R M"], batch: ScoredBatch, kind: Kind, total: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss, and metrics, all parts of weighted means over ``total`` labels or pairs.

    train/accuracy: the share of labels or pairs that are on their right side of 0. scores/mean,
    scores/label, scores/brier: of labels, the mean of sigmoid(s) and y, and the mean squared error.
    """
    values = {}
    if kind == "pairs":
        margins = scores[:, 0::2] - scores[:, 1::2]
        mask = batch.mask[:, 1::2]
        losses = jax.nn.softplus(-margins)
    else:
        margins = (2.0 * batch.labels - 1.0) * scores
        mask = batch.mask
        losses = jax.nn.softplus(scores) - batch.labels * scores
        p = jax.nn.sigmoid(scores)
        values = {
            "scores/mean": p,
            "scores/label": batch.labels,
            "scores/brier": jnp.square(p - batch.labels),
        }
    values["train/accuracy"] = margins > 0
    means = {name: jnp.sum(mask * x) / total for name, x in values.items()}
    return jnp.sum(mask * losses) / total, jax.lax.stop_gradient(means)


def make_scored_update(
    optimizer: OptimizerConfig, kind: Kind, micro_batches: int = 1
) -> Callable[..., tuple]:
    """An update(state, ScoredBatch) -> (state, metrics); otherwise as ``update.make_update``.
    train/labels is the weight of all labels, or the number of pairs.
    """

    def update(state: TrainState, batch: ScoredBatch) -> tuple[TrainState, dict[str, jax.Array]]:
        mask = batch.mask[:, 1::2] if kind == "pairs" else batch.mask
        total = jnp.maximum(jnp.sum(mask), 1.0)
        micro = split(batch, micro_batches)

        def share(model: ScoredTransformer, _: None, i: jax.Array) -> tuple[jax.Array, Terms]:
            part = take(micro, i)
            loss, means = scored_loss(_scores(model, part), part, kind, total)
            return loss, Terms(means, {})

        value, terms, grads, _ = accumulate(share, state.model, None, used(micro.mask))
        return apply(state, grads, value, optimizer, terms.means | {"train/labels": total})

    return jit_step(update)


@jax.jit
def scores_in(model: ScoredTransformer, batch: ScoredBatch) -> Float[Array, "R M"]:
    """The scores of a batch's places, float32; anything where there is no place."""
    return _scores(model, batch)


def _scores(model: ScoredTransformer, batch: ScoredBatch) -> Float[Array, "R M"]:
    found = model.scores(batch.tokens, batch.positions, batch.where, batch.at, batch.align)
    return constrain(found, "batch", None)
