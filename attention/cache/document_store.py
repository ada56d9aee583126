"""Encoded documents, found by their tokens, on the device, in host memory and on disk.

Each of the three tiers has a budget. Where it is exceeded, the least recently used documents move
to the next tier.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

from attention.cache.documents import DocumentKV, Fingerprint, check_fingerprint, fingerprint_tokens
from attention.cache.storage import CorruptedFile, load, load_meta, nbytes, save, to_device, to_host

TIERS = ("device", "host", "disk")


@dataclasses.dataclass(frozen=True)
class Budgets:
    """Bytes of each tier."""

    device: int
    host: int
    disk: int


class DocumentStore:
    """Documents encoded by one set of weights.

    A document is on the device or in host memory, never in both. It may be on disk besides.

    directory: holds one folder for each document. The next store finds them again.
    weights: fingerprint of the weights that every document must have been encoded by.
    encode: encodes a document that is in no tier, or whose files are corrupted.
    """

    def __init__(
        self,
        directory: Path,
        weights: str,
        budgets: Budgets,
        encode: Callable[[Sequence[int]], DocumentKV] | None = None,
    ):
        self.weights = weights
        self._directory = Path(directory)
        self._budgets = budgets
        self._encode = encode
        self._memory: dict[str, OrderedDict[str, DocumentKV]] = {
            "device": OrderedDict(),
            "host": OrderedDict(),
        }
        self._disk: OrderedDict[str, int] = OrderedDict()  # bytes
        self._counts: Counter[str] = Counter()
        self._directory.mkdir(parents=True, exist_ok=True)
        # names that begin with a dot are drafts of files that were never completed
        for path in sorted(self._directory.glob("[!.]*")):
            try:
                self._disk[path.name] = load_meta(path)["bytes"]
            except CorruptedFile:
                self._counts["corrupted"] += 1
                shutil.rmtree(path)

    def put(self, document: DocumentKV, tier: str = "device") -> None:
        """Keeps a document in a tier. Raises StaleDocument for one of other weights."""
        check_fingerprint(
            document.fingerprint, Fingerprint(document.fingerprint.tokens, self.weights)
        )
        budget = getattr(self._budgets, tier)
        if document.nbytes > budget:
            raise ValueError(
                f"a document of {document.nbytes} bytes does not fit in {tier=} of {budget} bytes"
            )
        key = document.fingerprint.tokens
        # it must not be in both tiers of memory
        for held in self._memory.values():
            held.pop(key, None)
        if tier == "disk":
            self._remove_file(key)
            self._write(document)
        else:
            move = to_device if tier == "device" else to_host
            self._memory[tier][key] = dataclasses.replace(document, layers=move(document.layers))
        self._fit()

    def get(self, tokens: Sequence[int]) -> DocumentKV:
        """The document of these tokens. It is then on the device, as the most recently used.

        Raises KeyError if it is in no tier, and CorruptedFile if its files are corrupted, unless it
        can be encoded again. Raises StaleDocument if the one on disk has other weights or tokens.
        """
        key = fingerprint_tokens(tokens)
        tier = next((tier for tier in TIERS if key in self._tier(tier)), None)
        self._counts[f"hits_{tier}" if tier else "misses"] += 1
        if tier == "device":
            self._memory["device"].move_to_end(key)
            return self._memory["device"][key]
        if tier == "host":
            document = self._memory["host"][key]
        else:
            document = (
                self._read(key, tokens)
                if tier
                else self._encoded(tokens, KeyError(f"no document {key}"))
            )
        self.put(document)
        return self._memory["device"][key]

    def evict(self, tier: str) -> None:
        """Moves a tier's least recently used document to the next tier; deletes it from disk."""
        if not self._tier(tier):
            raise ValueError(f"{tier=} holds no document")
        self._counts[f"evicted_{tier}"] += 1
        if tier == "disk":
            self._remove_file(next(iter(self._disk)))
            return
        key, document = self._memory[tier].popitem(last=False)
        if tier == "device" and document.nbytes <= self._budgets.host:
            self._memory["host"][key] = dataclasses.replace(
                document, layers=to_host(document.layers)
            )
        elif key in self._disk:
            # its files are there already, and stay valid: a document never changes
            self._disk.move_to_end(key)
        elif document.nbytes <= self._budgets.disk:
            self._write(document)
        self._fit()

    def where(self, tokens: Sequence[int]) -> str | None:
        """The uppermost tier that holds the document."""
        key = fingerprint_tokens(tokens)
        return next((tier for tier in TIERS if key in self._tier(tier)), None)

    def metrics(self) -> dict[str, int]:
        """Bytes and documents of every tier, and counts since the start."""
        names = ("misses", "encoded", "corrupted", "read_bytes", "written_bytes")
        names += tuple(f"{what}_{tier}" for what in ("hits", "evicted") for tier in TIERS)
        values = {name: self._counts[name] for name in names}
        for tier in TIERS:
            values |= {f"{tier}_bytes": self._bytes(tier), f"{tier}_count": len(self._tier(tier))}
        return {f"documents/{name}": value for name, value in values.items()}

    def _tier(self, tier: str) -> OrderedDict:
        return self._disk if tier == "disk" else self._memory[tier]

    def _bytes(self, tier: str) -> int:
        if tier == "disk":
            return sum(self._disk.values())
        return sum(document.nbytes for document in self._memory[tier].values())

    def _fit(self) -> None:
        # from the top down, since what leaves a tier goes to the one below
        for tier in TIERS:
            while self._bytes(tier) > getattr(self._budgets, tier):
                self.evict(tier)

    def _encoded(self, tokens: Sequence[int], error: Exception) -> DocumentKV:
        if self._encode is None:
            raise error
        document = self._encode(tokens)
        check_fingerprint(
            document.fingerprint, Fingerprint(fingerprint_tokens(tokens), self.weights)
        )
        self._counts["encoded"] += 1
        return document

    def _write(self, document: DocumentKV) -> None:
        arrays = {
            f"{index}.{part}.{which}": array
            for index, layer in enumerate(document.layers)
            for part, pair in layer.items()
            for which, array in zip("kv", pair, strict=True)
        }
        key = document.fingerprint.tokens
        size = nbytes(arrays)
        meta = dict(
            bytes=size,
            length=document.length,
            page=document.page,
            layers=len(document.layers),
            **vars(document.fingerprint),
        )
        save(self._directory / key, arrays, meta)
        self._disk[key] = size
        self._counts["written_bytes"] += size

    def _read(self, key: str, tokens: Sequence[int]) -> DocumentKV:
        try:
            arrays, meta = load(self._directory / key)
        except CorruptedFile as error:
            self._counts["corrupted"] += 1
            self._remove_file(key)
            return self._encoded(tokens, error)
        found = Fingerprint(meta["tokens"], meta["weights"])
        check_fingerprint(found, Fingerprint(key, self.weights))
        self._disk.move_to_end(key)
        self._counts["read_bytes"] += nbytes(arrays)

        layers: list[dict] = [{} for _ in range(meta["layers"])]
        for name in arrays:
            index, part, _ = name.split(".")
            layers[int(index)][part] = tuple(arrays[f"{index}.{part}.{which}"] for which in "kv")
        return DocumentKV(tuple(layers), meta["length"], meta["page"], found)

    def _remove_file(self, key: str) -> None:
        if self._disk.pop(key, None) is not None:
            shutil.rmtree(self._directory / key, ignore_errors=True)
