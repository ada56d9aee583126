"""A snapshot holds every file as it is, or says which file it cannot hold."""

from __future__ import annotations

import dataclasses

import pytest

from rl_code.environment.grader import grade
from rl_code.environment.sandbox.pool import File, SandboxConfig, SandboxPool, SnapshotError
from rl_code.environment.sandbox.snapshot import texts
from rl_code.environment.tools.api import execute, find_tools
from rl_code.environment.tools.workspace import Workspace
from rl_code.types import Case, Limits, Tests, ToolCall

CONFIG = SandboxConfig(
    workers=1,
    memory_mb=256,
    processes=16,
    workspace_mb=8,
    cpu_s=20,
    output_bytes=4000,
    snapshot_mb=6,
    snapshot_files=3000,
)


@pytest.fixture(scope="module")
def sandboxes():
    with SandboxPool(CONFIG) as pool:
        yield pool


@pytest.fixture
def sandbox(sandboxes):
    with sandboxes.open({"a.txt": "text é\n"}) as sandbox:
        yield sandbox


def shell(sandbox, script: str) -> str:
    done = sandbox.run(["bash", "-c", script], timeout_s=60)
    assert done.exit_code == 0, done
    return done.stdout


def test_binaries_links_and_rights_come_through(sandboxes, sandbox):
    script = r"""
printf '\377\000x' > d.bin; ln -s a.txt link; ln -s /nowhere/at/all dangling; ln -s .. up
mkdir -p bin; printf '#!/bin/bash\necho ran\n' > bin/tool; chmod 755 bin/tool
echo secret > closed; chmod 000 closed; mkdir shut; echo in > shut/f; chmod 000 shut
mkdir -p empty/er; echo x > read-only; chmod 444 read-only; mkdir __pycache__; echo x > __pycache__/m.pyc
"""
    shell(sandbox, script)
    snapshot = sandbox.snapshot()
    assert snapshot == {
        "a.txt": "text é\n",
        "bin/tool": File(b"#!/bin/bash\necho ran\n", 0o755),
        "closed": File(b"secret\n", 0o000),
        "d.bin": File(b"\xff\x00x"),
        "dangling": File(b"/nowhere/at/all", 0o777, "link"),
        "empty/er": File(b"", 0o755, "folder"),
        "link": File(b"a.txt", 0o777, "link"),
        "read-only": File(b"x\n", 0o444),
        "shut/f": "in\n",
        "up": File(b"..", 0o777, "link"),
    }
    assert sorted(texts(snapshot)) == ["a.txt", "bin/tool", "closed", "read-only", "shut/f"]
    with sandboxes.open(snapshot) as copy:
        assert copy.snapshot() == snapshot
        assert shell(copy, "bin/tool; cat link; stat -c %a closed") == "ran\ntext é\n0\n"


def test_a_repository_with_its_history_comes_through(sandboxes, sandbox):
    script = "git init -q . && git config user.email a@b && git config user.name a && git add -A"
    shell(sandbox, f"{script} && git commit -qm one && git gc -q")
    with sandboxes.open(sandbox.snapshot()) as copy:
        assert shell(copy, "git fsck --strict 2>&1; git log --format=%s; git status -s") == "one\n"


def test_large_and_many_files_come_through_up_to_the_limits(sandboxes, sandbox):
    shell(sandbox, "head -c 5000000 /dev/zero > zeros; mkdir m; cd m; touch $(seq 2500)")
    snapshot = sandbox.snapshot()
    assert len(snapshot) == 2502 and len(snapshot["zeros"]) == 5_000_000


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("head -c 7000000 /dev/zero > zeros", "more than 6291456 bytes"),
        ("truncate -s 7M sparse", "more than 6291456 bytes"),
        ("mkdir m; cd m; touch $(seq 3000)", "more than 3000 files"),
        ("mkfifo pipe", "pipe is neither a file nor a folder nor a link"),
        ("echo > $'new\\nline'", "'new\\\\nline' holds characters that do not print"),
        ("echo > $'\\377'", "holds characters that do not print"),
        (
            "mkdir -p $(printf 'd/%.0s' {1..499}); cd d/d; cd $(printf 'd/%.0s' {1..497}); echo > f",
            "lies in more than 32 folders",
        ),
        ("mkdir -p $(printf 'd/%.0s' {1..499})", "lies in more than 32 folders"),
    ],
)
def test_what_cannot_be_kept_is_an_error_that_names_it(sandbox, script, why):
    shell(sandbox, script)
    with pytest.raises(SnapshotError, match=why) as caught:
        sandbox.snapshot()
    assert len(str(caught.value)) < 200
    shell(sandbox, "rm -rf zeros sparse m pipe d [!a]*")
    assert sandbox.snapshot() == {"a.txt": "text é\n"}


def test_a_snapshot_is_graded_with_its_links_and_binaries(sandboxes):
    files = {
        "solution.py": File(b"real.py", kind="link"),
        "real.py": "def f():\n    return open('data.bin', 'rb').read()[0]\n",
        "data.bin": File(b"\xff"),
    }
    marks = grade("solution.py", "f", Tests(cases=(Case((), 255),)), files, sandboxes, 60.0)
    assert marks.passed == (True,)


def test_links_of_a_snapshot_cannot_lead_its_files_out(sandboxes):
    for files in (
        {"d": File(b"/tmp", kind="link"), "d/x": "x"},
        {"d": File(b"/tmp", kind="link"), "d/x": File(b"y", kind="link")},
    ):
        with pytest.raises(ValueError, match="do not go into a workspace"):
            sandboxes.open(files)


def test_limits_of_a_snapshot_are_checked():
    with pytest.raises(ValueError, match="snapshot_files"):
        dataclasses.replace(CONFIG, snapshot_files=0)


def test_an_agent_is_told_what_cannot_be_handed_in_and_can_mend_it(task, sandboxes):
    limits = Limits(turns=4, tokens=600, turn_tokens=200, test_runs=3, command_s=60.0)
    workspace = Workspace(task, sandboxes, limits, verbose=False)
    tools = find_tools()

    def use(tool: str, **arguments: str):
        return execute(ToolCall(tool, arguments), tools, workspace)

    use("terminal", command="mkfifo pipe")
    result = use("submit")
    assert not result.ok and "pipe is neither a file" in result.content
    assert workspace.handed_in is None
    use("terminal", command="rm pipe; chmod 755 solution.py")
    assert use("submit").ok and workspace.handed_in["solution.py"].mode == 0o755
    workspace.close()
