"""A transformer with a head that makes one number of a hidden state, instead of logits.

The number is w . h + b in float32, and begins as 0. Of the backbone everything is kept but its
matrix of logits, where it has one of its own.

Dimensions: R rows, M numbers of a row, D model.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from models.model_config import ModelConfig
from models.sharding import gathered, parameter_shardings
from models.transformer import Transformer
from pallas_kernels.tokens import Tokens


class ScalarHead(nnx.Module):
    """w . h + b, computed in float32."""

    def __init__(self, embed_dim: int):
        self.weight = nnx.Param(
            jnp.zeros((embed_dim,), jnp.float32), logical_axes=("embed",), stacks=0
        )
        self.bias = nnx.Param(jnp.zeros((1,), jnp.float32), logical_axes=(None,), stacks=0)

    def __call__(self, hidden: Float[Array, "... D"]) -> Float[Array, ...]:
        """One number for each hidden state, float32."""
        whole = gathered(self)
        products = hidden.astype(jnp.float32) * whole.weight[...]
        return jnp.sum(products, axis=-1) + whole.bias[0]


class ScoredTransformer(nnx.Module):
    """A backbone with a scalar head."""

    def __init__(self, backbone: Transformer, head: ScalarHead):
        self.backbone = backbone
        self.head = head

    @property
    def config(self) -> ModelConfig:
        """The shape of the backbone."""
        return self.backbone.config

    def scores(
        self,
        tokens: Int[Array, "R S"],
        positions: Int[Array, "R S"],
        where: Tokens,
        at: Int[Array, "R M"],
        align: int = 1,
    ) -> Float[Array, "R M"]:
        """The numbers of the tokens in slots ``at`` of each row, float32.

        positions, where, align: as of ``Transformer.hidden``.
        """
        hidden = self.backbone.hidden(tokens, positions, where, align=align)
        return self.head(jnp.take_along_axis(hidden, at[..., None], axis=1))


def with_head(backbone: Transformer) -> ScoredTransformer:
    """A model over a backbone, with which it shares its arrays; all its scores are 0."""
    copy: Any = jax.tree.map(lambda x: x, backbone)
    if hasattr(copy, "unembed"):
        del copy.unembed
    return ScoredTransformer(copy, ScalarHead(backbone.config.embed_dim))


def abstract_scored(config: ModelConfig, mesh: Mesh) -> ScoredTransformer:
    """The model with shapes, dtypes and shardings in place of arrays."""
    model = jax.eval_shape(lambda: with_head(Transformer(config, nnx.Rngs(0))))
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        model,
        parameter_shardings(model, mesh),
    )
