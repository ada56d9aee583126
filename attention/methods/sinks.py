"""Attention sinks: a learned number of each head joins the softmax as the score of a key without a
value, as in gpt-oss (2508.10925, section 2.2).

With z the sink of a head and lse the log-sum-exp of the scores of a query, the weights of all keys
are divided by exp(lse) + exp(z) in place of exp(lse). That multiplies the result without the sink
by exp(lse) / (exp(lse) + exp(z)) = sigmoid(lse - z). So every kernel that gives the log-sum-exp
serves, and the gradient of the sink flows through this product alone.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attention.calls import Call, CallShape, paged_call, rows_calls
from attention.methods.method import LayerShape, Method, Parameter
from attention.query_cost import QueryCost, windowed
from pallas_kernels.finite import cleaned, marked


@dataclasses.dataclass(frozen=True)
class Sinks(Method):
    """Every key that a token may see, or the last ``window`` of them, and a sink for each head."""

    # Keys that a query sees, its own counted; None for all.
    window: int | None = None

    def __post_init__(self):
        if self.window is not None and self.window < 1:
            raise ValueError(f"Sinks: window={self.window} must be at least 1, or None for all")

    def cut_keys(self):
        return ("main",)

    def windows(self):
        return (self.window,)

    def parameters(self, shape: LayerShape) -> dict[str, Parameter]:
        return {"sinks": Parameter((shape.num_heads,), ("heads",), 0.0)}

    def head_inputs(self, parameters, y):
        """The sinks, float32."""
        sinks = parameters["sinks"].astype(jnp.promote_types(jnp.float32, y.dtype))
        return jnp.broadcast_to(sinks[:, None], (*y.shape[:2], len(sinks), 1))

    def attend(self, q, keys, layout, inputs):
        return with_sinks(*layout.attend_lse(q, keys["main"], self.window), inputs[..., 0])

    def attend_pages(self, pages, q, q_tokens, reader, inputs):
        if self.window is not None:
            reader = reader.in_window(q, q_tokens, self.window)
        found = reader.dense_lse(pages["main"], q, q_tokens, self.window)
        return with_sinks(*found, inputs[..., 0])

    def append_pages(self, pages, keys, at, parameters, q, q_tokens, reader, inputs):
        *found, main = reader.append_lse(pages["main"], keys["main"], at, q, q_tokens, self.window)
        return with_sinks(*found, inputs[..., 0]), {**pages, "main": main}

    def decode_bytes(self, tokens: int, shape: LayerShape, dtype: str) -> int:
        return super().decode_bytes(min(tokens, self.window or tokens), shape, dtype)

    def query_cost(self, shape: LayerShape, row: int, seen: float, decode: bool) -> QueryCost:
        if self.window is None:
            return super().query_cost(shape, row, seen, decode)
        size = shape.num_heads * self.pair_size(shape, decode)
        visible, masked = windowed(seen, self.window, decode)
        return QueryCost(visible * size, masked=masked * size)

    def calls(self, shape: CallShape) -> tuple[Call, ...]:
        part = "all keys" if self.window is None else "window"
        return (*rows_calls(part, shape), paged_call(part, shape))


def with_sinks(
    out: Float[Array, "B T N H"], lse: Float[Array, "B T N"], sinks: Float[Array, "*#B #T N"]
) -> Float[Array, "B T N H"]:
    """The result of attention with a sink, in out's dtype, from that without.

    lse: the log-sum-exp of the scores; -inf for a query that sees no key, whose result stays 0.
    """
    bad = jnp.isnan(lse) | ~jnp.isfinite(sinks)
    # a share that is NaN would spread through gradients of 0
    lse = jnp.where(jnp.isnan(lse), 0.0, lse.astype(sinks.dtype))
    share = jax.nn.sigmoid(lse - cleaned(sinks))
    return marked((out.astype(sinks.dtype) * share[..., None]).astype(out.dtype), bad)
