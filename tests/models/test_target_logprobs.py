"""Log-probabilities of targets in parts of the vocabulary: those of a softmax over all logits, with its gradients,
on one device and on a mesh that cuts rows, parameters and the vocabulary.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from models.sharding import MeshConfig, make_mesh, partition_spec
from models.target_logprobs import AT_ONCE, KEPT, Head, chunk_size, target_logprobs

ROWS, TARGETS, WIDTH, VOCAB = 4, 7, 8, 20
AXES = {"tied": ("vocab", "embed"), "untied": ("embed", "vocab")}


def arguments(kind: str, dtype: str = "float32"):
    """(matrix, hidden states, targets)"""
    rng = np.random.default_rng(3)
    matrix = rng.standard_normal((VOCAB, WIDTH))
    matrix = jax.device_put((matrix if kind == "tied" else matrix.T).astype(np.float32))
    hidden = jax.device_put(rng.standard_normal((ROWS, TARGETS, WIDTH)).astype(dtype))
    # of a vocabulary of which the last two tokens do not exist
    return matrix, hidden, jax.device_put(rng.integers(0, VOCAB - 2, (ROWS, TARGETS)))


def plain(kind, tokens, temperature, matrix, hidden, targets):
    """The same from all logits in float32, by definition."""
    spec = "RMD,VD->RMV" if kind == "tied" else "RMD,DV->RMV"
    logits = jnp.einsum(spec, hidden, matrix.astype(hidden.dtype).astype(jnp.float32))
    logs = jax.nn.log_softmax(logits[..., :tokens] / temperature)
    chosen = jnp.take_along_axis(logs, targets[..., None], axis=-1)[..., 0]
    return chosen, -jnp.sum(jnp.exp(logs) * logs, axis=-1)


def in_chunks(kind, tokens, temperature, chunk, matrix, hidden, targets, entropy_gradient=True):
    head = Head(matrix, AXES[kind], tokens)
    return target_logprobs(head, hidden, targets, temperature, entropy_gradient, chunk=chunk)


def weighed(function):
    """A function's results, and the gradients of a sum in which each has a weight of its own."""

    def loss(matrix, hidden, targets):
        found = function(matrix, hidden, targets)
        weights = 1.0 + jnp.arange(targets.size).reshape(targets.shape) / 10
        return jnp.sum(found[0] * weights) + 0.3 * jnp.sum(found[1] * weights**2), found

    return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))


@functools.cache
def defined(kind, tokens, temperature):
    """``plain``'s results and gradients for the arguments of a kind."""
    return jax.device_get(
        weighed(functools.partial(plain, kind, tokens, temperature))(*arguments(kind))
    )


def close(found, wanted, tolerance=1e-5):
    def one(x, y):
        x, y = (np.asarray(z, np.float32) for z in (x, y))
        np.testing.assert_allclose(x, y, atol=tolerance * max(1.0, float(np.abs(y).max())))

    jax.tree.map(one, found, wanted)


@pytest.mark.parametrize(
    "kind, chunk, tokens, temperature",
    [
        ("tied", None, VOCAB - 2, 0.7),
        ("untied", None, VOCAB, 1.0),
        # the last chunk is not full, and it is
        ("tied", 6, VOCAB, 1.0),
        ("untied", 6, VOCAB - 2, 0.7),
    ],
)
def test_chunks_give_the_values_and_gradients_of_all_logits(kind, chunk, tokens, temperature):
    chunks = functools.partial(in_chunks, kind, tokens, temperature, chunk)
    close(weighed(chunks)(*arguments(kind)), defined(kind, tokens, temperature))


def test_entropy_without_a_gradient_adds_none():
    given = arguments("tied")
    chunks = functools.partial(in_chunks, "tied", VOCAB, 1.0, 5, entropy_gradient=False)

    def held(*given):
        logp, entropy = plain("tied", VOCAB, 1.0, *given)
        return logp, jax.lax.stop_gradient(entropy)

    close(weighed(chunks)(*given), weighed(held)(*given))


@pytest.mark.parametrize("kind, chunk", [("tied", None), ("untied", 3)])
def test_a_mesh_gives_the_values_and_gradients_of_one_device(kind, chunk):
    given = arguments(kind)
    wanted = defined(kind, VOCAB - 2, 0.7)
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    with jax.set_mesh(mesh):
        axes = (AXES[kind], ("batch", None, None), ("batch", None))
        placed = [
            jax.device_put(x, NamedSharding(mesh, partition_spec(names)))
            for x, names in zip(given, axes, strict=True)
        ]
        found = weighed(functools.partial(in_chunks, kind, VOCAB - 2, 0.7, chunk))(*placed)
        assert found[0][0].sharding.spec == placed[0].sharding.spec
    close(found, wanted)


def test_bfloat16_products_have_a_gradient_of_the_matrix_that_is_added_in_float32():
    given = arguments("tied", "bfloat16")
    wanted = weighed(functools.partial(plain, "tied", VOCAB, 1.0))(*given)
    found = weighed(functools.partial(in_chunks, "tied", VOCAB, 1.0, 5))(*given)
    assert found[0][0].dtype == jnp.float32
    close(found, wanted, tolerance=2**-7)


def test_no_array_holds_the_logits_of_all_targets():
    given = arguments("tied")
    loss = weighed(functools.partial(in_chunks, "tied", VOCAB, 1.0, 6))
    program = loss.lower(*given).as_text()
    assert f"<{ROWS * TARGETS}x6xf32>" in program
    for rows in (ROWS * TARGETS, f"{ROWS}x{TARGETS}"):
        assert f"<{rows}x{VOCAB}xf32>" not in program


def test_logits_at_a_time_take_the_memory_that_is_meant():
    for targets, vocabulary in ((4096, 151_936), (49_152, 151_936), (6144, 49_152), (512, 4096)):
        size = chunk_size(targets, vocabulary)
        whole = 4 * targets * vocabulary
        if whole <= KEPT:
            assert size == vocabulary
        else:
            # whole tiles of 128 tokens
            assert whole // vocabulary * (size - 128) < AT_ONCE
            assert -(-vocabulary // size) <= -(-whole // AT_ONCE)
