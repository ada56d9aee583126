"""The kernels of the gated delta rule equal its definition in float64, token by token, in results,
states and all gradients, whichever state a chunk begins with.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from attention.layout import lay_out
from attention.methods.gated_delta import GatedDelta
from attention.methods.method import LayerShape
from models.sharding import MeshConfig, abstract_mesh, use_mesh
from pallas_kernels.delta.api import chunked, obstacle_on
from pallas_kernels.delta.blocks import continued
from pallas_kernels.tokens import sequences
from planner.kernel_programs import calls
from planner.targets import TARGETS
from tests.attention.rows import relative
from tests.pallas_kernels.judge import normal

# Of two rows, the states that chunks begin with: chunks that continue the one before, and others
# that begin with the state 0, with one that two begin with, or with one further back.
PARENTS = np.array([[0, 1, 1, 0], [0, 0, 2, 1]], np.int32)
NAMES = ("q", "k", "v", "g", "beta", "first")


@dataclasses.dataclass(frozen=True)
class Case:
    """An implementation, and the sizes of its input."""

    options: dict[str, Any]
    # Tokens of a chunk, key size, value size and columns of a state.
    sizes: tuple[int, int, int, int]
    rows: int = 2
    dtype: Any = jnp.float32


CASES = {
    "reference": Case({"implementation": "reference"}, (8, 6, 5, 7), 2, jnp.float64),
    "tpu": Case(
        {
            "implementation": "tpu",
            "interpret": pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan"),
        },
        (8, 16, 10, 12),
    ),
    # two tiles of keys, and two thread blocks of a head
    "gpu": Case(
        {
            "implementation": "gpu",
            "interpret": plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan"),
        },
        (8, 72, 68, 70),
        rows=1,
    ),
}


@functools.cache
def inputs(name: str) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """((q, k, v, g, beta and the first state), weights of results and of states); two value heads
    for each key head.
    """
    case = CASES[name]
    tokens, key, value, columns = case.sizes
    places = (case.rows, PARENTS.shape[1], tokens, 1)
    states = (case.rows, 1, 2, key, columns)
    shapes = [(*places, key)] * 2 + [(*places, 2, value)] + [(*places, 2)] * 2 + [states]
    shapes += [(*places, 2, columns), (case.rows, PARENTS.shape[1], *states[1:])]
    q, k, v, g, beta, first, *weights = normal(0, *shapes, dtype=case.dtype)
    k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    # the last place of a chunk holds no token
    k[:, 1, -1] = g[:, 1, -1] = 0
    beta = 1 / (1 + np.exp(-beta))
    beta[:, 1, -1] = 0
    return (q, k, v, -np.abs(g), beta, first), tuple(weights)


def defined(given, weights, parents):
    """(results, states) and the gradients of their weighted sum, token by token in float64."""
    q, k, v, g, beta, first = (np.asarray(x, np.float64) for x in given)
    of_out, of_states = (np.asarray(x, np.float64) for x in weights)
    v = np.concatenate([v, np.zeros((*v.shape[:-1], of_out.shape[-1] - v.shape[-1]))], axis=-1)
    out, states = np.zeros_like(of_out), np.zeros_like(of_states)
    slopes = [np.zeros_like(x) for x in (q, k, v, g, beta, first)]
    dq, dk, dv, dg, dbeta, d_first = slopes
    rows, chunks, tokens, heads, each = g.shape
    for row, head, own in np.ndindex(rows, heads, each):
        place = row, head, own
        steps = {}
        for chunk in range(chunks):
            parent = parents[row, chunk]
            state = states[row, parent - 1, head, own] if parent else first[place]
            for token in range(tokens):
                at = row, chunk, token, head
                decayed = np.exp(g[*at, own]) * state
                missed = v[*at, own] - decayed.T @ k[at]
                changed = decayed + np.outer(k[at], beta[*at, own] * missed)
                steps[chunk, token] = state, decayed, missed, changed
                state = changed
                out[*at, own] = state.T @ q[at]
            states[row, chunk, head, own] = state
        behind = of_states[row, :, head, own].copy()
        for chunk in reversed(range(chunks)):
            d_state = behind[chunk]
            for token in reversed(range(tokens)):
                at = row, chunk, token, head
                state, decayed, missed, changed = steps[chunk, token]
                dq[at] += changed @ of_out[*at, own]
                d_state = d_state + np.outer(q[at], of_out[*at, own])
                d_change = d_state.T @ k[at]
                dbeta[*at, own] = d_change @ missed
                dv[*at, own] = beta[*at, own] * d_change
                dk[at] += beta[*at, own] * (d_state @ missed - decayed @ d_change)
                d_state = d_state - np.outer(k[at], dv[*at, own])
                dg[*at, own] = np.sum(d_state * decayed)
                d_state = np.exp(g[*at, own]) * d_state
            parent = parents[row, chunk]
            if parent:
                behind[parent - 1] += d_state
            else:
                d_first[place] += d_state
    slopes[2] = dv[..., : given[2].shape[-1]]
    return (out, states), slopes


@functools.cache
def program(name: str, uses_states: bool):
    """A compiled function of the inputs and the weights: results, states, and the gradients of a
    weighted sum of results, and perhaps of states.
    """
    parents = jnp.asarray(PARENTS[: CASES[name].rows])

    def total(*arrays):
        *given, of_out, of_states = arrays
        out, states = chunked(*given, parents, **CASES[name].options)
        found = jnp.sum(out * of_out)
        return found + (jnp.sum(states * of_states) if uses_states else 0), (out, states)

    return jax.jit(jax.grad(total, range(len(NAMES)), has_aux=True))


def run(name: str, given, weights, uses_states: bool = True):
    slopes, results = jax.device_get(program(name, uses_states)(*given, *weights))
    return results, slopes


def compared(name: str, uses_states: bool):
    """Pairs of an array and what it is by definition: results, states and gradients."""
    given, weights = inputs(name)
    found, found_slopes = run(name, given, weights, uses_states)
    weights = (weights[0], weights[1] * uses_states)
    wanted, slopes = defined(given, weights, PARENTS[: CASES[name].rows])
    return zip((*found, *found_slopes), (*wanted, *slopes), strict=True)


def test_the_reference_equals_the_recurrence(x64):
    for one, other in compared("reference", True):
        assert one.dtype == jnp.float64 and one.shape == other.shape
        assert relative(one, other) < 1e-12


@pytest.mark.parametrize("uses_states", [True, False])
@pytest.mark.parametrize("name", ["tpu", "gpu"])
@pytest.mark.quick(first=1)
def test_a_kernel_equals_the_recurrence(name, uses_states):
    for one, other in compared(name, uses_states):
        assert one.dtype == jnp.float32 and one.shape == other.shape
        assert relative(one, other) < 1e-6


@pytest.mark.parametrize("name", ["tpu", pytest.param("gpu", marks=pytest.mark.long)])
def test_not_finite_reaches_only_what_continues_a_chunk_and_what_it_continues(name):
    """A key of the second chunk of the first row, which continues the first as the third does."""
    given, weights = inputs(name)
    spoiled = [x.copy() for x in given]
    spoiled[1][0, 1, 3] = np.nan
    (out, states), slopes = run(name, given, weights)
    (found, found_states), found_slopes = run(name, spoiled, weights)
    bad = np.zeros(PARENTS[: len(out)].shape, bool)
    bad[0, 1] = True
    for one, other in ((found, out), (found_states, states)):
        assert np.isnan(one[bad]).any()
        np.testing.assert_array_equal(one[~bad], other[~bad])
    # what comes back goes on to the first chunk, to all but its queries, and to its first state
    for at, (one, other) in enumerate(zip(found_slopes[:-1], slopes[:-1], strict=True)):
        bad[0, 0] = NAMES[at] != "q"
        assert all(np.isnan(x).any() for x in one[bad])
        np.testing.assert_array_equal(one[~bad], other[~bad])
    assert np.isnan(found_slopes[-1][0]).any()
    np.testing.assert_array_equal(found_slopes[-1][1:], slopes[-1][1:])


def test_chunks_that_continue_another_than_the_one_before_are_listed():
    chunks, starts = jax.device_get(continued(jnp.asarray(PARENTS)))
    for row, parents in enumerate(PARENTS):
        for state in range(PARENTS.shape[1] + 1):
            listed = chunks[row, starts[row, state] : starts[row, state + 1]]
            wanted = [at for at, x in enumerate(parents) if x == state != at]
            assert list(listed) == wanted


@pytest.mark.parametrize("target", ["v5e", "h100", "gb200"])
def test_a_layer_calls_the_kernels_where_there_are_any(target):
    method = GatedDelta(key_size=128, value_size=128)
    shape = LayerShape(64, 4, 2, 16)
    parameters = {
        name: jax.ShapeDtypeStruct(p.shape, jnp.bfloat16)
        for name, p in method.parameters(shape).items()
    }

    def loss(parameters, y):
        layout = lay_out((method,), sequences(jnp.array([100]), 128), align=0)
        given = method.inputs(parameters, y, lambda x: x)
        return jnp.sum(method.mix(parameters, given, layout).astype(jnp.float32))

    y = jax.ShapeDtypeStruct((1, 128, 64), jnp.bfloat16)
    with use_mesh(abstract_mesh(MeshConfig(1, 1), TARGETS[target].device)):
        found = list(calls(jax.jit(jax.grad(loss)).trace(parameters, y).jaxpr.jaxpr))
    named = [x.params.get("name") or x.params["name_and_src_info"].name for x in found]
    assert named == ([] if target == "gb200" else ["delta_forward", "delta_backward"])


@pytest.mark.parametrize(
    "platform, name, dtype, tokens, sizes, reason",
    [
        ("tpu", "tpu", "float32", 64, (128, 128), None),
        ("tpu", "tpu", "bfloat16", 64, (128, 128), "the dtypes ['bfloat16'] must be one of"),
        ("tpu", "tpu", "float32", 4, (128, 128), "4 tokens of a chunk and the key size 128 must"),
        ("tpu", "tpu", "float32", 64, (512, 512), "a state of 512 by 512 elements is more than"),
        ("hopper", "gpu", "float32", 64, (96, 300), None),
        ("hopper", "gpu", "float32", 128, (96, 64), "128 tokens of a chunk are more than 64"),
        ("hopper", "gpu", "float32", 64, (192, 64), "key size 192 is more than 128"),
        ("blackwell", "gpu", "float32", 64, (128, 128), "no kernel for Blackwell"),
        ("cpu", "gpu", "float32", 64, (128, 128), "backend='cpu' is not 'gpu'"),
    ],
)
def test_what_a_kernel_cannot_run_is_said(platform, name, dtype, tokens, sizes, reason):
    found = obstacle_on(platform, name, dtype, tokens, sizes)
    assert found is None if reason is None else (found or "").startswith(reason)


def test_a_named_kernel_that_cannot_run_is_refused():
    given, _ = inputs("tpu")
    for options, reason in (
        ({"implementation": "tpu"}, "backend='cpu' is not 'tpu'"),
        ({"implementation": "triton"}, "must be one of"),
        ({"interpret": True}, "needs a named implementation"),
    ):
        with pytest.raises(ValueError, match=reason):
            chunked(*given, PARENTS, **options)
