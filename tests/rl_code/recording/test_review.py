"""A hunk is needless exactly when the work solves the task without it."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.tokenizer import Tokenizer
from rl_code.environment.layers import folder
from rl_code.environment.layers.store import LayerStore
from rl_code.environment.protocols.compact import Compact
from rl_code.environment.sandbox.disposable import OutOfBounds
from rl_code.environment.sandbox.pool import File, SandboxConfig, SandboxPool
from rl_code.environment.sandbox.snapshot import texts
from rl_code.environment.tools.api import find_tools
from rl_code.recording import review as review_module
from rl_code.recording.review import review, without
from rl_code.rewards import hunks as hunks_module
from rl_code.rewards.hunks import hunks
from rl_code.types import Case, Layer, Limits, Task, Tests, World
from tests.rl_code.environment import scripted

LIMITS = Limits(turns=6, tokens=2000, turn_tokens=600, test_runs=3, command_s=20.0)
BROKEN = "import math\n\ndef f(x):\n    y = x - 1\n    return y\n"
TASK = Task(
    id="two/0",
    messages=({"role": "user", "content": "add one"},),
    files={"f.py": BROKEN, "other.py": "a = 1\nb = 2\n"},
    path="f.py",
    entry_point="f",
    visible_tests=Tests(cases=(Case((1,), 2),)),
    hidden_tests=Tests(cases=(Case((5,), 6),)),
    reference={},
)
FIX = "<|call|>run\nsed -i 's/x - 1/x + 1/' f.py<|end|>"
SPOIL = "<|call|>run\nsed -i 's/^import math/import os/; s/return y/return y  # done/' f.py<|end|>"
NEW = "<|call|>run\necho 'b = 3' >> other.py; echo note > todo.txt<|end|>"
SUBMIT = "<|call|>submit<|end|>"

lines = st.lists(st.sampled_from("abc"), max_size=8).map(lambda x: "".join(f"{y}\n" for y in x))
trees = st.dictionaries(st.sampled_from(("p", "q", "r")), lines, max_size=3)


@given(trees, trees)
@settings(max_examples=100, deadline=None)
def test_reverting_all_hunks_gives_the_files_as_they_were(before, now):
    found = hunks(before, now)
    files = dict(now)
    for hunk in reversed(found):  # those behind first, so that places stay
        files = without(files, hunk, before)
    empty = {path: "" for path in {*before, *now}}
    assert empty | dict(files) == empty | before
    assert all(hunk.before != hunk.now for hunk in found)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return LayerStore(tmp_path_factory.mktemp("layers"))


@pytest.fixture(scope="module")
def pool(store):
    with SandboxPool(SandboxConfig(layers=str(store.folder))) as pool:
        yield pool


@pytest.fixture(scope="module")
def layered(store, tmp_path_factory) -> Task:
    """The task in a repository: all files but one are in a layer."""
    repository = tmp_path_factory.mktemp("repository")
    files = {
        "f.py": "".join(f"# line {i}\n" for i in range(20)) + BROKEN,
        "run.sh": "echo one\necho two\necho three\n",
        "unused.py": "a = 1\n",
    }
    for path, text in files.items():
        (repository / path).write_text(text)
    (repository / "run.sh").chmod(0o755)
    world = World((Layer(folder.build(store, repository), "/workspace"),))
    return dataclasses.replace(TASK, files={"other.py": TASK.files["other.py"]}, world=world)


def play(pool, *messages: str, task=TASK):
    tokenizer = Tokenizer.train([BROKEN] * 4, 300, Compact.SPECIAL_TOKENS)
    said = [message + "<|eot|>" for message in messages]
    return scripted.play(task, pool, tokenizer, LIMITS, *said, index=4)


def reviewed(pool, *trajectories, task=TASK):
    return list(review(task, trajectories, find_tools(), pool, LIMITS, verbose=False))


def marks(found) -> dict[str, bool]:
    """Whether each hunk is needless, by its diff."""
    pairs = zip(found.hunks, found.needless, strict=True)
    return {"\n".join(hunk.diff): needless for hunk, needless in pairs}


def test_work_that_takes_too_long_to_compare_is_not_reviewed(pool, monkeypatch):
    monkeypatch.setattr(hunks_module, "_CPU_S", 0.1)
    old, new = ("".join(f"{i * step % 7}\n" for i in range(9000)) for step in (1, 3))
    with pytest.raises(OutOfBounds, match="CPU seconds"):
        hunks({"f.py": old}, {"f.py": new})
    trajectory = play(pool, FIX, SUBMIT)
    late = OutOfBounds("more than 20 CPU seconds")
    monkeypatch.setattr(review_module, "hunks", lambda *_: (_ for _ in ()).throw(late))
    (found,) = reviewed(pool, trajectory)
    assert found.hunks == () and found.cause.startswith("its changes cannot be compared: more")


def test_needless_hunks_are_told_from_the_one_that_matters(pool):
    trajectory = play(pool, FIX, SPOIL, NEW, SUBMIT)
    assert trajectory.solved
    (found,) = reviewed(pool, trajectory)
    assert (found.task_id, found.index, found.cause) == ("two/0", 4, "")
    assert marks(found) == {
        "-import math\n+import os": True,
        "-    y = x - 1\n-    return y\n+    y = x + 1\n+    return y  # done": False,
        "+b = 3": True,
        "+note": True,
    }


def test_the_lines_of_a_repositorys_files_are_reverted_one_by_one(pool, layered):
    """Files of a layer, of which work has only the difference on record."""
    spoil = "<|call|>run\nsed -i 's/# line 3$/# three/' f.py; rm unused.py<|end|>"
    script = "<|call|>run\nsed -i 's/one/1/; s/three/3/' run.sh<|end|>"
    trajectory = play(pool, FIX, spoil, script, NEW, SUBMIT, task=layered)
    assert trajectory.solved
    (found,) = reviewed(pool, trajectory, task=layered)
    assert found.cause == ""
    assert marks(found) == {
        "-# line 3\n+# three": True,
        "-    y = x - 1\n+    y = x + 1": False,
        "-a = 1": True,
        "-echo one\n+echo 1": True,
        "-echo three\n+echo 3": True,
        "+b = 3": True,
        "+note": True,
    }
    places = [(hunk.path, hunk.at) for hunk in found.hunks if hunk.path == "f.py"]
    assert places == [("f.py", 3), ("f.py", 23)]


def test_a_script_without_a_hunk_keeps_its_other_lines_and_its_rights():
    before = {"run.sh": "echo one\necho two\necho three\n"}
    files = {"run.sh": File(b"echo 1\necho two\necho 3\n", 0o755)}
    first, second = hunks(before, texts(files))
    assert without(files, first, before) == {"run.sh": File(b"echo one\necho two\necho 3\n", 0o755)}
    assert without(without(files, second, before), first, before) == {
        "run.sh": File(before["run.sh"].encode(), 0o755)
    }


def test_a_file_that_became_a_folder_is_reviewed(pool, layered):
    commands = "rm unused.py other.py; mkdir unused.py other.py; "
    commands += "echo 1 > unused.py/a; echo 2 > other.py/b"
    trajectory = play(pool, FIX, f"<|call|>run\n{commands}<|end|>", SUBMIT, task=layered)
    (found,) = reviewed(pool, trajectory, task=layered)
    assert marks(found) == {
        "-    y = x - 1\n+    y = x + 1": False,
        # the file cannot come back while another one lies below it
        "-a = 1": False,
        "-a = 1\n-b = 2": False,
        "+1": True,
        "+2": True,
    }


def test_only_solved_work_is_reviewed_and_what_cannot_be_is_said(pool):
    solved = play(pool, FIX, SUBMIT)
    assert reviewed(pool, play(pool, SUBMIT)) == []
    # calls on record that no longer lead there, as after a change of a tool
    lost = dataclasses.replace(solved, turns=solved.turns[:2])
    spoiled = dataclasses.replace(solved, turns=(solved.turns[0], *solved.turns[3:]))
    causes = [one.cause for one in reviewed(pool, lost, spoiled)]
    assert causes == ["its calls hand in nothing", "its calls no longer solve the task"]
