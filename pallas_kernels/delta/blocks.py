"""Costs of the kernels, and the lists of the chunks that continue others."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from pallas_kernels.cost import Cost

# Products of a chunk. With the state: its corrections and queries, and the changes into it;
# backward, corrections are made once more, and each has two gradients.
_OF_STATE = {"forward": 3, "backward": 7}
# Of tokens with tokens, over the key size: keys with keys and with queries, and the solution;
# backward, all are made once more, and each has two gradients.
_OF_KEYS = {"forward": 3, "backward": 9}
# Of tokens with tokens, over the columns: the solution, and scores with changes; backward, the
# solution is made once more, and each has two gradients.
_OF_COLUMNS = {"forward": 2, "backward": 5}


def cost(kernel: str, shape: tuple[int, ...], size: int) -> Cost:
    """The cost of a kernel on TPU, "forward" or "backward", for values of a shape [B, N, M, C, W].

    size: H.
    """
    batch, chunks, heads, tokens, columns = shape
    products = _OF_STATE[kernel] * size * columns
    products += tokens * (_OF_KEYS[kernel] * size + _OF_COLUMNS[kernel] * columns)
    # the inverse, by blocks of 2, 4, ... rows
    products += 2 * (math.ceil(math.log2(tokens)) - 1) * tokens**2
    count = batch * chunks * heads
    # q, k, v, the results and the state; backward, all but the results have a gradient
    passes = 1 if kernel == "forward" else 2
    elements = passes * (2 * tokens * (size + columns) + size * columns)
    return Cost(2 * count * tokens * products, count * tokens * (tokens + 2), 4 * count * elements)


def continued(parents: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The chunks that begin with each state, without the one right behind it, from parents [B, N]:
    (chunks [B, N], starts [B, N + 2]), int32.

    Those of state s are chunks[starts[s] : starts[s + 1]], in rising order.
    """
    count = parents.shape[1]
    near = parents == jnp.arange(count)
    keys = jnp.where(near, count + 1, parents)
    chunks = jnp.argsort(keys, axis=1, stable=True)
    numbers = jnp.arange(count + 2)
    starts = jnp.sum(keys[:, None] < numbers[:, None], axis=2)
    return chunks.astype(jnp.int32), starts.astype(jnp.int32)
