"""A GRPO step written by hand for the workload of ``rl_step``, to compare the project's with.

It is what remains where one workload is all there is: every prompt has the same length, every
completion too, and nothing ends early. There is no engine, no pages, no packing and no record. One
program samples, one updates. Sampling computes a prompt once for its group, and all completions of
the group read the same keys of it. The update does the same (``share=True``), or has a row for each
completion with its prompt in front, as most code has it (``share=False``); both have the same
gradients.

The model's parameters are those of ``models.transformer``, and so are norms, rotation and SwiGLU.
Attention is a plain softmax over all scores. Tokens are drawn by the engine's function from the
engine's random numbers, so both sample the same tokens from the same weights.

Dimensions: P prompts, G completions of a prompt, T tokens of a prompt, C tokens of a completion, B
rows, S tokens of a row, N query heads, K key/value heads, R = N / K, H head size, D model.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from attention.methods.dense import Dense
from attention.products import project
from models.functions import rms_norm, rope, swiglu
from models.layers import Layers
from models.model_config import ModelConfig
from models.transformer import Transformer
from rl_code.rollout.sampling import SamplingConfig, sample, token_uniforms

# Queries that the causal attention of a prompt computes at once: keys behind them are left out.
_BLOCK = 256

_SAMPLING = SamplingConfig(temperature=1.0)

# (q [B, S, N, H], k [B, S, K, H], v [B, S, K, H]) -> [B, S, N, H]
Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """The state that an update changes."""

    model: Any
    opt_state: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Samples:
    """The result of a rollout, which an update reads."""

    # int32 [P, T].
    prompts: jax.Array
    # int32 [P, G, C].
    completions: jax.Array
    # float32 [P, G, C], of the sampler.
    logprobs: jax.Array


def check(config: ModelConfig) -> None:
    """Raises ValueError for a model that this code is not written for."""
    if (
        config.attention != (Dense(),)
        or config.moe is not None
        or config.qk_norm
        or not config.tied_embeddings
    ):
        raise ValueError(
            "the hand-written step is for dense attention and tied embeddings, without experts and "
            f"without norms of q and k, not for {config}"
        )


def optimizer() -> optax.GradientTransformation:
    """Optimizer with the settings of ``benchmarks.model.OPTIMIZER``."""
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(1e-5, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.0),
    )


def init_state(model: Transformer) -> State:
    """The state before the first update, which donates the model with it."""
    return State(model, jax.jit(optimizer().init)(model))


def advantages(completions: np.ndarray) -> np.ndarray:
    """GRPO's, float32 [P, G], where the reward is the share of even tokens of [P, G, C]."""
    rewards = np.mean(completions % 2 == 0, axis=-1)
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    return (centred / (rewards.std(axis=1, keepdims=True) + 1e-4)).astype(np.float32)


# --- The model ------------------------------------------------------------------------------------


def _qkv(c: ModelConfig, layer: Layers, y: jax.Array, positions: jax.Array):
    """(q, k, v) of normalised hidden states [B, S, D], q and k rotated by positions [B, S]."""
    q, k, v = (project(y, matrix[...]) for matrix in (layer.q, layer.k, layer.v))
    if c.qkv_bias:
        q, k, v = q + layer.q_bias[...], k + layer.k_bias[...], v + layer.v_bias[...]
    return rope(q, positions, c), rope(k, positions, c), v


def _after_attention(c: ModelConfig, layer: Layers, x: jax.Array, attended: jax.Array):
    """The hidden states after a layer, from those before it and the result of attention."""
    x = x + project(attended, layer.o[...], 2)
    y = rms_norm(x, layer.mlp_norm[...], c.norm_eps)
    return x + project(
        swiglu(project(y, layer.gate[...]), project(y, layer.up[...])), layer.down[...]
    )


def _forward(
    model: Transformer,
    tokens: Int[Array, "B S"],
    positions: Int[Array, "B S"],
    attention: Attention,
    keep: bool = False,
):
    """(final hidden states [B, S, D], keys and values [L, B, S, K, H] if they are to be kept)."""
    c = model.config

    def step(x, layer):
        q, k, v = _qkv(c, layer, rms_norm(x, layer.attention_norm[...], c.norm_eps), positions)
        x = _after_attention(c, layer, x, attention(q, k, v))
        return x, (k, v) if keep else None

    x, kept = jax.lax.scan(step, model.embed.table[...][tokens], model.layers)
    return rms_norm(x, model.final_norm[...], c.norm_eps), kept


def _logits(model: Transformer, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
    return hidden @ model.embed.table[...].T


def _heads(q: jax.Array, k: jax.Array) -> jax.Array:
    """Queries [..., N, H] scaled and by key head, [..., K, R, H]."""
    size = q.shape[-1]
    return (q * size**-0.5).reshape(*q.shape[:-2], k.shape[-2], -1, size)


def causal(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention of every token of a row to itself and those before it."""

    @jax.checkpoint
    def block(q, k, v):
        grouped = _heads(q, k)
        scores = jnp.einsum("BTKRH,BSKH->BKRTS", grouped, k)
        first = k.shape[1] - q.shape[1]
        seen = jnp.arange(k.shape[1]) <= first + jnp.arange(q.shape[1])[:, None]
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
        return jnp.einsum("BKRTS,BSKH->BTKRH", weights, v).reshape(q.shape)

    starts = range(0, q.shape[1], _BLOCK)
    ends = [min(start + _BLOCK, q.shape[1]) for start in starts]
    parts = [
        block(q[:, start:end], k[:, :end], v[:, :end])
        for start, end in zip(starts, ends, strict=True)
    ]
    return jnp.concatenate(parts, axis=1)


@jax.checkpoint
def _behind_prompt(q, prompt_k, prompt_v, own_k, own_v, seen):
    """Attention of completions to the group's prompt and to their own tokens.

    q [P, G, C, N, H]; prompt_k and prompt_v [P, T, K, H]; own_k and own_v [P, G, S, K, H]. seen:
    bool [C, S], which own tokens each query sees.
    """
    grouped = _heads(q, own_k)
    length = prompt_k.shape[1]
    to_prompt = jnp.einsum("PGCKRH,PTKH->PKRGCT", grouped, prompt_k)
    to_own = jnp.einsum("PGCKRH,PGSKH->PKRGCS", grouped, own_k)
    to_own = jnp.where(seen, to_own, -jnp.inf)
    weights = jax.nn.softmax(jnp.concatenate([to_prompt, to_own], axis=-1))
    out = jnp.einsum("PKRGCT,PTKH->PGCKRH", weights[..., :length], prompt_v)
    out += jnp.einsum("PKRGCS,PGSKH->PGCKRH", weights[..., length:], own_v)
    return out.reshape(q.shape)


# --- Sampling -------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=(4, 5))
def rollout(
    model: Transformer,
    prompts: Int[Array, "P T"],
    groups: Int[Array, " P"],
    key: jax.Array,
    samples: int,
    tokens: int,
) -> Samples:
    """Samples ``samples`` completions of ``tokens`` tokens for every prompt.

    groups: the number of each prompt's group, and key: the two words of a random key; random
    numbers depend on them as those of the engine do.
    """
    c = model.config
    count, length = prompts.shape
    rows = count * samples
    table = jnp.broadcast_to(jnp.arange(length), prompts.shape)
    hidden, (prompt_k, prompt_v) = _forward(model, prompts, table, causal, keep=True)
    keys = jnp.broadcast_to(key, (rows, 2))
    row_groups = jnp.repeat(groups, samples)
    numbers = jnp.tile(jnp.arange(samples), count)

    def draw(hidden, place):
        """A token of every row from hidden states [P * G, D] of the tokens at ``place``."""
        places = jnp.full(rows, place)
        uniforms = token_uniforms(keys, row_groups, numbers, places)
        return sample(_logits(model, hidden), uniforms, _SAMPLING)

    # cut out of their stack before the loop, in which a slice would be a copy
    layers = jax.lax.optimization_barrier(
        [jax.tree.map(operator.itemgetter(i), model.layers) for i in range(c.num_layers)]
    )

    def step(i, carry):
        out, logprobs, own = carry
        last = jax.lax.dynamic_index_in_dim(out, i, 1)
        x = model.embed.table[...][last]
        positions = jnp.full((rows, 1), length + i)
        seen = jnp.arange(tokens - 1)[None] <= i
        caches = []
        for layer, (own_k, own_v), k_p, v_p in zip(layers, own, prompt_k, prompt_v, strict=True):
            y = rms_norm(x, layer.attention_norm[...], c.norm_eps)
            q, k, v = _qkv(c, layer, y, positions)
            own_k, own_v = (
                jax.lax.dynamic_update_slice_in_dim(
                    cache, new.reshape(count, samples, 1, *new.shape[2:]), i, 2
                )
                for cache, new in ((own_k, k), (own_v, v))
            )
            grouped = q.reshape(count, samples, *q.shape[1:])
            attended = _behind_prompt(grouped, k_p, v_p, own_k, own_v, seen)
            x = _after_attention(c, layer, x, attended.reshape(q.shape))
            caches.append((own_k, own_v))
        hidden = rms_norm(x, model.final_norm[...], c.norm_eps)[:, 0]
        drawn, logp = draw(hidden, length + i)
        return out.at[:, i + 1].set(drawn), logprobs.at[:, i + 1].set(logp), caches

    first = draw(jnp.repeat(hidden[:, -1], samples, axis=0), length - 1)
    out, logprobs = (jnp.zeros((rows, tokens), x.dtype).at[:, 0].set(x) for x in first)
    empty = jnp.zeros((count, samples, tokens - 1, c.num_kv_heads, c.head_dim), prompt_k.dtype)
    carry = out, logprobs, [(empty, empty)] * c.num_layers
    out, logprobs, _ = jax.lax.fori_loop(0, tokens - 1, step, carry)
    return Samples(
        prompts, out.reshape(count, samples, tokens), logprobs.reshape(count, samples, tokens)
    )


# --- The update -----------------------------------------------------------------------------------


def _hidden_shared(model: Transformer, samples: Samples) -> Float[Array, "P G C D"]:
    """Hidden states from which the completions are predicted; a row has a prompt and all of its
    completions.
    """
    count, length = samples.prompts.shape
    _, group, tokens = samples.completions.shape
    own = tokens - 1  # nothing is predicted from a completion's last token
    rows = jnp.concatenate(
        [samples.prompts, samples.completions[..., :-1].reshape(count, -1)], axis=1
    )
    places = jnp.concatenate([jnp.arange(length), jnp.tile(length + jnp.arange(own), group)])
    seen = jnp.arange(own) <= jnp.arange(own)[:, None]

    def attention(q, k, v):
        prompt = [x[:, :length] for x in (q, k, v)]
        q, k, v = (x[:, length:].reshape(count, group, own, *x.shape[2:]) for x in (q, k, v))
        behind = _behind_prompt(q, *prompt[1:], k, v, seen)
        return jnp.concatenate(
            [causal(*prompt), behind.reshape(count, group * own, *q.shape[3:])], axis=1
        )

    hidden, _ = _forward(model, rows, jnp.broadcast_to(places, rows.shape), attention)
    last = jnp.broadcast_to(
        hidden[:, None, length - 1 : length], (count, group, 1, hidden.shape[-1])
    )
    own_hidden = hidden[:, length:].reshape(count, group, own, -1)
    return jnp.concatenate([last, own_hidden], axis=2)


def _hidden_repeated(model: Transformer, samples: Samples) -> Float[Array, "P G C D"]:
    """The same; a row has a prompt and one completion."""
    count, length = samples.prompts.shape
    _, group, tokens = samples.completions.shape
    rows = jnp.concatenate(
        [
            jnp.repeat(samples.prompts, group, axis=0),
            samples.completions[..., :-1].reshape(count * group, -1),
        ],
        axis=1,
    )
    places = jnp.broadcast_to(jnp.arange(rows.shape[1]), rows.shape)
    hidden, _ = _forward(model, rows, places, causal)
    return hidden[:, length - 1 :].reshape(count, group, tokens, -1)


def loss(
    model: Transformer, samples: Samples, advantages: Float[Array, "P G"], share: bool
) -> jax.Array:
    """PPO's clipped loss, a mean over tokens, where the policy at the start of the step is the one
    trained, and the weight of a token is its probability now over that of the sampler.
    """
    hidden = (_hidden_shared if share else _hidden_repeated)(model, samples)
    logits = _logits(model, hidden)
    chosen = jnp.take_along_axis(logits, samples.completions[..., None], axis=-1)[..., 0]
    logp = chosen - jax.nn.logsumexp(logits, axis=-1)
    before = jax.lax.stop_gradient(logp)
    ratio = jnp.exp(logp - before)
    weight = jnp.exp(before - samples.logprobs)
    credit = advantages[..., None]
    surrogate = jnp.minimum(ratio * credit, jnp.clip(ratio, 0.8, 1.2) * credit)
    return -jnp.mean(weight * surrogate)


@functools.partial(jax.jit, static_argnums=3, donate_argnums=0)
def update(
    state: State, samples: Samples, advantages: Float[Array, "P G"], share: bool
) -> tuple[State, jax.Array]:
    """One step of AdamW: (the new state, the loss). The state passed in is donated."""
    value, gradient = jax.value_and_grad(loss)(state.model, samples, advantages, share)
    changes, opt_state = optimizer().update(gradient, state.opt_state, state.model)
    return State(optax.apply_updates(state.model, changes), opt_state), value
