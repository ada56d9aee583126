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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from attention.cache import paged
from attention.cache.paged import PagedCache
from attention.cache.tables import Runs, sequence_pages
from models.adapter_rows import for_rows
from models.model_config import ModelConfig
from models.paged import forward, model_cache
from models.sharding import SAMPLER_AXES, partition_spec, shard_specs, use_mesh
from models.transformer import Transformer
from models.unstacked import Unstacked, unstacked
from rl_code.rollout import decode_loop
from rl_code.rollout.decode_input import DecodeInput, empty_input, empty_runs
from rl_code.rollout.engine_config import EngineConfig
from rl_code.rollout.sampling import SamplingConfig


def _prefill(
    model: Unstacked, cache: PagedCache, tables, tokens, places, runs: Runs | None, adapters
) -> PagedCache:
    """Writes the keys and values of ``tokens`` [R, T] at ``places`` [R, T]; -1 is padding."""
    model = for_rows(model, adapters)
    pages = sequence_pages(tables, jnp.max(places, axis=1) + 1, cache.page, runs)
    return forward(model, cache, tokens, places, pages)[1]


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
        self.states = any(method.keeps_state for method in methods)
        if self.states and config.draft_tokens:
            raise ValueError(
                f"draft_tokens={config.draft_tokens}: a state cannot take guessed tokens back, and "
                f"attention={model_config.attention} has one; set draft_tokens=0"
            )
        multiple = math.lcm(*(method.chunk(config.page) for method in methods))
        if config.prefill_tokens % multiple:
            raise ValueError(
                f"prefill_tokens={config.prefill_tokens} must be a multiple of {multiple}: "
                f"pages of {config.page} tokens keep states behind chunks of so many"
            )
        self._model_config = model_config
        self.vocab = model_config.vocab_size
        self._rows = NamedSharding(mesh, P(SAMPLER_AXES))
        self._everywhere = NamedSharding(mesh, P())
        # pages are numbered within a shard of the rows, and every device has those of its own heads
        by_layer: Any = tuple(
            NamedSharding(mesh, P(SAMPLER_AXES, *partition_spec((method.page_heads,))))
            for method in methods
        )
        self._pages = PagedCache(by_layer, methods, config.page)
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
            decode_loop.decode,
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
        # the platform of the mesh has a say in them
        shapes = self._run(jax.eval_shape, self._zeros)
        return jax.tree.map(
            lambda own, of_layer: self._abstract(of_layer, own), self._pages, shapes
        )

    def _zeros(self) -> PagedCache:
        c = self.config
        sizes = dict(page=c.page, undone=c.undone)
        return model_cache(self._model_config, self.shards * c.pages, c.cache_dtype, **sizes)

    def put(self, x: np.ndarray) -> jax.Array:
        """A host array [shards * n, ...] on the devices, rows split over their axes."""
        return self._place(x, self._rows)

    def own(self, model: Transformer) -> Unstacked:
        """The form of a model that the programs compute with, made once for a version of the
        weights. All processes of the mesh call alike.

        model: on the devices, whole along ``fsdp``; or abstract.
        """
        return unstacked(model, self.mesh)

    def prefill(
        self,
        model: Unstacked,
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

    def decode(self, model: Unstacked, cache: PagedCache, inputs: DecodeInput):
        """One dispatch of up to ``dispatch_tokens`` tokens per active row. Donates the cache. See
        ``decode_loop.decode``.
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

        model: abstract, or on the devices; they are those of ``own`` of it.
        """
        c = self.config
        model = self.own(model)
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
