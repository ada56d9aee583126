"""A sweep of forks: its command lines, what it refuses, and its table of paired differences."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from configs import quickstart
from launch import sweep, sweep_fork, sweep_paired, sweep_plan
from rl_code import lineage, read_config
from rl_code.evaluation.suite import SuiteResult, TaskResult
from rl_code.read_config import ConfigError
from rl_code.run_config import RunConfig
from rl_code.workdir import CONFIG_FILE

FORKER = """
import pathlib, sys
workdir = pathlib.Path(dict(a.lstrip("-").split("=", 1) for a in sys.argv[2:])["workdir"])
workdir.mkdir(parents=True)
(workdir / "config.json").write_text("{}")
(workdir / "forked.txt").write_text(" ".join(sys.argv[1:]))
sys.exit(5 if "broken" in workdir.name else 0)
"""
TRAINER = """
import pathlib, sys
workdir = pathlib.Path(dict(a.lstrip("-").split("=", 1) for a in sys.argv[1:])["workdir"])
(workdir / "trained.txt").write_text(" ".join(sys.argv[1:]))
"""


def make_runs(workdir, overrides):
    settings = read_config.complete(RunConfig, quickstart.get_config("smoke"))
    return sweep_plan.plan(settings, overrides, workdir)


def test_every_run_is_forked_once_and_trained_with_its_own_config(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep_fork, "FORK", (sys.executable, "-c", FORKER))
    runs = make_runs(tmp_path, [{"train.epochs": 1}, {"train.epochs": 2}])
    for _ in range(2):  # the second time they are there
        for run in runs:
            changes = ["--config.train.steps=60", *run.flags()]
            sweep_fork.fork(tmp_path / "base", 40, run.workdir, changes)
    assert sweep.execute(runs, [sys.executable, "-c", TRAINER], 1, forked=True) == []
    for run, epochs in zip(runs, (1, 2), strict=True):
        assert (run.workdir / "forked.txt").read_text().split() == [
            str(tmp_path / "base"),
            "--step=40",
            f"--workdir={run.workdir}",
            "--config.train.steps=60",
            f"--config.train.epochs={epochs}",
        ]
        trained = (run.workdir / "trained.txt").read_text().split()
        assert trained == [
            f"--config={run.workdir / CONFIG_FILE}",
            f"--workdir={run.workdir}",
        ]


def test_a_fork_that_fails_ends_the_sweep(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep_fork, "FORK", (sys.executable, "-c", FORKER))
    (run,) = make_runs(tmp_path, [{"variant": "broken", "seed": 3}])
    with pytest.raises(sweep_fork.ForkFailed, match=r"broken.* could not be forked from .*base"):
        sweep_fork.fork(tmp_path / "base", None, run.workdir, [])


def test_a_parent_of_another_config_is_refused(tmp_path):
    (run,) = make_runs(tmp_path, [{"train.epochs": 2}])
    parent = tmp_path / "base"
    parent.mkdir()
    base = read_config.build(RunConfig, quickstart.get_config("smoke"))
    (parent / CONFIG_FILE).write_text(read_config.to_json(base))
    sweep_fork.check(parent, run.config, run.overrides)
    with pytest.raises(ConfigError, match=r"train\.epochs"):
        sweep_fork.check(parent, run.config, [])
    settings = quickstart.get_config("smoke")
    settings.train.group_size = 2
    other = read_config.build(RunConfig, settings)
    (parent / CONFIG_FILE).write_text(read_config.to_json(other))
    with pytest.raises(ConfigError, match=r"another config than the sweep's: .*train\.group_size"):
        sweep_fork.check(parent, run.config, run.overrides)


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
        for _, kind, difference in sweep_paired.differences(variants["base"], variants["other"])
    }
    assert found["tasks"].pairs == 24 and found["seeds"].pairs == 3
    for difference in found.values():
        assert difference.paired.mean == pytest.approx(1 / 8, abs=0.05)
    tasks = found["tasks"]
    assert tasks.variance_ratio.low > 5
    assert tasks.paired.high - tasks.paired.low < tasks.unpaired.high - tasks.unpaired.low
    view = sweep_paired.table(
        (variant, seed, folder) for variant, of in variants.items() for seed, folder in of.items()
    )
    assert view.row_count == 2
    assert "Points minus those of base" in view.caption and "in training" in view.caption
    # one seed: tasks alone are pairs; other tasks are none
    alone = {variant: {0: runs[0]} for variant, runs in variants.items()}
    assert [kind for _, kind, _ in sweep_paired.differences(*alone.values())] == ["tasks"]
    save(tmp_path / "odd", "after", 60, [1, 2, 3])
    assert sweep_paired.differences(alone["base"], {0: tmp_path / "odd"}) == []


def test_before_is_where_a_fork_begins_if_that_was_evaluated(tmp_path):
    for label, step in (("before", 0), ("step_40", 40), ("after", 52)):
        for name in ("held_out", "other") if step != 40 else ("held_out",):
            save(tmp_path, label, step, [1, 2], suite=name)

    def steps(name):
        return [r.step for r in sweep_fork.evaluations(tmp_path) if r.suite == name]

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
    ((name, kind, found),) = sweep_paired.differences(*variants.values())
    assert (name, kind, found.pairs) == ("training", "seeds", 3)
    assert found.paired.low == found.paired.high == pytest.approx(0.125)
    assert found.unpaired.high > 0.4
