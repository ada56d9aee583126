"""Sliding-window attention: the last keys only."""

from __future__ import annotations

import dataclasses

from attention.calls import Call, CallShape, paged_call, rows_calls
from attention.methods.method import LayerShape, Method
from attention.query_cost import QueryCost, windowed


@dataclasses.dataclass(frozen=True)
class Window(Method):
    """The last ``window`` keys, s in (t - window, t]."""

    # Keys that a query sees, its own counted.
    window: int = 512

    def __post_init__(self):
        if self.window < 1:
            raise ValueError(f"Window: window={self.window} must be at least 1")

    def cut_keys(self):
        return ("main",)

    def windows(self):
        return (self.window,)

    def attend(self, q, keys, layout, inputs):
        return layout.attend(q, keys["main"], self.window)

    def attend_pages(self, pages, q, q_tokens, reader, inputs):
        return reader.windowed(pages["main"], q, q_tokens, self.window)

    def append_pages(self, pages, keys, at, parameters, q, q_tokens, reader, inputs):
        out, _, main = reader.append_lse(pages["main"], keys["main"], at, q, q_tokens, self.window)
        return out, {**pages, "main": main}

    def decode_bytes(self, tokens: int, shape: LayerShape, dtype: str) -> int:
        return super().decode_bytes(min(tokens, self.window), shape, dtype)

    def query_cost(self, shape: LayerShape, row: int, seen: float, decode: bool) -> QueryCost:
        size = shape.num_heads * self.pair_size(shape, decode)
        visible, masked = windowed(seen, self.window, decode)
        return QueryCost(visible * size, masked=masked * size)

    def calls(self, shape: CallShape) -> tuple[Call, ...]:
        return (*rows_calls("window", shape), paged_call("window", shape))
