"""Documents with a softmax and a gate of their own equal their definition, in values and
gradients.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import reference
from attention.methods.gated_documents import gated_documents
from pallas_kernels.tokens import TAIL
from tests.attention.rows import documents, normal, relative

TOKENS = documents([9, 17, 8], 6, block=1, prefix=3)
LENGTH = TOKENS.shape[1]


sigmoid = jax.jit(jax.nn.sigmoid)


def inputs(dtype):
    """(q, k, v, gates)."""
    shapes = ((1, LENGTH, 4, 8), (1, LENGTH, 2, 8), (1, LENGTH, 2, 8), (1, LENGTH, 4, 2))
    *qkv, gates = normal(0, *shapes, dtype=dtype)
    return (*qkv, sigmoid(gates))


@jax.jit
def ours(q, k, v, gates):
    return gated_documents(q, (k, v), TOKENS, TOKENS, gates)


@pytest.mark.parametrize(("dtype", "most"), [("float32", (1e-5, 1e-4)), ("bfloat16", (5e-3, 1e-2))])
@pytest.mark.quick(first=1)
def test_values_and_gradients_equal_the_definition(x64, dtype, most):
    weight = normal(1, (1, LENGTH, 4, 8), dtype=jnp.float64)[0]
    given = inputs(jnp.dtype(dtype))

    def definition(*x):
        return reference.gated_documents(*(y[0] for y in x[:3]), TOKENS.documents[0], x[3][0])[None]

    def results(function, *x):
        def total(*x):
            out = function(*x)
            return jnp.sum(out * weight), out

        gradients, out = jax.grad(total, argnums=range(4), has_aux=True)(*x)
        return out, *gradients

    found = jax.jit(lambda *x: results(ours, *x))(*given)
    exact = (np.asarray(x).astype(np.float64) for x in given)
    wanted = jax.jit(lambda *x: results(definition, *x))(*exact)
    for index, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert relative(a, b) <= most[index > 0]


def test_each_gate_weighs_its_part():
    q, k, v, gates = map(np.asarray, inputs(jnp.float32))
    tail = np.asarray(TOKENS.documents[0]) == TAIL
    parts = np.eye(2, dtype=np.float32)
    own, others = (
        np.asarray(ours(q, k, v, np.broadcast_to(part, gates.shape).copy())) for part in parts
    )
    np.testing.assert_allclose(
        ours(q, k, v, gates), own * gates[..., :1] + others * gates[..., 1:], atol=1e-6
    )
    assert not np.any(others[:, ~tail]) and np.all(np.any(others[0, tail] != 0, axis=-1))


def test_only_the_tail_sees_a_document_from_outside():
    q, k, v, gates = map(np.asarray, inputs(jnp.float32))
    inside = np.asarray(TOKENS.documents[0]) == 2
    value = np.float32(1e4)
    spoiled = (np.where(inside[None, :, None, None], value, x) for x in (k, v))
    poisoned = np.asarray(ours(q, *spoiled, gates))
    changed = np.any((poisoned != np.asarray(ours(q, k, v, gates)))[0], axis=(1, 2))
    np.testing.assert_array_equal(changed, inside | (np.asarray(TOKENS.documents[0]) == TAIL))
