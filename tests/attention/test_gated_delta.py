"""Gated delta net: the chunked form is the recurrence, in rows, trees, pages and decoding."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention.layout import lay_out
from attention.methods.dense import Dense
from attention.methods.gated_delta import CHUNK, GatedDelta, chunked, recurrence
from models.paged import model_cache
from pallas_kernels.tokens import sequences
from tests.attention import properties
from tests.attention.cache.model import PAGE, WIDTH, random_tokens, run
from tests.attention.rows import normal, pack, relative
from tests.models.small import small_model

METHOD = GatedDelta(key_heads=2, value_heads=4, key_size=6, value_size=10)
METHODS = (METHOD, Dense())


@functools.cache
def model(dtype: str = "float32"):
    """Two layers, whose decays and biases are random too."""
    made = small_model(METHODS, num_layers=2, dtype=dtype, param_dtype=dtype)
    for name in ("decay", "step_bias", "norm"):
        parameter = getattr(made.attention_0, name)
        (noise,) = normal(7, parameter.shape, dtype=jnp.dtype(dtype))
        setattr(made.attention_0, name, parameter.replace(parameter[...] + noise))
    return made


@pytest.mark.parametrize("length", [1, 17, 3 * 8])
def test_chunks_equal_the_recurrence(x64, length):
    size = 8
    count = -(-length // size)
    shapes = [(2, length, 2, 6)] * 2 + [(2, length, 2, 3, 5)] + [(2, length, 2, 3)] * 2
    shapes += [(2, 2, 3, 6, 5), (2, length, 2, 3, 5)]
    q, k, v, g, beta, first, weight = normal(0, *shapes, dtype=jnp.float64)
    k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    given = (q, k, v, -jnp.abs(g), jax.nn.sigmoid(beta), first)

    def cut(x):
        x = jnp.pad(x, ((0, 0), (0, count * size - length), *((0, 0),) * (x.ndim - 2)))
        return x.reshape(2, count, size, *x.shape[2:])

    def in_chunks(*given):
        *tokens, state = given
        parents = jnp.broadcast_to(jnp.arange(count), (2, count))
        out, states = chunked(*map(cut, tokens), state, parents)
        return out.reshape(2, -1, *out.shape[3:])[:, :length], states[:, -1]

    def weighted(function, *given):
        out, state = function(*given)
        return jnp.sum(out * weight) + jnp.sum(state * first), (out, state)

    arguments = tuple(range(6))
    for function in (in_chunks, recurrence):
        one = functools.partial(weighted, function)
        found = jax.jit(jax.grad(one, arguments, has_aux=True))(*given)
        wanted = found if function is in_chunks else wanted  # noqa: F821
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert relative(one, other) < 1e-10


def test_a_layer_is_its_definition_in_float64(x64):
    """Convolution, norms, gates and recurrence, written out for one sequence."""
    length = 2 * CHUNK + 5
    parameters = {
        name: normal(20 + at, p.shape, dtype=jnp.float64)[0] * (p.std or 1.0)
        for at, (name, p) in enumerate(METHOD.parameters(properties.SHAPE).items())
    }
    (y,) = normal(3, (1, length, 16), dtype=jnp.float64)
    layout = lay_out((METHOD,), sequences(jnp.array([length]), length), align=0)

    def ours(y):
        return METHOD.output(
            parameters, METHOD.mix(parameters, METHOD.inputs(parameters, y, lambda x: x), layout)
        )

    found = np.asarray(jax.jit(ours)(y))[0]
    p = {name: np.asarray(x) for name, x in parameters.items()}
    qkvz = np.einsum("td,dhw->thw", np.asarray(y[0]), p["qkvz"])
    ba = np.einsum("td,dhw->thw", np.asarray(y[0]), p["ba"])
    states = np.zeros((2, 2, 6, 10))
    mixed = np.zeros((length, 2, 2, 10))
    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    inner = 2 * 6 + 2 * 10
    for t in range(length):
        for h in range(2):
            window = [qkvz[t - i, h, :inner] if t >= i else np.zeros(inner) for i in (3, 2, 1, 0)]
            x = np.sum(np.stack(window, -1) * p["convolution"][h], -1)
            x = x * sigmoid(x)
            q, k, v = x[:6], x[6:12], x[12:].reshape(2, 10)
            q = q / np.sqrt(np.sum(q**2) + 1e-6) * 6**-0.5
            k = k / np.sqrt(np.sum(k**2) + 1e-6)
            for r in range(2):
                softplus = np.log1p(np.exp(ba[t, h, 2 + r] + p["step_bias"][h, r]))
                state = states[h, r] * np.exp(-np.exp(p["decay"][h, r]) * softplus)
                change = sigmoid(ba[t, h, r]) * (v[r] - state.T @ k)
                states[h, r] = state + np.outer(k, change)
                out = states[h, r].T @ q
                out = out / np.sqrt(np.mean(out**2) + METHOD.eps) * p["norm"]
                z = qkvz[t, h, inner + r * 10 : inner + (r + 1) * 10]
                mixed[t, h, r] = out * z * sigmoid(z)
    wanted = np.einsum("thw,hwd->td", mixed.reshape(length, 2, 20), p["out"])
    assert relative(found, wanted) < 1e-10


def test_nothing_leaks(monkeypatch):
    monkeypatch.setattr(properties, "model", lambda method: model())
    properties.nothing_leaks(METHOD)


@pytest.mark.long
def test_packed_sequences_and_shared_prompts_equal_the_sequences_apart(x64, monkeypatch):
    monkeypatch.setattr(properties, "model", lambda method, dtype: model(dtype))
    properties.packed_equals_separate(METHOD)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_prefill_and_decoding_equal_the_full_forward(poison, monkeypatch):
    monkeypatch.setattr(properties, "model", lambda method: model())
    cache = functools.partial(model_cache, model().config, page=PAGE)
    properties.cached_equals_full(METHOD, cache, poison)


@pytest.mark.long
def test_a_tree_of_any_depth_equals_its_paths_apart(x64):
    properties.trees_equal_paths(model("float64"))


def test_padding_may_hold_anything():
    """Values that are not finite in padding change no bit of the other tokens."""
    where, _ = pack(properties.PIECES, 160)
    layout = lay_out((METHOD,), where, properties.RUNS)
    x = properties.inputs(METHOD, 160)
    real = np.asarray(where.segments[0]) > 0

    @jax.jit
    def layer(y):
        return METHOD.mix(x.parameters, METHOD.inputs(x.parameters, y, lambda x: x), layout)

    clean = np.asarray(layer(x.y))[0, real]
    for poison in (np.nan, np.inf, 1e4):
        found = np.asarray(layer(properties.holding(x.y, ~real, poison)))[0, real]
        assert np.array_equal(found, clean) and np.isfinite(clean).all()


def test_a_prompt_gives_the_same_bits_however_much_of_it_is_in_the_cache():
    """Prefilled at once, or from the state of a page on."""
    tokens = random_tokens(0, 70)
    table = np.arange(WIDTH, dtype=np.int32)[None]
    whole, _ = run(model(), model_cache(model().config, WIDTH, page=PAGE), table, [tokens], [0], 32)
    _, cache = run(
        model(), model_cache(model().config, WIDTH, page=PAGE), table, [tokens[:48]], [0], 16
    )
    rest, _ = run(model(), cache, table, [tokens], [48], 32)
    wanted, _ = run(
        model(), model_cache(model().config, WIDTH, page=PAGE), table, [tokens], [0], 16
    )
    assert relative(rest[0], whole[0][48:]) < 1e-6
    assert np.array_equal(run(model(), cache, table, [tokens], [48], 16)[0][0], wanted[0][48:])


@pytest.mark.parametrize(
    "how, message",
    [
        (dict(), "runs=0 must be at least 1"),
        (dict(runs=2, documents=True), "no document could be computed alone"),
        (dict(runs=2, queries=8), "cannot continue tokens computed before"),
        (dict(runs=2, parts=2), "context=2 must be 1"),
    ],
)
def test_rows_without_meaning_are_refused(how, message):
    with pytest.raises(ValueError, match=message):
        lay_out((METHOD,), sequences(jnp.array([16]), 16), **how)


def test_a_model_of_states_alone_is_refused():
    with pytest.raises(ValueError, match="at least one layer of the period must attend"):
        small_model((METHOD,))


def test_decoding_reads_the_same_however_long_the_row_is():
    shape = properties.SHAPE
    assert METHOD.decode_bytes(1, shape, "bfloat16") == METHOD.decode_bytes(4096, shape, "bfloat16")
