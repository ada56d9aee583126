"""A row in SWE-bench's format, end to end: loaded, played in an episode, graded, and written as a
prediction that git applies to the repository, where its tests then pass."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from models.tokenizer import Tokenizer
from rl_code.config.named import Named
from rl_code.environment.episode import Episode
from rl_code.environment.protocols.api import PROTOCOLS
from rl_code.environment.protocols.compact import Compact
from rl_code.environment.sandbox.pool import File
from rl_code.environment.tools.api import find_tools
from rl_code.evaluation.predictions import Predictions, patch_of
from rl_code.tasks.api import find_source
from rl_code.types import Limits, Task
from tests.rl_code.signals import rewarder
from tests.rl_code.tasks import projects
from tests.rl_code.tasks.projects import BROKEN, FAILING, FIXED, NEW_TESTS, PASSING, SOURCE, TESTS

LIMITS = Limits(turns=6, tokens=4000, turn_tokens=1000, test_runs=1, command_s=60.0, grade_s=120.0)
TOOLS = (
    *map(Named, ("grep", "read_file", "terminal", "submit")),
    Named("edit_file", {"named": True}),
)
EDIT = f"<|call|>edit {SOURCE}\nprices[1:]\n=====\nprices<|end|>"
SUBMIT = "<|call|>submit<|end|>"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([BROKEN, NEW_TESTS] * 2, 330, Compact.SPECIAL_TOKENS)


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    folder = tmp_path_factory.mktemp("repositories") / "lab" / "shop"
    return {"folder": str(folder), **projects.make_shop(folder)}


@pytest.fixture
def task(shop, layered_pool, packages, tmp_path):
    path = projects.write_rows(tmp_path / "tasks.jsonl", projects.swe_row(shop))
    places = {"repositories": str(Path(shop["folder"]).parents[1]), "packages": packages}
    (task,) = find_source(Named("swe", {"path": str(path), "places": places}), "tasks").load(
        layered_pool, None
    )
    return task


def play(task, pool, tokenizer, *messages: str, index=0, on_work=None):
    """An episode in which the agent says these messages."""
    episode = Episode(
        task,
        group=0,
        index=index,
        protocol=PROTOCOLS["compact"],
        tools=find_tools(TOOLS),
        tokenizer=tokenizer,
        pool=pool,
        limits=LIMITS,
        reward=rewarder(),
        on_work=on_work,
    )
    episode.start()
    for message in messages:
        tokens = tokenizer.encode(message + "<|eot|>")
        episode.step(tokens, [0.0] * len(tokens), [0] * len(tokens))
    return episode.finish()


def test_a_row_is_solved_graded_and_predicted(shop, task, layered_pool, tokenizer, store, tmp_path):
    made = Predictions("a model", store)
    solving = play(
        task,
        layered_pool,
        tokenizer,
        f"<|call|>read {SOURCE}<|end|>",
        # what is no part of a patch, a cache and a commit
        "<|call|>run\ngit log --format=%s; mkdir .pytest_cache; echo 1 > .pytest_cache/x<|end|>",
        "<|call|>run\ngit rm -q old.txt; git commit -qam done; printf 'x\\0' > shop/data.bin<|end|>",
        EDIT,
        SUBMIT,
        on_work=made.add,
    )
    assert solving.solved and solving.reward.total == 1.0 and solving.status == "submitted"
    told = [result.content for turn in solving.turns for result in turn.results]
    assert "prices[1:]" in told[0] and "FUTURE" not in told[1] and "first" in told[1]
    reads = [f"<|call|>read {SOURCE}<|end|>"] * LIMITS.turns
    idle = play(task, layered_pool, tokenizer, *reads, index=1, on_work=made.add)
    assert not idle.solved and idle.status == "turn_limit"

    first, second = made.save(tmp_path / "predictions.jsonl")
    (row,) = map(json.loads, first.read_text().splitlines())
    assert row["instance_id"] == task.id and row["model_name_or_path"] == "a model"
    assert second.name == "predictions.1.jsonl"
    assert json.loads(second.read_text())["model_patch"] == ""

    # a fresh clone at the base commit, with the tests of the row
    clone = tmp_path / "clone"
    projects.git(tmp_path, "clone", "-q", shop["folder"], str(clone))
    projects.git(clone, "checkout", "-q", shop["base"])
    projects.git(clone, "apply", "--index", "-", given=shop["test_patch"])
    assert run_tests(clone).returncode == 1
    projects.git(clone, "apply", "--index", "-", given=row["model_patch"])
    assert run_tests(clone).returncode == 0
    changed = projects.git(clone, "diff", "--cached", "--name-status", shop["base"])
    assert changed.split("\n")[:-1] == [
        "D\told.txt",
        "A\tshop/data.bin",
        f"M\t{SOURCE}",
        f"M\t{TESTS}",
    ]


def run_tests(clone: Path) -> subprocess.CompletedProcess:
    """pytest on the two tests, outside of any sandbox: all code here is of these tests."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", FAILING, PASSING]
    return subprocess.run(command, cwd=clone, capture_output=True, check=False)


def test_a_patch_has_every_kind_of_change(task, store, shop, tmp_path):
    """Modes, links, binary files, and files where folders were."""
    folder = tmp_path / "ignoring"
    projects.git(tmp_path, "clone", "-q", shop["folder"], str(folder))
    work = {
        SOURCE: FIXED,
        "run.sh": File(b"echo\n", 0o755),
        "link": File(b"run.sh", kind="link"),
        "raw.bin": File(bytes(range(256))),
        "latin.py": File("# \xe9\n".encode("latin-1")),
        TESTS: File(b"", kind="deleted"),
        "old.txt": File(b"", kind="deleted"),
        "old.txt/now": "a folder\n",
        "empty": File(b"", kind="folder"),
        "sub/.git/config": "[core]\n",
        ".git/index": File(b"x"),
        "shop/__pycache__/x.pyc": File(b"x"),
        "a b\tc.py": "odd = 1\n",
    }
    patch = patch_of(task, work, store)
    projects.git(folder, "checkout", "-q", shop["base"])
    projects.git(folder, "apply", "--index", "-", given=patch)
    assert (folder / "run.sh").stat().st_mode & 0o111 and (folder / "link").readlink() == Path(
        "run.sh"
    )
    assert (folder / "raw.bin").read_bytes() == bytes(range(256))
    assert (folder / "latin.py").read_bytes() == "# \xe9\n".encode("latin-1")
    assert (folder / "old.txt" / "now").read_text() == "a folder\n" and not (
        folder / TESTS
    ).exists()
    assert (folder / "a b\tc.py").exists() and (folder / SOURCE).read_text() == FIXED
    assert not (folder / "sub").exists() and "__pycache__" not in patch
    assert patch_of(task, {}, store) == ""


def test_what_git_ignores_is_no_part_of_a_patch():
    plain = Task(
        id="plain",
        messages=(),
        files={".gitignore": "*.so\nbuild/\n", "kept.so": "1\n", "a.py": "x = 1\n", "b.py": ""},
    )
    work = {
        **plain.files,
        "new.so": "1\n",
        "build/x.py": "1\n",
        "kept.so": "2\n",
        "c.py": "y = 2\n",
    }
    del work["b.py"]
    patch = patch_of(plain, work, None)
    named = [line.split(" b/")[1] for line in patch.splitlines() if line.startswith("diff --git")]
    assert named == ["b.py", "c.py", "kept.so"]
    assert patch_of(plain, plain.files, None) == ""
