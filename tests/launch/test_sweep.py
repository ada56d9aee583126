"""Sweeps: overrides are checked before anything runs, finished runs are not repeated, seeds are put together."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import threading
import time

import ml_collections
import pytest
import rich.console

from launch import sweep
from rl_code.config import ConfigError
from rl_code.evaluation.suite import SuiteResult, TaskResult


@dataclasses.dataclass(frozen=True)
class Loss:
    kind: str
    clip: float | None


@dataclasses.dataclass(frozen=True)
class TinyConfig:
    seed: int
    steps: int
    loss: Loss


@pytest.fixture(autouse=True)
def tiny_config(monkeypatch):
    monkeypatch.setattr(sweep, "RunConfig", TinyConfig)


def config() -> ml_collections.ConfigDict:
    return ml_collections.ConfigDict({"seed": 0, "steps": 2, "loss": {"kind": "grpo", "clip": None}})


def make_runs(workdir, sweep_of=None) -> list[sweep.SweepRun]:
    kinds_and_seeds = [{"loss.kind": kind, "seed": seed} for kind in ("grpo", "rloo") for seed in (0, 1)]
    return sweep.plan(config(), sweep_of or kinds_and_seeds, workdir)


# A stand-in for the trainer: counts its calls, obeys SIGTERM, fails where it is told to.
TRAINER = """
import pathlib, signal, sys, time
workdir = pathlib.Path(dict(a.lstrip("-").split("=", 1) for a in sys.argv[1:])["workdir"])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
with open(workdir / "calls.txt", "a") as file:
    file.write(" ".join(sys.argv[1:]) + chr(10))
if (workdir.parent / "slow").exists():
    time.sleep(60)
sys.exit(3 if "rloo" in workdir.name and (workdir.parent / "broken").exists() else 0)
"""


def calls(run: sweep.SweepRun) -> list[str]:
    path = run.workdir / "calls.txt"
    return path.read_text().splitlines() if path.exists() else []


def test_runs_are_named_by_their_overrides_and_grouped_without_the_seed(tmp_path):
    runs = make_runs(tmp_path)
    assert [run.workdir.name for run in runs] == [f"kind={k},seed={s}" for k in ("grpo", "rloo") for s in (0, 1)]
    assert [run.variant for run in runs] == ["kind=grpo", "kind=grpo", "kind=rloo", "kind=rloo"]
    assert runs[3].config == TinyConfig(1, 2, Loss("rloo", None))
    assert sweep.describe({"a.kind": 1, "b.kind": 2, "c.x": 3}) == "a.kind=1,b.kind=2,x=3"


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        ([{"loss.kidn": "grpo"}], r"config\.loss\.kidn, which the config does not have"),
        ([{"seed.x": 1}], r"config\.seed\.x, which the config does not have"),
        ([{"steps": "many"}], r"config\.steps = 'many': expected int"),
        ([{"seed": 1}, {"seed": 1}], "seed=1 twice"),
    ],
)
def test_a_wrong_override_is_refused_before_anything_runs(tmp_path, overrides, complaint):
    with pytest.raises(ConfigError, match=complaint):
        make_runs(tmp_path, overrides)


@pytest.mark.parametrize("jobs", [1, 3])
def test_a_failed_run_is_repeated_and_a_finished_one_is_not(tmp_path, jobs):
    runs, command = make_runs(tmp_path), [sys.executable, "-c", TRAINER, "--config=c.py"]
    (tmp_path / "broken").touch()
    assert [run.variant for run in sweep.execute(runs, command, jobs)] == ["kind=rloo"] * 2
    assert [run.finished() for run in runs] == [True, True, False, False]
    (tmp_path / "broken").unlink()
    assert sweep.execute(runs, command, jobs) == []
    assert [len(calls(run)) for run in runs] == [1, 1, 2, 2]
    assert calls(runs[3])[0].split()[:3] == ["--config=c.py", "--config.loss.kind=rloo", "--config.seed=1"]


def test_a_run_takes_over_the_warm_start_of_a_finished_one_that_starts_alike(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sweep.sft, "MAY_DIFFER", ("loss",))
    runs, command = make_runs(tmp_path), [sys.executable, "-c", TRAINER]
    for run in runs[:2]:  # as if these had been trained before, each with its own warm start
        write_results(run, before=1, after=2, reward=1.0)
        (run.workdir / "sft").mkdir()
        (run.workdir / "sft" / "weights").write_text(run.workdir.name)
    (tmp_path / "kind=rloo,seed=1" / "sft").mkdir(parents=True)  # has begun its own
    sweep.execute(runs, command, jobs=1)
    assert (runs[2].workdir / "sft" / "weights").read_text() == "kind=grpo,seed=0"
    assert list((runs[3].workdir / "sft").iterdir()) == []
    assert "kind=rloo,seed=0 takes over the warm start of kind=grpo,seed=0" in capsys.readouterr().out


def test_a_run_finished_with_another_config_is_not_taken_for_this_one(tmp_path):
    write_results(make_runs(tmp_path)[0], before=1, after=2, reward=1.0)
    changed = config()
    changed.steps = 9
    with pytest.raises(ConfigError, match="finished with another config; steps differ"):
        sweep.plan(changed, [{"loss.kind": "grpo", "seed": 0}], tmp_path)[0].finished()


def test_a_stop_reaches_the_runs_and_leaves_none_behind(tmp_path, monkeypatch):
    (tmp_path / "slow").touch()
    runs, started = make_runs(tmp_path), []

    def start(run, command, to_log, start=sweep.start):
        started.append(start(run, command, to_log))
        if len(started) == 2:
            threading.Thread(target=stop_when_running).start()
        return started[-1]

    def stop_when_running():
        while not all(calls(run) for run in runs[:2]):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(sweep, "start", start)
    with pytest.raises(KeyboardInterrupt):
        sweep.execute(runs, [sys.executable, "-c", TRAINER], jobs=2)
    assert [process.returncode for process in started] == [130, 130]
    assert not any(run.finished() for run in runs)


def write_results(run: sweep.SweepRun, before: int, after: int, reward: float) -> None:
    """A finished run with ``before`` and ``after`` of 4 tasks solved."""
    run.workdir.mkdir(parents=True)
    for label, step, solved in (("before", 0, before), ("after", 2, after)):
        tasks = tuple(TaskResult(f"t{i}", 1, int(i < solved), 0, 0, 5.0) for i in range(4))
        SuiteResult("held_out", label, step, {}, tasks).save(run.workdir)
    rows = [{"step": step, "reward/total": reward * step} for step in range(3)]
    (run.workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sweep.record(run, 0, seconds=120.0)


def test_the_table_and_the_figure_put_the_seeds_of_a_variant_together(tmp_path, capsys):
    runs = make_runs(tmp_path)
    for run, after in zip(runs, (3, 4, 2, 2), strict=True):
        write_results(run, before=1, after=after, reward=0.1 * after)
    sweep.report(runs, ("reward/total",), tmp_path)
    lines = (tmp_path / "sweep.txt").read_text().splitlines()
    assert "mean [lowest, highest] over seeds" in lines[-1]
    (grpo,) = (line for line in lines if "kind=grpo" in line)
    assert [cell.strip() for cell in grpo.split("│")[2:-1]] == [
        "2",
        "25.0 [25.0, 25.0]",
        "87.5 [75.0, 100.0]",
        "62.5 [50.0, 75.0]",
        "2.0",
    ]
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert "sweep.png" in capsys.readouterr().out


def test_a_single_seed_shows_the_interval_over_tasks(tmp_path):
    (run,) = make_runs(tmp_path, [{"loss.kind": "rloo"}])
    write_results(run, before=1, after=3, reward=1.0)
    console = rich.console.Console(width=200)
    with console.capture() as capture:
        console.print(sweep.table({run.variant: [run]}))
    assert "+50.0" in capture.get() and "25.0 [0.0, 75.0]" in capture.get()


def test_a_metric_that_was_not_written_is_named(tmp_path):
    (run,) = make_runs(tmp_path, [{"seed": 1}])
    write_results(run, before=1, after=3, reward=1.0)
    with pytest.raises(ConfigError, match="no metric 'reward/totl'; it has reward/total, step"):
        sweep.draw({run.variant: [run]}, ("reward/totl",), tmp_path / "x.png")
