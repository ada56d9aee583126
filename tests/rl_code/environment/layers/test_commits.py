"""A made-up repository has the names of commits that git gives, and its layer holds them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_code.environment.layers import commits, repository
from rl_code.environment.layers.commits import Commit
from rl_code.environment.layers.store import LayerStore
from rl_code.environment.sandbox.config import SandboxConfig
from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.types import Layer, World

# a file comes, one goes, names and texts beyond ASCII, a file that is empty or does not end a line
MADE = (
    Commit("first", {"b.py": "x = 1\n", "a.py": "", "a-b.py": "y"}),
    Commit("second: ä", {"b.py": "x = 2\n", "ä.py": "é = 'ü'\n"}),
    Commit("third", {"b.py": "x = 2\ny = 3\n", "ä.py": "é = 'ü'\n"}),
)


def said(tree: Path, *arguments: str) -> list[str]:
    return repository.git(tree, "-c", "core.quotePath=false", *arguments).decode().splitlines()


def test_the_layer_has_the_commits_by_the_names_that_follow_from_their_texts(tmp_path):
    store = LayerStore(tmp_path)
    digest = commits.build(store, MADE)
    tree = store.folder / store.tree(digest)
    names = commits.names(MADE)
    assert said(tree, "log", "--reverse", "--format=%H %s") == [
        f"{name} {commit.subject}" for name, commit in zip(names, MADE, strict=True)
    ]
    for name, commit in zip(names, MADE, strict=True):
        paths = said(tree, "ls-tree", "-r", "--name-only", name)
        shown = {path: repository.git(tree, "show", f"{name}:{path}").decode() for path in paths}
        assert shown == commit.files
    assert {path.name for path in tree.iterdir()} == {".git", *MADE[-1].files}
    # of fewer commits it is another repository
    assert commits.names(MADE[:2]) == names[:2] and commits.build(store, MADE[:2]) != digest


def test_a_layer_is_built_once_and_the_same_everywhere(tmp_path, monkeypatch):
    digest = commits.build(LayerStore(tmp_path / "one"), MADE)
    assert commits.build(LayerStore(tmp_path / "two"), MADE) == digest
    with monkeypatch.context() as patch:
        patch.setattr(repository, "git", None)
        assert commits.build(LayerStore(tmp_path / "one"), MADE) == digest


def test_files_in_folders_are_refused():
    with pytest.raises(ValueError, match=r"lie in no folder, not \['a/b.py'\]"):
        Commit("first", {"a/b.py": "", "c.py": ""})
    with pytest.raises(ValueError, match="needs files"):
        Commit("first", {})


def test_a_store_may_be_named_from_the_folder_that_one_is_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with SandboxPool(SandboxConfig(layers="layers")) as pool:
        world = World((Layer(commits.build(pool.layers, MADE), "/workspace"),))
        sandbox = pool.open({}, world)
        done = sandbox.run(["git", "-c", "safe.directory=*", "log", "--format=%s"], timeout_s=10)
        assert done.stdout.split("\n")[0] == "third"
        sandbox.close()
