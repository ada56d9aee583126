"""Decoder-only transformer of the Llama family as a plain pytree: RMSNorm, RoPE, grouped queries,
SwiGLU or a mixture of experts (``moe``).

Options cover Llama, Qwen2 (bias on q, k, v), Qwen3 (RMSNorm on q and k) and SmolLM2 (tied
embeddings).

Parameters are stacked over layers, and the forward pass scans over them. The module holds
parameters only; caches and random keys are arguments and results. Training, prefill and decoding
share one ``block`` and differ only in how they attend.

The methods of attention may differ from layer to layer. They repeat after a period of
``len(config.attention)`` layers, and the scan goes over periods.

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
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Bool, Float, Int

from attention.indexed import Indexed
from attention.keys import Keys
from attention.layout import Before, Layout, lay_out
from attention.methods.method import Method, Parameters
from attention.picks import Noted, attend_noted, numbers
from attention.ring import Ring
from models.functions import hide_padding, norm, rope, swiglu
from models.layers import (
    EXPERT_BIASES,
    OF_ATTENTION,
    Embedding,
    Layers,
    MethodLayers,
    make_parameter,
    place_name,
)
from models.lora import STACKS, new_adapters, projected, projected_together
from models.model_config import REMAT_KEEPS, ModelConfig
from models.moe import Routing, feed_forward, feed_forward_noted
from models.quantised import MATRICES, Kind, cast_name, put_quantised, take_quantised
from models.sharding import (
    all_but_whole_parameters,
    constrain,
    context_size,
    cut_over,
    cut_tokens,
    cuts_parameters,
    gathered,
    gathered_array,
    parameter_shardings,
    per_shard,
)
from models.target_logprobs import Head
from pallas_kernels.tokens import Tokens

# Parameters of a layer that are gathered where they are used: by ``product``, and by experts.
GATHERED_LATER = (*MATRICES, *map(cast_name, MATRICES), "router", *EXPERT_BIASES)
# The hidden states before a layer, which may wait in the host's memory.
_BEFORE_LAYER = "before_layer"

# How a layer attends: (its parameters, normalised hidden states [B, T, D]) -> [B, T, N, H].
Attend = Callable[["Layers", jax.Array], jax.Array]


def _join(first: Any, second: Any) -> Any:
    """Joins two pytrees of arrays along tokens: [B, P, ...] before [B, T, ...]."""
    return jax.tree.map(lambda x, y: jnp.concatenate([x, y], axis=1), first, second)


def _ring() -> Ring | None:
    """The devices over which the current mesh cuts the tokens of rows, for ``Layout.cut``."""
    size = context_size()
    return Ring("context", size) if size > 1 else None


def _in_order(routed: list[Routing | None]) -> Routing | None:
    """Routings of the layers of a period, stacked over periods, as one of all layers in order."""
    if routed[0] is None:
        return None
    return jax.tree.map(
        lambda *xs: jnp.stack(xs, axis=1).reshape(-1, *xs[0].shape[1:]) if len(xs) > 1 else xs[0],
        *routed,
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerTerms:
    """Results of layers beside hidden states, for the losses that are not of tokens."""

    # Where the tokens went in every layer with experts; None for a model without any.
    routing: Routing | None = None
    # In each row, the sum over its tokens of the indexer's divergence in nats, of every layer whose
    # indexer learns; None without any.
    divergence: Float[Array, "L B"] | None = None


class Transformer(nnx.Module):
    """The model.

    Training calls ``hidden`` and ``logits``. Their pieces, ``embed_tokens``, ``block`` and
    ``finish``, are for code that attends in other ways, as the paged cache.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        self.embed = Embedding(config, rngs)
        dense = config.dense_layers
        if dense:
            self.first_layers = Layers(config, rngs, dense, None)
        self.layers = Layers(config, rngs, config.num_layers - dense, config.moe)
        for index, method in enumerate(config.attention):
            if parameters := method.parameters(config.layer_shape):
                name = place_name(index)
                setattr(self, name, MethodLayers(config, parameters, rngs))
        self.final_norm = make_parameter(
            *(rngs, (config.embed_dim,), ("embed",)),
            *(0.0 if config.norm_offset else None, config.param_dtype),
        )
        if not config.tied_embeddings:
            self.unembed = make_parameter(
                rngs,
                (config.embed_dim, config.vocab_size),
                ("embed", "vocab"),
                config.embed_dim**-0.5,
                config.param_dtype,
            )
        if config.lora is not None:
            # last, so that the other parameters are those of the same seed without adapters
            for name, adapters in new_adapters(self, config.lora, rngs).items():
                getattr(self, name).lora = adapters
        if config.quantised is not None:
            for name in _stacks_of(self):
                layers = getattr(self, name)
                put_quantised(layers, take_quantised(layers, config.quantised))

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        where: Tokens,
        runs: int = 0,
        before: Before | None = None,
        align: int = 1,
        documents: bool = False,
    ) -> Float[Array, "B T D"]:
        """Final hidden states of rows of tokens.

        positions: the positions that RoPE rotates by.
        where: who sees whom.
        runs, align, documents: see ``attention.layout.lay_out``. ``runs`` also count what stands
          ``before`` a row.
        before: tokens that every row follows, with their keys; None for none.
        """
        return self.hidden_routed(tokens, positions, where, runs, before, align, documents)[0]

    def hidden_routed(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        where: Tokens,
        runs: int = 0,
        before: Before | None = None,
        align: int = 1,
        documents: bool = False,
    ) -> tuple[Float[Array, "B T D"], LayerTerms]:
        """``hidden``, and what layers tell beside it.

        The routing has an axis of the layers with experts in front.
        """
        x, _, _, terms = self._scan(tokens, positions, where, runs, align, documents, before)
        return self.finish(x), terms

    def hidden_noted(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        where: Tokens,
        noted: Noted,
        runs: int = 0,
        documents: bool = False,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B M 2"] | None, LayerTerms]:
        """``hidden_routed`` where a sampler noted what its layers chose.

        Returns (final hidden states; for each noted query the share of the sampler's blocks that
        the layers would choose too, and the share of lists that are equal, means over layers and
        key/value heads, 0 where nothing was noted; what layers tell). The shares are None where
        layers do not choose.
        """
        x, _, found, terms = self._scan(
            tokens, positions, where, runs, documents=documents, noted=noted
        )
        # one entry [periods, B, M, K, 2] for each layer of a period that chooses
        shares = jnp.mean(jnp.stack(found), axis=(0, 1, 4)) if found else None
        return self.finish(x), shares, terms

    def prefill(
        self,
        tokens: Int[Array, "B P"],
        positions: Int[Array, "B P"],
        where: Tokens,
        runs: int = 0,
        align: int = 1,
    ) -> list[Keys]:
        """``Before.keys`` of tokens that others will follow; arguments as for ``hidden``."""
        _, kept, _, _ = self._scan(tokens, positions, where, runs, align, keep=True)
        return kept

    def _scan(
        self,
        tokens,
        positions,
        where: Tokens,
        runs: int = 0,
        align: int = 1,
        documents: bool = False,
        before: Before | None = None,
        keep: bool = False,
        noted: Noted | None = None,
    ):
        """Runs all layers: (hidden states of the last one, the keys that were to be kept, with
        ``noted`` how the layers' choices agree with those, what layers tell beside them).

        keep: whether to keep the keys that are computed from hidden states, not rotated. They come
        as a list with an entry for each layer of a period, whose arrays are stacked over the
        periods. noted: what a sampler chose. Agreement comes as a list with an entry for each layer
        of a period that chooses.
        """
        methods = self.config.attention
        picks = [None] * len(methods) if noted is None else noted.by_layer(methods)
        earlier: list[Keys | None] = [None] * len(methods)
        asking = None
        real = where.segments > 0
        if before is not None:
            # the layout is that of all tokens, of which only the new ones, the last, attend
            asking = tokens.shape[1]
            earlier = before.keys
            where, positions = _join((before.tokens, before.positions), (where, positions))
        layout = lay_out(
            methods, where, runs, asking, align=align, documents=documents, parts=context_size()
        )
        step = functools.partial(self._period, positions, layout, real, noted, keep)
        if self.config.remat:
            step = jax.checkpoint(step, policy=self._kept())
        elif cuts_parameters():
            # else the whole parameters of all layers would wait for the backward pass
            step = jax.checkpoint(step, policy=all_but_whole_parameters)
        of_methods = [self.method_parameters(index, slice(None)) for index in range(len(methods))]
        rest = (of_methods, earlier, picks)
        x = self._between(self.embed_tokens(tokens))
        found = []
        for layers, part in () if self.config.apart else self._stacks():
            own = rest if part is None else jax.tree.map(operator.itemgetter(part), rest)
            x, more = jax.lax.scan(step, x, (*self._by_period(layers, noted), *own))
            found.append(more)
        if self.config.apart:
            own = jax.tree.map(operator.itemgetter(0), rest)
            x, more = step(x, (*self._apart(noted), *own))
            found.append(jax.tree.map(lambda y: y[None], more))
        *_, routed = found[-1]
        routed = [each for each in routed if each is not None] or [None]
        kept, shares, diverged = (
            jax.tree.map(lambda *parts: jnp.concatenate(parts), *parts)
            if len(parts) > 1
            else parts[0]
            for parts in zip(*(more[:3] for more in found), strict=True)
        )
        divergence = jnp.concatenate(diverged) if diverged else None
        return x, kept, shares, LayerTerms(_in_order(routed), divergence)

    def _kept(self) -> Callable[..., Any] | None:
        """The policy of ``remat``: what the backward pass need not compute again; None for nothing
        but the hidden states before a layer.
        """
        names = REMAT_KEEPS[self.config.remat_keeps]
        policies = jax.checkpoint_policies
        if self.config.offload_activations:
            return policies.save_and_offload_only_these_names(
                names_which_can_be_saved=names,
                names_which_can_be_offloaded=[_BEFORE_LAYER],
                offload_src="device",
                offload_dst="pinned_host",
            )
        return policies.save_only_these_names(*names) if names else None

    def _period(
        self,
        positions,
        layout: Layout,
        real,
        noted: Noted | None,
        keep: bool,
        x,
        xs: tuple,
    ):
        """One step of the scan of ``_scan``, whose arguments these are: the layers of one period.

        xs: their parameters and noted experts (``_by_period``), the parameters of their methods,
        the keys of tokens before the rows, and the noted picks.
        """
        if self.config.offload_activations:
            x = checkpoint_name(x, _BEFORE_LAYER)
        layers, experts, of_methods, earlier, picks = xs
        methods = self.config.attention
        kept = []
        shares = []
        diverged = []
        routed = []
        indexed = Indexed()
        for index, method in enumerate(methods):
            alone = len(methods) == 1
            if isinstance(layers, list):
                layer = layers[index]
            else:
                layer = layers if alone else self._layer_of(layers, index)
            layer = gathered(layer, but=GATHERED_LATER)
            described = method.parameters(self.config.layer_shape)
            parameters = {
                name: gathered_array(x, described[name].axes)
                for name, x in of_methods[index].items()
            }
            given = None
            if noted is not None and picks[index] is not None:
                given = dataclasses.replace(noted, picks=picks[index])
            way = (method, parameters, positions, layout, earlier[index], kept, given, shares)
            attention = functools.partial(self._attend, *way)
            if method.indexes:
                told = []
                way = (method, parameters, positions, layout, indexed, given, told)
                attention = functools.partial(self._mix_indexed, *way)
            elif method.mixes:
                attention = functools.partial(self._mix, method, parameters, positions, layout)
            given = None
            if experts is not None and experts[index] is not None:
                given = dataclasses.replace(noted, experts=experts[index])
            x, routing = self.block(layer, x, attention, real, given)
            routed.append(routing)
            if method.indexes:
                (indexed,) = told
                shares += [] if indexed.agreement is None else [indexed.agreement]
                diverged += [] if indexed.loss is None else [jnp.sum(indexed.loss, axis=1)]
        if not self.config.sequence_parallel:
            x = constrain(x, "batch", "slots", None)
        return x, (kept if keep else None, shares, diverged, routed)

    def _by_period(self, layers: Layers, noted: Noted | None) -> tuple[Layers, jax.Array | None]:
        """(a stack of layers, the experts that a sampler noted of them), for a scan over periods:
        [periods, layers of a period, ...], where a period has several.
        """
        count = len(self.config.attention)
        # With one layer in a period there is no axis for it, for which XLA on CPU would copy all
        # weights, and the gradient of the scan would keep another copy.
        if count > 1:
            # of some parameters there are fewer than layers
            periods = layers.attention_norm.shape[0] // count
            layers = jax.tree.map(lambda y: y.reshape(periods, -1, *y.shape[1:]), layers)
        if noted is None or noted.experts is None or layers.moe is None:
            return layers, None
        # [B, M, L, k] -> [periods, layers of a period, B, M, k]
        experts = jnp.moveaxis(noted.experts, 2, 0)
        return layers, experts.reshape(-1, count, *experts.shape[1:])

    def _apart(self, noted: Noted | None) -> tuple[list[Layers], list | None]:
        """(every layer, the experts that a sampler noted of it) of a model without a period."""
        found = []
        for layers in (self.first_layers, self.layers):
            leaves, tree = jax.tree.flatten(layers)
            # unlike that of indexing, its gradient puts all layers together once
            each = zip(*(jnp.unstack(leaf) for leaf in leaves), strict=True)
            found += [jax.tree.unflatten(tree, list(one)) for one in each]
        if noted is None or noted.experts is None:
            return found, None
        experts = jnp.unstack(noted.experts, axis=2)
        return found, [*(None for _ in range(self.config.dense_layers)), *experts]

    def _layer_of(self, layers: Layers, index: int) -> Layers:
        """One of the consecutive layers of a stack that begins with a period, or of one period."""
        attending = self.config.attending
        period = len(self.config.attention)
        if len(attending) == period:
            return jax.tree.map(operator.itemgetter(index), layers)
        own = index % period in attending
        at = index // period * len(attending) + sum(place < index % period for place in attending)
        rest = jax.tree.map(lambda x: x, layers)
        names = (*OF_ATTENTION, *map(cast_name, OF_ATTENTION))
        taken = {name: getattr(rest, name) for name in names if hasattr(rest, name)}
        for name in taken:
            delattr(rest, name)
        found = jax.tree.map(operator.itemgetter(index), rest)
        for name, parameter in taken.items() if own else ():
            setattr(found, name, jax.tree.map(operator.itemgetter(at), parameter))
        return found

    def _stacks(self) -> list[tuple[Layers, slice | None]]:
        """Layers that are alike, and which periods they are; None for all."""
        if not self.config.dense_layers:
            return [(self.layers, None)]
        first = self.config.dense_layers // len(self.config.attention)
        return [(self.first_layers, slice(first)), (self.layers, slice(first, None))]

    def method_parameters(self, index: int, period: Any) -> Parameters:
        """The parameters of the method at place ``index`` of the period.

        period: which period's, or a slice of several. Empty for a method without parameters.
        """
        layers = getattr(self, place_name(index), None)
        return {} if layers is None else layers.layer(period)

    def unstacked(self) -> list[tuple[Layers, Parameters]]:
        """(parameters of the layer, parameters of its method) for each layer in order.

        It is for code that goes through the layers one by one, not in a scan.
        """
        period = len(self.config.attention)
        dense = self.config.dense_layers
        found = []
        for index in range(self.config.num_layers):
            layers = self.first_layers if index < dense else self.layers
            at = index if index < dense else index - dense
            found.append(
                (
                    self._layer_of(layers, at),
                    self.method_parameters(index % period, index // period),
                )
            )
        return found

    def parts(self) -> list[Layers]:
        """The modules that hold the parameters of layers."""
        return [getattr(self, name) for name in _stacks_of(self)]

    def _attend(
        self,
        method: Method,
        parameters: Parameters,
        positions,
        layout: Layout,
        earlier: Keys | None,
        kept: list,
        noted: Noted | None,
        shares: list,
        layer: Layers,
        y,
    ):
        """Attention of one layer over packed rows; each device has its own rows and heads.

        earlier: the keys of tokens before the rows. kept: a list, to which the layer's keys are
        appended, not rotated. noted: what a sampler chose in this layer, [B, M, K, n]; how the
        layer's own choice agrees with it is appended to ``shares``. y: normalised hidden states
        [B, T, D].
        """
        q, k, v, gate = self.qkv(layer, y)
        # the layer's own keys and those that its method adds, all from hidden states
        given = {"main": (k, v), **self.new_keys(method, parameters, layer, y)}
        if earlier is not None:
            given = _join(earlier, given)
        # derived keys may be made from several tokens, so those before the rows must be there
        keys = {**given, **self._derived_keys(method, parameters, given, layout)}
        at = method.positions(positions, layout)
        kept.append(given)
        turned = {}
        for name, places in at.items():
            k, v = keys[name]
            turned[name] = rope(k, places, self.config), v
        inputs = method.head_inputs(parameters, y)
        queries = ("batch", "slots", "heads", None)
        heads = ("batch", None, "heads", None)
        own = method.cut_keys()
        read = {name: queries if name in own else heads for name in turned}
        rows = ("batch",)
        ring = _ring()
        # ``inputs`` is an argument only for a method that has any
        extra = () if inputs is None else (inputs,)
        # the queries are the last of the tokens
        q = rope(q, positions[:, -q.shape[1] :], self.config)
        if noted is not None:
            by_noted = per_shard(
                lambda q, keys, layout, picks, sources, *extra: attend_noted(
                    method, q, keys, layout, *(extra or (None,)), picks, sources, noted.replay, ring
                ),
                (queries, read, rows, heads, rows, *(queries for _ in extra)),
                (queries, heads),
            )
            out, agreement = by_noted(q, turned, layout, noted.picks, noted.sources, *extra)
            shares.append(agreement)
            return gated(out, gate)
        mapped = per_shard(
            lambda q, keys, layout, *extra: method.attend(
                q, keys, layout.cut(ring), *(extra or (None,))
            ),
            (queries, read, rows, *(queries for _ in extra)),
            queries,
        )
        return gated(mapped(q, turned, layout, *extra), gate)

    def _mix(
        self, method: Method, parameters: Parameters, positions, layout: Layout, layer: Layers, y
    ) -> Float[Array, "B T D"]:
        """The result of a layer whose method has projections of its own; each device has its own
        rows and heads, and its part of the tokens where the method can do with that.

        y: normalised hidden states [B, T, D].
        """
        described = method.parameters(self.config.layer_shape)
        axes = {name: described[name].axes for name in parameters}
        ring = _ring() if method.cut_keys() else None
        slots = None if ring is None else "slots"
        inputs = tuple(("batch", slots, heads, None) for heads in method.input_heads)
        mapped = per_shard(
            lambda parameters, inputs, layout: method.mix(parameters, inputs, layout.cut(ring)),
            (axes, inputs, ("batch",)),
            ("batch", slots, "kv_heads", None),
        )
        turn = functools.partial(rope, positions=positions, config=self.config)
        mixed = mapped(parameters, method.inputs(parameters, y, turn), layout)
        return method.output(parameters, mixed)

    def _mix_indexed(
        self,
        method: Method,
        parameters: Parameters,
        positions,
        layout: Layout,
        earlier: Indexed,
        noted: Noted | None,
        told: list[Indexed],
        layer: Layers,
        y,
    ) -> Float[Array, "B T D"]:
        """``_mix`` of a method with an indexer. earlier: what the layer before gave. noted: what a
        sampler chose in this layer, [B, M, 1, n]. told: a list, to which what it gives is appended.
        """
        described = method.parameters(self.config.layer_shape)
        axes = {name: described[name].axes for name in parameters}
        ring = _ring() if method.cut_keys() else None
        slots = None if ring is None else "slots"
        queries = ("batch", slots)
        turn = functools.partial(rope, positions=positions, config=self.config)
        inputs = method.inputs(parameters, y, turn)
        heads = tuple(
            (*queries, head, None) for head, _ in zip(method.input_heads, inputs, strict=False)
        )
        # it is asked here: inside of the function the axes are no more to be cut over
        over = cut_over("kv_heads")
        picks = () if earlier.picks is None else (earlier.picks,)
        given = () if noted is None else (numbers(noted.picks)[:, :, 0], noted.sources)

        def own(parameters, inputs, layout, picks, given):
            before = Indexed(*picks)
            replay = (*given, noted.replay) if given else None
            layout = layout.cut(ring)
            return method.mix_indexed(parameters, inputs, layout, before, replay, over)

        out = Indexed((*queries, None), queries, ("batch", None, None, None))
        mapped = per_shard(
            own,
            (axes, heads, ("batch",), (*queries, None), ("batch",)),
            ((*queries, "kv_heads", None), out),
        )
        mixed, indexed = mapped(parameters, inputs, layout, picks, given)
        told.append(indexed)
        return method.output(parameters, mixed)

    def _derived_keys(
        self, method: Method, parameters: Parameters, given: Keys, layout: Layout
    ) -> Keys:
        """``Method.derived_keys``, where the tokens of rows are cut by every device of its part."""
        ring = _ring()
        if ring is None or not method.cut_keys():
            return method.derived_keys(parameters, given, layout)
        keys = ("batch", "slots", "heads", None)
        described = method.parameters(self.config.layer_shape)
        mapped = per_shard(
            lambda parameters, given, layout: method.derived_keys(
                parameters, given, layout.cut(ring)
            ),
            ({name: described[name].axes for name in parameters}, keys, ("batch",)),
            keys,
        )
        return mapped(parameters, given, layout)

    def new_keys(
        self, method: Method, parameters: Parameters, layer: Layers, y: Float[Array, "B T D"]
    ) -> Keys:
        """``Method.new_keys``, normalised as the layer's own keys are."""

        def normalise(x):
            if not self.config.qk_norm:
                return x
            return norm(x, layer.k_norm[...], self.config)

        return method.new_keys(parameters, y, normalise)

    def embed_tokens(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Embeddings in the compute dtype."""
        table = gathered(self.embed.table)[...]
        return constrain(table[tokens].astype(self.config.dtype), "batch", "slots", None)

    def qkv(
        self, layer: Layers, y: Float[Array, "B T D"], positions: Int[Array, "B T"] | None = None
    ):
        """(q [B, T, N, H], k [B, T, K, H], v [B, T, K, H], gate [B, T, N, H]) of a layer.

        The gate of the result is None in a model without ``output_gate``. y: normalised hidden
        states. positions: q and k are rotated by them; None for no rotation.
        """
        c = self.config
        query = 2 * c.head_dim if c.output_gate else c.head_dim
        keys = (c.num_kv_heads, c.head_dim)
        q, k, v = projected_together(layer, "qkv", y, [(c.num_heads, query), keys, keys])
        gate = None
        if c.output_gate:
            q, gate = jnp.split(q, 2, axis=-1)
        if c.qkv_bias:
            q, k, v = (
                x + b[...].astype(c.dtype)
                for x, b in ((q, layer.q_bias), (k, layer.k_bias), (v, layer.v_bias))
            )
        if c.qk_norm:
            q = norm(q, layer.q_norm[...], c)
            k = norm(k, layer.k_norm[...], c)
        if positions is None:
            return q, k, v, gate
        return rope(q, positions, c), rope(k, positions, c), v, gate

    def block(
        self,
        layer: Layers,
        x: Float[Array, "B T D"],
        attend: Attend,
        real: Bool[Array, "B T"],
        noted: Noted | None = None,
    ) -> tuple[Float[Array, "B T D"], Routing | None]:
        """One layer: attention and feed-forward with residuals. Returns also where the tokens went
        if the layer has experts.

        layer: the parameters of the layer, without the axis of layers. real: which tokens are no
        padding. noted: the experts that a sampler chose in this layer, [B, M, k].
        """
        out = attend(layer, self.before_attention(layer, x))
        return self.after_attention(layer, x, out, real, noted)

    def before_attention(self, layer: Layers, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The normalised hidden states that attention gets: the first half of ``block``."""
        return self._within(norm(x, layer.attention_norm[...], self.config))

    def after_attention(
        self,
        layer: Layers,
        x: Float[Array, "B T D"],
        attended: Float[Array, "B T N H"] | Float[Array, "B T D"],
        real: Bool[Array, "B T"],
        noted: Noted | None = None,
    ) -> tuple[Float[Array, "B T D"], Routing | None]:
        """The second half of ``block``: projection, residual, feed-forward and its residual.

        attended: the result of attention, or of a method with projections of its own.
        """
        if hasattr(layer, "o"):
            attended = projected(layer, "o", attended, contract=2)
            if self.config.o_bias:
                attended = attended + layer.o_bias[...].astype(attended.dtype)
        x = x + self._between(attended)
        y = norm(x, layer.mlp_norm[...], self.config)
        if layer.moe is None or not layer.moe.fold:
            y = self._within(y)
        if layer.moe is not None:
            if noted is None:
                out, routing = feed_forward(layer, y, real)
            else:
                given = numbers(noted.experts)
                out, routing = feed_forward_noted(
                    layer, y, real, given, noted.sources, noted.replay
                )
            return x + self._between(out), routing
        gate, up = projected_together(layer, "gate_up", y, 2 * [(self.config.mlp_dim,)])
        return x + self._between(projected(layer, "down", swiglu(gate, up))), None

    def _between(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Hidden states as they lie between the products of a layer."""
        return cut_tokens(x) if self.config.sequence_parallel else x

    def _within(self, y: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Hidden states as the products of a layer read them."""
        return constrain(y, "batch", "slots", None) if self.config.sequence_parallel else y

    def finish(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The normalisation after the last layer."""
        return self._within(norm(x, gathered(self.final_norm)[...], self.config))

    def head(self) -> Head:
        """The matrix from hidden states to logits, for ``models.target_logprobs``."""
        c = self.config
        table = self.embed.table if c.tied_embeddings else self.unembed
        tokens = c.vocab_size if c.unpadded is None else c.unpadded.vocab_size
        return Head(table[...], table.get_metadata("logical_axes"), tokens)

    def logits(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Next-token logits in float32."""
        if self.config.tied_embeddings:
            table, spec = self.embed.table, "...D,VD->...V"
        else:
            table, spec = self.unembed, "...D,DV->...V"
        # as for layers, in the dtype of the product before the table is gathered
        axes = table.get_metadata("logical_axes")
        table = gathered_array(table[...].astype(hidden.dtype), axes)
        logits = jnp.einsum(spec, hidden, table, preferred_element_type=jnp.float32)
        return hide_padding(self.config, logits)


def gated(out: Float[Array, "B T N H"], gate: Float[Array, "B T N H"] | None) -> jax.Array:
    """The result of attention times the sigmoid of its gate, if it has one."""
    return out if gate is None else out * jax.nn.sigmoid(gate)


def abstract_model(
    config: ModelConfig, mesh: Mesh | AbstractMesh | None = None, *, whole: bool = False
) -> Transformer:
    """The model with shapes and dtypes in place of arrays; with a mesh also with their shardings.

    whole: as for ``parameter_shardings``. Raises ValueError as that.
    """
    model = jax.eval_shape(lambda: Transformer(config, nnx.Rngs(0)))
    if mesh is None:
        return model
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        model,
        parameter_shardings(model, mesh, whole=whole),
    )


def parameter_count(config: ModelConfig) -> int:
    """Number of parameters, computed without allocating any."""
    return sum(leaf.size for leaf in jax.tree.leaves(abstract_model(config)))


def cast(model: Transformer, dtype: str, quantised: Kind | None = None) -> Transformer:
    """A copy whose parameters and computation are in ``dtype``, for sampling.

    Arrays that are in it already are shared, not copied.

    quantised: the 8-bit numbers as which matrices are kept (``models.quantised``), made from the
    model's own; None for none. Raises ValueError for a model that is quantised already, unless it
    is what is asked for.
    """
    config = dataclasses.replace(model.config, dtype=dtype, param_dtype=dtype, quantised=quantised)
    if model.config == config:
        return model
    if model.config.quantised is not None:
        raise ValueError(
            f"the model's matrices are {model.config.quantised} already; {dtype=} and "
            f"{quantised=} are made from a model that is not quantised"
        )
    copy = jax.tree.map(lambda x: x, model)
    taken = {}
    if quantised is not None:
        taken = {name: take_quantised(getattr(copy, name), quantised) for name in _stacks_of(copy)}
    copy = jax.tree.map(lambda x: x.astype(dtype), copy)
    for name, variables in taken.items():
        put_quantised(getattr(copy, name), variables)
    copy.config = config
    return copy


def _stacks_of(model: Transformer) -> list[str]:
    """The names of the model's stacks of layers."""
    return [name for name in STACKS if hasattr(model, name)]
