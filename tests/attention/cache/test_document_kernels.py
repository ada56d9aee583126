"""Attending from few queries to pages of documents: by the paged kernels the same as in XLA."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from attention.cache import reader
from attention.cache.paged import attend, init_cache
from attention.cache.tables import Runs, sequence_pages
from attention.methods.dense import Dense
from attention.methods.nsa import NSA
from attention.methods.window import Window
from models.sharding import MeshConfig, abstract_mesh, use_mesh
from pallas_kernels.paged.lists import TuningConfig
from pallas_kernels.tokens import TAIL
from planner.targets import TARGETS
from tests.attention.rows import relative

PAGE = 16
METHODS = (Dense(), Window(40), NSA(length=8, stride=4, block=PAGE, picks=3, window=20))


@jax.jit
def lay(tables, ends, runs):
    pages = sequence_pages(tables, ends, PAGE, runs)
    return pages, pages.at(ends[:, None] - 2 + jnp.arange(2))[0]


@functools.cache
def rows():
    """(the rows' pages, the tokens of the queries): two documents and a tail; one document and a
    tail. Every document is at positions from 0 on, and the tail behind the longest.
    """
    tables = np.array([[4, 1, 6, 0, 7, -1], [2, 3, 5, 0, 7, -1]])
    runs = Runs(
        documents=np.array([[1, 1, 2, TAIL, TAIL, 0], [1, 1, 1, TAIL, TAIL, 0]]),
        filled=np.array([[16, 5, 9, 16, 0, 0], [16, 16, 8, 16, 0, 0]]),
        shifts=np.array([[0, 0, 32, 27, 27, 0], [0, 0, 0, 8, 8, 0]]),
    )
    ends = np.full(2, 3 * PAGE + 13)
    return lay(tables, ends, runs)


def cache_of(method, dtype):
    """Pages of random keys."""
    cache = jax.eval_shape(lambda: init_cache((method,), 8, 2, 128, dtype, page=PAGE))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), dtype), cache)


def attending(method, dtype):
    """(a function of q, q)."""
    pages, seen = rows()
    cache = cache_of(method, dtype)
    q = jnp.asarray(np.random.default_rng(1).standard_normal((2, 2, 4, 128)), dtype)
    inputs = jnp.asarray(np.full((2, 2, 4, 3), 0.5), dtype)
    return lambda q: attend(cache, 0, q, seen, pages, inputs=inputs), q


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.quick(first=1)
def test_the_kernel_reads_documents_as_xla_does(monkeypatch, method):
    run, q = attending(method, jnp.float32)
    wanted = jax.jit(run)(q)
    kernel = dict(
        implementation="tpu",
        interpret=pltpu.InterpretParams(uninitialized_memory="nan"),
        tuning=TuningConfig(splits=2, keys=32),
    )
    for name in ("paged_attention", "selected_paged_attention"):
        call = functools.partial(getattr(reader, name), **kernel)
        monkeypatch.setattr(reader, name, call)
    run, q = attending(method, jnp.float32)
    assert relative(jax.jit(run)(q), wanted) < 1e-5


@pytest.mark.parametrize(
    "method, target",
    [(METHODS[0], "v5p"), (METHODS[1], "gb200"), (METHODS[2], "h100"), (METHODS[2], "v5p")],
    ids=str,
)
@pytest.mark.long
def test_decoding_from_documents_takes_a_kernel_on_accelerators(method, target):
    run, q = attending(method, jnp.bfloat16)
    with use_mesh(abstract_mesh(MeshConfig(1, 1), TARGETS[target].device)):
        program = str(jax.jit(run).trace(np.asarray(q)).jaxpr)
    assert "paged_attention" in program
    assert ("selected_paged_attention" in program) == isinstance(method, NSA)
