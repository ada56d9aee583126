"""Attention over a history that does not fit on the device, by a method that chooses pages before
it reads them (NSA). Only the blocks that queries choose travel to the device.

Three things stay on the device: the compressed keys and values of all tokens, by which blocks are
chosen; the window's keys and values of the last tokens; and as many blocks as the budget holds, of
which the least recently chosen leaves first. Every block is in host memory or on disk once it is
complete.

A layer's step runs in two programs. Between them the host learns which blocks were chosen, and
sends those that are missing. Choices change little from step to step and from layer to layer. While
a layer computes, two sets of blocks are therefore sent ahead to the next layer: those that it chose
in its last step, and those that the current layer has just chosen.

A history of documents that do not see each other need not pass through the model here: ``load``
takes their keys and values as ``documents.encode_document`` makes them. The tokens that follow are
the tail, which sees all documents.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from attention.cache.documents import DocumentKV, StaleDocument
from attention.cache.host_blocks import HostBlocks
from attention.cache.paged import PagedCache, zeros
from attention.cache.storage import nbytes, to_device, to_device_together
from attention.cache.tier_programs import Programs, TierRows, place, take
from attention.methods.method import Keys, LayerPages, Method, PageShape, Pair, Parameters, Rotate
from pallas_kernels.tokens import TAIL

# A block of one layer: (row, number in the row).
Block = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class TierConfig:
    """Sizes of a cache in tiers."""

    layers: int
    # Sequences side by side.
    rows: int
    # Most blocks of a sequence.
    pages: int
    # Most tokens of a row in a step.
    chunk: int
    kv_heads: int
    head_dim: int
    dtype: str
    # Budgets of all layers together.
    device_bytes: int
    host_bytes: int
    # Most blocks on their way to the device before it is known whether they will be chosen.
    prefetch: int = 8
    # Most blocks that travel together.
    batch: int = 16
    # Threads that move blocks.
    workers: int = 2


class TieredCache:
    """The caches of all layers, which must have the same method, one that chooses pages.

    directory: for the blocks on disk. rotate: how keys are rotated, as for ``paged.write``.
    """

    def __init__(
        self,
        method: Method,
        config: TierConfig,
        directory: Path,
        rotate: Rotate,
    ):
        self.method, self.config = method, config
        self.page = method.block_size()
        # Pages of a row's ring: as many as a chunk's windows and unfinished stretches can reach
        # back over, wherever the chunk begins in a page.
        span = method.recent_tokens() + config.chunk - 1
        self._ring = min(config.pages, (span + self.page - 2) // self.page + 1)
        shapes = jax.eval_shape(lambda: self._arrays(1))
        block = nbytes(shapes["main"])
        # what stays on the device besides blocks in slots: compressed keys and windows, and blocks
        # that have arrived but are not in a slot yet
        fixed = (nbytes(shapes) - block) * config.layers + (config.prefetch + config.batch) * block
        # the tables of slots of every layer, and the table of documents
        fixed += 4 * config.rows * config.pages * (config.layers + 1)
        self.slots = (config.device_bytes - fixed) // (block * config.layers)
        if self.slots < 1:
            raise ValueError(
                f"device_bytes={config.device_bytes} hold no block: {fixed} go to compressed keys, "
                "windows, tables, "
                f"prefetch={config.prefetch} and batch={config.batch} blocks, a block of all "
                f"{config.layers} layers "
                f"takes {block * config.layers}"
            )
        self.device_bytes = fixed + self.slots * block * config.layers
        self._caches = [
            PagedCache((self._arrays(self.slots),), (method,), self.page, True) for _ in self._range
        ]
        # For each layer: its free slots,
        self._free = [list(range(self.slots)) for _ in self._range]
        # the slot of each resident block, the least recently chosen first,
        self._resident: list[OrderedDict[Block, int]] = [OrderedDict() for _ in self._range]
        # the same as a table, -1 for none,
        self._slots = [np.full((config.rows, config.pages), -1, np.int32) for _ in self._range]
        # that table on the device, None when it has changed since,
        self._sent_slots: list[jax.Array | None] = [None for _ in self._range]
        # the blocks whose copy on the host is up to date,
        self._saved: list[set[Block]] = [set() for _ in self._range]
        # all blocks that were written so far,
        self._known: list[set[Block]] = [set() for _ in self._range]
        # the blocks on their way to the device,
        self._coming: list[dict[Block, Future]] = [{} for _ in self._range]
        # and the blocks that were chosen in the last step.
        self._chosen: list[list[Block]] = [[] for _ in self._range]
        # Tokens of each row.
        self._lengths = np.zeros(config.rows, np.int32)
        # The document of every block, and that table on the device, None when it has changed.
        self._documents = np.full((config.rows, config.pages), TAIL, np.int32)
        self._sent_documents: jax.Array | None = None
        # The weights that encoded the documents of each row.
        self._weights: list[str | None] = [None] * config.rows
        self._host = HostBlocks(directory, config.host_bytes, config.workers)
        self._counts: Counter[str] = Counter()
        self._programs = Programs(rotate, self._ring, self.page)
        self._move_nothing()

    @property
    def _range(self) -> range:
        return range(self.config.layers)

    def step(
        self,
        layer: int,
        q: Float[Array, "B T N H"],
        new: Keys,
        places: np.ndarray,
        inputs: Float[Array, "B T N parts"] | None,
        parameters: Parameters,
    ) -> Float[Array, "B T N H"]:
        """Writes a chunk into a layer and attends, as ``paged.write`` and ``paged.attend``.

        q, new: rotated. places: int32 [B, T], the same for every layer before the next chunk.
        parameters: those of the layer's method.

        If the queries together choose more blocks than fit on the device, they are taken in several
        parts. Raises ValueError when the blocks of a single query, or those that are written to, do
        not fit, and CorruptedFile or OSError when a block cannot be read.

        The last chunk may be given again, to all layers, as when a read has failed: what a chunk
        writes does not destroy what it was computed from.
        """
        if places.shape[1] > self.config.chunk:
            raise ValueError(
                f"{places.shape[1]} tokens in a step, at most chunk={self.config.chunk}"
            )
        self._lengths = np.maximum(self._lengths, places.max(axis=1) + 1)
        rows, at = np.nonzero(places >= 0)
        # the blocks that the new tokens lie in, each once, which must be on the device to be
        # written to
        written = list(
            dict.fromkeys(zip(rows.tolist(), (places[rows, at] // self.page).tolist(), strict=True))
        )
        self._bring(layer, written)
        seen = self._rows(layer, places)
        cache, compressed, picks = self._programs.first(
            self._caches[layer], seen, q, new, parameters
        )
        self._caches[layer] = cache
        self._known[layer].update(written)
        # the host's copies of these blocks, if there are any, are out of date now
        self._saved[layer].difference_update(written)
        # ``compressed`` only gives the shape: every query's result is replaced in one of the parts
        out, chosen = compressed, {}
        for queries, blocks in self._parts(np.asarray(picks)):
            # The blocks of the next part may be put into slots that this part still reads. They are
            # donated, so jax waits for those who read them.
            self._bring(layer, blocks)
            chosen |= dict.fromkeys(blocks)
            parts = (q, compressed, picks, inputs, out, queries)
            out = self._programs.second(self._caches[layer], self._rows(layer, places), *parts)
        self._drop_unchosen(layer)
        # a block that is full does not change any more: it is saved now, so that it can leave later
        # without being waited for
        complete = [key for key in written if (key[1] + 1) * self.page <= self._lengths[key[0]]]
        self._save(layer, (key for key in complete if key in self._resident[layer]))
        self._chosen[layer] = list(chosen)
        self._send_ahead((layer + 1) % self.config.layers, self._chosen[layer])
        return out

    def _parts(self, picks: np.ndarray) -> Iterator[tuple[np.ndarray, list[Block]]]:
        """Cuts the queries into parts whose chosen blocks fit on the device together.

        Gives (which queries, bool [B, T], the blocks that they chose) for each part.
        """
        queries = np.zeros(picks.shape[:2], bool)
        blocks = {}
        for row, at in np.ndindex(*queries.shape):
            own = {(row, int(block)): None for block in np.unique(picks[row, at]) if block >= 0}
            if queries.any() and len(blocks | own) > self.slots:
                yield queries.copy(), list(blocks)
                queries[:] = False
                blocks = {}
            queries[row, at] = True
            blocks = blocks | own
        yield queries, list(blocks)

    def load(self, row: int, document: DocumentKV) -> None:
        """Puts a document behind those that a row holds.

        Its keys are rotated for its place there. Its blocks go to host memory and disk, none to the
        device. Returns when they are there.

        Raises ValueError if the document does not fill whole blocks, does not fit in the row, or
        would follow tokens that are in no document. Raises StaleDocument if it was encoded by other
        weights than those before it.
        """
        page = self.page
        first, rest = divmod(int(self._lengths[row]), self.page)
        count = document.num_pages
        weights = document.fingerprint.weights
        if (
            document.page != page
            or document.length != count * page
            or len(document.layers) != self.config.layers
        ):
            raise ValueError(
                f"a document of {document.length} tokens in {len(document.layers)} layers with "
                f"page={document.page} "
                f"does not fill whole blocks of {page} in {self.config.layers} layers"
            )
        if first + count > self.config.pages:
            raise ValueError(
                f"{count} blocks after {first} do not fit in pages={self.config.pages}"
            )
        if rest or (first and self._documents[row, first - 1] == TAIL):
            raise ValueError(
                f"{row=} has {self._lengths[row]} tokens, of which the last are in no document"
            )
        if self._weights[row] not in (None, weights):
            raise StaleDocument(
                f"the document has {weights=}, those before it have {self._weights[row]}"
            )
        blocks = [(row, first + number) for number in range(count)]
        for layer, pages in enumerate(document.layers):
            self._caches[layer], main = self._programs.load(self._caches[layer], row, first, pages)
            self._host.write([(layer, *block) for block in blocks], main).result()
            self._known[layer].update(blocks)
            self._saved[layer].update(blocks)
        # The row has the document once all its blocks are kept: a write that fails leaves the row
        # as it was.
        self._weights[row] = weights
        self._documents[row, first : first + count] = 1 + (
            self._documents[row, first - 1] if first else 0
        )
        self._lengths[row] += document.length
        self._sent_documents = None

    def flush(self) -> None:
        """Waits until the disk has what belongs there; frees the memory of the system's copies."""
        self._host.flush()

    def reset(self, row: int) -> None:
        """Forgets a row's sequence, for another one."""
        self._lengths[row], self._documents[row], self._weights[row] = 0, TAIL, None
        self._sent_documents = None
        for layer in self._range:
            mine = {key for key in self._known[layer] if key[0] == row}
            for key in mine & set(self._resident[layer]):
                self._leave(layer, key)
            sent = [self._coming[layer].pop(key) for key in mine & set(self._coming[layer])]
            concurrent.futures.wait(sent)  # whether they arrived is of no interest
            self._known[layer] -= mine
            self._saved[layer] -= mine
            self._chosen[layer] = [key for key in self._chosen[layer] if key not in mine]
            self._host.forget({(layer, *key) for key in mine})
            self._caches[layer] = self._programs.clear(self._caches[layer], row)

    def close(self) -> None:
        """Ends the threads; raises what went wrong in them."""
        self._host.close()

    def metrics(self) -> dict[str, int]:
        """Bytes on the device and bytes moved; counts of needed blocks and of those sent in vain.

        A needed block was present, prefetched (on its way), or missing.
        """
        names = ("present", "prefetched", "missing", "sent_in_vain")
        counts = {name: self._counts[name] for name in names}
        values = {"device_bytes": self.device_bytes, **counts, **self._host.metrics()}
        return {f"tiers/{name}": value for name, value in values.items()}

    def _arrays(self, slots: int) -> LayerPages:
        """One layer's arrays, with room for ``slots`` blocks."""
        c = self.config
        counts = {"chosen": slots, "recent": c.rows * self._ring, "all": c.rows * c.pages}

        def of(count: int) -> LayerPages:
            shape = PageShape(count, c.kv_heads, self.page, c.head_dim, c.dtype, rotated=True)
            return self.method.pages(shape)

        shapes = {name: of(counts[kind])[name] for name, kind in self.method.tiers().items()}
        # Rings within a page get room for the whole page. A key then never overwrites an earlier
        # one that its own chunk was computed from, so that a chunk can be given again.
        for name, kind in self.method.tiers().items():
            if kind == "recent":
                shapes[name] = jax.tree.map(self._whole_page, shapes[name])
        return zeros(shapes)

    def _whole_page(self, shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        pages, heads, _, size = shape.shape
        return jax.ShapeDtypeStruct((pages, heads, self.page, size), shape.dtype)

    def _rows(self, layer: int, places: np.ndarray) -> TierRows:
        # A table is sent again only when it has changed. Programs run asynchronously and may still
        # read what they were given, so they get copies of arrays that change here. ``jnp.array``
        # makes none on CPU: it takes the memory of a numpy array where that is aligned to 64 bytes.
        if self._sent_slots[layer] is None:
            self._sent_slots[layer] = jnp.array(self._slots[layer].copy())
        if self._sent_documents is None:
            self._sent_documents = jnp.array(self._documents.copy())
        return TierRows(
            self._sent_slots[layer], self._lengths.copy(), self._sent_documents, places.copy()
        )

    def _bring(self, layer: int, needed: list[Block]) -> None:
        """Makes blocks resident, as the last ones to leave."""
        if len(needed) > self.slots:
            raise ValueError(
                f"a step needs {len(needed)} blocks of layer {layer}, slots={self.slots} fit in "
                f"device_bytes={self.config.device_bytes}"
            )
        resident = self._resident[layer]
        coming = self._coming[layer]
        missing = [key for key in needed if key not in resident]
        for key in needed:
            if key in resident:
                resident.move_to_end(key)
        self._counts["present"] += len(needed) - len(missing)
        old = [key for key in missing if key in self._known[layer]]
        self._counts["prefetched"] += sum(key in coming for key in old)
        self._counts["missing"] += sum(key not in coming for key in old)
        ahead = {key: coming.pop(key) for key in old if key in coming}
        self._make_room(layer, len(missing), set(needed))
        # A block counts as resident only once it is in its slot. If a read fails, those that were
        # not read are still missing, and the next step reads them.
        for part in itertools.batched((key for key in old if key not in ahead), self.config.batch):
            blocks = self._host.read([(layer, *key) for key in part])
            self._place(
                layer, part, to_device_together(blocks, self.config.batch), self.config.batch
            )
        # Blocks on their way are put in place last, so that they travel while the others are read.
        # Parts are filled up with repeated blocks, so that ``place`` is compiled for one size only.
        for part in itertools.batched(ahead, max(1, self.config.prefetch)):
            blocks = [ahead[key].result() for key in part]
            more = [blocks[0]] * (self.config.prefetch - len(part))
            self._place(layer, part, blocks + more, self.config.prefetch)
        # blocks that nothing was written to yet have nothing to be read
        self._enter(layer, (key for key in missing if key not in self._known[layer]))

    def _enter(self, layer: int, keys: Iterable[Block]) -> None:
        """Gives blocks a slot, as the last ones to leave."""
        for key in keys:
            self._resident[layer][key] = self._slots[layer][key] = self._free[layer].pop()
            self._sent_slots[layer] = None

    def _place(self, layer: int, keys: Sequence[Block], parts: Sequence[Pair], size: int) -> None:
        """Puts blocks that have arrived on the device into free slots.

        parts: ``size`` blocks; those beyond the number of keys only fill up.
        """
        # slot number ``self.slots`` is past the end: what fills up is dropped
        slots = np.full(size, self.slots, np.int32)
        slots[: len(keys)] = self._free[layer][: -len(keys) - 1 : -1]  # as ``_enter`` takes them
        cache = self._caches[layer]
        main = place(cache.layers[0]["main"], slots, parts)
        self._caches[layer] = dataclasses.replace(
            cache, layers=({**cache.layers[0], "main": main},)
        )
        self._enter(layer, keys)

    def _make_room(self, layer: int, count: int, keep: set[Block]) -> None:
        count = max(0, count - len(self._free[layer]))
        leaving = list(
            itertools.islice((key for key in self._resident[layer] if key not in keep), count)
        )
        self._save(layer, leaving)
        for key in leaving:
            self._leave(layer, key)

    def _move_nothing(self) -> None:
        """Compiles the programs that move blocks, so that no later step has to wait for that."""
        taken = take(self._caches[0].layers[0]["main"], np.zeros(self.config.batch, np.int32))
        none = [tuple(np.asarray(x[0]) for x in taken)]
        self._place(0, [], to_device_together(none, self.config.batch), self.config.batch)
        if self.config.prefetch:
            self._place(0, [], to_device(none) * self.config.prefetch, self.config.prefetch)

    def _leave(self, layer: int, key: Block) -> None:
        self._free[layer].append(self._resident[layer].pop(key))
        self._slots[layer][key] = -1
        self._sent_slots[layer] = None

    def _save(self, layer: int, keys: Iterable[Block]) -> None:
        """Sends resident blocks to the host unless it has them."""
        unsaved = [key for key in keys if key not in self._saved[layer]]
        self._saved[layer].update(unsaved)
        for part in itertools.batched(unsaved, self.config.batch):
            slots = np.zeros(self.config.batch, np.int32)
            slots[: len(part)] = [self._resident[layer][key] for key in part]
            self._host.write(
                [(layer, *key) for key in part], take(self._caches[layer].layers[0]["main"], slots)
            )

    def _send_ahead(self, layer: int, chosen: list[Block]) -> None:
        """Starts moving the blocks that a layer is likely to choose in its next step."""
        room = self.config.prefetch - sum(len(coming) for coming in self._coming)
        for key in dict.fromkeys([*self._chosen[layer], *chosen]):
            wanted = (
                key in self._known[layer]
                and key not in self._resident[layer]
                and key not in self._coming[layer]
            )
            if wanted and room > 0:
                room -= 1
                self._coming[layer][key] = self._host.send((layer, *key))

    def _drop_unchosen(self, layer: int) -> None:
        sent = [coming for coming in self._coming[layer].values() if not coming.cancel()]
        self._coming[layer].clear()
        # What is on its way counts towards the budget until it is dropped. Whether it arrived is of
        # no interest: a block that cannot be read is an error for the step that needs it.
        concurrent.futures.wait(sent)
        self._counts["sent_in_vain"] += len(sent)
