"""A sweep of forks: its command lines, what it refuses, and its table of paired differences."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from configs import quickstart
from rl_code.checkpoint import record as checkpoint_record
from rl_code.config import read_config
from rl_code.config.read_config import ConfigError
from rl_code.evaluation.suite import SuiteResult, TaskResult
from rl_code.run import lineage
from rl_code.run.config import RunConfig
from rl_code.run.workdir import CONFIG_FILE
from sweeps import fork, paired, running
from sweeps import runs as sweep_runs
from tests import sweep_programs

FORKER = """
import json, pathlib, sys
workdir = pathlib.Path(dict(a.lstrip("-").split("=", 1) for a in sys.argv[2:])["workdir"])
workdir.mkdir(parents=True)
entry = dict(parent=sys.argv[1], step=int(sys.argv[2].removeprefix("--step=")), time="")
entry |= dict(config={}, changes=[], other_bits=False, differing=[])
(workdir / "fork.json").write_text(json.dumps([entry]))
if "broken" in workdir.name:
    sys.exit(5)
(workdir / "config.json").write_text("{}")
(workdir / "forked.txt").write_text(" ".join(sys.argv[1:]))
"""


def make_runs(workdir, overrides):
    settings = read_config.complete(RunConfig, quickstart.get_config("smoke"))
    return sweep_runs.plan(settings, overrides, workdir)


def test_every_run_is_forked_once_and_trained_with_its_own_config(tmp_path, monkeypatch):
    monkeypatch.setattr(fork, "FORK", (sys.executable, "-c", FORKER))
    runs = make_runs(tmp_path, [{"train.epochs": 1}, {"train.epochs": 2}])
    for _ in range(2):  # the second time they are there
        for run in runs:
            changes = ["--config.train.steps=60", *run.flags()]
            assert fork.fork(tmp_path / "base", 40, run.workdir, changes) == 0
    with running.Interrupts() as interrupts:
        trainer = [sys.executable, "-c", sweep_programs.TRAINER]
        assert running.execute(runs, trainer, 1, interrupts, forked=True) == []
    for run, epochs in zip(runs, (1, 2), strict=True):
        assert (run.workdir / "forked.txt").read_text().split() == [
            str(tmp_path / "base"),
            "--step=40",
            f"--workdir={run.workdir}",
            "--config.train.steps=60",
            f"--config.train.epochs={epochs}",
        ]
        trained = (run.workdir / "calls.txt").read_text().split()
        assert trained == [
            f"--config={run.workdir / CONFIG_FILE}",
            f"--workdir={run.workdir}",
        ]


@pytest.fixture
def base(tmp_path):
    """The folder of a run of the quickstart."""
    folder = tmp_path / "base"
    folder.mkdir()
    config = read_config.build(RunConfig, quickstart.get_config("smoke"))
    (folder / CONFIG_FILE).write_text(read_config.to_json(config))
    return folder


def test_a_sweep_whose_first_fork_fails_makes_and_trains_the_others(tmp_path, base):
    variants = ("broken", "grpo", "rloo")
    done = sweep_programs.run(tmp_path, variants, f"--fork={base}", forker=FORKER)
    assert done.returncode == 1
    assert "variant=broken,seed=1 could not be forked from" in done.stdout
    assert "1 of 3 runs failed" in " ".join(done.stderr.split())
    for variant in ("grpo", "rloo"):
        assert (tmp_path / f"variant={variant},seed=1" / "calls.txt").exists()
    # neither of the others stands in for the one from which differences are taken
    assert "no run of broken has finished" in done.stdout


def test_all_forks_of_a_sweep_begin_at_one_step_of_one_run(tmp_path):
    base, other = tmp_path / "base", tmp_path / "other"
    folders = [tmp_path / name for name in "abc"]
    folders[0].mkdir()
    for step in (20, 40):
        folder = checkpoint_record.folder_of(base / "checkpoints", step)
        folder.mkdir(parents=True)
        (folder / checkpoint_record.RECORD).touch()
    assert fork.common_step(base, None, folders) == 40
    assert fork.common_step(base, 30, folders) == 30
    (folders[0] / CONFIG_FILE).touch()
    with pytest.raises(ConfigError, match=f"{folders[0]} holds a run that is no fork of {base}"):
        fork.common_step(base, None, folders)
    lineage.write(folders[0], [lineage.Fork(str(base), 20, "", {}, [], False, [])])
    assert fork.common_step(base, None, folders) == 20
    with pytest.raises(ConfigError, match="a was forked at step 20, not at 40; give --step=20"):
        fork.common_step(base, 40, folders)
    with pytest.raises(ConfigError, match=f"no fork of {other}"):
        fork.common_step(other, 20, folders)


def test_a_parent_of_another_config_is_refused(tmp_path, base):
    (run,) = make_runs(tmp_path, [{"train.epochs": 2}])
    fork.check(base, run.config, run.overrides)
    with pytest.raises(ConfigError, match=r"train\.epochs"):
        fork.check(base, run.config, [])
    settings = quickstart.get_config("smoke")
    settings.train.group_size = 2
    other = read_config.build(RunConfig, settings)
    (base / CONFIG_FILE).write_text(read_config.to_json(other))
    with pytest.raises(ConfigError, match=r"another config than the sweep's: .*train\.group_size"):
        fork.check(base, run.config, run.overrides)


def save(workdir, label, step, rates, suite="held_out"):
    tasks = tuple(TaskResult(f"t{i}", 8, int(rate), 0, 0, 5.0) for i, rate in enumerate(rates))
    SuiteResult(suite, label, step, {}, tasks).save(workdir)


def test_pairs_are_tasks_and_seeds_and_the_last_evaluation_counts(tmp_path):
    rng = np.random.default_rng(0)
    hard = rng.integers(0, 6, 24)
    variants = {"base": {}, "other": {}}
    for seed in (0, 1, 2):
        for variant, gain in (("base", 0), ("other", 1)):
            folder = tmp_path / f"{variant}{seed}"
            save(folder, "before", 0, hard * 0)
            save(folder, "after", 60, np.minimum(hard + gain + rng.integers(0, 2, 24), 8))
            variants[variant][seed] = folder
    found = {
        kind: difference
        for _, kind, difference in paired.differences(variants["base"], variants["other"])
    }
    assert found["tasks"].pairs == 24 and found["seeds"].pairs == 3
    for difference in found.values():
        assert difference.paired.mean == pytest.approx(1 / 8, abs=0.05)
    tasks = found["tasks"]
    assert tasks.variance_ratio.low > 5
    assert tasks.paired.high - tasks.paired.low < tasks.unpaired.high - tasks.unpaired.low
    view = paired.table(
        "base",
        [
            (variant, seed, folder)
            for variant, of in variants.items()
            for seed, folder in of.items()
        ],
    )
    assert view.row_count == 2
    assert "Points minus those of base" in view.caption and "in training" in view.caption
    # one seed: tasks alone are pairs; other tasks are none
    alone = {variant: {0: runs[0]} for variant, runs in variants.items()}
    assert [kind for _, kind, _ in paired.differences(*alone.values())] == ["tasks"]
    save(tmp_path / "odd", "after", 60, [1, 2, 3])
    assert paired.differences(alone["base"], {0: tmp_path / "odd"}) == []


def test_before_is_where_a_fork_begins_if_that_was_evaluated(tmp_path):
    for label, step in (("before", 0), ("step_40", 40), ("after", 52)):
        for name in ("held_out", "other") if step != 40 else ("held_out",):
            save(tmp_path, label, step, [1, 2], suite=name)

    def steps(name):
        return [r.step for r in fork.evaluations(tmp_path) if r.suite == name]

    assert steps("held_out") == [0, 40, 52]
    lineage.write(tmp_path, [lineage.Fork("base", 40, "", {}, [], False, [])])
    assert steps("held_out") == [40, 52] and steps("other") == [0, 52]


def test_training_is_compared_from_the_fork_on(tmp_path):
    variants = {"base": {}, "other": {}}
    for seed in (0, 1, 2):
        for variant, gain in (("base", 0.0), ("other", 0.125)):
            folder = tmp_path / f"{variant}{seed}"
            folder.mkdir()
            rows = [
                # steps before the fork are those of another run
                {"step": step, "reward/solved": 0.25 * seed + gain if step >= 2 else 0.9}
                for step in range(4)
            ]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            lineage.write(folder, [lineage.Fork("base", 2, "", {}, [], False, [])])
            variants[variant][seed] = folder
    ((name, kind, found),) = paired.differences(*variants.values())
    assert (name, kind, found.pairs) == ("training", "seeds", 3)
    assert found.paired.low == found.paired.high == pytest.approx(0.125)
    assert found.unpaired.high > 0.4
