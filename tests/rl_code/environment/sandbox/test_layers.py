"""A world of layers: shared, never changed, invisible from inside; snapshots are differences."""

from __future__ import annotations

import dataclasses
import random

import pytest

from rl_code.environment.layers import folder
from rl_code.environment.layers.store import LayerStore
from rl_code.environment.sandbox.pool import (
    File,
    SandboxConfig,
    SandboxFault,
    SandboxPool,
    SnapshotError,
)
from rl_code.environment.tools.api import execute, find_tools
from rl_code.environment.tools.workspace import Workspace
from rl_code.types import Layer, Limits, ToolCall, World

LISTING = r"""
find . -mindepth 1 -name .git -prune -o -mindepth 1 -printf '%P %y %m %l ' \
  -type f -exec sha256sum {} ';' -o -mindepth 1 -printf '\n' | sort
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return LayerStore(tmp_path_factory.mktemp("layers"))


@pytest.fixture(scope="module")
def sandboxes(store):
    config = SandboxConfig(
        workers=1, memory_mb=256, workspace_mb=4, cpu_s=20, layers=str(store.folder)
    )
    with SandboxPool(config) as pool:
        yield pool


@pytest.fixture(scope="module")
def world(store, tmp_path_factory):
    """A lower layer of a small repository, and an upper one that changes a file of it."""
    lower = tmp_path_factory.mktemp("lower")
    for path in ("pkg/a.py", "pkg/b.py", "pkg/deep/er/c.py", "docs/x.txt", "docs/y.txt", "top.txt"):
        (lower / path).parent.mkdir(parents=True, exist_ok=True)
        (lower / path).write_text(f"# {path}\n")
    (lower / "solution.py").write_text("def f(x):\n    return x\n")
    (lower / "tool").write_text("#!/bin/sh\necho ran\n")
    (lower / "tool").chmod(0o755)
    (lower / "link").symlink_to("docs")
    (lower / "empty").mkdir()
    upper = tmp_path_factory.mktemp("upper")
    (upper / "top.txt").write_text("of the upper layer\n")
    layers = [folder.build(store, path) for path in (lower, upper)]
    return World(tuple(Layer(digest, "/workspace") for digest in layers))


def shell(sandbox, script: str) -> str:
    done = sandbox.run(["bash", "-c", script], timeout_s=60)
    assert done.exit_code == 0, done
    return done.stdout


def test_layers_are_shared_and_never_changed(sandboxes, store, world):
    with sandboxes.open({"new.txt": "new\n"}, world) as one, sandboxes.open({}, world) as two:
        assert shell(one, "cat top.txt new.txt docs/x.txt; ./tool") == (
            "of the upper layer\nnew\n# docs/x.txt\nran\n"
        )
        shell(one, "echo more >> docs/x.txt; rm -r pkg; chmod 700 docs")
        assert shell(two, "cat link/x.txt; ls") == (
            "# docs/x.txt\ndocs\nempty\nlink\npkg\nsolution.py\ntool\ntop.txt\n"
        )
        assert two.snapshot() == {}
    for layer in world.layers:
        store.verify(layer.digest)


def test_a_snapshot_is_the_difference_from_the_layers(sandboxes, world):
    with sandboxes.open({}, world) as sandbox:
        script = r"""
rm -r pkg/deep; rm docs/x.txt; mkdir docs/x.txt; echo in > docs/x.txt/f     # a folder for a file
rm -r docs/y.txt link; echo > link; ln -s /nowhere docs/y.txt               # files for links
rm -r empty; mkdir -p empty/inner; printf '\377' > bin; chmod 600 tool; touch pkg/t; rm pkg/t
"""
        shell(sandbox, script)
        assert sandbox.snapshot() == {
            "bin": File(b"\xff"),
            "docs/x.txt": File(b"", 0o755, "replaced"),
            "docs/x.txt/f": "in\n",
            "docs/y.txt": File(b"/nowhere", 0o777, "link"),
            "empty": File(b"", 0o755, "replaced"),
            "empty/inner": File(b"", 0o755, "folder"),
            "link": "\n",
            "pkg/deep": File(b"", 0o755, "deleted"),
            "tool": File(b"#!/bin/sh\necho ran\n", 0o600),
        }


def random_script(numbers: random.Random) -> str:
    """Commands that change a tree at random places; some of them fail."""
    places = ["pkg", "pkg/a.py", "pkg/deep", "pkg/deep/er", "docs", "docs/x.txt", "link", "empty",
              "tool", "n", "n/m", "pkg/new", "docs/x.txt/z", "top.txt"]  # fmt: skip
    commands = []
    for number in range(12):
        one, two = numbers.sample(places, 2)
        commands.append(
            numbers.choice(
                [
                    f"rm -rf {one}",
                    f"mkdir -p {one}",
                    f"rm -rf {one}; echo {number} > {one}",
                    f"mv {one} {two}",
                    f"ln -sfn {two} {one}",
                    f"cp -r {one} {two}",
                    f"echo {number} >> {one}",
                    f"chmod 6{numbers.randrange(8)}{numbers.randrange(8)} {one}/*.py",
                ]
            )
        )
    return "\n".join(f"({command}) 2> /dev/null" for command in commands) + "\ntrue"


@pytest.mark.quick(first=6)
@pytest.mark.parametrize("seed", range(80))
def test_a_fork_has_the_same_tree_and_goes_its_own_way(sandboxes, world, seed):
    numbers = random.Random(seed)
    with sandboxes.open({}, world) as sandbox:
        shell(sandbox, random_script(numbers))
        with sandboxes.fork(sandbox) as fork:
            before = shell(sandbox, LISTING)
            assert shell(fork, LISTING) == before
            assert fork.snapshot() == sandbox.snapshot()
            shell(fork, random_script(numbers) + "; echo fork > only_here")
            assert shell(sandbox, LISTING) == before


def test_neither_the_store_nor_the_changes_can_be_reached(sandboxes, world):
    look = "ls /opt/layers /opt/changes 2>&1; ls /proc/self/fd; grep Cap /proc/self/status"
    for sandbox in (sandboxes.open({}), sandboxes.open({}, world)):
        with sandbox:
            done = sandbox.run(["bash", "-c", look], timeout_s=60).stdout
            assert "/opt/layers': Permission denied" in done and "\n0\n1\n2\n3\nCap" in done
            assert done.count("0000000000000000") == 4 and "CapBnd:\t0000000000240000" in done
            covered = "/opt/changes': Permission denied" in done
            assert covered or (sandbox.world is None and "/opt/changes:\n" in done)
            for attack in ("umount -l /opt/layers", "chmod 777 /opt/layers", "umount /workspace"):
                assert sandbox.run(["bash", "-c", attack], timeout_s=60).exit_code


def test_the_changes_have_a_limit(sandboxes, world):
    with sandboxes.open({}, world) as sandbox:
        script = "head -c 3000000 /dev/zero > a; head -c 3000000 /dev/zero > b"
        done = sandbox.run(["bash", "-c", script], timeout_s=60)
        assert done.exit_code and "No space left" in done.stdout
        shell(sandbox, "rm a b; echo x > b")
        assert sandbox.snapshot() == {"b": "x\n"}


def test_snapshots_cannot_lead_out_through_links(sandboxes, world):
    for files in (
        {"link/x": "x"},  # a link of a layer
        {"d": File(b"/tmp", kind="link"), "d/x": "x"},
        {"d/e": File(b"..", kind="link"), "d/e/f/x": File(b"", kind="deleted")},
    ):
        with pytest.raises(ValueError, match="do not go into a workspace"):
            sandboxes.open(files, world)
    with sandboxes.open({}, world) as sandbox:
        shell(sandbox, "mkfifo pipe")
        with pytest.raises(SnapshotError, match="pipe is neither"):
            sandboxes.fork(sandbox)


def test_what_the_host_lacks_is_its_fault(sandboxes, store, world):
    missing = World((Layer("sha256:" + "0" * 64, "/workspace"),))
    with pytest.raises(SandboxFault, match="is not in the layer store"):
        sandboxes.open({}, missing)
    with (
        SandboxPool(SandboxConfig(workers=1)) as without,
        pytest.raises(SandboxFault, match=r"sandbox\.layers names no layer store"),
    ):
        without.open({}, world)


def test_a_task_with_a_world_is_worked_on_and_forked(task, sandboxes, world):
    """Tools read the layers, a fork goes on from the files as they stand."""
    task = dataclasses.replace(task, files={}, world=world)
    limits = Limits(turns=4, tokens=600, turn_tokens=200, test_runs=3, command_s=60.0)
    workspace = Workspace(task, sandboxes, limits, verbose=False)

    def use(place: Workspace, tool: str, **arguments: str):
        return execute(ToolCall(tool, arguments), find_tools(), place)

    try:
        assert "return x" in use(workspace, "read_file", path="solution.py").content
        assert not use(workspace, "run_tests").ok or workspace.tests_failed
        fork = workspace.fork()
        text = "def f(x):\n    return [2 * y for y in x]\n"
        assert use(fork, "write_file", path="solution.py", content=text).ok
        use(fork, "run_tests")
        assert not fork.tests_failed
        assert fork.snapshot() == {"solution.py": text} and workspace.snapshot() == {}
        fork.close()
    finally:
        workspace.close()


@pytest.mark.parametrize(
    ("layers", "workspace", "why"),
    [
        ((("sha256:" + "0" * 63, "/workspace"),), "/workspace", "64 hexadecimal digits"),
        ((("sha256:" + "0" * 64, "workspace"),), "/workspace", "absolute path"),
        ((("sha256:" + "0" * 64, "/etc"),), "/workspace", "must be at /, /opt/packages"),
        ((("sha256:" + "0" * 64, "/repo"),), "/repo", "without a layer at /"),
        ((("sha256:" + "0" * 64, "/"),), "/proc", "a folder of its own"),
    ],
)
def test_impossible_worlds_are_refused(layers, workspace, why):
    with pytest.raises(ValueError, match=why):
        World(tuple(Layer(*layer) for layer in layers), workspace)
