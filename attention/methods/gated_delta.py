"""Gated delta net (2412.06464): a recurrent state in place of keys.

The layer keeps for every value head a matrix S [key size, value size], float32, which every token
changes by the delta rule (``attention.delta_rule``).

q, k and v of a token come from one projection, a causal depthwise convolution over the last tokens
of its sequence, and SiLU. The result passes through RMSNorm and the gate SiLU(z).

Rows are computed in chunks (``pallas_kernels.delta``). In packed rows every run of one segment and
branch begins a chunk. Its first state, and the inputs of its first convolutions, are those at the
end of the run that it continues, at any depth of a tree; zero where it continues none
(``attention.chunks``).

Where the tokens of rows are cut over devices, a state is linear in the one that its device begins
with: S = A S_0 + B. Every device computes A and B of its own chunks at the same time as all others,
A as further columns of the state, which no value changes. Then the states at the borders go from
device to device, and each adds what S_0 gives to its results.

In pages, every page keeps the state and the last inputs of the convolution behind its last token.
So whatever shares, copies, moves or restores pages does the same with states: a prefix is shared up
to its last whole page, as keys are. It costs the bytes of a state for every page, however many
tokens a page has: models with large states need large pages (``rollout.engine.page``).

Dimensions: B rows, T tokens, D model, K key heads, R value heads of a key head, H key size, V value
size, W = 2 H + R V, N chunks, C tokens of a chunk, J runs of a row.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from attention.cache.reader import PageReader
from attention.cache.writer import PageWriter
from attention.calls import Call, CallShape
from attention.chunks import CHUNK, Chunks, cut_rows
from attention.delta_rule import step
from attention.layout import Layout
from attention.methods.method import (
    LayerPages,
    LayerShape,
    Method,
    PageShape,
    Parameter,
    Parameters,
    Turn,
)
from attention.products import project
from attention.query_cost import QueryCost
from attention.ring import Ring
from pallas_kernels.delta.api import chunked, obstacle_on
from pallas_kernels.delta.reference import SMALL
from pallas_kernels.tokens import Tokens

_HIGHEST = jax.lax.Precision.HIGHEST


class Sizes(NamedTuple):
    """The sizes of a layer."""

    # K, R, H and V.
    key_heads: int
    values_of_key: int
    key_size: int
    value_size: int


@dataclasses.dataclass(frozen=True)
class GatedDelta(Method):
    """A recurrent state that forgets (α) and corrects itself (β).

    Sizes that are None are those of the layers' attention.
    """

    # Heads of q and k.
    key_heads: int | None = None
    # Heads of v, a multiple of the others.
    value_heads: int | None = None
    key_size: int | None = None
    value_size: int | None = None
    # Tokens that the convolution reads, the own one counted.
    width: int = 4
    # Added to mean squares by the RMSNorm of the result.
    eps: float = 1e-6

    mixes = True
    keeps_state = True
    input_heads: ClassVar[tuple[str | None, ...]] = ("kv_heads", "kv_heads")

    def __post_init__(self):
        for name in ("key_heads", "value_heads", "key_size", "value_size", "width"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"GatedDelta: {name}={value} must be at least 1")

    def sizes(self, shape: LayerShape) -> Sizes:
        """The sizes of a layer of the method."""
        heads = self.key_heads or shape.num_kv_heads
        values = self.value_heads or shape.num_heads
        if values % heads:
            raise ValueError(
                f"GatedDelta: value_heads={values} must be a multiple of key_heads={heads}"
            )
        key, value = self.key_size or shape.head_dim, self.value_size or shape.head_dim
        return Sizes(heads, values // heads, key, value)

    def parameters(self, shape: LayerShape) -> dict[str, Parameter]:
        heads, each, key, value = self.sizes(shape)
        embed = shape.embed_dim
        values = each * value
        inner = 2 * key + values
        std = embed**-0.5
        into = ("embed", "kv_heads", None)
        of_head = ("kv_heads", None)
        return {
            # of each key head q, k, the values and their gates z
            "qkvz": Parameter((embed, heads, inner + values), into, std),
            # of each key head the b, and then the a, of its value heads
            "ba": Parameter((embed, heads, 2 * each), into, std),
            "convolution": Parameter(
                (heads, inner, self.width), ("kv_heads", None, None), self.width**-0.5
            ),
            "decay": Parameter((heads, each), of_head, _log_rates),
            "step_bias": Parameter((heads, each), of_head, _step_biases),
            "norm": Parameter((value,), (None,), None),
            "out": Parameter(
                (heads, values, embed),
                ("kv_heads", None, "embed"),
                (heads * values) ** -0.5,
            ),
        }

    # --- The parts of a layer ------------------------------------------------------------------

    def inputs(
        self, parameters: Parameters, y: Float[Array, "B T D"], turn: Turn
    ) -> tuple[jax.Array, ...]:
        """The projections of hidden states, [B, T, K, ...] each: (q, k, v and z; b and a)."""
        return tuple(project(y, parameters[name].astype(y.dtype)) for name in ("qkvz", "ba"))

    def output(self, parameters: Parameters, mixed: Float[Array, "B T K RV"]) -> jax.Array:
        """The hidden states [B, T, D] of results."""
        return project(mixed, parameters["out"].astype(mixed.dtype), 2)

    def mix(
        self, parameters: Parameters, inputs: tuple[jax.Array, ...], layout: Layout
    ) -> Float[Array, "B T K RV"]:
        """The results of whole rows. ``inputs``: of this device's heads."""
        ring = layout.ring
        prepared: Chunks = layout.prepared_for(self)
        chunks = prepared.part(ring)
        x, z, b, a = self._split(parameters, *inputs)
        # padding may hold anything
        real = layout.queries.segments > 0
        x, b, a = (
            jnp.where(real.reshape(*real.shape, *(1,) * (y.ndim - 2)), y, 0) for y in (x, b, a)
        )
        if ring is not None:
            x = jnp.concatenate([_last_before(ring, x, prepared.tails), x], axis=1)
        window = [x]
        for _ in range(self.width - 1):
            window.insert(0, _taken(window[0], chunks.previous))
        windows = [y[:, x.shape[1] - b.shape[1] :] for y in window]
        q, k, v, g, beta = self._recurrent(parameters, windows, b, a)
        cut = (_taken(y, chunks.slots) for y in (q, k, v, g, beta))
        count = chunks.parents.shape[1]
        cut = [y.reshape(y.shape[0], count, -1, *y.shape[2:]) for y in cut]
        first = jnp.zeros((x.shape[0], *self._state(q, v)), q.dtype)
        if ring is None:
            out, _ = chunked(*cut, first, chunks.parents)
        else:
            out = _chunked_over(ring, cut, first, chunks)
        out = out.reshape(out.shape[0], -1, *out.shape[3:])
        return self._gated(parameters, _taken(out, chunks.places), z)

    def _split(self, parameters: Parameters, qkvz: jax.Array, ba: jax.Array):
        """(inputs of the convolution [B, T, K, W], z [B, T, K, R, V], b and a [B, T, K, R])."""
        inner = parameters["convolution"].shape[1]
        x, z = qkvz[..., :inner], qkvz[..., inner:]
        b, a = jnp.split(ba, 2, axis=-1)
        return x, z.reshape(*b.shape, -1), b, a

    def _recurrent(self, parameters: Parameters, x: Sequence[Float[Array, "B T K W"]], b, a):
        """(q, k [B, T, K, H], v [B, T, K, R, V], logarithm of α and β [B, T, K, R]).

        x: the inputs of the convolution, its own token last.
        """
        wide = jnp.promote_types(b.dtype, jnp.float32)
        b, a = (y.astype(wide) for y in (b, a))
        weights = parameters["convolution"].astype(wide)
        # not a sum over an axis of a few elements, which is many times slower on CPU
        convolved = sum(y.astype(wide) * weights[..., at] for at, y in enumerate(x))
        convolved = jax.nn.silu(convolved)
        each = b.shape[-1]
        values = each * parameters["norm"].shape[0]
        size = (convolved.shape[-1] - values) // 2
        q, k, v = jnp.split(convolved, (size, 2 * size), axis=-1)
        rate = jnp.exp(parameters["decay"].astype(wide))
        g = -rate * jax.nn.softplus(a + parameters["step_bias"].astype(wide))
        v = v.reshape(*b.shape, -1)
        return _unit(q) * size**-0.5, _unit(k), v, g, jax.nn.sigmoid(b)

    def _state(self, q: jax.Array, v: jax.Array) -> tuple[int, ...]:
        """The shape of a state: [K, R, H, V]."""
        return (*v.shape[2:4], q.shape[-1], v.shape[-1])

    def _gated(self, parameters: Parameters, out, z):
        """The normalised and gated results, [B, T, K, R V] in the dtype of z."""
        wide = out.dtype
        mean = jnp.mean(jnp.square(out), axis=-1, keepdims=True)
        out = out * jax.lax.rsqrt(mean + self.eps) * parameters["norm"].astype(wide)
        out = out * jax.nn.silu(z.astype(wide))
        return out.astype(z.dtype).reshape(*z.shape[:3], -1)

    # --- Rows ----------------------------------------------------------------------------------

    def cut_keys(self) -> tuple[str, ...]:
        return ("state",)

    def prepare(self, layout: Layout) -> Chunks:
        # a row without branches that begins at slot 0 has one run, and padding behind it
        runs = layout.runs or 2
        return cut_rows(layout.tokens, runs, layout.parts, layout.align, self.width)

    # --- Pages ---------------------------------------------------------------------------------

    def chunk(self, page: int) -> int:
        return math.gcd(CHUNK, page)

    def pages(self, shape: PageShape) -> LayerPages:
        assert shape.layer is not None
        heads, each, key, value = self.sizes(shape.layer)
        state = (shape.num_pages, heads, each, key, value)
        inner = 2 * key + each * value
        inputs = (shape.num_pages, heads, self.width - 1, inner)
        return {
            "state": jax.ShapeDtypeStruct(state, jnp.promote_types(shape.dtype, jnp.float32)),
            "inputs": jax.ShapeDtypeStruct(inputs, shape.dtype),
        }

    def mix_pages(
        self,
        parameters: Parameters,
        pages: LayerPages,
        inputs: tuple[jax.Array, ...],
        at: PageWriter,
        q_tokens: Tokens,
        reader: PageReader,
    ) -> tuple[Float[Array, "B T K RV"], LayerPages]:
        """(the results of new tokens, the pages with the states behind them)."""
        x, z, b, a = self._split(parameters, *inputs)
        real = (at.places >= 0)[..., None, None]
        x, b, a = (jnp.where(real, y, 0) for y in (x, b, a))
        before, _ = at.where(at.first - 1)
        state, earlier = (
            pages[name].at[before[:, 0]].get(mode="fill", fill_value=0)
            for name in ("state", "inputs")
        )
        # [B, width - 1 + T, K, W]
        whole = jnp.concatenate([jnp.moveaxis(earlier, 1, 2).astype(x.dtype), x], axis=1)
        count = x.shape[1]
        windows = [whole[:, i : i + count] for i in range(self.width)]
        q, k, v, g, beta = self._recurrent(parameters, windows, b, a)
        # padding leaves the state as it is
        g, beta, k = (jnp.where(real, y, 0) for y in (g, beta, k))
        if count == 1:
            out, state = step(state, *(y[:, 0] for y in (q, k, v, g, beta)))
            out, states = out[:, None], state[:, None]
            page, _ = at.where(at.first)
            last = at.first
            behind = jnp.zeros_like(page)
        else:
            # Chunks lie at multiples of their size, wherever the new tokens begin. So what is
            # computed for a token does not depend on the chunks that a prompt is prefilled in.
            size = self.chunk(at.page)
            first = jnp.maximum(at.first, 0)
            chunks = -(-(count + size - 1) // size)
            at_chunk = first % size
            slots = jnp.arange(chunks * size) - at_chunk
            slots = jnp.where((slots >= 0) & (slots < count), slots, -1)
            cut = (_taken(y, slots) for y in (q, k, v, g, beta))
            cut = [y.reshape(y.shape[0], chunks, size, *y.shape[2:]) for y in cut]
            parents = jnp.broadcast_to(jnp.arange(chunks), (x.shape[0], chunks))
            out, states = chunked(*cut, state, parents)
            out = out.reshape(out.shape[0], -1, *out.shape[3:])
            out = _taken(out, at_chunk + jnp.arange(count))
            page, starts = at.touched()
            last = jnp.minimum(starts + at.page - 1, at.last)
            behind = jnp.clip(last // size - first // size, 0, chunks - 1)
        rows = jnp.arange(x.shape[0])[:, None]
        # the inputs at the last ``width - 1`` places of each page, of which the row has ``whole``
        index = jnp.clip(last - at.first, 0, count - 1)[..., None] + 1 + jnp.arange(self.width - 1)
        kept = jnp.swapaxes(whole[rows[..., None], index], 2, 3)
        pages = {
            "state": pages["state"].at[page].set(states[rows, behind], mode="drop"),
            "inputs": pages["inputs"].at[page].set(kept.astype(pages["inputs"].dtype), mode="drop"),
        }
        return self._gated(parameters, out, z), pages

    def pair_size(self, shape: LayerShape, decode: bool) -> int:
        return 0

    def query_cost(self, shape: LayerShape, row: int, seen: float, decode: bool) -> QueryCost:
        heads, each, key, value = self.sizes(shape)
        if decode:
            # ``step`` goes through the state seven times, by a multiplication or an addition: it
            # decays, is multiplied by k and summed, k times the change is made and added, and it is
            # multiplied by q and summed
            return QueryCost(0.0, derived=7 / 2 * heads * each * key * value)
        # ``chunked``, of places that hold tokens: keys with keys, queries with keys
        pairs = 2 * CHUNK * key
        # corrections, queries and new keys with the state or into it; scores with changes
        of_state = 3 * key * value + CHUNK * value
        solved = CHUNK * (value + key)
        # its inverse (``delta.reference``): two products for each block below the diagonal, of 8,
        # 16, ... rows
        inverse = (CHUNK**2 - SMALL**2) / 3
        return QueryCost(
            0.0,
            derived=heads * (pairs + each * (of_state + solved)),
            inverted=heads * each * inverse,
            # corrections with the state, of which the gradient of scores is made
            repeated=heads * each * key * value,
        )

    def calls(self, shape: CallShape) -> tuple[Call, ...]:
        sizes = self.key_size or shape.head_dim, self.value_size or shape.head_dim
        found = []
        for phase, tokens in (("train", CHUNK), ("prefill", self.chunk(shape.page))):

            def obstacle(platform: str, name: str, dtype: str, tokens: int = tokens) -> str | None:
                # states, and what changes them, are at least float32
                wide = str(jnp.promote_types(dtype, jnp.float32))
                return obstacle_on(platform, name, wide, tokens, sizes)

            found.append(Call("states", phase, obstacle))
        return (*found, Call("states", "decode", _no_kernel))

    def decode_bytes(self, tokens: int, shape: LayerShape, dtype: str) -> int:
        heads, each, key, value = self.sizes(shape)
        return 4 * heads * each * key * value


def _no_kernel(platform: str, name: str, dtype: str) -> str:
    return "one token multiplies no matrices"


def _log_rates(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Logarithms of rates between 1 and 16, as the paper's code and Mamba 2 (2405.21060) begin."""
    return jnp.log(jax.random.uniform(key, shape, jnp.float32, 1.0, 16.0))


def _step_biases(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Biases whose softplus is between 0.001 and 0.1, uniform in its logarithm, as they begin there
    too: a state then lasts for 1 to 1,000 tokens.
    """
    lowest, highest = math.log(1e-3), math.log(1e-1)
    steps = jnp.exp(jax.random.uniform(key, shape, jnp.float32, lowest, highest))
    return steps + jnp.log(-jnp.expm1(-steps))


def _unit(x: jax.Array) -> jax.Array:
    """Vectors divided by their norm."""
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


def _taken(x: jax.Array, slots: jax.Array) -> jax.Array:
    """x [B, T, ...] at slots [B, S], zeros where the slot is -1 or past the last one."""
    slots = jnp.where(slots < 0, x.shape[1], slots)
    return jax.vmap(lambda row, at: row.at[at].get(mode="fill", fill_value=0))(x, slots)


def _last_before(
    ring: Ring, x: Float[Array, "B L K W"], tails: Int[Array, "B P M w"]
) -> Float[Array, "B M*w K W"]:
    """The last inputs of the open runs in front of this device's part; x: those of its own slots.

    tails: ``Chunks.tails`` of all parts.
    """
    begin = jax.lax.axis_index(ring.axis) * x.shape[1]
    own = jnp.where(tails >= begin, tails - begin, -1).reshape(tails.shape[0], -1)
    found = _taken(x, own).reshape(*tails.shape[:2], -1, *x.shape[2:])
    # of each place all devices but one have zeros
    return jax.lax.psum_scatter(found, ring.axis, scatter_dimension=1)


def _chunked_over(
    ring: Ring, cut: list[jax.Array], first: Float[Array, "B K R H V"], chunks: Chunks
) -> Float[Array, "B N C K R V"]:
    """The results of ``chunked`` where runs begin with states of the devices before.

    cut: (q, k, v, g, beta) of this device's chunks. first: zeros. chunks: those of this device.
    """
    size, width = first.shape[-2:]
    one = jnp.broadcast_to(jnp.eye(size, dtype=first.dtype), (*first.shape[:-1], size))
    first = jnp.concatenate([first, one], axis=-1)
    out, states = chunked(*cut, first, chunks.parents)
    states = jnp.concatenate([first[:, None], states], axis=1)
    ends = _taken(states, chunks.exits)

    def turn(opened, _):
        begun = _taken(opened, chunks.sources)
        behind = ends[..., :width] + jnp.matmul(ends[..., width:], begun, precision=_HIGHEST)
        return ring.handed_on(behind), None

    opened = jnp.zeros((*ends.shape[:-1], width), ends.dtype)
    # after so many turns the first devices have their states
    opened, _ = jax.lax.scan(turn, opened, None, length=ring.parts - 1)
    begun = _taken(opened, chunks.roots)
    more = jnp.einsum("bnckrh,bnkrhv->bnckrv", out[..., width:], begun, precision=_HIGHEST)
    return out[..., :width] + more
