"""Types of a layer's keys and values.

Dimensions: B rows, S keys, K key/value heads, H head size.
"""

from __future__ import annotations

from collections.abc import Callable

import jax

# Keys and values of the same shape.
Pair = tuple[jax.Array, jax.Array]
# Keys and values by the name of their branch, [B, S, K, H] each. "main" is the branch of the
# layer's own keys and values.
Keys = dict[str, Pair]
# A function of (keys [B, S, K, H], positions [B, S]) that returns the keys rotated by RoPE.
Rotate = Callable[[jax.Array, jax.Array], jax.Array]
