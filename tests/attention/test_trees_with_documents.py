"""Rows of trees with documents against definitions written token by token.

The definitions take one context at a time, in float64 and with loops. They know nothing of rows,
blocks of places and copies, so they can be read beside the papers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention.layout import lay_out
from attention.methods.dense import Dense
from attention.methods.gated_documents import GatedDocuments
from attention.methods.method import Method
from attention.methods.moba import MoBA
from attention.methods.nsa import NSA
from attention.methods.window import Window
from pallas_kernels.tokens import TAIL, Tokens, branch_of
from tests.attention.properties import attended, inputs

BLOCK = 16
SLOTS, RUNS, ROWS = 384, 26, 3


@dataclasses.dataclass(eq=False)
class Context:
    """The tokens of one context, in order."""

    order: np.ndarray
    documents: np.ndarray
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    y: np.ndarray
    parameters: dict[str, np.ndarray]

    def sees(self, t: int) -> np.ndarray:
        """bool [T], which tokens token t sees."""
        mine = self.documents[t]
        own = (self.documents == 0) | (self.documents == mine) | (mine == TAIL)
        return (self.order <= self.order[t]) & own

    def keys(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values [T, K, H] of another branch of NSA."""
        return tuple(
            np.einsum("td,dkh->tkh", self.y, self.parameters[f"{name}_{part}"]) for part in "kv"
        )

    def gates(self) -> np.ndarray:
        return 1 / (1 + np.exp(-np.einsum("td,dnc->tnc", self.y, self.parameters["gates"])))

    def softmax(self, t: int, head: int, seen: np.ndarray, k=None, v=None) -> np.ndarray:
        """Attention of one query head to the keys that it sees; zeros if it sees none."""
        weights = self.weights(t, head, seen, self.k if k is None else k)
        return weights @ self.of_head(self.v if v is None else v, head)

    def weights(self, t: int, head: int, seen: np.ndarray, k: np.ndarray) -> np.ndarray:
        scores = self.of_head(k, head) @ self.q[t, head] / np.sqrt(self.q.shape[-1])
        found = np.zeros(len(scores))
        if seen.any():
            found[seen] = np.exp(scores[seen] - scores[seen].max())
            found /= found.sum()
        return found

    def of_head(self, x: np.ndarray, head: int) -> np.ndarray:
        """x of the key/value head that a query head reads."""
        return x[:, head * x.shape[1] // self.q.shape[1]]


def dense(method: Dense, c: Context, t: int) -> list[np.ndarray]:
    return [c.softmax(t, head, c.sees(t)) for head in range(c.q.shape[1])]


def window(method: Window, c: Context, t: int) -> list[np.ndarray]:
    seen = c.sees(t) & (c.order[t] - c.order < method.window)
    return [c.softmax(t, head, seen) for head in range(c.q.shape[1])]


def gated(method: GatedDocuments, c: Context, t: int) -> list[np.ndarray]:
    others = (c.documents > 0) & (c.documents != c.documents[t])
    parts = (c.sees(t) & ~others, c.sees(t) & others)
    return [
        sum(
            gate * c.softmax(t, head, part)
            for gate, part in zip(c.gates()[t, head], parts, strict=True)
        )
        for head in range(c.q.shape[1])
    ]


def moba(method: MoBA, c: Context, t: int) -> list[np.ndarray]:
    blocks = c.order // method.block
    found = []
    for head in range(c.q.shape[1]):
        keys = c.of_head(c.k, head)

        def rank(block, head=head, keys=keys):
            own = block == blocks[t]
            return (not own, -(c.q[t, head] @ keys[blocks == block].mean(axis=0)), block)

        chosen = sorted(set(blocks[c.sees(t)]), key=rank)[: method.picks]
        found.append(c.softmax(t, head, c.sees(t) & np.isin(blocks, chosen)))
    return found


@functools.lru_cache(maxsize=1)
def stretches(method: NSA, c: Context) -> list[list[int]]:
    """The tokens of every stretch: consecutive ones of one document, or outside of documents."""
    at = {order: token for token, order in enumerate(c.order.tolist())}
    found = []
    for start in range(0, int(c.order.max()) + 1, method.stride):
        tokens = [at.get(start + offset, -1) for offset in range(method.length)]
        if min(tokens) >= 0 and len({*c.documents[tokens].tolist()}) == 1:
            found.append(tokens)
    return found


@functools.lru_cache(maxsize=1)  # of one context, for all of its tokens
def compressed(method: NSA, c: Context) -> tuple[np.ndarray, np.ndarray]:
    """phi of every stretch (equation 7, with a mean), [E, K, H] each."""

    def phi(x: np.ndarray, name: str) -> np.ndarray:
        p = {part: c.parameters[f"{name}_{part}"] for part in ("positions", "first", "second")}
        found = np.zeros((0, *x.shape[1:]))
        for tokens in stretches(method, c):
            flat = (x[tokens] + p["positions"][:, None]).transpose(1, 0, 2).reshape(x.shape[1], -1)
            hidden = jax.nn.gelu(flat @ p["first"].reshape(flat.shape[1], -1))
            mean = x[tokens].mean(axis=0)
            found = np.concatenate([found, (mean + np.asarray(hidden) @ p["second"])[None]])
        return found

    k, v = c.keys("compressed")
    return phi(k, "k"), phi(v, "v")


def nsa(method: NSA, c: Context, t: int) -> list[np.ndarray]:
    found = stretches(method, c)
    starts = np.array([c.order[tokens[0]] for tokens in found], int)
    seen = np.array([c.sees(t)[tokens[-1]] for tokens in found], bool)
    k, v = compressed(method, c)
    window_k, window_v = c.keys("window")
    in_window = c.sees(t) & (c.order[t] - c.order < method.window)
    blocks = c.order // method.block
    candidates = sorted(set(blocks[c.sees(t)].tolist()))
    groups = c.q.shape[1] // c.k.shape[1]
    outs = []
    for kv_head in range(c.k.shape[1]):
        heads = range(kv_head * groups, (kv_head + 1) * groups)
        # the probabilities of a group's heads are added, and count by the tokens in common
        shared = sum(c.weights(t, head, seen, k) for head in heads)
        scores = {}
        for block in candidates:
            begin = np.maximum(starts, block * method.block)
            end = np.minimum(starts + method.length, (block + 1) * method.block)
            scores[block] = np.sum(shared * np.maximum(end - begin, 0)) / method.stride

        def rank(block, scores=scores):
            initial = block * method.block < candidates[0] * method.block + (
                method.initial * method.block
            )
            local = block > c.order[t] // method.block - method.local
            return (0, 0, block) if initial or local else (1, -scores[block], block)

        chosen = sorted(candidates, key=rank)[: method.picks]
        selected = c.sees(t) & np.isin(blocks, chosen)
        for head in heads:
            parts = (
                c.softmax(t, head, seen, k, v),
                c.softmax(t, head, selected),
                c.softmax(t, head, in_window, window_k, window_v),
            )
            outs.append(sum(g * x for g, x in zip(c.gates()[t, head], parts, strict=True)))
    return outs


CASES: dict[str, tuple[Method, Callable]] = {
    "dense": (Dense(), dense),
    "window": (Window(13), window),
    "moba": (MoBA(block=BLOCK, picks=3), moba),
    "gated": (GatedDocuments(), gated),
    "nsa": (NSA(8, 4, BLOCK, picks=4, initial=1, local=2, window=10), nsa),
    "nsa, long stretches": (NSA(16, 4, BLOCK, picks=3, initial=1, local=1, window=21), nsa),
}


def random_runs(rng, at: int, number: int, outside: int) -> tuple[list, int, int]:
    """A few runs of text and documents from order ``at`` on: ([(document, orders)], the order and
    the number of documents behind them). outside: the document number of text.
    """
    runs = []
    for _ in range(rng.integers(1, 4)):
        if outside == TAIL and rng.random() < 0.45:
            at = -(-at // BLOCK) * BLOCK
            length = int(rng.integers(1, 45))
            number += 1
            runs.append((number, np.arange(at, at + length)))
            at = -(-(at + length) // BLOCK) * BLOCK
        elif not runs or runs[-1][0] != outside:
            length = int(rng.integers(1, 40))
            runs.append((outside, np.arange(at, at + length)))
            at += length
    return runs, at, number


def random_row(rng) -> tuple[Tokens, list[list[int]]]:
    """A packed row of prompts and completions, and the slots of every context in it."""
    outside = TAIL if rng.random() < 0.7 else 0  # without documents all may see all text
    fields = [[], [], [], []]
    contexts = []
    runs = 0
    for segment in range(1, 50):
        prompt, end, number = random_runs(rng, 0, 0, outside)
        branches = [random_runs(rng, end, number, outside)[0] for _ in range(rng.integers(0, 3))]
        parts = [prompt, *branches]
        runs += 1 + sum(map(len, parts))
        size = sum(len(orders) for part in parts for _, orders in part)
        if len(fields[0]) + size + 3 > SLOTS or runs >= RUNS:
            break
        slots = []
        for number, part in enumerate(parts):
            start = len(fields[0])
            for document, orders in part:
                for order in orders:
                    values = (segment, branch_of(number, 0) if number else 0, document, order)
                    for field, value in zip(fields, values, strict=True):
                        field.append(value)
            slots.append(list(range(start, len(fields[0]))))
        contexts += [slots[0] + own for own in slots[1:]] or slots
        for field in fields:  # a gap of empty slots
            field += [0] * (segment % 3)
    padded = [np.pad(np.array(field, np.int32), (0, SLOTS - len(field))) for field in fields]
    return Tokens(*(jnp.asarray(field)[None] for field in padded)), contexts


@pytest.mark.parametrize("name", CASES)
@pytest.mark.quick(first=1)
def test_contexts_of_a_row_equal_their_definition(x64, name):
    method, definition = CASES[name]
    rng = np.random.default_rng(0)
    x = inputs(method, SLOTS, jnp.float64)
    run = jax.jit(lambda x, where: attended(method, x, lay_out((method,), where, RUNS)))
    parameters = {key: np.asarray(value) for key, value in x.parameters.items()}
    for _ in range(ROWS):
        where, contexts = random_row(rng)
        found = np.asarray(run(x, where))[0]
        for slots in contexts:
            fields = (where.order, where.documents, x.q, x.k, x.v, x.y)
            context = Context(*(np.asarray(field)[0, slots] for field in fields), parameters)
            # every token would take long with loops
            tokens = rng.choice(len(slots), min(len(slots), 12), replace=False)
            for t in tokens:
                wanted = np.stack(definition(method, context, int(t)))
                np.testing.assert_allclose(found[slots[t]], wanted, rtol=1e-9, atol=1e-9)
