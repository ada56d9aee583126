"""The parameters of a model's embeddings, layers and methods of attention.

Each parameter states its shape, dtype, logical axes and initial values in one place. The parameters
of layers are stacked on axis 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from attention.methods.method import Draw, Parameter, Parameters
from models.lora import Adds
from models.model_config import ModelConfig, MoE


def make_parameter(
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    std: float | Draw | None,
    dtype: str,
    stacks: int = 0,
):
    """One parameter: shape, logical axes and initial values together.

    std: standard deviation of a normal truncated at three of them; 0.0 for zeros, None for ones; or
    a function that draws other values.
    stacks: how many axes in front number parameters that have nothing to do with each other, as
    those of layers and of experts do. The others are the axes of one matrix, vector or table.
    """
    if std is None:
        value = jnp.ones(shape, dtype)
    elif std == 0.0:
        value = jnp.zeros(shape, dtype)
    else:
        # drawn in float32, so that models that differ only in dtype start from the same values
        value = initial(rngs.params(), shape, std).astype(dtype)
    return nnx.Param(value, logical_axes=axes, stacks=stacks)


def initial(key: jax.Array, shape: tuple[int, ...], std: float | Draw) -> jax.Array:
    """Initial values in float32; std as for ``make_parameter``."""
    if isinstance(std, (int, float)):
        return std * jax.random.truncated_normal(key, -3, 3, shape, jnp.float32)
    return std(key, shape)


# Parameters that only layers with attention have, not those whose method keeps a state.
OF_ATTENTION = (
    *("q", "k", "v", "o", "q_bias", "k_bias", "v_bias", "o_bias"),
    *("q_norm", "k_norm"),
)

# Biases of a router and of experts, which only some models have.
EXPERT_BIASES = (
    *("router_logit_bias",),
    *("expert_gate_bias", "expert_up_bias", "expert_down_bias"),
)

# How the model's names for methods' parameters begin; none of its other names begins so.
_PLACE = "attention_"


class Embedding(nnx.Module):
    """Token embeddings."""

    def __init__(self, c: ModelConfig, rngs: nnx.Rngs):
        self.table = make_parameter(
            rngs, (c.vocab_size, c.embed_dim), ("vocab", "embed"), c.embed_std, c.param_dtype
        )


class Layers(nnx.Module):
    """The parameters of layers that are alike, stacked on axis 0.

    Indexing every leaf by the number of a layer gives the parameters of that layer.
    """

    # Low-rank adapters of these layers, or several for the rows of a batch; None without any.
    lora: Adds | None = None

    def __init__(self, c: ModelConfig, rngs: nnx.Rngs, layers: int, moe: MoE | None):
        """
        layers: how many of the model's layers these are. moe: their experts; None for a dense
        feed-forward part.
        """
        # says which feed-forward part a layer has; no parameter
        self.moe = moe
        embed = c.embed_dim
        # a matrix whose inputs have variance 1 gives outputs of variance 1
        std_in = embed**-0.5
        # the residual stream sums 2 results of each layer; so scaled, its variance does not grow
        # with the number of layers
        std_out = (2 * c.num_layers) ** -0.5

        def parameter(shape, axes, std, stacks=1, count=layers):
            full = (count, *shape)
            return make_parameter(rngs, full, ("layers", *axes), std, c.param_dtype, stacks)

        norm = 0.0 if c.norm_offset else None
        self.attention_norm = parameter((embed,), ("embed",), norm)
        if attending := c.attending_of(layers):
            self._attention(c, functools.partial(parameter, count=attending), norm)
        self.mlp_norm = parameter((embed,), ("embed",), norm)
        # the dense part, or in its place the one that all tokens share
        mlp = c.mlp_dim if moe is None else moe.shared * moe.mlp_dim
        if mlp:
            self.gate = parameter((embed, mlp), ("embed", "mlp"), std_in)
            self.up = parameter((embed, mlp), ("embed", "mlp"), std_in)
            self.down = parameter((mlp, embed), ("mlp", "embed"), std_out * mlp**-0.5)
        if moe is None:
            return
        if moe.shared_gate:
            self.shared_gate = parameter((embed, 1), ("embed", None), std_in)
        mlp = moe.mlp_dim
        self.router = parameter((embed, moe.experts), ("embed", "scores"), std_in)
        if moe.ranking_bias:
            self.router_bias = parameter((moe.experts,), ("scores",), 0.0)
        count = moe.slots or moe.experts
        experts, hidden = ("folded_experts", None) if moe.fold else ("experts", "mlp")
        axes = (experts, "embed", hidden)
        self.expert_gate = parameter((count, embed, mlp), axes, std_in, stacks=2)
        self.expert_up = parameter((count, embed, mlp), axes, std_in, stacks=2)
        self.expert_down = parameter(
            (count, mlp, embed), (experts, hidden, "embed"), std_out * mlp**-0.5, stacks=2
        )
        if moe.biases:
            self.router_logit_bias = parameter((moe.experts,), ("scores",), 0.0)
            self.expert_gate_bias = parameter((count, mlp), (experts, hidden), 0.0, stacks=2)
            self.expert_up_bias = parameter((count, mlp), (experts, hidden), 0.0, stacks=2)
            self.expert_down_bias = parameter((count, embed), (experts, "embed"), 0.0, stacks=2)

    def _attention(self, c: ModelConfig, parameter: Callable, norm: float | None) -> None:
        """Makes the parameters of attention.

        parameter: a function of shape, axes and deviation. norm: deviation of those of norms.
        """
        embed = c.embed_dim
        head = c.head_dim
        std_in = embed**-0.5
        std_out = (2 * c.num_layers) ** -0.5
        # of each head q, and then its gate
        query = 2 * head if c.output_gate else head
        self.q = parameter((embed, c.num_heads, query), ("embed", "heads", "head_dim"), std_in)
        self.k = parameter((embed, c.num_kv_heads, head), ("embed", "kv_heads", "head_dim"), std_in)
        self.v = parameter((embed, c.num_kv_heads, head), ("embed", "kv_heads", "head_dim"), std_in)
        attention_width = c.num_heads * head
        self.o = parameter(
            (c.num_heads, head, embed),
            ("heads", "head_dim", "embed"),
            std_out * attention_width**-0.5,
        )
        if c.qkv_bias:
            self.q_bias = parameter((c.num_heads, head), ("heads", "head_dim"), 0.0)
            self.k_bias = parameter((c.num_kv_heads, head), ("kv_heads", "head_dim"), 0.0)
            self.v_bias = parameter((c.num_kv_heads, head), ("kv_heads", "head_dim"), 0.0)
        if c.o_bias:
            self.o_bias = parameter((embed,), ("embed",), 0.0)
        if c.qk_norm:
            self.q_norm = parameter((head,), ("head_dim",), norm)
            self.k_norm = parameter((head,), ("head_dim",), norm)


class MethodLayers(nnx.Module):
    """The parameters that a method of attention has beside those of ``Layers``.

    They are stacked on axis 0 over the layers that have this place in the repeating period.
    """

    def __init__(self, c: ModelConfig, parameters: dict[str, Parameter], rngs: nnx.Rngs):
        for name, p in parameters.items():
            shape = (c.periods, *p.shape)
            dtype = p.dtype or c.param_dtype
            axes = ("layers", *p.axes)
            setattr(self, name, make_parameter(rngs, shape, axes, p.std, dtype, stacks=1))

    def layer(self, period: Any) -> Parameters:
        """The arrays of one layer by name.

        period: the layer's index on axis 0, or a slice of several.
        """
        # flax keeps its own attributes under names that begin with "_"
        return {name: x[...][period] for name, x in vars(self).items() if name[0] != "_"}


def place_name(index: int | str) -> str:
    """The model's name for the parameters of the method at a place of the repeating period."""
    return f"{_PLACE}{index}"


def is_of_method(name: str) -> bool:
    """True if a parameter's dotted name in the model is that of a method's parameter."""
    return name.startswith(_PLACE)
