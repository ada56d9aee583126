"""Dense attention: every key that a token may see."""

from __future__ import annotations

import dataclasses

from attention.calls import Call, CallShape, paged_call, rows_calls
from attention.methods.method import Method


@dataclasses.dataclass(frozen=True)
class Dense(Method):
    """Attention to every key that a token may see."""

    reads_all_pages = True

    def cut_keys(self):
        return ("main",)

    def windows(self):
        return (None,)

    def attend(self, q, keys, layout, inputs):
        return layout.attend(q, keys["main"])

    def attend_pages(self, pages, q, q_tokens, reader, inputs):
        return reader.dense(pages["main"], q, q_tokens)

    def append_pages(self, pages, keys, at, parameters, q, q_tokens, reader, inputs):
        out, _, main = reader.append_lse(pages["main"], keys["main"], at, q, q_tokens)
        return out, {**pages, "main": main}

    def calls(self, shape: CallShape) -> tuple[Call, ...]:
        return (*rows_calls("all keys", shape), paged_call("all keys", shape))
