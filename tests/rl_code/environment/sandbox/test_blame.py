"""Who is to blame when a sandbox is lost: never the host once code of a candidate ran in it."""

from __future__ import annotations

import threading

import pytest

from rl_code.environment.grader import grade
from rl_code.environment.sandbox.pool import SandboxConfig, SandboxFault, SandboxPool
from rl_code.environment.tools.api import execute, find_tools
from rl_code.environment.tools.workspace import Workspace
from rl_code.types import Case, Limits, Tests, ToolCall
from tests.rl_code.environment.sandbox.processes import kill_zygote

CONFIG = SandboxConfig(
    workers=1, memory_mb=256, processes=16, workspace_mb=8, cpu_s=20, output_bytes=4000
)
LIMITS = Limits(turns=4, tokens=600, turn_tokens=200, test_runs=3, command_s=30.0)
ADD = {"solution.py": "def add(a, b):\n    return a + b\n"}


@pytest.fixture(scope="module")
def sandboxes():
    with SandboxPool(CONFIG) as pool:
        yield pool


@pytest.fixture
def workspace(task, sandboxes):
    workspace = Workspace(task, sandboxes, LIMITS, verbose=False)
    yield workspace
    workspace.close()


def test_a_worker_that_dies_before_any_command_is_the_hosts_fault():
    with SandboxPool(CONFIG) as pool:
        sandbox = pool.open(ADD)
        kill_zygote(pool)
        for _ in range(2):
            with pytest.raises(SandboxFault):
                sandbox.read_file("solution.py")
        sandbox.close()


def test_a_worker_that_dies_under_a_command_is_the_candidates_failure_at_once():
    with SandboxPool(CONFIG) as pool, pool.open(ADD) as sandbox:
        killer = threading.Timer(0.5, kill_zygote, [pool])
        killer.start()
        assert sandbox.run(["sleep", "60"], timeout_s=60).exit_code == 137
        killer.join()
        assert sandbox.call("solution.py", "add", [(1, 2)], timeout_s=120)[0].cause == "killed"
        assert (sandbox.list_files(), sandbox.snapshot()) == ([], {})
        with pytest.raises(FileNotFoundError):
            sandbox.write_file("solution.py", "")


def test_a_session_that_cannot_start_a_command_is_lost_not_an_error(sandboxes, monkeypatch):
    """As when a command has used up what the next one needs: it raised out of the episode."""
    with sandboxes.open(ADD) as sandbox:
        assert sandbox.run(["true"], timeout_s=120).exit_code == 0
        monkeypatch.setattr(
            sandbox._connection.slot, "channel", Answers(b'{"error":["OSError","no"]}')
        )
        assert sandbox.run(["true"], timeout_s=120).exit_code == 137
    with sandboxes.open(ADD) as sandbox:  # nothing has run yet: the machine is short of something
        monkeypatch.setattr(
            sandbox._connection.slot, "channel", Answers(b'{"error":["OSError","no"]}')
        )
        with pytest.raises(SandboxFault, match="no"):
            sandbox.run(["true"], timeout_s=120)


@pytest.mark.parametrize("frame", [b"", b"[", b"[]", b"[" * 100_000, b'{"ok"', b"\xff", b"3"])
def test_a_broken_answer_is_an_outcome(sandboxes, monkeypatch, frame):
    with sandboxes.open(ADD) as sandbox:
        sandbox.run(["true"], timeout_s=120)
        monkeypatch.setattr(sandbox._connection.slot, "channel", Answers(frame))
        assert sandbox.run(["true"], timeout_s=120).exit_code == 137
        assert sandbox.snapshot() == {}


class Answers:
    """A socket on which every request gets the same answer."""

    def __init__(self, frame: bytes):
        self._data = len(frame).to_bytes(4, "little") + frame

    def settimeout(self, seconds: float) -> None:
        pass

    def sendall(self, data: bytes) -> None:
        pass

    def shutdown(self, how: int) -> None:
        pass

    def close(self) -> None:
        pass

    def recv(self, size: int) -> bytes:
        part, self._data = self._data[:size], self._data[size:]
        return part


def use(workspace, tool, **arguments):
    return execute(ToolCall(tool, arguments), find_tools(), workspace)


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("name", ["f", "f" * 200])
def test_a_path_of_499_folders_is_refused_in_words(workspace, opened, name):
    if opened:
        use(workspace, "terminal", command="true")
    for folders in (499, 40):
        result = use(workspace, "write_file", path="d/" * folders + name, content="x")
        assert not result.ok and ("folders" in result.content or "too long" in result.content)
    assert use(workspace, "terminal", command="echo alive").content == "alive"


def test_files_that_do_not_fit_are_the_agents_to_mend(workspace):
    for number in range(3):
        assert use(workspace, "write_file", path=f"{number}.txt", content="x" * (4 << 20)).ok
    for tool in ("terminal", "run_tests"):
        result = use(workspace, tool, **({"command": "true"} if tool == "terminal" else {}))
        assert not result.ok and "do not go into a workspace" in result.content
    assert use(workspace, "write_file", path="0.txt", content="").ok
    assert use(workspace, "write_file", path="1.txt", content="").ok
    assert use(workspace, "terminal", command="echo alive").content == "alive"


def test_files_that_break_the_session_fail_their_grade(sandboxes, monkeypatch):
    """Only the files can be to blame when a sandbox without them opens."""
    take = sandboxes._sandboxes.take
    broken = []

    def breaks_on_files():
        slot = take()
        if len(broken) < 3:
            broken.append(slot)
            slot.channel.shutdown(2)
        return slot

    monkeypatch.setattr(sandboxes._sandboxes, "take", breaks_on_files)
    tests = Tests(cases=(Case((1, 2), 3),))
    marks = grade("solution.py", "add", tests, ADD, sandboxes, 30.0)
    assert marks.passed == (False,) and "do not go into a workspace" in marks.errors[0]
