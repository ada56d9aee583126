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

from attention.picks import Noted, choosing, narrowest
from models.model_config import ModelConfig
from rl_code.learner.objective import Terms
from rl_code.types import Batch, Context

# The name of NSA's picks in ``Context.choices`` and ``Batch.choices``.
BLOCKS = "blocks"


def shapes(model: ModelConfig, slots: int) -> dict[str, jax.ShapeDtypeStruct]:
    """What ``Batch.choices`` has for each target, in rows of so many slots.

    Raises ValueError for a model without a layer whose picks can be noted.
    """
    most = choosing(model.attention)
    if most is None:
        raise ValueError(
            f"rollout.picks is for layers that choose blocks, as nsa does; the model has "
            f"attention={model.attention}: set rollout.picks to None"
        )
    layers = sum(method.noted_picks() is not None for method in model.attention) * model.periods
    sizes = [method.block_size() for method in model.attention if method.noted_picks()]
    # no context has more blocks than a row has slots for
    dtype = narrowest(slots // min(sizes) + 1)
    return {BLOCKS: jax.ShapeDtypeStruct((layers, model.num_kv_heads, most), dtype)}


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
                f"model chooses {there.shape[2:]} for each (layers, key/value heads, picks)"
            )
        # targets are written one after another, so all before these have their sources
        first = ~np.isin(sources, batch.sources[span[0], : span[1].start])
        none = np.iinfo(there.dtype).max
        found = np.where(found == np.iinfo(found.dtype).max, none, found).astype(there.dtype)
        there[span] = np.where(first.reshape(-1, 1, 1, 1), found, none)


def noted(batch: Batch, replay: bool) -> Noted:
    """What was noted for the targets of a batch that has choices."""
    return Noted(batch.choices[BLOCKS], batch.sources, replay)


def with_agreement(terms: Terms, batch: Batch, shares: jax.Array, tokens: jax.Array) -> Terms:
    """The terms of a micro-batch with those that ``finished`` reads.

    shares: [R, M, 2], from ``Transformer.hidden_noted``. tokens: the denominator of all means.
    """
    picks = batch.choices[BLOCKS]
    some = jnp.any(picks != jnp.iinfo(picks.dtype).max, axis=(2, 3, 4))
    counted = batch.mask * some
    sums = {
        "noted": counted,
        "policy/picks_overlap": counted * shares[..., 0],
        "policy/picks_equal": counted * shares[..., 1],
    }
    sums = {name: jnp.sum(x) / tokens for name, x in sums.items()}
    return dataclasses.replace(terms, means=terms.means | jax.lax.stop_gradient(sums))


def finished(terms: Terms) -> Terms:
    """The terms of a whole batch: means over the queries of which something was noted."""
    if "noted" not in terms.means:
        return terms
    means = dict(terms.means)
    noted = means.pop("noted")
    for name in ("policy/picks_overlap", "policy/picks_equal"):
        means[name] = means[name] / jnp.where(noted > 0.0, noted, 1.0)
    return dataclasses.replace(terms, means=means)
