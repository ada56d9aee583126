"""Attending from few queries to pages of documents: by the paged kernels the same as in XLA, and
with keys that are rotated or not.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from attention.cache import reader
from attention.cache.documents import Assembly, Fingerprint, Slot, document_pages
from attention.cache.paged import attend, init_cache
from attention.cache.tables import Pages, Runs
from attention.methods.dense import Dense
from attention.methods.nsa import NSA
from attention.methods.window import Window
from models.functions import rope
from models.sharding import MeshConfig, abstract_mesh, use_mesh
from pallas_kernels.paged.lists import TuningConfig
from planner.targets import TARGETS
from tests.attention.rows import relative
from tests.models.small import small_config

PAGE, TAIL = 16, 13
METHODS = (Dense(), Window(40), NSA(length=8, stride=4, block=PAGE, picks=3, window=20))
ROTATE = functools.partial(rope, config=small_config(head_dim=128))


def rows(positions: str):
    """(the rows' pages, the tokens of the queries): two documents and a tail; one document."""
    fingerprint = Fingerprint("", "")
    first = (Slot((4, 1), 21, fingerprint), Slot((6,), 9, fingerprint))
    second = (Slot((2, 3, 5), 40, fingerprint),)
    assemblies = [Assembly(slots, (0, 7), positions, PAGE) for slots in (first, second)]
    pages = document_pages(assemblies, [TAIL, TAIL], width=6)
    ends = jnp.array([3, 3]) * PAGE + TAIL
    return pages, pages.at(ends[:, None] - 2 + jnp.arange(2))[0]


def runs_of(pages: Pages) -> Runs:
    """What the pages hold, as the engine says it of a cache of rotated keys."""
    tokens = pages.tokens
    filled = (tokens.segments > 0).reshape(tokens.shape[0], -1, PAGE).sum(axis=2)
    shifts = tokens.order - pages.positions
    return Runs(tokens.documents[:, ::PAGE], filled.astype(jnp.int32), shifts[:, ::PAGE])


def cache_of(method, dtype, rotated: bool):
    """Pages of random keys."""
    cache = init_cache((method,), 8, 2, 128, dtype, page=PAGE, rotated=rotated)
    leaves, tree = jax.tree.flatten(cache)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    drawn = [jax.random.normal(key, x.shape, dtype) for key, x in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(tree, drawn)


def attending(method, dtype, positions="shared", rotated=False):
    """(a function of q, q)."""
    pages, seen = rows(positions)
    if rotated:
        pages = dataclasses.replace(pages, runs=runs_of(pages))
    cache = cache_of(method, dtype, rotated)
    q = jax.random.normal(jax.random.key(1), (2, 2, 4, 128), dtype)
    inputs = jnp.full((2, 2, 4, 3), 0.5, dtype)
    return lambda q: attend(cache, 0, q, seen, pages, inputs=inputs, rotate=ROTATE), q


# each two of the three together at least once
@pytest.mark.parametrize(
    "method, positions, rotated",
    [
        (METHODS[0], "shared", False),
        (METHODS[0], "sequential", True),
        (METHODS[1], "shared", True),
        (METHODS[1], "sequential", False),
        (METHODS[2], "shared", True),
        (METHODS[2], "sequential", False),
    ],
    ids=str,
)
@pytest.mark.quick(first=1)
def test_the_kernel_reads_documents_as_xla_does(monkeypatch, method, positions, rotated):
    run, q = attending(method, jnp.float32, positions, rotated)
    wanted = jax.jit(run)(q)
    kernel = dict(
        implementation="tpu",
        interpret=pltpu.InterpretParams(uninitialized_memory="nan"),
        tuning=TuningConfig(splits=2, keys=32),
    )
    for name in ("paged_attention", "selected_paged_attention"):
        call = functools.partial(getattr(reader, name), **kernel)
        monkeypatch.setattr(reader, name, call)
    run, q = attending(method, jnp.float32, positions, rotated)
    assert relative(jax.jit(run)(q), wanted) < 1e-5


@pytest.mark.parametrize("target", ["v5p", "h100", "gb200"])
@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.quick(first=1)
def test_decoding_from_documents_takes_a_kernel_on_accelerators(method, target):
    run, q = attending(method, jnp.bfloat16)
    with use_mesh(abstract_mesh(MeshConfig(1, 1), TARGETS[target].device)):
        program = str(jax.jit(run).trace(np.asarray(q)).jaxpr)
    assert "paged_attention" in program
    assert ("selected_paged_attention" in program) == isinstance(method, NSA)
