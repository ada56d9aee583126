"""The sampler's picks in a batch, and how the trainer's agree with them (``attention.picks``).

A sampled token is predicted by the query before it, so picks belong to targets. A query that
several trajectories continue, such as the last token of their prompt, stands in a row once. The
picks of the first trajectory count for it; the others chose the same blocks if the same weights
computed the same keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from attention.picks import Noted, choosing, narrowest, noted_dtype, noted_shape
from models.model_config import ModelConfig
from models.moe import Routing
from rl_code.learner.batch import Batch
from rl_code.learner.objective import Terms
from rl_code.types import Context

# The names of NSA's picks and of a token's experts in ``Context.choices`` and ``Batch.choices``.
BLOCKS = "blocks"
EXPERTS = "experts"
# How the metrics of each begin.
_METRICS = {BLOCKS: "policy/picks", EXPERTS: "policy/experts"}


def shapes(model: ModelConfig, slots: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Entries that ``Batch.choices`` has for each target, in rows of so many slots.

    Raises ValueError for a model without a layer whose choice can be noted.
    """
    found = {}
    if model.moe is not None:
        shape = (model.num_layers - model.moe.first_dense, model.moe.active)
        found[EXPERTS] = jax.ShapeDtypeStruct(shape, narrowest(model.moe.experts))
    if choosing(model.attention) is None:
        if not found:
            raise ValueError(
                f"rollout.picks is for layers that choose keys, as nsa and dsa do, or experts; the "
                f"model has attention={model.attention} and no experts: set rollout.picks to None"
            )
        return found
    methods = model.attention * model.periods
    # no context has more tokens than a row has slots, and perhaps a last block that is not full
    dtype = noted_dtype(methods, slots + max(method.pick_size() or 1 for method in methods))
    shape = noted_shape(methods, model.num_kv_heads)
    found[BLOCKS] = jax.ShapeDtypeStruct(shape, dtype)
    return found


def empty(
    shapes: Mapping[str, jax.ShapeDtypeStruct], rows: int, targets: int
) -> dict[str, np.ndarray] | None:
    """``Batch.choices`` in which nothing was noted; None for no shapes."""
    if not shapes:
        return None
    return {
        name: np.full((rows, targets, *x.shape), np.iinfo(x.dtype).max, x.dtype)
        for name, x in shapes.items()
    }


def write(batch: Batch, span: tuple[int, slice], context: Context, sources: np.ndarray) -> None:
    """Writes what a context's sampler chose into a batch that has room for it.

    span: row and targets of the context's sampled tokens. sources: their slots. A context of which
    nothing was noted leaves the batch as it is.

    Raises ValueError for choices of other shapes than the model's.
    """
    for name, there in (batch.choices or {}).items():
        if context.choices is None or name not in context.choices:
            continue
        found = context.choices[name]
        if found.shape != (len(sources), *there.shape[2:]):
            raise ValueError(
                f"{name} of shape {found.shape} were noted for {len(sources)} sampled tokens; the "
                f"model chooses {there.shape[2:]} for each (layers, key/value heads of {BLOCKS}, "
                "picks)"
            )
        # targets are written one after another, so all before these have their sources
        first = ~np.isin(sources, batch.sources[span[0], : span[1].start])
        none = np.iinfo(there.dtype).max
        found = np.where(found == np.iinfo(found.dtype).max, none, found).astype(there.dtype)
        there[span] = np.where(first.reshape(-1, *(1,) * (found.ndim - 1)), found, none)


def noted(batch: Batch, replay: bool) -> Noted:
    """Notes for the targets of a batch that has choices."""
    choices = batch.choices
    return Noted(choices.get(BLOCKS), batch.sources, replay, choices.get(EXPERTS))


def with_agreement(
    terms: Terms,
    batch: Batch,
    shares: jax.Array | None,
    routing: Routing | None,
    tokens: jax.Array,
) -> Terms:
    """The terms of a micro-batch with those that ``finished`` reads.

    shares [R, M, 2] and routing are from ``Transformer.hidden_noted``. tokens: the denominator of
    all means.
    """
    if batch.choices is None:
        return terms
    sums = {}
    agreements = {BLOCKS: shares}
    if EXPERTS in batch.choices:
        agreements[EXPERTS] = jnp.mean(routing.agreement, axis=0)
    for name, noted in batch.choices.items():
        some = jnp.any(noted != jnp.iinfo(noted.dtype).max, axis=tuple(range(2, noted.ndim)))
        counted = batch.mask * some
        sums[f"noted_{name}"] = counted
        for at, kind in enumerate(("overlap", "equal")):
            sums[f"{_METRICS[name]}_{kind}"] = counted * agreements[name][..., at]
    sums = {name: jnp.sum(x) / tokens for name, x in sums.items()}
    return dataclasses.replace(terms, means=terms.means | jax.lax.stop_gradient(sums))


def finished(terms: Terms) -> Terms:
    """The terms of a whole batch: means over the queries of which something was noted."""
    means = dict(terms.means)
    for name, metric in _METRICS.items():
        if f"noted_{name}" in means:
            noted = means.pop(f"noted_{name}")
            for kind in ("overlap", "equal"):
                whole = means[f"{metric}_{kind}"]
                means[f"{metric}_{kind}"] = whole / jnp.where(noted > 0.0, noted, 1.0)
    return dataclasses.replace(terms, means=means)
