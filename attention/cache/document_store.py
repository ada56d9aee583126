"""Encoded documents, found by their tokens, on the device, in host memory and on disk.

Each of the three tiers has a budget. Where it is exceeded, the least recently used documents move
to the next tier.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

from attention.cache.documents import (
    DocumentKV,
    Fingerprint,
    StaleDocument,
    check_fingerprint,
    fingerprint_tokens,
)
from attention.cache.storage import (
    META,
    CorruptedFile,
    load,
    load_meta,
    nbytes,
    save,
    to_device,
    to_host,
)

TIERS = ("device", "host", "disk")
# Names of a document's folder: the hash of its tokens, and a draft of that.
_FOLDER = re.compile(r"[0-9a-f]{32}|\.[0-9a-f]{32}\.draft")
# Names of the folders in it, one for each array: layer, name in the layer, keys or values.
_ARRAY = re.compile(r"[0-9]+\.\w+\.[kv]")


@dataclasses.dataclass(frozen=True)
class Budgets:
    """Bytes of each tier."""

    device: int
    host: int
    disk: int


class DocumentStore:
    """Documents encoded by one set of weights.

    A document is on the device or in host memory, never in both. It may be on disk besides.

    directory: holds one folder for each document. The next store finds them again, and lets go of
      those that its budget has no room for. It belongs to one store at a time. What else lies in it
      is left as it is.
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
        # Documents in memory that were put after the one of the same tokens on disk, which may
        # differ: of other weights, or corrupted.
        self._newer: set[str] = set()
        self._counts: Counter[str] = Counter()
        self._directory.mkdir(parents=True, exist_ok=True)
        self._find_files()
        self._fit()

    def put(self, document: DocumentKV, tier: str = "device") -> None:
        """Keeps a document in a tier. Raises StaleDocument for one of other weights."""
        check_fingerprint(
            document.fingerprint, Fingerprint(document.fingerprint.tokens, self.weights)
        )
        self._check_size(document, tier)
        key = document.fingerprint.tokens
        if tier == "disk":
            self._forget(key)
            self._remove_file(key)
            self._write(document)
            self._fit()
        else:
            if key in self._disk:
                self._newer.add(key)
            self._hold(document, tier)

    def get(self, tokens: Sequence[int]) -> DocumentKV:
        """The document of these tokens. It is then on the device, as the most recently used.

        Raises KeyError if it is in no tier, CorruptedFile if its files are corrupted, and
        StaleDocument if the one on disk has other weights or tokens; none of them if it can be
        encoded again. Raises ValueError if it does not fit on the device.
        """
        key = fingerprint_tokens(tokens)
        tier = next((tier for tier in TIERS if key in self._tier(tier)), None)
        self._counts[f"hits_{tier}" if tier else "misses"] += 1
        if tier == "device":
            self._memory["device"].move_to_end(key)
            return self._memory["device"][key]
        if tier == "host":
            document = self._memory["host"][key]
        elif tier == "disk":
            document = self._read(key, tokens)
        else:
            document = self._encoded(tokens, KeyError(f"no document {key}"))
        self._check_size(document, "device")
        self._hold(document, "device")
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
        elif key in self._disk and key not in self._newer:
            # its files are there already, and stay valid: a document never changes
            self._use_file(key)
        else:
            # a file of the same tokens, if there is one, is not of this document
            self._remove_file(key)
            if document.nbytes <= self._budgets.disk:
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

    def _check_size(self, document: DocumentKV, tier: str) -> None:
        budget = getattr(self._budgets, tier)
        if document.nbytes > budget:
            raise ValueError(
                f"a document of {document.nbytes} bytes does not fit in {tier=} of {budget} bytes"
            )

    def _hold(self, document: DocumentKV, tier: str) -> None:
        """Keeps a document in a tier of memory, as the most recently used."""
        key = document.fingerprint.tokens
        move = to_device if tier == "device" else to_host
        moved = dataclasses.replace(document, layers=move(document.layers))
        self._forget(key)
        self._memory[tier][key] = moved
        self._fit()

    def _forget(self, key: str) -> None:
        """Removes a document from memory: it must not be in both tiers of it."""
        for held in self._memory.values():
            held.pop(key, None)

    def _find_files(self) -> None:
        """Finds the documents that earlier stores left on disk, and removes drafts and documents
        that cannot be read.

        Documents of other weights are the first to leave, then those not used for longest.
        """
        found = []
        for path in filter(_is_documents, self._directory.iterdir()):
            if path.name.startswith("."):  # a draft that was never completed
                shutil.rmtree(path, ignore_errors=True)
                continue
            try:
                meta = load_meta(path)
            except CorruptedFile:
                self._counts["corrupted"] += 1
                shutil.rmtree(path, ignore_errors=True)
                continue
            used = path.stat().st_mtime_ns
            found.append((meta["weights"] == self.weights, used, path.name, meta["bytes"]))
        for _, _, name, size in sorted(found):
            self._disk[name] = size

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
        self._newer.discard(key)
        self._counts["written_bytes"] += size

    def _read(self, key: str, tokens: Sequence[int]) -> DocumentKV:
        try:
            arrays, meta = load(self._directory / key)
            found = Fingerprint(meta["tokens"], meta["weights"])
            check_fingerprint(found, Fingerprint(key, self.weights))
        except CorruptedFile as error:
            self._counts["corrupted"] += 1
            self._remove_file(key)
            return self._encoded(tokens, error)
        except StaleDocument as error:
            document = self._encoded(tokens, error)
            self._remove_file(key)
            return document
        self._use_file(key)
        self._counts["read_bytes"] += nbytes(arrays)

        layers: list[dict] = [{} for _ in range(meta["layers"])]
        for name in arrays:
            index, part, _ = name.split(".")
            layers[int(index)][part] = tuple(arrays[f"{index}.{part}.{which}"] for which in "kv")
        return DocumentKV(tuple(layers), meta["length"], meta["page"], found)

    def _use_file(self, key: str) -> None:
        """Notes that a file is the most recently used, for this store and for the next one."""
        self._disk.move_to_end(key)
        with contextlib.suppress(OSError):  # a file that is gone is noticed when it is read
            os.utime(self._directory / key)

    def _remove_file(self, key: str) -> None:
        self._newer.discard(key)
        if self._disk.pop(key, None) is not None:
            shutil.rmtree(self._directory / key, ignore_errors=True)


def _is_documents(path: Path) -> bool:
    """True if a folder is a document's, by its name and by the names of all that lies in it."""
    if not _FOLDER.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
        return False
    inside = {entry.name for entry in path.iterdir()}
    return bool(inside) and all(name == META or _ARRAY.fullmatch(name) for name in inside)
