"""Decoder-only transformer of the Llama family as a plain pytree: RMSNorm, RoPE, grouped queries,
SwiGLU.

Options cover Llama, Qwen2 (bias on q, k, v), Qwen3 (RMSNorm on q and k) and SmolLM2 (tied
embeddings). Parameters are stacked over layers and the forward pass scans over them. The module
holds parameters only: caches and random keys are arguments and results, and one ``block`` serves
training, prefill and decoding, which differ in how they attend.

Dimensions: B rows, T tokens, D model, N query heads, K key/value heads, H head size, F
feed-forward, V vocabulary, L layers.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from attention.layout import Before, Layout, lay_out
from attention.methods.api import DEFAULT
from attention.methods.method import Keys, LayerShape, Method, Parameters
from attention.products import project
from models.functions import RopeScaling, rms_norm, rope, swiglu
from models.layers import Embedding, Layers, MethodLayers, make_parameter, place_name
from models.sharding import constrain, per_shard
from pallas_kernels.tokens import Tokens


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Everything that fixes parameter shapes and the forward pass."""

    # V.
    vocab_size: int
    # D, the size of the residual stream.
    embed_dim: int
    # F.
    mlp_dim: int
    num_layers: int
    # N query heads share K key/value heads, each N / K of them.
    num_heads: int
    num_kv_heads: int
    # H; even, since RoPE rotates pairs.
    head_dim: int
    # Base of the wavelengths of RoPE.
    rope_theta: float
    # Added to mean squares by RMSNorm.
    norm_eps: float
    # Whether logits come from the embeddings instead of a matrix of their own.
    tied_embeddings: bool
    # Whether q, k and v have a bias (Qwen2).
    qkv_bias: bool = False
    # Whether q and k pass through RMSNorm (Qwen3).
    qk_norm: bool = False
    # Llama 3.1's stretch of low frequencies; None for plain RoPE.
    rope_scaling: RopeScaling | None = None
    # Names such as "float32": of computation, and of parameters.
    dtype: str = "float32"
    param_dtype: str = "float32"
    # Whether activations are computed again in the backward pass, to save memory.
    remat: bool = False
    # The methods of the first layers, repeated until all layers have one.
    attention: tuple[Method, ...] = DEFAULT
    # Standard deviation of initial embeddings.
    embed_std: float = 0.02

    def __post_init__(self):
        if not self.attention or self.num_layers % len(self.attention):
            raise ValueError(
                f"num_layers={self.num_layers} must be a multiple of the {len(self.attention)} "
                f"layers of attention={self.attention}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: RoPE rotates pairs")

    @property
    def periods(self) -> int:
        """How often ``attention`` repeats over the layers."""
        return self.num_layers // len(self.attention)

    @property
    def layer_shape(self) -> LayerShape:
        """What the parameters of a method of attention depend on."""
        return LayerShape(self.embed_dim, self.num_heads, self.num_kv_heads, self.head_dim)


# How a layer attends: (its parameters, normalised hidden states [B, T, D]) -> [B, T, N, H].
Attend = Callable[["Layers", jax.Array], jax.Array]


def _join(first: Any, second: Any) -> Any:
    """Two pytrees of arrays of tokens as one, [B, P, ...] before [B, T, ...]."""
    return jax.tree.map(lambda x, y: jnp.concatenate([x, y], axis=1), first, second)


class Transformer(nnx.Module):
    """The model. ``hidden`` and ``logits`` are the training path; ``embed``, ``block`` and
    ``finish`` its pieces.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        self.embed = Embedding(config, rngs)
        self.layers = Layers(config, rngs)
        for index, method in enumerate(config.attention):
            if parameters := method.parameters(config.layer_shape):
                name = place_name(index)
                setattr(self, name, MethodLayers(config, parameters, rngs))
        self.final_norm = make_parameter(
            rngs, (config.embed_dim,), ("embed",), None, config.param_dtype
        )
        if not config.tied_embeddings:
            self.unembed = make_parameter(
                rngs,
                (config.embed_dim, config.vocab_size),
                ("embed", "vocab"),
                config.embed_dim**-0.5,
                config.param_dtype,
            )

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        where: Tokens,
        runs: int | None = None,
        before: Before | None = None,
    ) -> Float[Array, "B T D"]:
        """Final hidden states of rows of tokens, perhaps of those that follow others.

        positions: those that RoPE rotates by. where: who sees whom. runs: see
        ``attention.layout.lay_out``; they count what stands ``before`` a row too.
        """
        return self.finish(self._scan(tokens, positions, where, runs, before)[0])

    def prefill(
        self,
        tokens: Int[Array, "B P"],
        positions: Int[Array, "B P"],
        where: Tokens,
        runs: int | None = None,
    ) -> list[Keys]:
        """``Before.keys`` of tokens that others will follow; arguments as ``hidden``."""
        _, kept = self._scan(tokens, positions, where, runs, keep="given")
        return kept

    def keys_values(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], where: Tokens
    ) -> tuple[Keys, ...]:
        """The keys that every layer's attention reads, not rotated, and their values, for a cache
        of documents; arguments as ``hidden``.
        """
        _, kept = self._scan(tokens, positions, where, None, keep="read")
        return tuple(
            jax.tree.map(operator.itemgetter(period), keys)
            for period in range(self.config.periods)
            for keys in kept
        )

    def _scan(
        self,
        tokens,
        positions,
        where: Tokens,
        runs: int | None,
        before: Before | None = None,
        keep: Literal["given", "read"] | None = None,
    ):
        """(hidden states of the last layer, per layer of a period the stacked keys to be kept).

        keep: "given", the keys that came from hidden states; "read", those that attention reads;
        None for none. Neither are rotated.
        """
        methods = self.config.attention
        earlier: list[Keys | None] = [None] * len(methods)
        asking = None
        if before is not None:
            asking = tokens.shape[1]
            earlier = before.keys
            where, positions = _join((before.tokens, before.positions), (where, positions))
        layout = lay_out(methods, where, runs, asking)

        def step(x, xs):
            layers, of_methods, earlier = xs
            kept = []
            for index, method in enumerate(methods):
                layer = jax.tree.map(operator.itemgetter(index), layers)
                parameters = of_methods[index]
                attention = functools.partial(
                    self._attend, method, parameters, positions, layout, earlier[index], kept, keep
                )
                x = self.block(layer, x, attention)
            return constrain(x, "batch", None, None), kept if keep else None

        if self.config.remat:
            step = jax.checkpoint(step)
        periods = self.config.periods
        layers = jax.tree.map(lambda y: y.reshape(periods, -1, *y.shape[1:]), self.layers)
        of_methods = [self.method_parameters(index, slice(None)) for index in range(len(methods))]
        return jax.lax.scan(step, self.embed_tokens(tokens), (layers, of_methods, earlier))

    def method_parameters(self, index: int, period: Any) -> Parameters:
        """What the method at a place of the period has beside the parameters of ``Layers``.

        period: the index of its layer among those of this place, or a slice of them.
        """
        layers = getattr(self, place_name(index), None)
        return {} if layers is None else layers.layer(period)

    def unstacked(self) -> list[tuple[Layers, Parameters]]:
        """The parameters of each layer and of its method, for code that goes through them one by
        one.
        """
        period = len(self.config.attention)
        return [
            (
                jax.tree.map(operator.itemgetter(index), self.layers),
                self.method_parameters(index % period, index // period),
            )
            for index in range(self.config.num_layers)
        ]

    def _attend(
        self,
        method: Method,
        parameters: Parameters,
        positions,
        layout: Layout,
        earlier: Keys | None,
        kept: list,
        keep: str | None,
        layer: Layers,
        y,
    ):
        """Attention of one layer of packed rows, each device to its own rows and heads; appends the
        keys to kept.
        """
        q, k, v = self.qkv(layer, y)
        given = {"main": (k, v), **self.new_keys(method, parameters, layer, y)}
        if earlier is not None:
            given = _join(earlier, given)
        keys = {**given, **method.derived_keys(parameters, given, layout)}
        at = method.positions(positions, layout)
        kept.append(given if keep == "given" else {name: keys[name] for name in at})
        turned = {}
        for name, places in at.items():
            k, v = keys[name]
            turned[name] = rope(k, places, self.config), v
        inputs = method.head_inputs(parameters, y)
        heads = ("batch", None, "heads", None)
        rows = ("batch",)
        extra = () if inputs is None else (inputs,)
        mapped = per_shard(
            lambda q, keys, layout, *extra: method.attend(q, keys, layout, *(extra or (None,))),
            (heads, heads, rows, *(heads for _ in extra)),
            heads,
        )
        q = rope(q, positions[:, -q.shape[1] :], self.config)
        return mapped(q, turned, layout, *extra)

    def new_keys(
        self, method: Method, parameters: Parameters, layer: Layers, y: Float[Array, "B T D"]
    ) -> Keys:
        """``Method.new_keys``, normalised as the layer's own keys are."""

        def normalise(x):
            if not self.config.qk_norm:
                return x
            return rms_norm(x, layer.k_norm[...], self.config.norm_eps)

        return method.new_keys(parameters, y, normalise)

    def embed_tokens(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Embeddings in the compute dtype."""
        return constrain(
            self.embed.table[...][tokens].astype(self.config.dtype), "batch", None, None
        )

    def qkv(
        self, layer: Layers, y: Float[Array, "B T D"], positions: Int[Array, "B T"] | None = None
    ):
        """(q [B, T, N, H], k [B, T, K, H], v [B, T, K, H]) of a layer's normalised hidden states.

        positions: q and k are rotated by them, if given.
        """
        c = self.config
        q, k, v = (project(y, w[...].astype(c.dtype)) for w in (layer.q, layer.k, layer.v))
        if c.qkv_bias:
            q, k, v = (
                x + b[...].astype(c.dtype)
                for x, b in ((q, layer.q_bias), (k, layer.k_bias), (v, layer.v_bias))
            )
        if c.qk_norm:
            q = rms_norm(q, layer.q_norm[...], c.norm_eps)
            k = rms_norm(k, layer.k_norm[...], c.norm_eps)
        if positions is None:
            return q, k, v
        return rope(q, positions, c), rope(k, positions, c), v

    def block(
        self, layer: Layers, x: Float[Array, "B T D"], attend: Attend
    ) -> Float[Array, "B T D"]:
        """One layer: attention and feed-forward with residuals. ``layer``: leaves without their
        layer axis.
        """
        return self.after_attention(layer, x, attend(layer, self.before_attention(layer, x)))

    def before_attention(self, layer: Layers, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """What a layer's attention sees of the hidden states: the first half of ``block``."""
        return rms_norm(x, layer.attention_norm[...], self.config.norm_eps)

    def after_attention(
        self, layer: Layers, x: Float[Array, "B T D"], attended: Float[Array, "B T N H"]
    ) -> Float[Array, "B T D"]:
        """The second half of ``block``."""
        dtype = self.config.dtype
        x = x + project(attended, layer.o[...].astype(dtype), contract=2)
        y = rms_norm(x, layer.mlp_norm[...], self.config.norm_eps)
        gate, up = (project(y, w[...].astype(dtype)) for w in (layer.gate, layer.up))
        return x + project(swiglu(gate, up), layer.down[...].astype(dtype))

    def finish(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The last normalisation."""
        return rms_norm(x, self.final_norm[...], self.config.norm_eps)

    def logits(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Next-token logits in float32."""
        if self.config.tied_embeddings:
            table = self.embed.table[...].astype(hidden.dtype)
            return jnp.einsum("...D,VD->...V", hidden, table, preferred_element_type=jnp.float32)
        table = self.unembed[...].astype(hidden.dtype)
        return jnp.einsum("...D,DV->...V", hidden, table, preferred_element_type=jnp.float32)


def abstract_model(config: ModelConfig) -> Transformer:
    """The model with shapes and dtypes in place of arrays."""
    return jax.eval_shape(lambda: Transformer(config, nnx.Rngs(0)))


def parameter_count(config: ModelConfig) -> int:
    """Number of parameters, computed without allocating any."""
    return sum(leaf.size for leaf in jax.tree.leaves(abstract_model(config)))


def cast(model: Transformer, dtype: str) -> Transformer:
    """A copy whose parameters and computation are in ``dtype``, for sampling; arrays already in it
    are shared.
    """
    if model.config.dtype == dtype and model.config.param_dtype == dtype:
        return model
    copy = jax.tree.map(lambda x: x.astype(dtype), model)
    copy.config = dataclasses.replace(model.config, dtype=dtype, param_dtype=dtype)
    return copy
