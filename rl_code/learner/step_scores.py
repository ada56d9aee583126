"""Training of a model that scores the turn borders of episodes (``models.scalar_head``).

The loss is the cross-entropy between the label of a border and sigmoid(score), as for the steps of
a solution in Math-Shepherd (2312.08935, equation 2). Departure: a label may be a share, as of the
continuations that solved the task (equation 4), and then counts as that share of labels of 1.

An episode stands in a row once, with all its borders. As in ``update``, losses are divided by the
weights of the whole batch, so that neither the number of micro-batches nor that of devices changes
the update.

Dimensions: R rows, S slots, M borders of a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

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


@dataclasses.dataclass(frozen=True)
class Steps:
    """The borders of one context."""

    # Token ids.
    tokens: Sequence[int]
    # The place of the last token before each border.
    places: Sequence[int]
    # Label of each border, from 0 to 1.
    labels: Sequence[float]
    # Weight of each border in the loss.
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepBatch:
    """Rows of contexts with labelled borders."""

    # int32 [R, S], token ids.
    tokens: jax.Array
    # int32 [R, S], the positions by which RoPE rotates.
    positions: jax.Array
    # Who sees whom.
    where: Tokens
    # int32 [R, M], the slot of the last token before each border.
    at: jax.Array
    # float32 [R, M].
    labels: jax.Array
    # float32 [R, M], the weight of each border in the loss; 0 where there is none.
    mask: jax.Array
    # As of ``SupervisedBatch``.
    align: int = dataclasses.field(default=1, metadata=dict(static=True))


def pack_steps(
    examples: Iterable[Steps], *, rows: int, slots: int, most: int, align: int = 1
) -> tuple[StepBatch, list[tuple[int, int]]]:
    """Packs examples in order, by first fit, until one does not fit.

    most: borders of a row (M). align: ``ModelConfig.alignment``.

    Returns the batch as numpy arrays, and for each example that was taken its row and the index of
    its first border there. Raises ValueError for an example that no row holds.
    """
    ids, order, marks, zeros, none = (np.zeros((rows, slots), np.int32) for _ in range(5))
    where = Tokens(segments=marks, branches=zeros, documents=none, order=order)
    at = np.zeros((rows, most), np.int32)
    labels, mask = np.zeros((rows, most), np.float32), np.zeros((rows, most), np.float32)
    batch = StepBatch(ids, order, where, at, labels, mask, align)
    used_slots = [Slots(align, slots, spare=0) for _ in range(rows)]
    counts = [0] * rows
    segments = [0] * rows
    found: list[tuple[int, int]] = []
    for example in examples:
        size, count = len(example.tokens), len(example.places)
        if not 0 < size <= slots or count > most:
            raise ValueError(
                f"{size} tokens with {count} borders do not fit into a row of {slots} slots for "
                f"{most} borders"
            )
        fitting = (
            row
            for row in range(rows)
            if used_slots[row].free + size <= slots and counts[row] + count <= most
        )
        row = next(fitting, None)
        if row is None:
            break
        taken = np.asarray(used_slots[row].take(np.zeros(size, int)))
        segments[row] += 1
        ids[row, taken] = example.tokens
        order[row, taken] = np.arange(size)
        marks[row, taken] = segments[row]
        own = slice(counts[row], counts[row] + count)
        at[row, own] = taken[np.asarray(example.places, int)]
        labels[row, own] = example.labels
        mask[row, own] = example.weights
        found.append((row, counts[row]))
        counts[row] += count
    return batch, found


def step_loss(
    scores: Float[Array, "R M"], batch: StepBatch, total: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The cross-entropy in nats, and metrics, all parts of weighted means over the borders of the
    whole batch, whose weights come to ``total``.

    -y log sigmoid(s) - (1 - y) log sigmoid(-s) = softplus(s) - y s.
    """
    losses = jax.nn.softplus(scores) - batch.labels * scores
    p = jax.nn.sigmoid(scores)
    values = {
        "scores/loss": losses,
        "scores/mean": p,
        "scores/label": batch.labels,
        "scores/brier": jnp.square(p - batch.labels),
    }
    means = {name: jnp.sum(batch.mask * x) / total for name, x in values.items()}
    return means["scores/loss"], jax.lax.stop_gradient(means)


def make_step_update(optimizer: OptimizerConfig, micro_batches: int = 1) -> Callable[..., tuple]:
    """An update(state, StepBatch) -> (state, metrics); otherwise as ``update.make_update``."""

    def update(state: TrainState, batch: StepBatch) -> tuple[TrainState, dict[str, jax.Array]]:
        total = jnp.maximum(jnp.sum(batch.mask), 1.0)
        micro = split(batch, micro_batches)

        def share(model: ScoredTransformer, _: None, i: jax.Array) -> tuple[jax.Array, Terms]:
            part = take(micro, i)
            loss, means = step_loss(_scores(model, part), part, total)
            return loss, Terms(means, {})

        value, terms, grads, _ = accumulate(share, state.model, None, used(micro.mask))
        return apply(state, grads, value, optimizer, terms.means | {"train/borders": total})

    return jit_step(update)


@jax.jit
def border_scores(model: ScoredTransformer, batch: StepBatch) -> Float[Array, "R M"]:
    """Sigmoid of the scores: estimates of the labels; anything where there is no border."""
    return jax.nn.sigmoid(_scores(model, batch))


def _scores(model: ScoredTransformer, batch: StepBatch) -> Float[Array, "R M"]:
    found = model.scores(batch.tokens, batch.positions, batch.where, batch.at, batch.align)
    return constrain(found, "batch", None)
