"""Prefill and decode over an explicit KV cache: four jitted programs of fixed shape.

Two caches. ``slots`` holds one row per running episode; ``prompts`` holds prompts waiting to be shared, so that a
group's prompt is prefilled once and then copied into the slot of each of its samples. Every program is a shard_map over
the mesh axis ``data``: each shard owns its rows and loops on its own, so decoding needs no collective; the axis
``tensor`` is left to the compiler.

A row's numbers depend only on its own tokens: every shape is fixed, a prompt is cut into the same chunks whoever shares
the batch, and random numbers are drawn per (group, sample, position). The same seed therefore gives the same tokens
whatever else runs beside an episode.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from attention.methods import Dense
from models.transformer import ModelConfig, Transformer
from pallas_kernels.softmax import masked_attention
from rl_code.rollout.sampling import SamplingConfig, sample, stop_mask, token_uniforms


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Shapes of the engine, each per shard of the mesh axis ``data``.

    slots: episodes decoded together. prompts: prompts kept for sharing. prefill_rows x prefill_tokens: one prefill.
    prompt_length: longest prompt. length: longest trajectory. decode_steps: most tokens a row gains per dispatch.
    cache_dtype: of keys and values.
    """

    slots: int
    prompts: int
    prefill_rows: int
    prefill_tokens: int
    prompt_length: int
    length: int
    decode_steps: int
    cache_dtype: str

    def __post_init__(self):
        if self.prefill_rows < 2:
            raise ValueError(
                f"prefill_rows={self.prefill_rows} must be at least 2: a product with one row may round differently"
            )
        if self.prompt_length > self.length:
            raise ValueError(f"prompt_length={self.prompt_length} must not exceed length={self.length}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys (rotated) and values, one array [rows, K, S, H] per layer."""

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]


def init_cache(config: ModelConfig, rows: int, length: int, dtype: str) -> KVCache:
    """A cache of zeros."""
    shape = (rows, config.num_kv_heads, length, config.head_dim)

    def zeros():
        return tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers))

    return KVCache(keys=zeros(), values=zeros())


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeInput:
    """Per slot, int32 [slots] unless said: what the next decode dispatch needs to know.

    tokens: the last token, not yet in the cache. positions: its position. active: bool. budgets: tokens the row may
    still sample in this dispatch. groups, samples: numbers that fix the row's random stream.
    """

    tokens: jax.Array
    positions: jax.Array
    active: jax.Array
    budgets: jax.Array
    groups: jax.Array
    samples: jax.Array


def _prefill(model: Transformer, cache: KVCache, rows, tokens, starts) -> KVCache:
    """Write the keys and values of ``tokens`` [R, T] at positions starts..starts+T of cache rows ``rows`` [R].

    Positions past a row's real tokens receive values that are overwritten before any query can see them. A row number
    past the end marks padding and is dropped.
    """
    positions = starts[:, None] + jnp.arange(tokens.shape[1])
    length = cache.keys[0].shape[2]
    mask = jnp.arange(length)[None, None, :] <= positions[:, :, None]
    x = model.embed_tokens(tokens)
    keys, values = [], []
    for index, (k_cache, v_cache) in enumerate(zip(cache.keys, cache.values, strict=True)):

        def attend(layer, y, k_cache=k_cache, v_cache=v_cache):
            q, k, v = model.qkv(layer, y, positions)
            k_rows = _write_chunk(k_cache.at[rows].get(mode="clip"), k, starts)
            v_rows = _write_chunk(v_cache.at[rows].get(mode="clip"), v, starts)
            keys.append(k_cache.at[rows].set(k_rows, mode="drop"))
            values.append(v_cache.at[rows].set(v_rows, mode="drop"))
            return masked_attention(
                q, k_rows.transpose(0, 2, 1, 3).astype(q.dtype), v_rows.transpose(0, 2, 1, 3).astype(q.dtype), mask
            )[0]

        x = model.block(model.layer(index), x, attend)
    return KVCache(keys=tuple(keys), values=tuple(values))


def _write_chunk(rows, chunk, starts):
    """Put ``chunk`` [R, T, K, H] into ``rows`` [R, K, S, H] at each row's start."""
    chunk = chunk.transpose(0, 2, 1, 3).astype(rows.dtype)
    return jax.vmap(lambda row, new, start: jax.lax.dynamic_update_slice(row, new, (0, start, 0)))(rows, chunk, starts)


def _admit(slots: KVCache, prompts: KVCache, targets, sources) -> KVCache:
    """Copy prompt rows ``sources`` [A] into slots ``targets`` [A]; a target past the end is dropped."""

    def copy(slot, prompt):
        return slot.at[targets, :, : prompt.shape[2]].set(prompt.at[sources].get(mode="clip"), mode="drop")

    return jax.tree.map(copy, slots, prompts)


def _decode(model: Transformer, cache: KVCache, rows: DecodeInput, key, *, steps, sampling, stop_ids):
    """Up to ``steps`` tokens for every active row; a row ends at a stop token or when its budget is used.

    Returns (cache, tokens int32 [slots, steps], logprobs float32 [slots, steps], counts int32 [slots]).
    """
    num_slots = rows.tokens.shape[0]
    layers = [model.layer(index) for index in range(model.config.num_layers)]
    slot_index = jnp.arange(num_slots)

    def one_token(cache, tokens, positions):
        mask = jnp.arange(cache.keys[0].shape[2])[None, None, :] <= positions[:, None, None]
        x = model.embed_tokens(tokens[:, None])
        keys, values = list(cache.keys), list(cache.values)
        for index, layer in enumerate(layers):

            def attend(layer, y, index=index):
                q, k, v = model.qkv(layer, y, positions[:, None])
                keys[index] = keys[index].at[slot_index, :, positions].set(k[:, 0].astype(keys[index].dtype))
                values[index] = values[index].at[slot_index, :, positions].set(v[:, 0].astype(values[index].dtype))
                return masked_attention(
                    q,
                    keys[index].transpose(0, 2, 1, 3).astype(q.dtype),
                    values[index].transpose(0, 2, 1, 3).astype(q.dtype),
                    mask,
                )[0]

            x = model.block(layer, x, attend)
        return KVCache(keys=tuple(keys), values=tuple(values)), model.logits(model.finish(x)[:, 0])

    def cond(carry):
        step, active = carry[0], carry[4]
        return (step < steps) & jnp.any(active)

    def body(carry):
        step, cache, tokens, positions, active, counts, out_tokens, out_logprobs = carry
        cache, logits = one_token(cache, tokens, positions)
        uniforms = token_uniforms(key, rows.groups, rows.samples, positions)
        sampled, logprobs = sample(logits, uniforms, sampling)
        tokens = jnp.where(active, sampled, tokens)
        positions = positions + active
        counts = counts + active
        out_tokens = out_tokens.at[:, step].set(jnp.where(active, sampled, 0))
        out_logprobs = out_logprobs.at[:, step].set(jnp.where(active, logprobs, 0.0))
        active = active & ~stop_mask(sampled, stop_ids) & (counts < rows.budgets)
        return step + 1, cache, tokens, positions, active, counts, out_tokens, out_logprobs

    out_shape = (num_slots, steps)
    start = (
        jnp.int32(0),
        cache,
        rows.tokens,
        rows.positions,
        rows.active,
        jnp.zeros(num_slots, jnp.int32),
        jnp.zeros(out_shape, jnp.int32),
        jnp.zeros(out_shape, jnp.float32),
    )
    _, cache, _, _, _, counts, out_tokens, out_logprobs = jax.lax.while_loop(cond, body, start)
    return cache, out_tokens, out_logprobs, counts


class Engine:
    """The compiled programs and their caches' shapes; holds no arrays of its own."""

    def __init__(
        self,
        model_config: ModelConfig,
        config: EngineConfig,
        sampling: SamplingConfig,
        stop_ids: tuple[int, ...],
        mesh: Mesh,
    ):
        if set(model_config.attention) != {Dense()}:
            raise ValueError(f"the engine decodes dense attention only, not attention={model_config.attention}")
        self.config, self.sampling, self.mesh = config, sampling, mesh
        self.shards = mesh.shape["data"]
        self._model_config = model_config
        self._rows = NamedSharding(mesh, P("data"))

        def sharded(function, arguments: str, donate: tuple[int, ...]):
            """arguments: one letter each, 'r' replicated (over data), 'd' split over data."""
            in_specs = tuple(P() if kind == "r" else P("data") for kind in arguments)
            mapped = jax.shard_map(
                function, mesh=mesh, in_specs=in_specs, out_specs=P("data"), axis_names={"data"}, check_vma=False
            )
            return jax.jit(mapped, donate_argnums=donate)

        self._prefill = sharded(_prefill, "rdddd", (1,))
        self._admit = sharded(_admit, "dddd", (0,))
        decode = functools.partial(_decode, steps=config.decode_steps, sampling=sampling, stop_ids=stop_ids)
        self._decode = sharded(decode, "rddr", (1,))

    def init(self) -> tuple[KVCache, KVCache]:
        """(slots, prompts), zero caches. Each row is one prefill chunk longer than it needs: chunks are padded."""
        c = self.config

        @functools.partial(jax.jit, out_shardings=self._rows)
        def zeros():
            return (
                init_cache(self._model_config, self.shards * c.slots, c.length + c.prefill_tokens, c.cache_dtype),
                init_cache(self._model_config, self.shards * c.prompts, self.prompt_cache_length, c.cache_dtype),
            )

        return zeros()

    @property
    def prompt_cache_length(self) -> int:
        """Positions of a row of the prompt cache: the longest prompt, rounded up to whole chunks."""
        chunk = self.config.prefill_tokens
        return min(-(-self.config.prompt_length // chunk) * chunk, self.config.length + chunk)

    def put(self, x: np.ndarray) -> jax.Array:
        """A host array [shards * n, ...] on the devices, rows split over ``data``."""
        return jax.device_put(x, self._rows)

    def prefill(self, model: Transformer, cache: KVCache, rows, tokens, starts) -> KVCache:
        """One prefill of shards * prefill_rows rows; ``rows`` are numbers within the shard. Donates the cache."""
        return self._prefill(model, cache, self.put(rows), self.put(tokens), self.put(starts))

    def admit(self, slots: KVCache, prompts: KVCache, targets, sources) -> KVCache:
        """Copy prompts into slots, at most ``slots`` of them per shard. Donates ``slots``."""
        return self._admit(slots, prompts, self.put(targets), self.put(sources))

    def decode(self, model: Transformer, cache: KVCache, rows: DecodeInput, key: jax.Array):
        """One dispatch of up to ``decode_steps`` tokens per active slot. Donates the cache. See ``_decode``."""
        return self._decode(model, cache, jax.tree.map(self.put, rows), key)
