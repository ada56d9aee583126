"""Two runs are compared to the first thing that differs, and the inputs that differ are named.

The runs here train for real and sample with a stand-in (``tests.rl_code.recorded_runs``), but for
those of one code and another, which are whole runs in processes of their own.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launch.bisect import tell
from rl_code.config.read_config import ConfigError
from rl_code.recording.bisect import compare
from rl_code.run import provenance
from rl_code.run.run import Run
from rl_code.run.workdir import STORE
from rl_code.store.steps import step_folder
from rl_code.train import train
from tests import programs
from tests.rl_code.recorded_runs import STEPS, VOCAB, change_token, make_config
from tests.rl_code.recording.test_fork import changed, make_fork
from tests.rl_code.rollout.test_actor import FakeScheduler
from tests.rl_code.store.groups import group_path, out_of_shards

pytestmark = pytest.mark.usefixtures("stand_in")
ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.long
def test_a_run_is_equal_to_itself_sampled_again(recorded, tmp_path):
    train(make_config("one_step", 1), tmp_path / "other")
    found = compare(recorded, tmp_path / "other")
    assert found.parting is None and found.steps == range(STEPS)
    assert found.groups == 2 * STEPS and found.inputs == []


@pytest.mark.long
def test_two_runs_that_differ_in_one_flag_part_at_the_update_that_it_changes(recorded, tmp_path):
    train(changed(make_config("one_step", 1)), tmp_path / "other")
    found = compare(recorded, tmp_path / "other")
    assert (found.parting.step, found.parting.what) == (0, "update")
    assert found.inputs == ["config.train.optimizer.learning_rate: 0.01 -> 0.003"]


@pytest.mark.long
def test_runs_of_two_seeds_part_at_the_plan(recorded, tmp_path):
    train(dataclasses.replace(make_config("one_step", 1), seed=3), tmp_path / "other")
    found = compare(recorded, tmp_path / "other")
    assert (found.parting.step, found.parting.what) == (0, "plan")
    assert "task = " in found.parting.words and found.inputs == ["config.seed: 0 -> 3"]


@pytest.mark.long
def test_runs_that_sample_other_tokens_part_at_the_first_group(recorded, tmp_path, monkeypatch):
    """The same config, but another code of the sampler."""
    monkeypatch.setattr(Run, "scheduler", lambda *_, **ways: FakeScheduler(vocab=VOCAB - 1))
    train(make_config("one_step", 1), tmp_path / "other")
    found = compare(recorded, tmp_path / "other")
    assert (found.parting.step, found.parting.what) == (0, "token")
    assert found.groups == 0 and found.inputs == []


@pytest.mark.long
def test_a_fork_parts_from_its_parent_at_its_first_step(recorded, tmp_path):
    config = changed(make_config("one_step", 1))
    make_fork(recorded, tmp_path / "fork", 2, config)
    train(config, tmp_path / "fork")
    found = compare(recorded, tmp_path / "fork")
    assert (found.parting.step, found.parting.what) == (2, "update")
    assert found.groups == 6  # of steps 0 to 2
    assert found.inputs == ["config.train.optimizer.learning_rate: 0.01 -> 0.003"]


@pytest.mark.long
def test_one_changed_byte_of_one_group_is_found(recorded, copy):
    out_of_shards(copy / STORE)
    path = group_path(copy / STORE, 3, 1)
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    parting = compare(recorded, copy).parting
    assert (parting.step, parting.what) == (3, "record")
    assert f"group 1 of {copy}: {path} from byte 0 on is damaged" in parting.words


@pytest.mark.long
def test_a_changed_token_of_a_record_that_is_still_sound_is_found(recorded, copy):
    change_token(copy, 3)
    parting = compare(recorded, copy).parting
    assert (parting.step, parting.what) == (3, "record")
    assert "is another one than the group that was trained on; sample 0 at token 3: token " in (
        parting.words
    )


def keep_steps(workdir: Path, kept: range) -> None:
    """Leaves no other steps in a run's record."""
    out_of_shards(workdir / STORE)
    for step in set(range(STEPS)) - set(kept):
        shutil.rmtree(step_folder(workdir / STORE, step))


def test_runs_without_a_common_step_are_not_called_equal(recorded, copy, tmp_path):
    late = shutil.copytree(copy, tmp_path / "late")
    keep_steps(copy, range(2))
    keep_steps(late, range(3, STEPS))
    words = f"{copy} has steps 0 to 1 on record and {late} has steps 3 to 4"
    with pytest.raises(ConfigError, match=words):
        compare(copy, late)
    with pytest.raises(ConfigError, match="there is no step in common"):
        compare(late, copy)


def test_a_comparison_says_which_steps_only_one_run_has(recorded, copy, capsys):
    keep_steps(copy, range(3, STEPS))
    found = compare(recorded, copy)
    assert found.parting is None and found.steps == range(3, STEPS)
    tell(recorded, copy, found)
    told = capsys.readouterr().out
    assert f"{recorded} begins at step 0, which is not on record in the other one" in told


def test_a_folder_without_a_run_is_said(recorded, tmp_path):
    with pytest.raises(ConfigError, match="holds no run"):
        compare(recorded, tmp_path)


# --- One run under two codes ----------------------------------------------------------------------


def run_of(tree: Path, file: str = "", before: str = "", after: str = "") -> Path:
    """The workdir of a run of a copy of the code, of which one file may be edited."""
    for package in ("rl_code", "models", "attention", "pallas_kernels", "launch", "configs"):
        shutil.copytree(ROOT / package, tree / package)
    if file:
        text = (tree / file).read_text()
        assert text.count(before) == 1
        (tree / file).write_text(text.replace(before, after))
    small = ["--config.train.steps=2", "--config.sft=None", "--config.suites=()"]
    small += ["--config.model.preset=tests.models.small:SHALLOW", "--config.limits.turns=2"]
    small += ["--config.mesh.data=1", "--config.train.micro_batches=1"]
    command = ["--config=configs/quickstart.py:smoke", f"--workdir={tree / 'run'}", *small]
    run_command(tree, "train", *command)
    return tree / "run"


def run_command(tree: Path, name: str, *arguments: str, code: int = 0) -> str:
    """What a command of the code in ``tree`` prints; it must end with this exit code."""
    if tree == ROOT:
        done = programs.run(f"launch.{name}", *arguments, devices=8)
    else:
        done = subprocess.run(
            [sys.executable, "-m", f"launch.{name}", *arguments],
            cwd=tree,
            # the model's shape is of the tests, all else of the tree
            env=os.environ | {"PYTHONPATH": f"{tree}{os.pathsep}{ROOT}"},
            capture_output=True,
            text=True,
        )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    return run_of(tmp_path_factory.mktemp("original"))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_run_whose_code_was_changed_by_one_character(original, tmp_path):
    file = "rl_code/learner/advantages.py"
    changed_run = run_of(tmp_path, file, "eps: float = 1e-4", "eps: float = 1e-5")
    found = compare(original, changed_run)
    assert (found.parting.step, found.parting.what) == (0, "batch")
    assert found.inputs == [f"code: {file}"]
    assert provenance.last(original)["code"] != provenance.last(changed_run)["code"]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_commands_fork_replay_and_compare_a_run(original, tmp_path):
    fork, rate = str(tmp_path / "fork"), "--config.train.optimizer.learning_rate=0.001"
    run = str(original)
    told = run_command(ROOT, "replay", run, "--step=1", "--task=2", "--sample=1")
    assert "sample 1 is equal: " in told and "--- assistant, tokens " in told
    assert "replayed: equal, token for token" in told
    told = run_command(ROOT, "fork", run, "--step=1", f"--workdir={fork}", rate)
    assert f"forked from: {run} at step 1" in told
    assert f"Next: python -m launch.train --config={fork}/config.json --workdir={fork}" in told
    run_command(ROOT, "train", f"--config={fork}/config.json", f"--workdir={fork}")
    assert "replayed: equal, bit for bit" in run_command(ROOT, "replay", fork)
    told = run_command(ROOT, "bisect", run, fork, code=1)
    assert "part at step 1: update: equal groups and an equal batch" in told
    assert "config.train.optimizer.learning_rate: 0.0004 -> 0.001" in told
    assert f"{run} holds another run already" in _complaint(run, fork)


def _complaint(run: str, fork: str) -> str:
    """What the fork of a fork into the folder of a run is answered."""
    done = programs.run("launch.fork", fork, "--step=1", f"--workdir={run}")
    assert done.returncode == 2
    return " ".join(done.stderr.split())
