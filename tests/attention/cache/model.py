"""A small model with a layer of every method, and its jitted programs over a paged cache."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from attention.cache.tables import Pages, sequence_pages
from attention.methods.dense import Dense
from attention.methods.gated_documents import GatedDocuments
from attention.methods.moba import MoBA
from attention.methods.nsa import NSA
from attention.methods.window import Window
from models.paged import forward, model_cache
from models.transformer import Transformer
from tests.models.small import VOCABULARY, small_model

PAGE, WIDTH = 16, 6
SPARSE = NSA(length=8, stride=4, block=PAGE, picks=3, initial=1, local=1, window=10)
METHODS = (Window(9), SPARSE, Dense(), MoBA(block=PAGE, picks=2), GatedDocuments())


@functools.cache
def model(methods=METHODS, seed: int = 0) -> Transformer:
    return small_model(methods, seed=seed, num_layers=len(methods))


def cache(num_pages: int, methods=METHODS):
    return model_cache(model(methods).config, num_pages, page=PAGE)


@jax.jit
def full(model: Transformer, tokens, positions, where):
    """Hidden states without a cache. Every sequence and document starts at a page."""
    return model.hidden(tokens, positions, where, align=PAGE)


step = jax.jit(forward)


@jax.jit
def view(tables, lengths) -> Pages:
    return sequence_pages(tables, lengths, PAGE)


def run(model, cache, tables, tokens: list[list[int]], starts: list[int], chunk: int):
    """``feed`` for rows that hold one sequence each; the tokens of each row are given from its
    start.
    """
    tables = jnp.asarray(tables)
    rows = [row[start:] for row, start in zip(tokens, starts, strict=True)]
    return feed(
        model, cache, lambda lengths: view(tables, jnp.asarray(lengths)), rows, starts, chunk
    )


def feed(model, cache, pages_of, tokens: list[list[int]], starts: list[int], chunk: int):
    """Tokens of every row, ``chunk`` at a time: (hidden states of each row's tokens, cache).

    starts: place of each row's first token. pages_of: from the places that the rows reach to Pages.
    """
    outs = [[] for _ in tokens]
    done = [0] * len(tokens)
    while any(at < len(row) for at, row in zip(done, tokens, strict=True)):
        ids = np.zeros((len(tokens), chunk), np.int32)
        places = np.full((len(tokens), chunk), -1, np.int32)
        counts = [min(chunk, len(row) - at) for at, row in zip(done, tokens, strict=True)]
        for i, (at, count) in enumerate(zip(done, counts, strict=True)):
            ids[i, :count] = tokens[i][at : at + count]
            places[i, :count] = starts[i] + np.arange(at, at + count)
        done = [at + count for at, count in zip(done, counts, strict=True)]
        pages = pages_of([start + at for start, at in zip(starts, done, strict=True)])
        hidden, cache = step(model, cache, jnp.asarray(ids), jnp.asarray(places), pages)
        for out, row, count in zip(outs, np.asarray(hidden), counts, strict=True):
            out.append(row[:count])
    return [np.concatenate(out) for out in outs], cache


def random_tokens(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist()
