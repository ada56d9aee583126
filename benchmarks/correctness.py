"""Checks of every method of attention on a device, held to the same in float64 on the CPU.

For each method: whole rows with their gradients, a chunk of a prompt against pages, and one token
against pages. On the device each call makes the choice that a run makes, so these are the kernels
where there are any. The reference is the path in XLA in float64, which the tests hold to the
definitions. Methods that choose blocks are given room for all of them here: a choice between two
scores that are almost equal may fall otherwise in another dtype, and says nothing about a kernel.
Kernels with some blocks chosen are checked apart, with the same choice for both.

An error is |x - reference| / |reference|. In bfloat16 it may be at most twice that of XLA in
bfloat16 on the CPU: sums of several rounded parts err more than any one bound for all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import rich.table
from jax.sharding import Mesh

from attention.cache.paged import attend, init_cache, write, write_and_attend
from attention.cache.tables import sequence_pages
from attention.layout import lay_out
from attention.methods.dense import Dense
from attention.methods.gated_documents import GatedDocuments
from attention.methods.method import LayerShape, Method
from attention.methods.moba import MoBA
from attention.methods.nsa import NSA
from attention.methods.window import Window
from attention.selected import selected_attention
from models.sharding import MeshConfig, make_mesh, use_mesh
from pallas_kernels import choice
from pallas_kernels.delta.api import chunked
from pallas_kernels.latent.api import latent_attention, stored_size
from pallas_kernels.selected import api as kernels
from pallas_kernels.tokens import TAIL, sequences

# Largest relative errors of an output and of a gradient in float32.
BOUNDS = (1e-5, 1e-4)
# Tokens of a page and of a block.
BLOCK = 64


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the random input: a multiple of BLOCK tokens."""

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int


@dataclasses.dataclass(frozen=True)
class Check:
    """A program, and the random arrays that it is run with."""

    name: str
    # Of arrays in one dtype, to the output and perhaps gradients.
    run: Callable[..., tuple[jax.Array, ...]]
    # Shapes of the arrays; they are drawn in float64 and rounded.
    shapes: tuple[tuple[int, ...], ...]
    # The dtype of what has one whatever that of the model is.
    dtype: str | None = None


@dataclasses.dataclass(frozen=True)
class Found:
    """The outcome of a check."""

    check: str
    # "output" or "gradients", of which the worst counts.
    of: str
    error: float
    bound: float

    @property
    def right(self) -> bool:
        """True if the error is within the bound; False for NaN."""
        return self.error <= self.bound


def check_all(dtype: str, sizes: Sizes, device: jax.Device | None = None) -> Iterator[Found]:
    """Every check on a device, by default the first one, in float32 or bfloat16.

    In float32 the bounds are BOUNDS. In bfloat16 there is no absolute one, unlike in the tests:
    each result may be twice as far from float64 as that of XLA in bfloat16 on the CPU.
    """
    here = make_mesh(MeshConfig(1, 1), [device or jax.devices()[0]])
    cpu = make_mesh(MeshConfig(1, 1), jax.devices("cpu")[:1])
    for check in checks(sizes):
        own = check.dtype or dtype
        rng = np.random.default_rng(0)
        arrays = [rng.standard_normal(shape) for shape in check.shapes]
        exact = compute(check, arrays, "float64", cpu)
        found = errors(compute(check, arrays, own, here), exact)
        rough = errors(compute(check, arrays, own, cpu), exact) if own == "bfloat16" else None
        for of, part in (("output", slice(0, 1)), ("gradients", slice(1, None))):
            if not found[part]:
                continue
            fixed = [BOUNDS[of == "gradients"]] * len(found[part])
            bounds = fixed if rough is None else [2 * error for error in rough[part]]
            shares = [x / max(y, 1e-30) for x, y in zip(found[part], bounds, strict=True)]
            # the one that is nearest to its bound; NaN must not be lost in a maximum
            worst = int(np.argmax(np.nan_to_num(shares, nan=np.inf)))
            yield Found(check.name, of, found[part][worst], bounds[worst])


def compute(check: Check, arrays: list[np.ndarray], dtype: str, mesh: Mesh) -> list[np.ndarray]:
    """The results of a check in a dtype on the device of a mesh, in float64."""
    with jax.enable_x64(dtype == "float64"), use_mesh(mesh):
        given = [jax.device_put(jnp.asarray(x, dtype), mesh.devices.flat[0]) for x in arrays]
        return [
            np.asarray(x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, np.float64)
            for x in jax.jit(check.run)(*given)
        ]


def errors(found: list[np.ndarray], exact: list[np.ndarray]) -> list[float]:
    """The relative error of each result."""
    return [
        float(np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-30))
        for x, y in zip(found, exact, strict=True)
    ]


def methods(tokens: int) -> dict[str, Method]:
    """Every method of the tree, with room for all blocks where it chooses."""
    # at least those that NSA always takes
    blocks = max(3, -(-tokens // BLOCK))
    return {
        "dense": Dense(),
        "window": Window(max(BLOCK // 2, tokens // 4)),
        "nsa": NSA(block=BLOCK, picks=blocks, window=max(BLOCK // 2, tokens // 4)),
        "moba": MoBA(block=BLOCK, picks=blocks),
        "gated_documents": GatedDocuments(),
    }


def checks(sizes: Sizes) -> Iterator[Check]:
    """Every check, method by method."""
    for name, method in methods(sizes.tokens).items():
        yield _rows(name, method, sizes)
        yield _pages(f"{name}, prefill", method, sizes, queries=min(BLOCK, sizes.tokens // 2))
        yield _pages(f"{name}, decode", method, sizes, queries=1)
    # pages of more tokens than a step of the kernel on GPU takes
    large = 4 * BLOCK
    moba = MoBA(block=large, picks=-(-sizes.tokens // large))
    yield _pages("moba, decode from large pages", moba, sizes, queries=1, page=large)
    yield _chosen("some blocks, rows", sizes)
    # where a kernel has two ways, the one that the heuristic does not take
    yield _chosen("some blocks, rows, the other way", sizes, gather_in_kernel=False)
    yield _states("gated delta, rows", sizes)
    yield _latent("mla, decode", sizes)


def _rows(name: str, method: Method, sizes: Sizes) -> Check:
    """Whole rows in training: outputs and the gradients of q and of all keys."""
    tokens = sequences(jnp.array([sizes.tokens - 5]), sizes.tokens)
    if name == "gated_documents":
        # four documents and a tail
        slots = np.arange(sizes.tokens)
        number = np.where(slots < sizes.tokens * 3 // 4, slots * 16 // (3 * sizes.tokens) + 1, TAIL)
        documents = jnp.asarray(number, jnp.int32)[None]
        tokens = dataclasses.replace(tokens, documents=documents)
    q, pair = _heads(sizes, sizes.tokens)
    branches = ["main"]
    shapes = [q, *pair]
    if isinstance(method, NSA):
        stretches = (1, sizes.tokens // method.stride, *pair[0][2:])
        branches += ["window", "compressed"]
        shapes += [*pair, stretches, stretches]
    parts = {"nsa": 3, "gated_documents": 2}.get(name)
    if parts:
        shapes.append((*q[:3], parts))

    def run(*arrays):
        weight, *arrays = arrays

        def total(q, *rest):
            extra = jax.nn.sigmoid(rest[-1]) if parts else None
            keys = {name: rest[2 * i : 2 * i + 2] for i, name in enumerate(branches)}
            layout = lay_out((method,), tokens, align=0)
            out = method.attend(q, keys, layout, extra)
            real = layout.queries.segments[..., None, None] > 0
            out = jnp.where(real, out, 0)
            return jnp.sum((out * weight).astype(jnp.promote_types(jnp.float32, out.dtype))), out

        slopes, out = jax.grad(total, range(len(arrays)), has_aux=True)(*arrays)
        return out, *slopes

    return Check(f"{name}, rows", run, (q, *shapes))


def _pages(
    name: str,
    method: Method,
    sizes: Sizes,
    queries: int,
    page: int = BLOCK,
) -> Check:
    """The last tokens of two rows, written to pages and attending to them, and the same once more
    from what was written.
    """
    rows = 2
    count = -(-sizes.tokens // page)
    layer = LayerShape(sizes.head_dim, sizes.heads, sizes.kv_heads, sizes.head_dim)
    given = method.parameters(layer)
    names = [*given]
    q, pair = _heads(sizes, sizes.tokens, rows)
    queries_shape = (rows, queries, *q[2:])
    branches = ["main", *(x for x in ("raw", "window") if isinstance(method, NSA))]
    parts = next((x.shape[-1] for at, x in given.items() if at == "gates"), None)
    shapes = [queries_shape, *pair * len(branches)]
    shapes += [given[at].shape for at in names]
    shapes += [(*queries_shape[:3], parts)] if parts else []

    def run(q, *arrays):
        keys = {at: tuple(arrays[2 * i : 2 * i + 2]) for i, at in enumerate(branches)}
        rest = arrays[2 * len(branches) :]
        # small, so that the compressed keys are about as large as the others
        parameters = {
            at: x * (x.size / x.shape[-1]) ** -0.5 for at, x in zip(names, rest, strict=False)
        }
        inputs = jax.nn.sigmoid(rest[-1]) if parts else None
        shape = (rows * count, sizes.kv_heads, sizes.head_dim, q.dtype)
        cache = init_cache((method,), *shape, page=page)
        tables = jnp.arange(rows * count, dtype=jnp.int32).reshape(rows, count)[:, ::-1]
        lengths = jnp.array([sizes.tokens, sizes.tokens - 7], jnp.int32)
        slots = jnp.arange(sizes.tokens, dtype=jnp.int32)
        places = jnp.where(slots < lengths[:, None] - queries, slots, -1)
        # keys are drawn as if they were rotated already
        options = dict(parameters=parameters, rotate=lambda k, positions: k)
        cache = write(cache, 0, tables, places, keys, **options)
        pages = sequence_pages(tables, lengths, page)
        last = lengths[:, None] - queries + jnp.arange(queries, dtype=jnp.int32)
        seen = pages.at(last)[0]
        new = {
            at: tuple(jnp.take_along_axis(x, last[..., None, None], axis=1) for x in pair)
            for at, pair in keys.items()
        }
        # a single token is written by the kernel that attends, where there is one
        found, cache = write_and_attend(
            cache, 0, pages, last, new, q, seen, pages, inputs=inputs, **options
        )
        return (jnp.stack([found, attend(cache, 0, q, seen, pages, inputs=inputs)]),)

    return Check(name, run, tuple(shapes))


def _chosen(name: str, sizes: Sizes, **changes: bool) -> Check:
    """Some blocks for each query, the same in every dtype: outputs and gradients.

    changes: of the sizes that the heuristic chooses.
    """
    count = sizes.tokens // BLOCK
    slots = np.arange(sizes.tokens, dtype=np.int32)
    ranks = np.random.default_rng(1).random((1, sizes.tokens, sizes.kv_heads, count))
    # no pick where a query sees nothing of a block; the query's own block is always one
    later = np.arange(count) - (slots // BLOCK)[:, None, None]
    ranks = np.where(later > 0, -1.0, np.where(later == 0, 2.0, ranks))
    best = np.argsort(-ranks, axis=-1)[..., : max(1, count // 2)]
    picks = np.where(np.take_along_axis(ranks, best, axis=-1) < 0, -1, best).astype(np.int32)
    order = jnp.asarray(slots)[None]
    q, pair = _heads(sizes, sizes.tokens)

    def attend(*qkv):
        given = (*qkv, jnp.asarray(picks), order, order)
        if not changes or (on := choice.here()) == "cpu":
            return selected_attention(*given, size=BLOCK)
        tuning = dataclasses.replace(kernels.heuristic(on), **changes)
        return kernels.selected_attention(*given, size=BLOCK, tuning=tuning)

    def run(weight, *arrays):
        def total(*qkv):
            out, _ = attend(*qkv)
            wide = jnp.promote_types(jnp.float32, out.dtype)
            return jnp.sum((out * weight).astype(wide)), out

        slopes, out = jax.grad(total, (0, 1, 2), has_aux=True)(*arrays)
        return out, *slopes

    return Check(name, run, (q, q, *pair))


def _states(name: str, sizes: Sizes) -> Check:
    """Chunks of gated delta nets, not all of which continue the one before: results and the
    gradients of all that they are made of. States are in float32.
    """
    count = sizes.tokens // BLOCK
    slots = np.arange(count)
    # every third one begins where the one before began
    parents = np.where(slots % 3 == 2, slots - 1, slots)[None]
    heads, each, size = sizes.kv_heads, sizes.heads // sizes.kv_heads, sizes.head_dim
    places = (1, count, BLOCK, heads)
    keys, values, numbers = (*places, size), (*places, each, size), (*places, each)
    first = (1, heads, each, size, size)

    def run(weight, *arrays):
        def total(q, k, v, g, beta, first):
            k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
            given = q, k, v, -jax.nn.softplus(g), jax.nn.sigmoid(beta), first
            out, _ = chunked(*given, jnp.asarray(parents, jnp.int32))
            return jnp.sum(out * weight), out

        slopes, out = jax.grad(total, range(6), has_aux=True)(*arrays)
        return out, *slopes

    return Check(name, run, (values, keys, keys, values, numbers, numbers, first), "float32")


def _latent(name: str, sizes: Sizes) -> Check:
    """One token of two rows against pages of latent vectors, which are keys and, but for an eighth
    of the value's size, values: in DeepSeek-V3's proportion.
    """
    rows, count = 2, sizes.tokens // BLOCK
    rank = 4 * sizes.head_dim
    size = rank + sizes.head_dim // 2

    def run(q, vectors):
        tables = jnp.arange(rows * count, dtype=jnp.int32).reshape(rows, count)[:, ::-1]
        lengths = jnp.array([sizes.tokens, sizes.tokens - 7], jnp.int32)
        vectors = jnp.pad(vectors, [(0, 0)] * 2 + [(0, stored_size(size) - size)])
        content = vectors.reshape(rows, count, 1, BLOCK, -1)
        pages = jnp.zeros((rows * count, *content.shape[2:]), q.dtype).at[tables].set(content)
        return (latent_attention(q, pages, rank, tables, lengths[:, None] - 1, lengths)[0],)

    return Check(name, run, ((rows, 1, sizes.heads, size), (rows, sizes.tokens, size)))


def _heads(sizes: Sizes, tokens: int, rows: int = 1):
    """(shape of q, (shape of k, shape of v))."""
    pair = (rows, tokens, sizes.kv_heads, sizes.head_dim)
    return (rows, tokens, sizes.heads, sizes.head_dim), (pair, pair)


def table(found: list[Found]) -> rich.table.Table:
    """One line for each check and kind of result."""
    view = rich.table.Table(title="correctness", title_justify="left")
    for name in ("check", "of", "error", "bound", ""):
        view.add_column(name, justify="right" if name in ("error", "bound") else "left")
    for row in found:
        verdict = "right" if row.right else "WRONG"
        view.add_row(row.check, row.of, f"{row.error:.1e}", f"{row.bound:.1e}", verdict)
    return view
