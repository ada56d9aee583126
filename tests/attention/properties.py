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

from attention.indexed import Indexed
from attention.layout import Layout, lay_out
from attention.methods.dense import Dense
from attention.methods.method import LayerShape, Method
from models.transformer import Transformer
from pallas_kernels.tokens import Tokens, visible
from tests.attention.cache.model import PAGE, WIDTH, random_tokens, run
from tests.attention.rows import Piece, documents, normal, pack, relative, separate
from tests.attention.trees import TREES, pack_trees
from tests.models.small import VOCABULARY, small_model

SHAPE = LayerShape(embed_dim=16, num_heads=4, num_kv_heads=2, head_dim=8)
# (method, q [T, N, H], keys by name [T, K, H], head inputs [T, N, parts], parameters) to [T, N, H].
Reference = Callable[..., jax.Array]

PIECES = [Piece(9), Piece(40, (20, 1, 17)), Piece(5, (30,))]
LENGTH, RUNS = 128, 7
# Rows of a cache: two share a prompt.
CACHED = [Piece(40, (35, 11)), Piece(30)]


@functools.cache
def model(method: Method, dtype: str = "float32") -> Transformer:
    """A layer of the sizes of SHAPE. Behind one that keeps a state one attends, and behind one that
    chooses keys one takes its choice.

    Parameters that begin as zeros or ones are random too.
    """
    methods: tuple[Method, ...] = (method,)
    if method.keeps_state:
        methods = (method, Dense())
    elif method.indexes:
        methods = (method, dataclasses.replace(method, shared=True))
    norms = method.keeps_state or not method.mixes
    sizes = dict(num_layers=len(methods), qk_norm=norms, dtype=dtype, param_dtype=dtype)
    made = small_model(methods, **sizes)
    rng = np.random.default_rng(7)
    for name, described in method.parameters(SHAPE).items():
        if not described.std:
            parameter = getattr(made.attention_0, name)
            value = np.asarray(parameter[...])
            noise = rng.standard_normal(value.shape).astype(value.dtype)
            setattr(made.attention_0, name, parameter.replace(jnp.asarray(value + noise)))
    return made


@jax.jit
def packed_hidden(model: Transformer, tokens, where: Tokens):
    return model.hidden(tokens, where.order, where, RUNS)


def ids(seed: int, length: int = LENGTH) -> np.ndarray:
    return np.asarray([random_tokens(seed, length)], np.int32)


def nothing_leaks(method: Method) -> None:
    """A token changes no bit of what comes before it, of other sequences and of other completions
    of its prompt.
    """
    where, slots = pack(PIECES, LENGTH)
    tokens = ids(1)
    clean = np.asarray(packed_hidden(model(method), tokens, where))[0]
    longest = slots[1]  # the prompt of 40 tokens and its first completion
    # the last tokens of sequences too, before the first ones of others
    for at in map(int, (slots[0][-1], *longest[[0, 17, 45, -1]], slots[-1][-1])):
        changed = tokens.copy()
        changed[0, at] = (tokens[0, at] + 1) % VOCABULARY
        found = np.asarray(packed_hidden(model(method), changed, where))[0]
        sees = np.zeros(LENGTH, bool)
        for mine in slots:
            if at in mine:
                sees[mine[list(mine).index(at) :]] = True
        assert np.array_equal(found[~sees], clean[~sees])
        assert not np.array_equal(found[at], clean[at])


def cached_equals_packed(method: Method, cache: Callable) -> None:
    """Prefill in chunks and decoding token by token give what a packed row gives, in pages that held
    anything before, and leave the pages of others as they are.

    cache: number of pages to an empty cache of ``model(method)``.
    """
    where, slots = pack(CACHED, LENGTH)
    packed = ids(3)
    wanted = np.asarray(packed_hidden(model(method), packed, where))[0]
    tokens = [packed[0, at].tolist() for at in slots]
    count = len(tokens)
    pages = count * WIDTH + 2
    table = np.random.default_rng(0).permutation(pages)[: count * WIDTH].reshape(count, WIDTH)
    table = table.astype(np.int32)
    own = [row[: -(-len(mine) // PAGE)] for row, mine in zip(table, tokens, strict=True)]
    others = np.setdiff1d(np.arange(pages), np.concatenate(own))
    empty = jax.eval_shape(lambda: cache(pages))
    starts = [len(row) - 6 for row in tokens]
    prompts = [row[:end] for row, end in zip(tokens, starts, strict=True)]
    for poison in (np.nan, np.inf):
        dirty = jax.tree.map(lambda x, held=poison: np.full(x.shape, held, x.dtype), empty)
        first, paged = run(model(method), dirty, table, prompts, [0] * count, 20)
        rest, paged = run(model(method), paged, table, tokens, starts, 1)
        for *found, at in zip(first, rest, slots, strict=True):
            assert relative(np.concatenate(found), wanted[at]) < 1e-5
        for before, after in zip(jax.tree.leaves(dirty), jax.tree.leaves(paged), strict=True):
            assert np.array_equal(np.asarray(after)[others], before[others], equal_nan=True)


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
        parameters[name] = value * (1.0 if callable(p.std) else p.std or 1.0)
    return Inputs(q, k, v, y, parameters)


def given_keys(method: Method, x: Inputs) -> dict:
    return {"main": (x.k, x.v), **method.new_keys(x.parameters, x.y, lambda keys: keys)}


def turned(x: jax.Array, positions: jax.Array) -> jax.Array:
    """x [B, T, heads, H] rotated by the positions of its tokens, in its own precision."""
    size = x.shape[-1] // 2
    angles = positions[..., None, None] * 0.1 ** np.arange(size, dtype=x.dtype)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    one, other = x[..., :size], x[..., size:]
    return jnp.concatenate([one * cos - other * sin, other * cos + one * sin], axis=-1)


def attended(method: Method, x: Inputs, layout: Layout) -> jax.Array:
    """A layer's attention, keys not rotated. Of a method with projections of its own its result,
    rotated, with the loss of its indexer behind it.
    """
    if method.mixes:
        turn = functools.partial(turned, positions=layout.tokens.order)
        given = method.inputs(x.parameters, x.y, turn)
        if not method.indexes:
            return method.output(x.parameters, method.mix(x.parameters, given, layout))
        mixed, told = method.mix_indexed(x.parameters, given, layout, Indexed(), None, ())
        out = method.output(x.parameters, mixed)
        return out if told.loss is None else jnp.concatenate([out, told.loss[..., None]], axis=-1)
    keys = given_keys(method, x)
    keys |= method.derived_keys(x.parameters, keys, layout)
    read = {name: keys[name] for name in method.positions(layout.tokens.order, layout)}
    return method.attend(x.q, read, layout, method.head_inputs(x.parameters, x.y))


def defined(method: Method, reference: Reference, x: Inputs) -> jax.Array:
    """The definition of a layer's attention, row by row."""
    extra = method.head_inputs(x.parameters, x.y)
    rows = jax.vmap(lambda q, keys, extra: reference(method, q, keys, extra, x.parameters))
    return rows(x.q, given_keys(method, x), extra)


def weights(method: Method, length: int, dtype=jnp.float32) -> jax.Array:
    """A weight for every number of a row's result."""
    shape = (4, 8)
    if method.mixes:
        shape = (17,) if getattr(method, "index_loss", 0.0) else (16,)
    return normal(5, (1, length, *shape), dtype=dtype)[0]


def same(found, wanted) -> None:
    """Fails unless (gradients, result) are equal but for rounding in float64."""
    assert relative(found[1], wanted[1]) < 1e-12  # the same keys are chosen
    for a, b in zip(jax.tree.leaves(found[0]), jax.tree.leaves(wanted[0]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


def equals_its_definition(method: Method, reference: Reference, length: int) -> None:
    """Values and all gradients are those of the definition, in float64."""
    x = inputs(method, length, jnp.float64)
    where = separate([length], length)
    weight = weights(method, length, jnp.float64)

    def ours(x):
        out = attended(method, x, lay_out((method,), where, align=0))
        return jnp.sum(out * weight), out

    def theirs(x):
        out = defined(method, reference, x)
        return jnp.sum(out * weight), out

    same(*(jax.jit(jax.grad(one, has_aux=True))(x) for one in (ours, theirs)))


def packed_equals_separate(
    method: Method, reference: Reference | None = None, trees: bool = False
) -> None:
    """A packed row gives each sequence what it gets alone, and a prompt that its completions share
    gives what a prompt repeated for each does: values, and all gradients. In float64.

    reference: the definition, for what a sequence gets alone; None for what the method gives.
    trees: whether the row holds trees of any depth, whose paths are the sequences.
    """
    runs = RUNS
    where, slots = pack(PIECES, LENGTH)
    if trees:
        where, slots = pack_trees(TREES, 64)
        runs = sum(1 + tree.descendants for tree in TREES) + 1
    length = where.shape[1]
    x = inputs(method, length, jnp.float64)
    weight = weights(method, length, jnp.float64)
    lengths = [len(at) for at in slots]
    longest = max(lengths)
    rows = separate(lengths, longest)
    index = np.stack([np.pad(at, (0, longest - len(at))) for at in slots])
    own = np.arange(longest) < np.array(lengths)[:, None]

    def weighted(outs):
        """outs: [sequences, tokens, ...]."""
        outs = jnp.where(own.reshape(*own.shape, *(1,) * (outs.ndim - 2)), outs, 0.0)
        return jnp.sum(outs * weight[0, index]), outs

    def together(x):
        return weighted(attended(method, x, lay_out((method,), where, runs))[0, index])

    def apart(x):
        x = dataclasses.replace(x, **{name: getattr(x, name)[0, index] for name in "qkvy"})
        if reference is not None:
            return weighted(defined(method, reference, x))
        return weighted(attended(method, x, lay_out((method,), rows, align=0)))

    same(*(jax.jit(jax.grad(one, has_aux=True))(x) for one in (together, apart)))


@functools.cache
def masked_rows() -> dict[str, tuple[Tokens, dict[str, int]]]:
    """Rows with every kind of place that nobody sees, and how ``lay_out`` is to cut them."""
    long = separate([150], 200)  # in blocks, the last of them empty
    packed, _ = pack(PIECES, 160)
    # padding between documents; short enough for all scores in memory
    gaps = documents([20, 33, 0, 5], 30, block=16)
    return {
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
    weight = weights(method, where.shape[1])

    def run(value):
        at = {name: holding(getattr(x, name), ~real, value) for name in "qkvy"}
        return layer(method, kind)(dataclasses.replace(x, **at), holding(weight, ~real, value))

    out, gradients = jax.device_get(run(0.0))
    for poison in (np.nan, np.inf, 1e4):
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
    weight = weights(method, where.shape[1])
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
