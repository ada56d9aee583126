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
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from attention.methods import (
    Before,
    Dense,
    KeyValues,
    Method,
    View,
    attend,
    stretch_positions,
    view,
)
from attention.nsa import NSA, compress
from attention.squid import GatedDocuments
from models.functions import RopeScaling, project, rms_norm, rope, swiglu
from models.sharding import constrain, per_shard
from pallas_kernels.tokens import Tokens


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Everything that fixes parameter shapes and the forward pass. dtypes are names such as
    "float32".

    attention: the methods of the first layers, repeated until all layers have one. embed_std: of
    initial embeddings.
    """

    vocab_size: int
    embed_dim: int
    mlp_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    norm_eps: float
    tied_embeddings: bool
    qkv_bias: bool = False
    qk_norm: bool = False
    rope_scaling: RopeScaling | None = None
    dtype: str = "float32"
    param_dtype: str = "float32"
    remat: bool = False
    attention: tuple[Method, ...] = (Dense(),)
    embed_std: float = 0.02

    def __post_init__(self):
        if not self.attention or self.num_layers % len(self.attention):
            raise ValueError(
                f"num_layers={self.num_layers} must be a multiple of the {len(self.attention)} "
                "layers of attention="
                f"{self.attention}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if len({method for method in self.attention if isinstance(method, NSA)}) > 1:
            raise ValueError(
                f"attention={self.attention}: all NSA layers must have the same settings"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: RoPE rotates pairs")


# The parameters of consecutive layers, stacked: those that all have, and by name those that only
# some methods have.
Stacked = tuple["Layers", dict[str, "NSALayers | DocumentGates"]]
# How a layer attends: (its parameters, normalised hidden states [B, T, D]) -> [B, T, N, H].
Attend = Callable[["Layers", jax.Array], jax.Array]


def _parameter(
    rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], std: float | None, dtype: str
):
    """One parameter: shape, logical axes and init together. std: of a normal; None for ones, 0.0
    for zeros.
    """
    if std is None:
        value = jnp.ones(shape, dtype)
    elif std == 0.0:
        value = jnp.zeros(shape, dtype)
    else:
        value = std * jax.random.truncated_normal(rngs.params(), -3, 3, shape, jnp.float32)
    return nnx.Param(value.astype(dtype), logical_axes=axes)


def _join(first: Any, second: Any) -> Any:
    """Two pytrees of arrays of tokens as one, [B, P, ...] before [B, T, ...]."""
    return jax.tree.map(lambda x, y: jnp.concatenate([x, y], axis=1), first, second)


class Embedding(nnx.Module):
    """Token embeddings."""

    def __init__(self, c: ModelConfig, rngs: nnx.Rngs):
        self.table = _parameter(
            rngs, (c.vocab_size, c.embed_dim), ("vocab", "embed"), c.embed_std, c.param_dtype
        )


class Layers(nnx.Module):
    """The parameters of all layers, stacked on axis 0; indexing every leaf by a layer gives that
    layer.
    """

    def __init__(self, c: ModelConfig, rngs: nnx.Rngs):
        layers = c.num_layers
        embed = c.embed_dim
        mlp = c.mlp_dim
        head = c.head_dim
        std_in = embed**-0.5
        std_out = (2 * layers) ** -0.5

        def parameter(shape, axes, std):
            return _parameter(rngs, (layers, *shape), ("layers", *axes), std, c.param_dtype)

        self.attention_norm = parameter((embed,), ("embed",), None)
        self.q = parameter((embed, c.num_heads, head), ("embed", "heads", "head_dim"), std_in)
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
        if c.qk_norm:
            self.q_norm = parameter((head,), ("head_dim",), None)
            self.k_norm = parameter((head,), ("head_dim",), None)
        self.mlp_norm = parameter((embed,), ("embed",), None)
        self.gate = parameter((embed, mlp), ("embed", "mlp"), std_in)
        self.up = parameter((embed, mlp), ("embed", "mlp"), std_in)
        self.down = parameter((mlp, embed), ("mlp", "embed"), std_out * mlp**-0.5)


class NSALayers(nnx.Module):
    """What NSA layers have beside the parameters of ``Layers``, whose k and v are those of the
    selected branch.

    keys and values of the compressed and of the window branch; the MLPs that compress keys and
    values; the gates.
    """

    def __init__(self, c: ModelConfig, settings: NSA, rngs: nnx.Rngs):
        embed = c.embed_dim
        head = c.head_dim
        length = settings.length
        layers = _count(c, NSA)

        def parameter(shape, axes, std):
            return _parameter(rngs, (layers, *shape), ("layers", *axes), std, c.param_dtype)

        for name in ("compressed_k", "compressed_v", "window_k", "window_v"):
            axes = ("embed", "kv_heads", "head_dim")
            setattr(self, name, parameter((embed, c.num_kv_heads, head), axes, embed**-0.5))
        for name in ("k", "v"):
            setattr(self, f"{name}_positions", parameter((length, head), (None, "head_dim"), 0.02))
            first = parameter(
                (length, head, head), (None, None, "head_dim"), (length * head) ** -0.5
            )
            setattr(self, f"{name}_first", first)
            setattr(self, f"{name}_second", parameter((head, head), (None, "head_dim"), head**-0.5))
        self.gates = parameter((embed, c.num_heads, 3), ("embed", "heads", None), embed**-0.5)


class DocumentGates(nnx.Module):
    """What layers of GatedDocuments have beside the parameters of ``Layers``."""

    def __init__(self, c: ModelConfig, settings: GatedDocuments, rngs: nnx.Rngs):
        shape = (_count(c, GatedDocuments), c.embed_dim, c.num_heads, 2)
        self.gates = _parameter(
            rngs, shape, ("layers", "embed", "heads", None), c.embed_dim**-0.5, c.param_dtype
        )


# Parameters of layers that have more than ``Layers``, by the name under which the model keeps them.
EXTRA = {"nsa": (NSA, NSALayers), "document_gates": (GatedDocuments, DocumentGates)}


def _count(c: ModelConfig, kind: type) -> int:
    """Layers of a method."""
    return sum(isinstance(method, kind) for method in c.attention) * (
        c.num_layers // len(c.attention)
    )


def compress_keys(
    nsa: NSALayers, method: NSA, k: Float[Array, "B S K H"], v: Float[Array, "B S K H"]
):
    """(k, v) [B, E, K, H] of the stretches, by the MLPs of one layer; keys are not rotated."""
    return (
        compress(k, nsa.k_positions[...], nsa.k_first[...], nsa.k_second[...], method),
        compress(v, nsa.v_positions[...], nsa.v_first[...], nsa.v_second[...], method),
    )


def gates(
    extra: NSALayers | DocumentGates, y: Float[Array, "B T D"]
) -> Float[Array, "B T N parts"]:
    """The gates of the parts of one layer's attention."""
    return jax.nn.sigmoid(project(y, extra.gates[...].astype(y.dtype)))


class Transformer(nnx.Module):
    """The model. ``hidden`` and ``logits`` are the training path; ``embed``, ``block`` and
    ``finish`` its pieces.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        self.embed = Embedding(config, rngs)
        self.layers = Layers(config, rngs)
        for name, (kind, parameters) in EXTRA.items():
            settings = [method for method in config.attention if isinstance(method, kind)]
            if settings:
                setattr(self, name, parameters(config, settings[0], rngs))
        self.final_norm = _parameter(
            rngs, (config.embed_dim,), ("embed",), None, config.param_dtype
        )
        if not config.tied_embeddings:
            self.unembed = _parameter(
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
        ``attention.methods.view``; they count what stands ``before`` a row too.
        """
        return self.finish(self._scan(tokens, positions, where, runs, before)[0])

    def prefill(
        self,
        tokens: Int[Array, "B P"],
        positions: Int[Array, "B P"],
        where: Tokens,
        runs: int | None = None,
    ) -> list[KeyValues]:
        """``Before.keys`` of tokens that others will follow; arguments as ``hidden``."""
        _, kept = self._scan(tokens, positions, where, runs, keep=True)
        return [dataclasses.replace(keys, compressed=None) for keys in kept]

    def keys_values(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], where: Tokens
    ) -> tuple[KeyValues, ...]:
        """The keys, not rotated, and values of every layer, for a cache of documents; arguments as
        ``hidden``.
        """
        _, kept = self._scan(tokens, positions, where, None, keep=True)
        kept = [dataclasses.replace(keys, raw=None) for keys in kept]
        periods = range(self.config.num_layers // len(kept))
        return tuple(
            jax.tree.map(operator.itemgetter(period), keys) for period in periods for keys in kept
        )

    def _scan(
        self,
        tokens,
        positions,
        where: Tokens,
        runs: int | None,
        before: Before | None = None,
        keep=False,
    ):
        """(hidden states of the last layer, per layer of a period the stacked KeyValues if they are
        to be kept).
        """
        methods = self.config.attention
        earlier = [None] * len(methods)
        asking = None
        if before is not None:
            asking = tokens.shape[1]
            earlier = before.keys
            where, positions = _join((before.tokens, before.positions), (where, positions))
        seen = view(methods, where, runs, asking)

        def step(x, xs):
            (period, earlier) = xs
            kept = []
            for index, method in enumerate(methods):
                layer, extra = self.of_period(period, index)
                attention = functools.partial(
                    self._attend, method, extra, positions, seen, earlier[index], kept
                )
                x = self.block(layer, x, attention)
            return constrain(x, "batch", None, None), kept if keep else None

        if self.config.remat:
            step = jax.checkpoint(step)
        periods = self.config.num_layers // len(methods)
        stacked = jax.tree.map(lambda y: y.reshape(periods, -1, *y.shape[1:]), self.stacked())
        return jax.lax.scan(step, self.embed_tokens(tokens), (stacked, earlier))

    def stacked(self) -> Stacked:
        """The parameters of all layers."""
        return self.layers, {name: getattr(self, name) for name in EXTRA if hasattr(self, name)}

    def unstacked(self) -> list[tuple[Layers, NSALayers | DocumentGates | None]]:
        """The parameters of each layer, for code that goes through them one by one."""
        return [self.of_period(self.stacked(), index) for index in range(self.config.num_layers)]

    def of_period(
        self, stacked: Stacked, index: int
    ) -> tuple[Layers, NSALayers | DocumentGates | None]:
        """The parameters of a layer from those of consecutive layers: all layers' own, and what its
        method has more.
        """
        methods = self.config.attention
        method = methods[index % len(methods)]
        before = [methods[at % len(methods)] for at in range(index)]
        layer = jax.tree.map(operator.itemgetter(index), stacked[0])
        for name, (kind, _) in EXTRA.items():
            if isinstance(method, kind):
                count = sum(isinstance(other, kind) for other in before)
                return layer, jax.tree.map(operator.itemgetter(count), stacked[1][name])
        return layer, None

    def _attend(
        self, method: Method, extra, positions, seen: View, earlier, kept: list, layer: Layers, y
    ):
        """Attention of one layer of packed rows, each device to its own rows and heads; appends the
        keys to kept.
        """
        q, k, v = self.qkv(layer, y)
        keys = KeyValues((k, v))
        at = {"main": positions}
        if isinstance(method, NSA):
            raw, window = self.nsa_keys(layer, extra, y)
            keys = KeyValues((k, v), raw=raw, window=window)
            at |= {"window": positions, "compressed": stretch_positions(method, positions, seen)}
        if earlier is not None:
            keys = _join(earlier, keys)
        if isinstance(method, NSA):
            placed = (seen.blocks[method.block].place(x) for x in keys.raw)
            keys = dataclasses.replace(keys, compressed=compress_keys(extra, method, *placed))
        kept.append(keys)
        turned = {}
        for name, places in at.items():
            k, v = getattr(keys, name)
            turned[name] = rope(k, places, self.config), v
        parts = (gates(extra, y),) if extra else ()
        heads = ("batch", None, "heads", None)
        rows = ("batch",)
        mapped = per_shard(
            functools.partial(attend, method), (heads, heads, rows, *(heads for _ in parts)), heads
        )
        return mapped(
            rope(q, positions[:, -q.shape[1] :], self.config), KeyValues(**turned), seen, *parts
        )

    def nsa_keys(self, layer: Layers, nsa: NSALayers, y: Float[Array, "B T D"]):
        """((k, v) to be compressed, (window k, v)) of an NSA layer, [B, T, K, H] each, keys not
        rotated.
        """
        names = ("compressed_k", "compressed_v", "window_k", "window_v")
        ck, cv, wk, wv = (project(y, getattr(nsa, name)[...].astype(y.dtype)) for name in names)
        if self.config.qk_norm:
            ck, wk = (rms_norm(x, layer.k_norm[...], self.config.norm_eps) for x in (ck, wk))
        return (ck, cv), (wk, wv)

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
