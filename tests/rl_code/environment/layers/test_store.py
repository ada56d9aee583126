"""Layers are named by their content, built once, and whole or not there."""

from __future__ import annotations

import concurrent.futures
import importlib
import multiprocessing
import os
import py_compile
import sys
from pathlib import Path

import pytest

from rl_code.environment.layers import folder
from rl_code.environment.layers.store import LayerStore, MissingLayer


@pytest.fixture
def store(tmp_path):
    return LayerStore(tmp_path / "store")


def fill(tree: Path, text: str = "text\n") -> None:
    (tree / "a").mkdir(mode=0o500)
    (tree / "b.txt").write_text(text)
    (tree / "link").symlink_to("/nowhere")
    os.mkfifo(tree / "pipe")
    (tree / "b.txt").chmod(0o4555)


def _build(place: str) -> str:
    """In a process of its own."""
    return LayerStore(place).build({"kind": "test"}, fill)


def test_processes_that_build_one_layer_at_once_get_the_same(tmp_path):
    fresh = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(3, fresh) as pool:
        found = set(pool.map(_build, [str(tmp_path)] * 12))
    (digest,) = found
    store = LayerStore(tmp_path)
    store.verify(digest)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [digest.removeprefix("sha256:"), "made"]
    )
    manifest = store.manifest(digest)
    assert (manifest.entries, manifest.bytes) == (3, 5)  # neither pipe nor device
    tree = tmp_path / store.tree(digest)
    assert (tree / "b.txt").stat().st_mode & 0o7777 == 0o755
    assert (tree / "a").stat().st_mode & 0o7777 == 0o700
    assert (tree / "b.txt").stat().st_mtime == 0


def test_equal_content_has_one_address_and_other_content_another(store):
    one = store.build({"made": 1}, fill)
    assert store.build({"made": 2}, fill) == one
    assert store.build({"made": 3}, lambda tree: fill(tree, "other")) != one

    def never(tree: Path) -> None:
        raise AssertionError("a recipe is carried out once")

    assert store.build({"made": 1}, never) == one


@pytest.mark.parametrize("kept", [True, False], ids=["of its source", "of another source"])
def test_a_compiled_module_is_read_if_it_belongs_to_its_source(store, monkeypatch, kept):
    """What was compiled says another number than its source, so that it shows which one is read."""

    def fill(tree: Path) -> None:
        module = tree / "compiled_in_a_layer.py"
        module.write_text("NUMBER = 1\n")
        os.utime(module, (12345, 12345))
        py_compile.compile(str(module))
        module.write_text("NUMBER = 2\n")
        os.utime(module, (12345, 12345 if kept else 12346))

    digest = store.build({"kind": "test"}, fill)
    monkeypatch.syspath_prepend(str(store.folder / store.tree(digest)))
    assert importlib.import_module("compiled_in_a_layer").NUMBER == (1 if kept else 2)
    del sys.modules["compiled_in_a_layer"]


def test_a_build_that_fails_leaves_nothing(store):
    def full(tree: Path) -> None:
        fill(tree)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        store.build({"kind": "test"}, full)
    assert [path.name for path in store.folder.iterdir()] == ["made"]


def test_a_layer_that_is_missing_or_was_changed_is_named(store):
    digest = store.build({"kind": "test"}, fill)
    (store.folder / store.tree(digest) / "b.txt").write_text("changed")
    with pytest.raises(ValueError, match=f"{digest} in .* was changed"):
        store.verify(digest)
    with pytest.raises(MissingLayer, match="build it there again"):
        store.tree("sha256:" + "1" * 64)
    with pytest.raises(NotADirectoryError, match="is no folder"):
        folder.build(store, store.folder / "nothing")
