"""Tiers of documents: what is used least moves down, and files that are not what was written are
noticed.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from attention.cache.document_store import Budgets, DocumentStore
from attention.cache.documents import DocumentKV, Fingerprint, StaleDocument, fingerprint_tokens
from attention.cache.storage import CorruptedFile, load

# bytes of a document: two pages, main and compressed, bfloat16
ONE = 2 * 2 * 1 * 4 * 2 * 2 + 2 * 2 * 1 * 2 * 2 * 2
ENOUGH = 100 * ONE


def tokens(number: int) -> list[int]:
    return [number] * 7


def document(number: int, weights: str = "w") -> DocumentKV:
    values = np.random.default_rng(number)

    def pair(length):
        return tuple(
            jnp.asarray(values.normal(size=(2, 1, length, 2)), jnp.bfloat16) for _ in range(2)
        )

    layers = ({"main": pair(4), "compressed": pair(2)},)
    return DocumentKV(layers, 7, 4, Fingerprint(fingerprint_tokens(tokens(number)), weights))


def same(found: DocumentKV, number: int) -> bool:
    expected = document(number)
    equal = (found.fingerprint, found.length, found.page) == (
        expected.fingerprint,
        expected.length,
        expected.page,
    )
    for name in ("main", "compressed"):
        pairs = zip(found.layers[0][name], expected.layers[0][name], strict=True)
        equal &= all(
            np.array_equal(np.asarray(x), np.asarray(y)) and x.dtype == y.dtype for x, y in pairs
        )
    return equal and set(found.layers[0]) == {"main", "compressed"}


def store(
    path: Path, device=ENOUGH, host=ENOUGH, disk=ENOUGH, encode=None, weights="w"
) -> DocumentStore:
    return DocumentStore(path, weights, Budgets(device, host, disk), encode)


def tiers(documents: DocumentStore, count: int) -> str:
    """d, h, f or - for every document."""
    letters = {"device": "d", "host": "h", "disk": "f", None: "-"}
    return "".join(letters[documents.where(tokens(number))] for number in range(count))


def chunk(path: Path) -> Path:
    """A file of a document's first array."""
    return next(file for file in sorted(path.rglob("*")) if file.is_file() and "/c/" in str(file))


def test_the_least_recently_used_move_down(tmp_path):
    documents = store(tmp_path, 2 * ONE, ONE, 2 * ONE)
    for number in range(3):
        documents.put(document(number))
    assert tiers(documents, 3) == "hdd"
    documents.get(tokens(1))
    documents.put(document(3))
    assert tiers(documents, 4) == "fdhd"
    assert same(documents.get(tokens(0)), 0)  # from disk, where it stays besides
    assert tiers(documents, 4) == "dhfd"
    for number in (4, 5, 6):
        documents.put(document(number))
    assert tiers(documents, 7) == "f--" + "fhdd"
    metrics = documents.metrics()
    assert metrics["documents/device_bytes"] == metrics["documents/disk_bytes"] == 2 * ONE
    assert metrics["documents/host_bytes"] == ONE and metrics["documents/host_count"] == 1
    assert metrics["documents/hits_device"] == metrics["documents/hits_disk"] == 1
    assert metrics["documents/evicted_disk"] == 3 and metrics["documents/read_bytes"] == ONE
    assert same(documents.get(tokens(3)), 3) and same(documents.get(tokens(4)), 4)


def test_documents_outlive_the_store(tmp_path):
    documents = store(tmp_path)
    documents.put(document(0), "disk")
    documents.put(document(1), "host")
    documents.evict("host")
    again = store(tmp_path)
    assert tiers(again, 2) == "ff" and again.metrics()["documents/disk_bytes"] == 2 * ONE
    assert same(again.get(tokens(0)), 0) and same(again.get(tokens(1)), 1)


def test_arrays_of_another_document_are_noticed(tmp_path):
    """Copies within a shape have right checksums of their own, and are another array's."""
    documents = store(tmp_path)
    for number in range(2):
        documents.put(document(number), "disk")
    one, other = (tmp_path / fingerprint_tokens(tokens(number)) for number in range(2))
    kept = {path.name: path for path in other.iterdir() if path.is_dir()}
    for name, source in {"0.main.k": "0.main.k", "0.main.v": "0.main.k"}.items():
        shutil.copytree(kept[source], one / name, dirs_exist_ok=True)
        with pytest.raises(CorruptedFile, match=rf"{name} is not what was written"):
            load(one)
        documents.put(document(0), "disk")
    # within one document too
    shutil.copytree(one / "0.main.k", one / "0.main.v", dirs_exist_ok=True)
    with pytest.raises(CorruptedFile, match=r"0\.main\.v is not what was written"):
        load(one)
    assert same(documents.get(tokens(1)), 1)


def flip(path):
    data = bytearray(chunk(path).read_bytes())
    data[5] ^= 1
    chunk(path).write_bytes(data)


def test_corrupted_files_are_noticed_and_encoded_again(tmp_path):
    damages = [
        flip,
        lambda path: chunk(path).write_bytes(chunk(path).read_bytes()[:-6]),
        lambda path: chunk(path).unlink(),
        lambda path: (path / "meta.json").unlink(),
        lambda path: (path / "meta.json").write_text(
            (path / "meta.json").read_text().replace('"length": 7', '"length": 8')
        ),
    ]
    for number, damage in enumerate(damages):
        asked = []
        documents = store(
            tmp_path, encode=lambda ids, asked=asked: asked.append(ids) or document(ids[0])
        )
        documents.put(document(number), "disk")
        damage(tmp_path / fingerprint_tokens(tokens(number)))
        assert same(documents.get(tokens(number)), number) and asked == [tokens(number)]
        assert (
            documents.metrics()["documents/corrupted"]
            == documents.metrics()["documents/encoded"]
            == 1
        )
        assert documents.where(tokens(number)) == "device"
    documents = store(tmp_path)
    documents.put(document(9), "disk")
    flip(tmp_path / fingerprint_tokens(tokens(9)))
    with pytest.raises(CorruptedFile, match=fingerprint_tokens(tokens(9))):
        documents.get(tokens(9))
    documents.put(document(9), "disk")
    (tmp_path / fingerprint_tokens(tokens(9)) / "meta.json").write_text("")
    # one that cannot be read is not counted in
    assert store(tmp_path).metrics()["documents/corrupted"] == 1


def test_whatever_happens_a_document_is_found_as_it_was_encoded(tmp_path):
    """Puts, gets, evictions, new stores, damage and documents of other weights in any order."""
    rng = np.random.default_rng(0)
    sizes = dict(device=2 * ONE, host=2 * ONE, disk=3 * ONE)

    def open_store(weights="w"):
        return store(
            tmp_path, **sizes, weights=weights, encode=lambda ids: document(ids[0], weights)
        )

    documents = open_store()
    for _ in range(150):
        number = int(rng.integers(8))
        match rng.choice(["put", "get", "get", "get", "evict", "open", "damage", "other"]):
            case "put":
                documents.put(document(number), rng.choice(["device", "host", "disk"]))
            case "get":
                assert same(documents.get(tokens(number)), number)
                assert documents.where(tokens(number)) == "device"
            case "evict":
                tier = rng.choice(["device", "host", "disk"])
                if documents.metrics()[f"documents/{tier}_count"]:
                    documents.evict(tier)
            case "open":
                documents = open_store()
            case "damage":
                files = [path for path in tmp_path.rglob("*") if path.is_file()]
                if files:
                    path = files[rng.integers(len(files))]
                    content = bytearray(path.read_bytes())
                    content[rng.integers(len(content))] ^= 1 << int(rng.integers(8))
                    path.write_bytes(content)
            case "other":
                open_store("other").put(document(number, "other"), "disk")
                documents = open_store()
        metrics = documents.metrics()
        for tier, most in sizes.items():
            assert metrics[f"documents/{tier}_bytes"] <= most
        assert {path.name for path in tmp_path.iterdir()} == set(documents._disk)
        assert not documents._memory["device"].keys() & documents._memory["host"].keys()


def test_every_changed_bit_of_the_shapes_is_noticed(tmp_path):
    documents = store(tmp_path)
    documents.put(document(0), "disk")
    path = tmp_path / fingerprint_tokens(tokens(0)) / "0.main.k" / "zarr.json"
    original = path.read_bytes()
    # a shape of another length gives an empty array or one that is cut
    shape = original.index(b'"shape":') + len(b'"shape":')
    for at in range(shape, original.index(b"]", shape)):
        for bit in range(8):
            changed = bytearray(original)
            changed[at] ^= 1 << bit
            path.write_bytes(changed)
            with pytest.raises(CorruptedFile, match=r"0\.main\.k is not what was"):
                load(path.parents[1])
    path.write_bytes(original)
    assert same(documents.get(tokens(0)), 0)


def test_what_is_not_a_documents_is_left_as_it_is(tmp_path):
    documents = store(tmp_path)
    documents.put(document(0), "disk")
    name = fingerprint_tokens(tokens(1))
    others = [tmp_path / "notes" / "a.txt", tmp_path / "stray.txt", tmp_path / name / "mine.txt"]
    others += [tmp_path / fingerprint_tokens(tokens(2)), tmp_path / f".{name}" / "meta.json"]
    for path in others:
        path.parent.mkdir(exist_ok=True)
        path.write_text("kept")
    # folders of documents: one never completed, one that cannot be read
    draft = tmp_path / f".{fingerprint_tokens(tokens(3))}.draft"
    damaged = tmp_path / fingerprint_tokens(tokens(4))
    for path in (draft, damaged):
        (path / "0.main.k").mkdir(parents=True)
    again = store(tmp_path)
    assert [path.read_text() for path in others] == ["kept"] * len(others)
    assert not draft.exists() and not damaged.exists()
    assert tiers(again, 5) == "f----" and same(again.get(tokens(0)), 0)
    assert again.metrics()["documents/corrupted"] == 1


def test_a_store_keeps_to_its_budget_on_disk_from_the_start(tmp_path):
    documents = store(tmp_path)
    for number in range(4):
        documents.put(document(number), "disk")
        path = tmp_path / fingerprint_tokens(tokens(number))
        os.utime(path, (number, number))
    documents.get(tokens(0))  # the most recently used now
    again = store(tmp_path, disk=2 * ONE)
    assert tiers(again, 4) == "f--f" and again.metrics()["documents/disk_bytes"] == 2 * ONE
    assert len(list(tmp_path.iterdir())) == 2
    # documents of other weights leave first, however recently they were used
    other = store(tmp_path, weights="new", disk=2 * ONE)
    other.put(document(1, "new"), "disk")
    os.utime(tmp_path / fingerprint_tokens(tokens(1)), (1, 1))
    assert tiers(store(tmp_path, weights="new", disk=ONE), 4) == "-f--"


@pytest.mark.parametrize("how", ["weights", "damage"])
def test_a_document_that_is_put_again_replaces_its_file_when_it_leaves_memory(tmp_path, how):
    weights = "older" if how == "weights" else "w"
    store(tmp_path, weights=weights).put(document(0, weights), "disk")
    documents = store(tmp_path, host=0)
    if how == "damage":
        flip(tmp_path / fingerprint_tokens(tokens(0)))
    documents.put(document(0))
    documents.evict("device")
    assert tiers(documents, 1) == "f"
    assert same(documents.get(tokens(0)), 0)


def test_a_file_of_other_weights_is_encoded_again_if_that_is_possible(tmp_path):
    store(tmp_path, weights="older").put(document(0, "older"), "disk")
    documents = store(tmp_path, encode=lambda ids: document(ids[0]))
    assert same(documents.get(tokens(0)), 0)
    assert documents.metrics()["documents/encoded"] == 1
    documents.evict("device")
    documents.evict("host")
    assert same(store(tmp_path).get(tokens(0)), 0)


def test_documents_of_other_weights_or_tokens_are_refused(tmp_path):
    documents = store(tmp_path, encode=lambda ids: document(1))
    with pytest.raises(StaleDocument, match=r"weights='new'.*expected.*weights='w'"):
        documents.put(document(0, "new"))
    with pytest.raises(
        StaleDocument, match=f"{fingerprint_tokens(tokens(1))}.*{fingerprint_tokens(tokens(0))}"
    ):
        documents.get(tokens(0))  # the callback encodes something else
    documents.put(document(0), "disk")
    with pytest.raises(StaleDocument, match=r"weights='w'.*expected.*weights='new'"):
        store(tmp_path, weights="new").get(tokens(0))
    path = tmp_path / fingerprint_tokens(tokens(0))
    path.rename(tmp_path / fingerprint_tokens(tokens(2)))
    with pytest.raises(StaleDocument, match=fingerprint_tokens(tokens(2))):
        store(tmp_path).get(tokens(2))


def test_errors_name_the_values(tmp_path):
    documents = store(tmp_path, ONE - 1)
    with pytest.raises(
        ValueError,
        match=f"a document of {ONE} bytes does not fit in tier='device' of {ONE - 1} bytes",
    ):
        documents.put(document(0))
    with pytest.raises(KeyError, match=fingerprint_tokens(tokens(0))):
        documents.get(tokens(0))
    with pytest.raises(ValueError, match="tier='host' holds no document"):
        documents.evict("host")
