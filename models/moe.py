"""Mixture of experts: which experts compute a token, and their results.

Routing is that of Qwen3-MoE (2505.09388; softmax, the k best) and of DeepSeek-V3 (2412.19437,
equations 12 to 16; sigmoid, a bias that only ranks, groups, a scale). A token goes to all experts
that were chosen for it: there is no capacity, and nothing is dropped. Tokens of padding go to none
and are not counted.

Groups that lose are ranked as -inf, as in DeepSeek's own code and in transformers 5.24.
transformers 4 ranks them as 0, so that with a negative bias an expert that was ruled out may win
there.

Dimensions: B rows, T tokens, D model, E experts, k experts of a token, F feed-forward size of an
expert, P pairs of a token and one of its experts.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention.picks import agreement
from attention.products import project
from models.expert_parallel import Way, room, through_experts
from models.functions import clipped_swiglu, swiglu
from models.layers import EXPERT_BIASES, Layers
from models.model_config import MoE
from models.quantised import MATRICES, expert_product, product, scale_name
from models.sharding import (
    constrain,
    cut_over,
    cuts_parameters,
    cuts_tokens,
    gathered_array,
    gathered_part,
    per_shard,
    shared_by,
    sum_parts,
)
from models.side_by_side import products


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """Experts to which the tokens of a layer went, padding excluded."""

    # The layer's own choice for each token, the best first.
    experts: Int[Array, "B T k"]
    # In each row, the tokens that each expert computed, float32.
    counts: Float[Array, "B E"]
    # In each row, the sum over tokens of their scores, divided by their sum for a token.
    shares: Float[Array, "B E"]
    # In each row, the sum over tokens of the entropy of these shares, in nats; no gradient.
    entropy: Float[Array, " B"]
    # Where a sampler noted its experts: of each noted token the share of them that the layer would
    # choose too, and whether both are the same set.
    agreement: Float[Array, "B M 2"] | None = None


def feed_forward(
    layer: Layers,
    y: Float[Array, "B T D"],
    real: Bool[Array, "B T"],
    given: Int[Array, "B T k"] | None = None,
) -> tuple[Float[Array, "B T D"], Routing]:
    """The experts of a layer, and the shared one if there is any.

    Under a mesh every device routes its own rows, and has some of the experts, and a part of their
    feed-forward size. With ``MoE.fold`` it has whole experts, and its own tokens of the rows.

    layer: one layer's parameters. y: normalised hidden states. real: which tokens are no padding;
    for the others the result is that of the shared expert alone. given: experts to take in place of
    the layer's own choice, such as a sampler's; -1 in a token's first place for none.
    """
    matrices = [name for name in MATRICES if name.startswith("expert_")]
    names = ["router", "router_bias", *EXPERT_BIASES, *matrices, *map(scale_name, matrices)]
    names = [name for name in names if hasattr(layer, name)]
    parameters = {name: getattr(layer, name)[...] for name in names}
    # the axis of layers is gone
    axes = {name: getattr(layer, name).get_metadata("logical_axes")[1:] for name in names}
    rows = ("batch",)
    cut = layer.moe.fold and cuts_tokens(real.shape[1])
    tokens = ("batch", "tokens" if cut else "slots")
    spread = cut_over(tokens[1])
    extra = () if given is None else (given,)
    in_parts = cuts_parameters()

    def on_device(y, real, parameters, *extra):
        if in_parts:
            # experts in the dtype of their products, in fewer bytes
            parameters = {
                name: gathered_part(x, axes[name], y.dtype if name in matrices else x.dtype)
                for name, x in parameters.items()
            }
        return _routed(layer.moe, cut, spread, parameters, y, real, *extra)

    routed = per_shard(
        on_device,
        (tokens, tokens, axes, *(tokens for _ in extra)),
        (tokens, Routing(experts=tokens, counts=rows, shares=rows, entropy=rows)),
        whole=not in_parts,
    )
    out, routing = routed(y, real, parameters, *extra)
    if layer.moe.shared:
        # with sequence parallelism and ``MoE.fold`` its tokens are cut
        y = constrain(y, "batch", "slots", None) if layer.moe.fold else y
        gate, up = products(layer, "gate_up", y, 2 * [(layer.moe.shared * layer.moe.mlp_dim,)])
        shared = product(layer, "down", swiglu(gate, up))
        if layer.moe.shared_gate:
            weights = gathered_array(layer.shared_gate[...], ("embed", None)).astype(y.dtype)
            shared = shared * jax.nn.sigmoid(project(y, weights))
        out = out + shared
    return out, routing


def feed_forward_noted(
    layer: Layers,
    y: Float[Array, "B T D"],
    real: Bool[Array, "B T"],
    experts: Int[Array, "B M k"],
    sources: Int[Array, "B M"],
    replay: bool,
) -> tuple[Float[Array, "B T D"], Routing]:
    """``feed_forward`` where a sampler noted the experts of some tokens.

    experts: those of the tokens at the slots ``sources``; -1 where nothing was noted. replay:
    whether they are taken instead of the layer's own choice.
    """
    given = None
    if replay:
        nothing = jnp.full((*real.shape, layer.moe.active), -1, experts.dtype)
        # past the last slot, where nothing is written
        at = jnp.where(experts[..., 0] < 0, real.shape[1], sources)
        given = nothing.at[jnp.arange(len(real))[:, None], at].set(experts, mode="drop")
    out, routing = feed_forward(layer, y, real, given)
    own = jnp.take_along_axis(routing.experts, sources[..., None], axis=1)
    return out, dataclasses.replace(routing, agreement=agreement(own, experts))


def _routed(moe: MoE, cut: bool, spread: tuple[str, ...], parameters, y, real, given=None):
    """``feed_forward`` without the shared expert, on one device's tokens.

    cut: whether devices along ``tensor`` have different tokens. spread: the mesh axes over which
    the tokens of a row are cut.
    """
    # what padding holds must reach nobody, not even as 0 times NaN
    y = jnp.where(real[..., None], y, 0)
    scores = router_scores(moe, parameters["router"], y, parameters.get("router_logit_bias"))
    own = choose_experts(moe, scores, parameters.get("router_bias"))
    experts = own if given is None else jnp.where(given[..., :1] < 0, own, given)
    weights = expert_weights(moe, scores, experts)
    chosen = jnp.where(real[..., None], experts, moe.experts)
    if moe.fold:
        computed = _experts if cut else _of_own_tokens
        out = computed(moe, parameters, y, chosen, weights)
    else:
        parts = _bias_once(parameters)
        out = sum_parts(_experts(moe, parts, y, chosen, weights), "mlp")
    some = real[..., None].astype(jnp.float32)
    shares = scores / jnp.sum(scores, axis=-1, keepdims=True)
    # only a metric; scores of 0 are left out
    held = jax.lax.stop_gradient(shares)
    entropy = -jnp.sum(held * jnp.log(jnp.where(held > 0.0, held, 1.0)), axis=-1)
    rows = jnp.arange(real.shape[0])[:, None, None]
    counts = jnp.zeros((real.shape[0], moe.experts), jnp.float32)
    sums = (
        counts.at[rows, experts].add(jnp.broadcast_to(some, experts.shape)),
        jnp.sum(jnp.where(some > 0.0, shares, 0.0), axis=1),
        jnp.sum(jnp.where(real, entropy, 0.0), axis=1),
    )
    # of whole rows
    return out, Routing(own, *(jax.lax.psum(x, spread) if spread else x for x in sums))


def router_scores(
    moe: MoE,
    router: Float[Array, "D E"],
    y: Float[Array, "B T D"],
    bias: Float[Array, " E"] | None = None,
) -> Float[Array, "B T E"]:
    """The score of every expert for every token, in float32.

    bias: of the logits; None for none.
    """
    logits = project(y.astype(jnp.float32), router.astype(jnp.float32))
    if bias is not None:
        logits = logits + bias.astype(jnp.float32)
    return jax.nn.softmax(logits, axis=-1) if moe.scores == "softmax" else jax.nn.sigmoid(logits)


def choose_experts(
    moe: MoE, scores: Float[Array, "B T E"], bias: Float[Array, " E"] | None
) -> Int[Array, "B T k"]:
    """The experts of every token, the best first; of equal ones that with the lower number.

    bias: is added to the scores here and nowhere else, None for none.
    """
    ranks = jax.lax.stop_gradient(scores)
    if bias is not None:
        ranks = ranks + jax.lax.stop_gradient(bias).astype(jnp.float32)
    if moe.active_groups < moe.groups:
        groups = ranks.reshape(*ranks.shape[:-1], moe.groups, -1)
        best = jnp.sum(jax.lax.top_k(groups, 2)[0], axis=-1)
        kept = jax.nn.one_hot(jax.lax.top_k(best, moe.active_groups)[1], moe.groups, dtype=bool)
        groups = jnp.where(jnp.any(kept, axis=-2)[..., None], groups, -jnp.inf)
        ranks = groups.reshape(ranks.shape)
    return jax.lax.top_k(ranks, moe.active)[1]


def expert_weights(
    moe: MoE, scores: Float[Array, "B T E"], experts: Int[Array, "B T k"]
) -> Float[Array, "B T k"]:
    """Factor by which each chosen expert's result is multiplied."""
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if moe.normalise:
        # sigmoids can all be almost 0
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return weights * moe.scale


def _bias_once(parameters):
    """The parameters of experts whose results devices along ``tensor`` add: the bias of the result
    is that of the first device, and 0 on the others.
    """
    axes = shared_by("mlp")
    if not axes or "expert_down_bias" not in parameters:
        return parameters
    bias = parameters["expert_down_bias"]
    bias = jnp.where(jax.lax.axis_index(axes) == 0, bias, jnp.zeros_like(bias))
    return {**parameters, "expert_down_bias": bias}


def _of_own_tokens(moe: MoE, parameters, y, experts, weights):
    """``_experts`` where all devices along ``tensor`` have the same tokens: each sends some of them
    to their experts.
    """
    axes = shared_by("mlp")
    devices = jax.lax.axis_size(axes) if axes else 1
    count = y.shape[0] * y.shape[1]
    each = -(-count // devices)

    def own(x, fill):
        x = x.reshape(1, count, -1)
        x = jnp.pad(x, ((0, 0), (0, each * devices - count), (0, 0)), constant_values=fill)
        first = each * jax.lax.axis_index(axes) if axes else 0
        return jax.lax.dynamic_slice_in_dim(x, first, each, axis=1)

    out = _experts(moe, parameters, own(y, 0), own(experts, moe.experts), own(weights, 0))
    if axes:
        out = jax.lax.all_gather(out, axes, axis=1, tiled=True)
    return out[:, :count].reshape(y.shape)


def _experts(moe: MoE, parameters, y, experts, weights):
    """Weighted sum of the results of a token's experts.

    experts: moe.experts stands for none; y is 0 there.
    """
    flat = y.reshape(-1, y.shape[-1])
    pairs = experts.reshape(-1)
    # Pairs are sorted by expert, so that each expert has one stretch; those of padding come last.
    order = jnp.argsort(pairs, stable=True)
    places = jnp.zeros_like(order).at[order].set(jnp.arange(len(order)), unique_indices=True)
    # with their scales where they are quantised
    matrices = {name: x for name, x in parameters.items() if name.startswith("expert_")}
    axes = shared_by("folded_experts" if moe.fold else "experts")
    devices = jax.lax.axis_size(axes) if axes else 1
    # of those that no token chooses nothing is computed
    slots = devices * len(matrices["expert_up"])
    sizes = jnp.bincount(pairs, length=moe.experts + 1)[: moe.experts].astype(jnp.int32)
    sizes = jnp.pad(sizes, (0, slots - moe.experts))
    x = _permute(jnp.repeat(flat, moe.active, axis=0), order, places)
    products = _products_of(moe.limit)
    if axes:
        most = devices * len(flat) * min(moe.active, slots // devices)
        way = Way(axes, room(len(pairs), most, moe.buffer))
        out = through_experts(products, matrices, x, sizes, way)
    else:
        out = products(matrices, x, sizes)
    # Each token's results stand side by side in the order of its experts, so their sum does not
    # depend on the tokens beside it.
    out = _permute(out, places, order).reshape(*experts.shape, -1).astype(jnp.float32)
    return jnp.sum(out * weights[..., None], axis=-2).astype(y.dtype)


@functools.cache
def _products_of(limit: float | None):
    """``_products`` with the experts' activation; the same object for the same limit."""
    return functools.partial(_products, limit)


def _products(limit: float | None, matrices, x, sizes):
    """The results of rows that are sorted by expert, 0 behind the last expert's.

    limit: of ``clipped_swiglu``; None for SwiGLU.
    """
    rows = jnp.arange(len(x))
    experts = jnp.searchsorted(jnp.cumsum(sizes), rows, side="right")

    def product(name, x):
        out = expert_product(matrices, name, x, sizes, experts)
        bias = matrices.get(f"{name}_bias")
        return out if bias is None else out + bias.astype(out.dtype).at[experts].get(mode="clip")

    gate, up = product("expert_gate", x), product("expert_up", x)
    hidden = swiglu(gate, up) if limit is None else clipped_swiglu(gate, up, limit)
    out = product("expert_down", hidden)
    return jnp.where((rows < jnp.sum(sizes))[:, None], out, 0)


@jax.custom_vjp
def _permute(x, order, inverse):
    """x[order]. Its gradient is a permutation too, where JAX would make a slow sum."""
    return x[order]


_permute.defvjp(
    lambda x, order, inverse: (x[order], inverse),
    lambda inverse, gradient: (gradient[inverse], None, None),
)
