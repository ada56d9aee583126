"""Several adapters of one model in one batch: each row is computed with its own, or with none.

Adapters of the same model are stacked, of different ranks and targets too: what one lacks is zero.
Every product of a layer gathers the matrices of its rows. So a row reads its adapter only, and its
numbers do not depend on the adapters of the rows beside it. A step of B rows reads B adapters, one
layer at a time, however few different ones there are.

Dimensions: L layers of a stack, N adapters, B rows, T tokens, D inputs and F outputs of a matrix, R
the greatest rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from models.lora import STACKS, TARGETS, Adapters
from models.transformer import Transformer


class AdapterRows(nnx.Module):
    """The adapters of a stack of layers, on axis 1 of parameters like those of ``Adapters``: "q_a"
    [L, N, D, R] and "q_b" [L, N, R, F].
    """

    # int32 [L, B], which adapter computes each row, -1 for none; None until ``for_rows``.
    rows: nnx.Param | None = None

    def __init__(self, adapters: Sequence[Adapters]):
        rank = max(one.rank for one in adapters)
        for name in TARGETS.values():
            for part in ("a", "b"):
                self._stack(f"{name}_{part}", adapters, rank)
        first = jax.tree.leaves(adapters[0])[0]
        # s of each adapter
        scales = jnp.asarray([one.scale for one in adapters], jnp.float32)
        scales = jnp.broadcast_to(scales, (first.shape[0], len(adapters)))
        self.scales = nnx.Param(scales, logical_axes=("layers", "adapters"))

    def _stack(self, part: str, adapters: Sequence[Adapters], rank: int) -> None:
        """Stacks one parameter of adapters of which at least one has it."""
        found = [getattr(one, part, None) for one in adapters]
        like = next((x for x in found if x is not None), None)
        if like is None:
            return
        axes = like.get_metadata("logical_axes")
        at = axes.index("rank")
        shape = (*like.shape[:at], rank, *like.shape[at + 1 :])

        def padded(x: nnx.Param | None) -> jax.Array:
            if x is None:
                return jnp.zeros(shape, like.dtype)
            widths = [(0, rank - size if axis == at else 0) for axis, size in enumerate(x.shape)]
            return jnp.pad(x[...], widths)

        stacked = jnp.stack([padded(x) for x in found], axis=1)
        setattr(self, part, nnx.Param(stacked, logical_axes=(axes[0], "adapters", *axes[1:])))

    def added(self, name: str, y: jax.Array, contract: int) -> jax.Array | None:
        """As ``Adapters.added``, each row with its adapter; 0 for a row without one.

        Raises ValueError where nobody said which adapters the rows have.
        """
        if not hasattr(self, f"{name}_a"):
            return None
        if self.rows is None:
            raise ValueError("the model has several adapters: say by for_rows which row has which")
        rows = self.rows[...]

        def of_rows(x: nnx.Param) -> jax.Array:
            return x[...].at[rows].get(mode="clip").astype(y.dtype)

        a, b = (of_rows(getattr(self, f"{name}_{part}")) for part in "ab")
        flat = y.reshape(*y.shape[:2], math.prod(y.shape[2:]))
        low = jnp.einsum("BTD,BDR->BTR", flat, a.reshape(len(rows), -1, a.shape[-1]))
        out = jnp.einsum("BTR,BRF->BTF", low, b.reshape(len(rows), b.shape[1], -1))
        out = out * of_rows(self.scales)[:, None, None]
        # not by a scale of 0: what is not finite in another row's adapter must not get here
        out = jnp.where((rows >= 0)[:, None, None], out, 0)
        return out.reshape(*y.shape[:2], *b.shape[2:])


def with_several(model: Transformer, adapters: Sequence[Mapping[str, Adapters]]) -> Transformer:
    """A copy of a model without adapters that can compute each row with one of several.

    adapters: each by its stack, as ``lora.trained`` gives them.

    Raises ValueError if the model has adapters already, or none are given.
    """
    if model.config.lora is not None or not adapters:
        raise ValueError(
            f"lora={model.config.lora} of the model must be None, and the {len(adapters)} adapters "
            "at least one"
        )
    copy = jax.tree.map(lambda x: x, model)
    for stack in STACKS:
        found = [part[stack] for part in adapters if stack in part]
        if found:
            getattr(copy, stack).lora = AdapterRows(found)
    return copy


def num_adapters(model: Transformer) -> int:
    """Number of adapters of a model of ``with_several``; 0 for any other model."""
    for part in model.parts():
        if isinstance(part.lora, AdapterRows):
            return part.lora.scales.shape[-1]
    return 0


def for_rows[M: Transformer](model: M, rows: Int[Array, " B"] | None) -> M:
    """A copy of a model of ``with_several`` for a batch.

    rows: which adapter computes each row, counted from 0; -1 for none. None returns the model as it
    is, for one without several adapters.
    """
    if rows is None:
        return model
    copy = jax.tree.map(lambda x: x, model)
    for part in copy.parts():
        # of a stack of layers, or of one layer
        layers = part.lora.scales.shape[:-1]
        of_layers = jnp.broadcast_to(rows, (*layers, *rows.shape))
        part.lora.rows = nnx.Param(of_layers, logical_axes=("layers", "batch"))
    return copy
