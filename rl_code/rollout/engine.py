"""Prefill and decode over a paged KV cache: jitted programs of fixed shape, for every attention
method.

Every program is a shard_map over ``data``, ``fsdp``, ``context`` and ``expert``, over all of which
rows are cut. Each shard has pages of its own and the whole weights. It loops on its own, so
decoding needs no collective over these axes. An exception is ``expert`` in a model with experts:
its shards have some of the experts each, exchange tokens at every step, and leave the loop
together. Over the axis ``tensor`` pages and attention are cut by heads (``models.paged``), and the
rest is left to the compiler. Which page holds what is decided on the host (``page_pool``,
``scheduler``).

The numbers of a row depend only on its own tokens. Every shape is fixed, no sum runs over more than
one row, and random numbers are drawn per (group, index in the group, position). The same seed
therefore gives the same tokens, whatever else runs beside an episode, and however much of its
prompt was in the cache already.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from attention.cache import paged
from attention.cache.gathered import GatheredPages
from attention.cache.paged import PagedCache
from attention.cache.tables import Runs, sequence_pages
from attention.picks import choosing, compact, narrowest
from models.adapter_rows import for_rows
from models.model_config import ModelConfig
from models.paged import decode_tokens, forward, gather_pages, model_cache, put_pages_back
from models.sharding import SAMPLER_AXES, per_shard, shard_specs, shared_by, use_mesh
from models.transformer import Transformer
from rl_code.rollout.decode_input import DecodeInput, empty_input, empty_runs
from rl_code.rollout.drafts import NONE, propose
from rl_code.rollout.engine_config import EngineConfig
from rl_code.rollout.own_way import sample_own
from rl_code.rollout.sampling import SamplingConfig, sample, stop_mask, token_uniforms
from rl_code.types import MOST_ALTERNATIVES


def _prefill(
    model: Transformer, cache: PagedCache, tables, tokens, places, runs: Runs | None, adapters
) -> PagedCache:
    """Writes the keys and values of ``tokens`` [R, T] at ``places`` [R, T]; -1 is padding."""
    model = for_rows(model, adapters)
    pages = sequence_pages(tables, jnp.max(places, axis=1) + 1, cache.page, runs)
    return forward(model, cache, tokens, places, pages)[1]


def _decode(
    model: Transformer,
    cache: PagedCache,
    inputs: DecodeInput,
    *,
    config: EngineConfig,
    sampling,
    stop_ids,
    view_block,
):
    """Samples tokens of every active row in up to ``decode_steps`` steps. A row ends at a stop
    token, or when its budget is used.

    With texts to copy from each step guesses the next tokens of a row, runs them together with its
    last one, draws a token after each, and keeps those draws whose guesses before were right. Keys
    of wrong guesses stay in the cache: nobody sees them before they are written over, since the
    next step begins at the first of them.

    view_block: tokens of a block of the view; 0 to read keys on their pages.
    Returns (cache, tokens int32 [slots, dispatch_tokens], logprobs float32 [slots,
    dispatch_tokens], counts int32 [slots], choices: what ``Context.choices`` has for each token
    [slots, dispatch_tokens, ...], and with ``inputs.ways`` "alternatives" and "likely", the most
    likely tokens in place of each (``own_way.sample_own``), steps int32 [slots] in which each row
    gained tokens, drafted int32 [slots]: tokens that were guessed).
    """
    model = for_rows(model, inputs.adapters)
    if inputs.texts is None:
        config = config.without_drafts()
    views = {}
    layers = None
    if view_block:
        # The layers are cut out of their stack before the loop, since on CPU a slice is a copy. The
        # barrier keeps the compiler from moving the slices back into the loop.
        layers = jax.lax.optimization_barrier(model.unstacked())
        # The greatest number of tokens behind the shared prefix that any row will have at the end
        # of this dispatch: further blocks of the view stay empty.
        reach = jnp.max(
            jnp.where(inputs.active, inputs.places - inputs.rows.starts + inputs.budgets - 1, 0)
        )
        views = gather_pages(cache, inputs.rows, view_block, reach, inputs.places)

    num_rows = inputs.tokens.shape[0]
    noted_dtype = config.noted_dtype
    index = jnp.arange(1 + config.draft_tokens)
    row = jnp.arange(num_rows)[:, None]

    # with whom this shard exchanges tokens at every step
    together = () if model.config.moe is None else shared_by("experts")

    def goes_on(active):
        some = jnp.any(active)
        return jax.lax.pmax(some.astype(jnp.int32), together) > 0 if together else some

    def cond(carry):
        return (carry.step < config.decode_steps) & carry.goes_on

    def body(carry: _Decoding) -> _Decoding:
        guesses = jnp.zeros((num_rows, 0), jnp.int32)
        if config.draft_tokens:
            ends = config.draft_room + inputs.places + carry.counts + 1
            guess = functools.partial(
                propose,
                count=config.draft_tokens,
                own=config.draft_room,
                context="context" in config.draft_sources,
            )
            guesses = per_shard(guess, ((), ()), ())(carry.texts, ends)
        # the last token of every row, and guesses at those behind it that it may still sample
        tokens = jnp.concatenate([carry.tokens[:, None], jnp.maximum(guesses, 0)], axis=1)
        left = inputs.budgets - carry.counts
        real = carry.active[:, None] & (index < left[:, None])
        real &= jnp.pad(guesses != NONE, ((0, 0), (1, 0)), constant_values=True)
        positions = (inputs.places + carry.counts)[:, None] + index
        places = jnp.where(real, positions, -1)
        hidden, cache, views, (picks, experts) = decode_tokens(
            *(model, *carry.held, inputs.rows, inputs.tables, tokens, places, layers, inputs.runs),
            note=noted_dtype is not None,
        )

        def each(x):
            """A value of each row for each of its tokens."""
            return jnp.repeat(x, len(index), axis=0)

        keys = (each(inputs.keys), each(inputs.groups), each(inputs.samples))
        uniforms = token_uniforms(*keys, positions.reshape(-1))
        # Every device of the axis tensor samples from all logits. The compiler would cut the
        # running sums of the cumulative distribution with exchanges that all devices of the mesh
        # have to join, and the shards of rows do not go through this loop together.
        logits = model.logits(hidden.reshape(num_rows * len(index), -1))
        alternatives = {}
        if inputs.ways is None:
            draw = per_shard(functools.partial(sample, config=sampling), ((), ()), ((), ()))
            drawn = draw(logits, uniforms)
        else:
            own = functools.partial(sample_own, config=sampling)
            draw = per_shard(own, ((), (), (), ()), ((), (), (), ()))
            first = carry.counts == 0
            *drawn, tokens_there, likely = draw(logits, uniforms, first, inputs.ways)
            alternatives = {"alternatives": tokens_there, "likely": likely}
        sampled, logprobs = (x.reshape(num_rows, -1) for x in drawn)
        # A draw counts if the guesses before it were right and none of them ended the message.
        right = sampled[:, :-1] == guesses
        if stop_ids:
            right &= ~stop_mask(sampled[:, :-1], stop_ids)
        right = jnp.pad(right, ((0, 0), (1, 0)), constant_values=True)
        taken = real & (jnp.cumprod(right, axis=1) > 0)
        gained = jnp.sum(taken, axis=1, dtype=jnp.int32)
        last = jnp.take_along_axis(sampled, jnp.maximum(gained - 1, 0)[:, None], axis=1)[:, 0]
        counts = carry.counts + gained
        active = carry.active & (counts < inputs.budgets)
        if stop_ids:
            active = active & ~stop_mask(last, stop_ids)

        def append(out, x, first=carry.counts):
            """``out`` with a value of each token that counts behind those of the steps before."""
            if not config.draft_tokens:
                keep = taken.reshape(num_rows, 1, *(1 for _ in x.shape[2:]))
                return out.at[:, carry.step].set(jnp.where(keep, x, 0)[:, 0])
            at = jnp.where(taken, first[:, None] + index, out.shape[1])
            return out.at[row, at].set(x, mode="drop")

        choices = carry.choices
        for name, found in alternatives.items():
            choices = choices | {name: append(choices[name], found[:, None])}
        if picks:
            found = jnp.stack([compact(x, most, noted_dtype) for x in picks], axis=2)
            choices = choices | {"blocks": append(choices["blocks"], found)}
        if experts:
            found = jnp.stack(experts, axis=2).astype(choices["experts"].dtype)
            choices = choices | {"experts": append(choices["experts"], found)}
        texts = carry.texts
        if config.draft_tokens:
            texts = append(texts, sampled, ends)
        return _Decoding(
            step=carry.step + 1,
            held=(cache, views),
            tokens=jnp.where(carry.active, last, carry.tokens),
            active=active,
            goes_on=goes_on(active),
            counts=counts,
            out_tokens=append(carry.out_tokens, sampled),
            out_logprobs=append(carry.out_logprobs, logprobs),
            choices=choices,
            texts=texts,
            steps=carry.steps + carry.active,
            drafted=carry.drafted + jnp.sum(real[:, 1:], axis=1, dtype=jnp.int32),
        )

    shape = (num_rows, config.dispatch_tokens)
    most = choosing(cache.methods)
    moe = model.config.moe
    choices = {}
    if noted_dtype is not None and moe is not None:
        noted = (*shape, model.config.num_layers - moe.first_dense, moe.active)
        choices["experts"] = jnp.zeros(noted, narrowest(moe.experts))
    if noted_dtype is not None and most is not None:
        layers_that_choose = sum(method.noted_picks() is not None for method in cache.methods)
        noted = (*shape, layers_that_choose, model.config.num_kv_heads, most)
        choices["blocks"] = jnp.zeros(noted, noted_dtype)
    if inputs.ways is not None:
        noted = (*shape, min(MOST_ALTERNATIVES, inputs.ways.biases.shape[-1]))
        choices["alternatives"] = jnp.zeros(noted, jnp.int32)
        choices["likely"] = jnp.zeros(noted, jnp.float32)
    nothing = jnp.zeros(num_rows, jnp.int32)
    start = _Decoding(
        step=jnp.int32(0),
        held=(cache, views),
        tokens=inputs.tokens,
        active=inputs.active,
        goes_on=goes_on(inputs.active),
        counts=nothing,
        out_tokens=jnp.zeros(shape, jnp.int32),
        out_logprobs=jnp.zeros(shape, jnp.float32),
        choices=choices,
        texts=inputs.texts,
        steps=nothing,
        drafted=nothing,
    )
    end = jax.lax.while_loop(cond, body, start)
    cache, views = end.held
    cache = put_pages_back(
        cache, views, inputs.rows, inputs.places, end.counts, config.dispatch_tokens
    )
    results = (end.out_tokens, end.out_logprobs, end.counts, end.choices, end.steps, end.drafted)
    return cache, *results


class _Decoding(NamedTuple):
    """State that a dispatch of the decoder carries from step to step."""

    step: jax.Array
    # The cache, and the pages that are laid side by side.
    held: tuple[PagedCache, dict[int, GatheredPages]]
    # Of every row: the last token, whether it goes on, and how many tokens it has sampled.
    tokens: jax.Array
    active: jax.Array
    counts: jax.Array
    # Whether any row goes on, here or in a shard that tokens are exchanged with.
    goes_on: jax.Array
    # What it has sampled.
    out_tokens: jax.Array
    out_logprobs: jax.Array
    choices: dict[str, jax.Array]
    # What drafts are copied from, with what it has sampled; None without drafts.
    texts: jax.Array | None
    # The steps in which it gained tokens, and the tokens that were guessed.
    steps: jax.Array
    drafted: jax.Array


def _read_pages(cache: PagedCache, pages) -> list[jax.Array]:
    """The content of pages [C], [C, ...] each; a page past the end reads as any other."""
    return [x.at[pages].get(mode="clip") for x in jax.tree.leaves(cache.layers)]


def _write_pages(cache: PagedCache, pages, content: list[jax.Array]) -> PagedCache:
    """Puts content [C, ...], as ``_read_pages`` gives it, onto pages [C]; a page past the end is
    not written.
    """
    leaves, tree = jax.tree.flatten(cache.layers)
    leaves = [x.at[pages].set(y, mode="drop") for x, y in zip(leaves, content, strict=True)]
    return dataclasses.replace(cache, layers=jax.tree.unflatten(tree, leaves))


class Engine:
    """The compiled programs and their caches' shapes; holds no arrays of its own.

    On an abstract mesh its programs can be traced, to see what they are for a device that is not
    here, and not run.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        config: EngineConfig,
        sampling: SamplingConfig,
        stop_ids: tuple[int, ...],
        mesh: Mesh | AbstractMesh,
    ):
        self.config, self.sampling, self.mesh = config, sampling, mesh
        self.shards = math.prod(mesh.shape[name] for name in SAMPLER_AXES)
        methods = model_config.attention * (model_config.num_layers // len(model_config.attention))
        if paged.page_size(methods, config.page) != config.page:
            raise ValueError(
                f"page={config.page} must be the block of attention={model_config.attention}"
            )
        self._model_config = model_config
        self.vocab = model_config.vocab_size
        self._rows = NamedSharding(mesh, P(SAMPLER_AXES))
        self._everywhere = NamedSharding(mesh, P())
        # pages are numbered within a shard of the rows, and every device has those of its own heads
        self._pages = NamedSharding(mesh, P(SAMPLER_AXES, "tensor"))
        on_cpu = mesh.abstract_mesh.abstract_device.platform == "cpu"
        self.viewed = config.decode == "view" or (config.decode is None and on_cpu)

        # an axis of one device has nothing to cut, for the compiler or for ``per_shard``
        manual = {*SAMPLER_AXES} | {name for name, size in mesh.shape.items() if size == 1}
        # With several processes, each needs everything that comes to the host, so those results are
        # replicated. With one process, every device keeps its part.
        several = isinstance(mesh, Mesh) and not self._rows.is_fully_addressable
        on_host = self._everywhere if several else None

        def sharded(function, arguments: str, donate: tuple[int, ...], out):
            """arguments: a letter each, "m" the model, "r" replicated, "d" split over the axes of
            rows. out: shardings of results, None for what the compiler chooses.
            """

            def program(*given):
                specs = {"r": P(), "d": P(SAMPLER_AXES)}
                mapped = jax.shard_map(
                    function,
                    mesh=mesh,
                    in_specs=tuple(
                        shard_specs(x, manual) if kind == "m" else specs[kind]
                        for kind, x in zip(arguments, given, strict=True)
                    ),
                    out_specs=P(SAMPLER_AXES),
                    axis_names=manual,
                    check_vma=False,
                )
                return mapped(*given)

            return jax.jit(program, donate_argnums=donate, out_shardings=out)

        self._prefill = sharded(_prefill, "mdddddd", (1,), self._pages)
        decode = functools.partial(
            _decode,
            config=config,
            sampling=sampling,
            stop_ids=stop_ids,
            view_block=config.view_block if self.viewed else 0,
        )
        self._decode = sharded(decode, "mdd", (1,), (self._pages, *(on_host,) * 6))
        self._copy = sharded(paged.copy_pages, "ddd", (0,), self._pages)
        self._read = sharded(_read_pages, "dd", (), on_host)
        self._write = sharded(_write_pages, "ddr", (0,), self._pages)

    def init(self) -> PagedCache:
        """A cache of zeros."""
        return self._run(jax.jit(self._zeros, out_shardings=self._pages))

    def cache_shape(self) -> PagedCache:
        """The shapes, dtypes and shardings of a cache."""
        return self._abstract(jax.eval_shape(self._zeros), self._pages)

    def _zeros(self) -> PagedCache:
        c = self.config
        sizes = dict(page=c.page, undone=c.undone)
        return model_cache(self._model_config, self.shards * c.pages, c.cache_dtype, **sizes)

    def put(self, x: np.ndarray) -> jax.Array:
        """A host array [shards * n, ...] on the devices, rows split over their axes."""
        return self._place(x, self._rows)

    def prefill(
        self,
        model: Transformer,
        cache: PagedCache,
        tables,
        tokens,
        places,
        runs: Runs | None,
        adapters: np.ndarray | None = None,
    ) -> PagedCache:
        """One prefill of shards * prefill_rows rows, or result_rows; pages are numbered within the
        shard.

        Donates the cache. adapters: as ``DecodeInput.adapters``, of these rows.
        """
        inputs = jax.tree.map(self.put, (tables, tokens, places, runs, adapters))
        return self._run(self._prefill, model, cache, *inputs)

    def decode(self, model: Transformer, cache: PagedCache, inputs: DecodeInput):
        """One dispatch of up to ``dispatch_tokens`` tokens per active row. Donates the cache. See
        ``_decode``.
        """
        return self._run(self._decode, model, cache, jax.tree.map(self.put, inputs))

    def copy_pages(self, cache: PagedCache, sources, targets) -> PagedCache:
        """Pages ``sources`` [shards * slots] copied onto ``targets``, past the end for none.
        Donates the cache.
        """
        return self._run(self._copy, cache, self.put(sources), self.put(targets))

    def read_pages(self, cache: PagedCache, pages) -> list[jax.Array]:
        """The content of pages [shards * n], on the devices. Each n is a program of its own."""
        return self._run(self._read, cache, self.put(pages))

    def write_pages(self, cache: PagedCache, pages, content: list) -> PagedCache:
        """Puts what one shard's pages held, here or on another engine, [n, ...] each, onto pages
        [shards * n]. Each n is a program of its own.

        Donates the cache.
        """
        content = [self._place(x, self._everywhere) for x in content]
        return self._run(self._write, cache, self.put(pages), content)

    def compiled(self, model: Transformer) -> dict[str, jax.stages.Compiled]:
        """The programs "prefill" and "decode" for a look at them; nothing is run."""
        return {name: traced.lower().compile() for name, traced in self.traced(model).items()}

    def traced(self, model: Transformer) -> dict[str, jax.stages.Traced]:
        """The programs "prefill" and "decode" before they are compiled, as of ``tracers``."""
        return {name: trace() for name, trace in self.tracers(model).items()}

    def tracers(self, model: Transformer) -> dict[str, Callable[[], jax.stages.Traced]]:
        """Functions that trace the programs "prefill" and "decode".

        model: abstract, or on the devices.
        """
        c = self.config
        rows = self.shards * c.prefill_rows
        cache = self.cache_shape()
        inputs = self._abstract(empty_input(c, self.shards), self._rows)
        runs = self._abstract(empty_runs(c, rows), self._rows)
        table, chunk = (
            jax.ShapeDtypeStruct((rows, size), jnp.int32, sharding=self._rows)
            for size in (c.table, c.prefill_tokens)
        )
        return {
            "prefill": functools.partial(
                self._run, self._prefill.trace, model, cache, table, chunk, chunk, runs, None
            ),
            "decode": functools.partial(self._run, self._decode.trace, model, cache, inputs),
        }

    @staticmethod
    def _abstract(arrays, sharding: NamedSharding):
        """The shapes and dtypes of arrays, with a sharding."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arrays
        )

    @staticmethod
    def _place(x, sharding: NamedSharding) -> jax.Array:
        if sharding.is_fully_addressable:
            return jax.device_put(x, sharding)
        # the same in every process
        return jax.make_array_from_callback(x.shape, sharding, lambda part: x[part])

    def _run(self, program, *arguments):
        with use_mesh(self.mesh):  # whichever one the caller has set
            return program(*arguments)
