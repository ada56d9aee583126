"""Gated delta net: the chunked form is the recurrence, and a layer is its definition. Rows, trees,
pages and decoding are in ``test_methods``.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from attention.chunks import CHUNK
from attention.delta_rule import recurrence
from attention.layout import lay_out
from attention.methods.gated_delta import GatedDelta
from attention.methods.method import LayerShape
from attention.ring import Ring
from models.layers import initial
from models.paged import model_cache
from pallas_kernels.delta.api import chunked
from pallas_kernels.tokens import Tokens
from tests.attention import properties
from tests.attention.cache.model import PAGE, WIDTH, random_tokens, run
from tests.attention.rows import normal, relative, separate
from tests.attention.test_methods import CASES
from tests.attention.trees import TREES, Node, pack_trees, random_tree
from tests.models.small import small_model

METHOD = CASES["gated_delta"][0]


def test_states_of_new_layers_last_for_one_to_a_thousand_tokens():
    described = GatedDelta().parameters(LayerShape(8, 64, 64, 2))
    rate, step = (
        np.asarray(initial(jax.random.key(at), described[name].shape, described[name].std))
        for at, name in enumerate(("decay", "step_bias"))
    )
    rate, step = np.exp(rate), np.log1p(np.exp(step))
    assert 1.0 <= rate.min() < 2.0 and 15.0 < rate.max() <= 16.0
    np.testing.assert_array_less(0.00099, step)
    np.testing.assert_array_less(step, 0.101)
    assert abs(np.median(np.log10(step)) + 2.0) < 0.3  # uniform in its logarithm
    tokens = 1 / (rate * step)
    assert 0.6 < tokens.min() < 3.0 and 100.0 < tokens.max() <= 1010.0


@pytest.mark.parametrize("length", [17, 1, 3 * 8])
@pytest.mark.quick(first=1)
def test_chunks_equal_the_recurrence(x64, length):
    size = 8
    count = -(-length // size)
    shapes = [(2, length, 2, 6)] * 2 + [(2, length, 2, 3, 5)] + [(2, length, 2, 3)] * 2
    shapes += [(2, 2, 3, 6, 5), (2, length, 2, 3, 5)]
    q, k, v, g, beta, first, weight = map(np.asarray, normal(0, *shapes, dtype=jnp.float64))
    k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    given = (q, k, v, -np.abs(g), 1 / (1 + np.exp(-beta)), first)

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
        name: normal(20 + at, p.shape, dtype=jnp.float64)[0]
        * (1.0 if callable(p.std) else p.std or 1.0)
        for at, (name, p) in enumerate(METHOD.parameters(properties.SHAPE).items())
    }
    (y,) = normal(3, (1, length, 16), dtype=jnp.float64)

    def ours(y):
        layout = lay_out((METHOD,), separate([length], length), align=0)
        given = METHOD.inputs(parameters, y, lambda x: x)
        return METHOD.output(parameters, METHOD.mix(parameters, given, layout))

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


def in_blocks(lengths: list[int], size: int, block: int) -> Tokens:
    """One row of sequences that begin at multiples of ``block``."""
    fields = np.zeros((4, size), np.int32)
    at = 0
    for number, length in enumerate(lengths, start=1):
        fields[0, at : at + length] = number
        fields[3, at : at + length] = np.arange(length)
        at += -(-length // block) * block
    return Tokens(*map(jnp.asarray, fields[:, None]))


def rows_of_trees(size: int) -> Tokens:
    """Three rows: of deep trees, of random ones with short and empty runs, and of one sequence."""
    rng = np.random.default_rng(3)

    def longer(node: Node) -> Node:
        return Node(5 * node.length, tuple(map(longer, node.children)))

    rows = [tuple(map(longer, TREES)), [random_tree(rng, 12) for _ in range(4)], [Node(size)]]
    packed = [pack_trees(trees, size)[0] for trees in rows]
    return jax.tree.map(lambda *x: jnp.concatenate(x), *packed)


def mixed_on(parts: int, tokens: Tokens, runs: int, align: int):
    """The results of a layer whose rows are cut over devices, and the gradients of a sum of them.

    A function of (parameters, inputs, the weights of the sum).
    """
    kinds = (AxisType.Auto,)
    mesh = jax.make_mesh((parts,), ("context",), kinds, devices=jax.devices()[:parts])
    ring = Ring("context", parts) if parts > 1 else None
    cut, whole = PartitionSpec(None, "context"), PartitionSpec()

    def total(parameters, given, weight):
        layout = lay_out((METHOD,), tokens, runs, align=align, parts=parts)
        mixed = jax.shard_map(
            lambda parameters, given, layout: METHOD.mix(parameters, given, layout.cut(ring)),
            mesh=mesh,
            in_specs=(whole, cut, whole),
            out_specs=cut,
            check_vma=False,
        )(parameters, given, layout)
        # padding has no result
        mixed = jnp.where((tokens.segments > 0)[..., None, None], mixed, 0)
        return jnp.sum(mixed * weight), mixed

    return jax.jit(jax.grad(total, (0, 1), has_aux=True))


@pytest.mark.parametrize("kind, parts", [("trees", 4), ("aligned", 3), ("one", 8)])
@pytest.mark.long
def test_states_pass_from_device_to_device(x64, kind, parts):
    """Results and gradients of rows that are cut over devices are those of whole rows."""
    # no border lies where a chunk of the whole row ends
    size = 120 * parts
    how = {
        "trees": (rows_of_trees(size), 30, 1),
        "aligned": (in_blocks([70, 64, 130], size, CHUNK), 0, CHUNK),
        "one": (separate([size, size - 130], size), 0, 0),
    }[kind]
    shapes = {name: p.shape for name, p in METHOD.parameters(properties.SHAPE).items()}
    parameters = dict(zip(shapes, normal(20, *shapes.values(), dtype=jnp.float64), strict=True))
    rows = how[0].shape[0]
    heads, _, _ = shapes["convolution"]
    inputs = [(rows, size, heads, x) for x in (shapes["qkvz"][-1], shapes["ba"][-1])]
    *given, weight = normal(21, *inputs, (rows, size, heads, shapes["out"][1]), dtype=jnp.float64)
    arguments = parameters, tuple(given), weight
    with jax.default_matmul_precision("highest"):
        found, wanted = (mixed_on(n, *how)(*arguments) for n in (parts, 1))
    assert relative(found[1], wanted[1]) < 1e-12
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert relative(one, other) < 1e-10


@pytest.mark.long
@pytest.mark.parametrize("chunk", [16, 32])
def test_a_prompt_gives_the_same_however_much_of_it_is_in_the_cache(chunk):
    """Prefilled at once, or from the state of a page on: the same bits in equal chunks."""
    model = properties.model(METHOD)
    tokens = random_tokens(0, 70)
    table = np.arange(WIDTH, dtype=np.int32)[None]
    empty = model_cache(model.config, WIDTH, page=PAGE)
    whole, _ = run(model, empty, table, [tokens], [0], chunk)
    _, cache = run(model, empty, table, [tokens[:48]], [0], 16)
    rest, _ = run(model, cache, table, [tokens], [48], chunk)
    if chunk == 16:
        assert np.array_equal(rest[0], whole[0][48:])
    assert relative(rest[0], whole[0][48:]) < 1e-6


@pytest.mark.parametrize(
    "how, message",
    [
        (dict(), "runs=0 must be at least 1"),
        (dict(runs=2, documents=True), "no document could be computed alone"),
        (dict(runs=2, queries=8), "cannot continue tokens computed before"),
    ],
)
def test_rows_without_meaning_are_refused(how, message):
    with pytest.raises(ValueError, match=message):
        lay_out((METHOD,), separate([16], 16), **how)


def test_a_model_of_states_alone_is_refused():
    with pytest.raises(ValueError, match="at least one layer of the period must attend"):
        small_model((METHOD,))


def test_decoding_reads_the_same_however_long_the_row_is():
    shape = properties.SHAPE
    assert METHOD.decode_bytes(1, shape, "bfloat16") == METHOD.decode_bytes(4096, shape, "bfloat16")
