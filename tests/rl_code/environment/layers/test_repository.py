"""A repository's layer holds the commit, its ancestors, and nothing of what came later."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from rl_code.environment.layers import repository
from rl_code.environment.layers.store import LayerStore
from rl_code.environment.sandbox.pool import SandboxConfig, SandboxPool
from rl_code.types import Layer, World

_ENVIRONMENT = {
    **{key: os.environ[key] for key in ("PATH",)},
    **{f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
    "GIT_CONFIG_GLOBAL": os.devnull,
    "HOME": os.devnull,
}


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), *arguments],
        capture_output=True,
        encoding="latin-1",
        check=True,
        env=_ENVIRONMENT,
    ).stdout.strip()


def commit(folder: Path, files: dict[str, str], message: str) -> str:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", message)
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A repository whose future (FUTURE in every text) is kept in all the ways that git has."""
    folder = tmp_path_factory.mktemp("source")
    git(folder, "init", "-q", "-b", "trunk")
    commit(folder, {"a.py": "x = 1\n", "tests/t.py": "old\n"}, "first")
    git(folder, "checkout", "-q", "-b", "side")
    commit(folder, {"side.py": "merged\n"}, "side work")
    git(folder, "checkout", "-q", "trunk")
    commit(folder, {"a.py": "x = 2\n"}, "second")
    git(folder, "merge", "-q", "--no-ff", "-m", "merged", "side")
    (folder / "run.sh").write_text("echo hi\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "link").symlink_to("a.py")
    base = commit(folder, {}, "base")
    fix = commit(folder, {"a.py": "x = 3  # FUTURE\n"}, "FUTURE fix")
    git(folder, "tag", "-a", "v2", "-m", "FUTURE tag")
    git(folder, "notes", "add", "-m", "FUTURE note", base)
    git(folder, "update-ref", "refs/remotes/origin/HEAD", fix)
    git(folder, "replace", base, fix)
    (folder / "a.py").write_text("FUTURE stash\n")
    git(folder, "stash", "-q")
    subprocess.run(
        ["git", "-C", str(folder), "hash-object", "-w", "--stdin"],
        input=b"FUTURE dangling",
        check=True,
        env=_ENVIRONMENT,
        capture_output=True,
    )
    (folder / "FUTURE.txt").write_text("FUTURE untracked")
    return folder, base


def test_nothing_of_the_future_is_in_any_object_or_file(source, tmp_path):
    folder, base = source
    store = LayerStore(tmp_path)
    tree = tmp_path / store.tree(repository.build(store, folder, base))
    plain = ["--no-replace-objects"]
    there = git(tree, "cat-file", "--batch-all-objects", "--batch-check").splitlines()
    ancestors = git(folder, *plain, "rev-list", "--objects", base).splitlines()
    assert {line.split()[0] for line in there} == {line.split()[0] for line in ancestors}
    for line in there:
        name, kind, _ = line.split()
        assert "FUTURE" not in git(tree, "cat-file", kind, name)
    assert git(tree, "for-each-ref", "--format=%(refname) %(objectname)") == (
        f"refs/heads/main {base}"
    )
    assert git(tree, "fsck", "--strict", "--unreachable", "--full") == ""
    for path in tree.rglob("*"):
        assert "FUTURE" not in path.name
        if path.is_file() and not path.is_symlink():
            assert b"FUTURE" not in path.read_bytes() and fixed(folder) not in path.read_bytes()
    assert not (tree / ".git/logs").exists() and not (tree / ".git/ORIG_HEAD").exists()
    log = git(tree, "log", "--format=%s")
    assert log == git(folder, *plain, "log", "--format=%s", base) and "side work" in log


def fixed(folder: Path) -> bytes:
    """The name of the commit after the base."""
    return git(folder, "rev-parse", "trunk").encode()


def test_the_same_commit_is_the_same_layer_wherever_it_comes_from(source, tmp_path):
    folder, base = source
    copy = tmp_path / "copy"
    git(tmp_path, "clone", "-q", "--bare", str(folder), str(copy))
    git(copy, "gc", "-q", "--aggressive")
    one, two = LayerStore(tmp_path / "one"), LayerStore(tmp_path / "two")
    assert repository.build(one, folder, base) == repository.build(two, copy, base)
    with pytest.raises(repository.RepositoryError, match="rev-parse"):
        repository.build(one, folder, "nothing")


def test_an_agent_can_read_the_history_and_commit(source, tmp_path):
    folder, base = source
    store = LayerStore(tmp_path)
    world = World((Layer(repository.build(store, folder, base), "/workspace"),))
    config = SandboxConfig(workers=1, memory_mb=256, layers=str(tmp_path))
    script = (
        "git status --short; git blame -s a.py | cut -c 1-8; git log --all --oneline | wc -l; "
        "./run.sh; cat link; echo y >> a.py; git commit -qam mine; git log -1 --format=%s"
    )
    with SandboxPool(config) as pool, pool.open({}, world) as sandbox:
        done = sandbox.run(["bash", "-c", script], timeout_s=60)
        second = git(folder, "--no-replace-objects", "rev-list", "--grep=second", base)
        assert done.stdout.split() == [second[:8], "5", "hi", "x", "=", "2", "mine"], done
        snapshot = sandbox.snapshot()
        assert ".git/refs/heads/main" in snapshot and "link" not in snapshot


def test_a_repository_cannot_name_a_program_that_fetches_what_it_lacks(tmp_path):
    mark, folder = tmp_path / "mark", tmp_path / "given"
    repository.git(tmp_path, "init", "--quiet", str(folder))
    for key, value in {
        "core.repositoryFormatVersion": "1",
        "extensions.partialClone": "other",
        "remote.other.promisor": "true",
        "remote.other.url": f"ext::touch {mark}",
        "protocol.ext.allow": "always",
    }.items():
        repository.git(folder, "config", key, value)
    with pytest.raises(repository.RepositoryError):
        repository.git(folder, "rev-parse", "--verify", f"{'12' * 20}^{{commit}}")
    assert not mark.exists()
