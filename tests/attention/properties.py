"""What holds for every method of attention, one function a property.

``test_methods`` runs them for every entry of METHODS, and a drill for a method from outside of the
tree, so a new method is tested by adding its entry.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from attention.layout import Layout, lay_out
from attention.methods.method import LayerShape, Method
from models.transformer import Transformer
from pallas_kernels.tokens import Tokens, sequences, visible
from tests.attention.cache.model import PAGE, WIDTH, full, random_tokens, run
from tests.attention.rows import Piece, documents, normal, pack, relative
from tests.attention.trees import TREES, pack_trees
from tests.models.small import VOCABULARY, small_model

SHAPE = LayerShape(embed_dim=16, num_heads=4, num_kv_heads=2, head_dim=8)
# (method, q [T, N, H], keys by name [T, K, H], head inputs [T, N, parts], parameters) to [T, N, H].
Reference = Callable[..., jax.Array]

PIECES = [Piece(9), Piece(40, (20, 1, 17)), Piece(5, (30,))]
LENGTH, RUNS = 128, 7


@functools.cache
def model(method: Method, dtype: str = "float32") -> Transformer:
    """Two layers of the method, of the sizes of SHAPE."""
    return small_model((method,), num_layers=2, dtype=dtype, param_dtype=dtype)


@jax.jit
def packed_hidden(model: Transformer, tokens, where: Tokens):
    return model.hidden(tokens, where.order, where, RUNS)


def ids(seed: int, length: int = LENGTH) -> np.ndarray:
    return np.asarray(jax.random.randint(jax.random.key(seed), (1, length), 0, VOCABULARY))


def nothing_leaks(method: Method) -> None:
    """A token changes no bit of what comes before it, of other sequences and of other completions
    of its prompt.
    """
    where, slots = pack(PIECES, LENGTH)
    tokens = ids(1)
    clean = np.asarray(packed_hidden(model(method), tokens, where))[0]
    longest = slots[1]  # the prompt of 40 tokens and its first completion
    for at in (int(longest[0]), int(longest[17]), int(longest[45]), int(slots[-1][-1])):
        changed = tokens.copy()
        changed[0, at] = (tokens[0, at] + 1) % VOCABULARY
        found = np.asarray(packed_hidden(model(method), changed, where))[0]
        sees = np.zeros(LENGTH, bool)
        for mine in slots:
            if at in mine:
                sees[mine[list(mine).index(at) :]] = True
        assert np.array_equal(found[~sees], clean[~sees])
        assert not np.array_equal(found[at], clean[at])


def packed_equals_separate(method: Method) -> None:
    """Packed rows give each sequence what it gets alone, and a prompt that its completions share
    gives what a prompt repeated for each does: values, and gradients of all parameters. In float64.
    """
    where, slots = pack(PIECES, LENGTH)
    tokens = ids(1)
    m = model(method, "float64")
    longest = max(len(at) for at in slots)
    weight = jax.random.normal(jax.random.key(2), (1, LENGTH, m.config.embed_dim))

    def together(m):
        out = m.hidden(tokens, where.order, where, RUNS)
        return sum(jnp.sum(out[:, at] * weight[:, at]) for at in slots), out

    def apart(m):
        rows = np.stack([np.pad(tokens[0, at], (0, longest - len(at))) for at in slots])
        row = sequences(jnp.array([len(at) for at in slots]), longest)
        out = m.hidden(rows, row.order, row, align=0)
        return sum(jnp.sum(out[i, : len(at)] * weight[0, at]) for i, at in enumerate(slots)), out

    found, out = jax.jit(jax.grad(together, has_aux=True))(m)
    wanted, outs = jax.jit(jax.grad(apart, has_aux=True))(m)
    out, outs = np.asarray(out), np.asarray(outs)
    for i, at in enumerate(slots):
        assert relative(out[0, at], outs[i, : len(at)]) < 1e-5  # norms are in float32
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert relative(a, b) < 1e-5


def cached_equals_full(method: Method, cache: Callable, poison: float) -> None:
    """Prefill in chunks and decoding token by token give what the whole rows give, in pages that
    held anything before.

    cache: number of pages to an empty cache of ``model(method)``. poison: what the pages held.
    """
    lengths = (75, 41)
    pages = 2 * WIDTH + 2
    tokens = [random_tokens(seed, length) for seed, length in enumerate(lengths)]
    paged = jax.tree.map(lambda x: jnp.full_like(x, poison), cache(pages))
    table = np.random.default_rng(0).permutation(pages)[: 2 * WIDTH].reshape(2, WIDTH)
    table = table.astype(np.int32)
    prompts = [row[: len(row) - 6] for row in tokens]
    starts = [len(row) for row in prompts]
    first, paged = run(model(method), paged, table, prompts, [0, 0], 20)
    rest, _ = run(model(method), paged, table, tokens, starts, 1)
    rows = np.zeros((2, WIDTH * PAGE), np.int32)
    for row, mine in zip(rows, tokens, strict=True):
        row[: len(mine)] = mine
    where = sequences(jnp.array(lengths), WIDTH * PAGE)
    wanted = np.asarray(full(model(method), rows, where.order, where))
    for at, length in enumerate(lengths):
        assert relative(np.concatenate([first[at], rest[at]]), wanted[at, :length]) < 1e-5


# --- One layer, without a model ------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a layer hands to a method, for one row."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    # Normalised hidden states.
    y: jax.Array
    parameters: dict[str, jax.Array]


def inputs(method: Method, length: int, dtype=jnp.float32) -> Inputs:
    q, k, v, y = normal(
        0, (1, length, 4, 8), (1, length, 2, 8), (1, length, 2, 8), (1, length, 16), dtype=dtype
    )
    parameters = {}
    for number, (name, p) in enumerate(method.parameters(SHAPE).items()):
        (value,) = normal(10 + number, p.shape, dtype=dtype)
        parameters[name] = value * (p.std or 1.0)
    return Inputs(q, k, v, y, parameters)


def given_keys(method: Method, x: Inputs) -> dict:
    return {"main": (x.k, x.v), **method.new_keys(x.parameters, x.y, lambda keys: keys)}


def attended(method: Method, x: Inputs, layout: Layout) -> jax.Array:
    """A layer's attention, keys not rotated."""
    keys = given_keys(method, x)
    keys |= method.derived_keys(x.parameters, keys, layout)
    read = {name: keys[name] for name in method.positions(layout.tokens.order, layout)}
    return method.attend(x.q, read, layout, method.head_inputs(x.parameters, x.y))


def equals_its_definition(method: Method, reference: Reference, length: int) -> None:
    """Values and all gradients are those of the definition, in float64."""
    x = inputs(method, length, jnp.float64)
    where = sequences(jnp.array([length]), length)
    (weight,) = normal(5, x.q.shape, dtype=jnp.float64)

    def ours(x):
        out = attended(method, x, lay_out((method,), where, align=0))
        return jnp.sum(out * weight), out

    def theirs(x):
        keys = jax.tree.map(lambda y: y[0], given_keys(method, x))
        extra = method.head_inputs(x.parameters, x.y)
        extra = None if extra is None else extra[0]
        out = reference(method, x.q[0], keys, extra, x.parameters)[None]
        return jnp.sum(out * weight), out

    found, out = jax.jit(jax.grad(ours, has_aux=True))(x)
    wanted, expected = jax.jit(jax.grad(theirs, has_aux=True))(x)
    assert relative(out, expected) < 1e-12  # float64: the same blocks are chosen
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


def masked_rows() -> dict[str, tuple[Tokens, dict[str, int]]]:
    """Rows with every kind of place that nobody sees, and how ``lay_out`` is to cut them."""
    single = sequences(jnp.array([50]), 64)  # short enough for all scores in memory
    long = sequences(jnp.array([150]), 200)  # in blocks, the last of them empty
    packed, _ = pack(PIECES, 160)
    gaps = documents([20, 33, 0, 5], 30, block=16)  # padding between documents
    return {
        "short": (single, dict(align=0)),
        "long": (long, dict(align=0)),
        "packed": (packed, dict(runs=RUNS)),
        "documents": (gaps, dict(align=16)),
    }


@functools.lru_cache(maxsize=64)
def layer(method: Method, kind: str) -> Callable:
    """A function of (inputs, the cotangent of the result) on the rows of a kind: the result, and the
    gradients of the inputs. One program for all that a test puts into them.
    """
    where, how = masked_rows()[kind]

    @jax.jit
    def run(x: Inputs, cotangent):
        out, pull = jax.vjp(lambda x: attended(method, x, lay_out((method,), where, **how)), x)
        return out, pull(cotangent)[0]

    return run


def holding(y: jax.Array, places: np.ndarray, value: float) -> np.ndarray:
    """[1, T, ...] with a value at some places, bool [T]."""
    return np.where(places.reshape(1, -1, *(1,) * (y.ndim - 2)), np.asarray(y.dtype.type(value)), y)


def padding_may_hold_anything(method: Method, kind: str) -> None:
    """Values that are not finite in padding change no bit of outputs and gradients elsewhere.

    They stand in queries, keys, values and hidden states of padding, and come back as gradients of
    the outputs of padding.
    """
    where, _ = masked_rows()[kind]
    real = np.asarray(where.segments[0]) > 0
    assert not real.all()
    x = inputs(method, where.shape[1])
    (weight,) = normal(5, x.q.shape)

    def run(value):
        at = {name: holding(getattr(x, name), ~real, value) for name in "qkvy"}
        return layer(method, kind)(dataclasses.replace(x, **at), holding(weight, ~real, value))

    out, gradients = jax.device_get(run(0.0))
    for poison in (np.nan, np.inf):
        found, found_gradients = jax.device_get(run(poison))
        assert np.array_equal(found[0, real], out[0, real])
        assert np.isfinite(out[0, real]).all()
        for name in "qkvy":
            one, other = getattr(found_gradients, name), getattr(gradients, name)
            assert np.array_equal(one[0, real], other[0, real]), name
        for name in "qkv":
            assert not np.any(getattr(found_gradients, name)[0, ~real]), name


def tokens_not_seen_may_hold_large_values(method: Method, kind: str) -> None:
    """1e4 in the keys, values and hidden states of real tokens changes no bit of outputs and
    gradients of the tokens that do not see them: earlier ones, other sequences, other documents.
    """
    where, _ = masked_rows()[kind]
    segments, inside, order = (
        np.asarray(x[0]) for x in (where.segments, where.documents, where.order)
    )
    last = segments.max()
    spoiled = (inside == 2) if inside.any() else (segments == last) & (order >= 3)
    sees = np.asarray(visible(where, where))[0]
    others = (segments > 0) & ~sees[:, spoiled].any(axis=1)
    assert spoiled.any() and others.any()
    x = inputs(method, where.shape[1])
    (weight,) = normal(5, x.q.shape)
    # gradients of what the others get
    weight = holding(weight, ~others, 0.0)

    def run(value):
        at = {name: holding(getattr(x, name), spoiled, value) for name in "kvy"}
        return layer(method, kind)(dataclasses.replace(x, **at), weight)

    out, gradients = jax.device_get(run(0.0))
    found, found_gradients = jax.device_get(run(1e4))
    assert np.array_equal(found[0, others], out[0, others])
    for name in "qkvy":
        one, other = getattr(found_gradients, name), getattr(gradients, name)
        assert np.array_equal(one[0, others], other[0, others]), name


def trees_equal_paths(m: Transformer) -> None:
    """Trees of any depth have the values and gradients that their paths have alone.

    m: in float64.
    """
    size = 64
    where, paths = pack_trees(TREES, size)
    tokens = ids(1, size)
    (weight,) = normal(2, (1, size, m.config.embed_dim), dtype=jnp.float64)
    runs = sum(1 + tree.descendants for tree in TREES) + 1
    longest = max(map(len, paths))

    def together(m):
        out = m.hidden(tokens, where.order, where, runs)
        return sum(jnp.sum(out[:, at] * weight[:, at]) for at in paths), out

    def apart(m):
        rows = np.stack([np.pad(tokens[0, at], (0, longest - len(at))) for at in paths])
        row = sequences(jnp.array([len(at) for at in paths]), longest)
        out = m.hidden(rows, row.order, row, align=0)
        return sum(jnp.sum(out[i, : len(at)] * weight[0, at]) for i, at in enumerate(paths)), out

    found, out = jax.jit(jax.grad(together, has_aux=True))(m)
    wanted, outs = jax.jit(jax.grad(apart, has_aux=True))(m)
    for i, at in enumerate(paths):
        assert relative(out[0, at], outs[i, : len(at)]) < 1e-5  # norms are in float32
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert relative(a, b) < 1e-5
