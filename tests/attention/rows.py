"""Random inputs and packed rows that the attention tests share."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from attention import reference
from pallas_kernels.tokens import TAIL, Tokens, visible


def relative(x, expected) -> float:
    """|x - expected| / |expected| in float64."""
    x = np.asarray(x, np.float64)
    expected = np.asarray(expected, np.float64)
    return float(np.linalg.norm(x - expected) / max(np.linalg.norm(expected), 1e-30))


@dataclasses.dataclass(frozen=True)
class Piece:
    """A prompt of documents and text, and its completions: their lengths in tokens."""

    prompt: int
    completions: tuple[int, ...] = ()

    def sequences(self) -> list[tuple[int, int]]:
        """(prompt, completion) lengths of every sequence that the piece packs."""
        return [(self.prompt, length) for length in self.completions] or [(self.prompt, 0)]


def pack(pieces: list[Piece], size: int) -> tuple[Tokens, list[np.ndarray]]:
    """One packed row, and the slots of each sequence in it, in order."""
    fields = np.zeros((4, size), np.int32)
    slots = []
    at = 0
    for number, piece in enumerate(pieces, start=1):
        prompt = np.arange(at, at + piece.prompt)
        fields[0, prompt] = number
        fields[3, prompt] = np.arange(piece.prompt)
        at += piece.prompt
        if not piece.completions:
            slots.append(prompt)
        for branch, length in enumerate(piece.completions, start=1):
            own = np.arange(at, at + length)
            fields[0, own], fields[1, own] = number, branch
            fields[3, own] = piece.prompt + np.arange(length)
            slots.append(np.concatenate([prompt, own]))
            at += length
    assert at <= size
    return Tokens(*map(jnp.asarray, fields[:, None])), slots


def separate(lengths: list[int], size: int) -> Tokens:
    """``sequences``, without a program."""
    slots = np.tile(np.arange(size, dtype=np.int32), (len(lengths), 1))
    segments = (slots < np.array(lengths)[:, None]).astype(np.int32)
    return Tokens(*map(jnp.asarray, (segments, slots * 0, slots * 0, slots)))


def documents(lengths: list[int], tail: int, block: int, prefix: int = 0, gap: int = 0) -> Tokens:
    """One row of a shared prefix, documents and a tail, each starting at a multiple of ``block``.

    gap: by which the order of what follows the prefix is greater than its slot.
    """
    parts = (
        [(0, prefix)] * (prefix > 0)
        + list(enumerate(lengths, start=1))
        + [(TAIL, tail)] * (tail > 0)
    )
    fields: list[list[int]] = [[], [], [], []]
    for document, length in parts:
        start = len(fields[0])
        padding = -length % block
        fields[0] += [1] * length + [0] * padding
        fields[1] += [0] * (length + padding)
        fields[2] += [document] * length + [0] * padding
        order = start + gap * (document != 0)
        fields[3] += list(range(order, order + length)) + [0] * padding
    return Tokens(*(jnp.asarray(np.array([x], np.int32)) for x in fields))


def normal(seed: int, *shapes: tuple[int, ...], dtype=jnp.float32) -> list[jax.Array]:
    """Standard normal arrays, at most 16."""
    keys = jax.random.split(jax.random.key(seed), 16)[: len(shapes)]
    return [drawn(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


def drawn(key: jax.Array, shape: tuple[int, ...], dtype=jnp.float32) -> jax.Array:
    """``jax.random.normal``, by few programs."""
    # In few sizes, since each is compiled. A number depends on its place alone.
    count = math.prod(shape)
    size = max(1024, 1 << (count - 1).bit_length())
    return jnp.asarray(np.asarray(_draw(key, size, jnp.dtype(dtype)))[:count].reshape(shape))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _draw(key, size: int, dtype) -> jax.Array:
    return jax.random.normal(key, (size,), dtype)


def results(function, qkv, weight, weight_lse):
    """((out, lse), the gradients of a weighted sum of them for q, k and v) of one program.

    function: of q, k and v to (out [B, T, N, H], lse [B, T, N]).
    """
    gradients, found = jax.jit(jax.grad(_weighted(function, weight, weight_lse), (0, 1, 2), True))(
        *qkv
    )
    return found, gradients


def defined(qkv, weight, weight_lse, q_tokens: Tokens, k_tokens: Tokens, window=None):
    """``results`` of the reference under the rule's own mask, row by row."""
    return defined_by(_visible(q_tokens, k_tokens, window), qkv, weight, weight_lse)


def defined_by(mask, qkv, weight, weight_lse):
    """``results`` of the reference under a mask bool [B, T, S]."""
    return _defined(*qkv, mask, weight, weight_lse)


_visible = jax.jit(visible, static_argnums=2)


@jax.jit  # one program for all masks of a shape
def _defined(q, k, v, mask, weight, weight_lse):
    def rows(q, k, v):
        return jax.vmap(lambda q, k, v, m: reference.attention(q, k, v, m[None])[:2])(q, k, v, mask)

    gradients, found = jax.grad(_weighted(rows, weight, weight_lse), (0, 1, 2), True)(q, k, v)
    return found, gradients


def _weighted(function, weight, weight_lse):
    def total(*qkv):
        out, lse = function(*qkv)
        seen = jnp.isfinite(lse)
        sums = jnp.where(seen, jnp.where(seen, lse, 0) * weight_lse, 0)
        return jnp.sum(out * weight) + jnp.sum(sums), (out, lse)

    return total
