"""Sweeps: overrides are checked before anything runs, finished runs are not repeated, seeds are put
together.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import ml_collections
import pytest
import rich.console

from rl_code.config.read_config import ConfigError
from rl_code.evaluation.suite import SuiteResult, TaskResult
from sweeps import figure as sweep_figure
from sweeps import running, table
from sweeps import runs as sweep_runs
from sweeps.done import finished, finished_in
from sweeps.runs import SweepRun
from tests import sweep_programs
from tests.late import Late
from tests.sweep_programs import TRAINER

figure = Late("matplotlib.figure")


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
    monkeypatch.setattr(sweep_runs, "RunConfig", TinyConfig)


def config() -> ml_collections.ConfigDict:
    return ml_collections.ConfigDict(
        {"seed": 0, "steps": 2, "loss": {"kind": "grpo", "clip": None}}
    )


def make_runs(workdir, sweep_of=None) -> list[SweepRun]:
    kinds_and_seeds = [
        {"loss.kind": kind, "seed": seed} for kind in ("grpo", "rloo") for seed in (0, 1)
    ]
    return sweep_runs.plan(config(), kinds_and_seeds if sweep_of is None else sweep_of, workdir)


def execute(runs: Sequence[SweepRun], command: Sequence[str], jobs: int) -> list[str]:
    """Runs them; returns the variants of those that failed."""
    with running.Interrupts() as interrupts:
        return [failure.run.variant for failure in running.execute(runs, command, jobs, interrupts)]


def calls(run: SweepRun) -> list[str]:
    path = run.workdir / "calls.txt"
    return path.read_text().splitlines() if path.exists() else []


def test_runs_are_named_by_their_overrides_and_grouped_without_the_seed(tmp_path):
    runs = make_runs(tmp_path)
    assert [run.workdir.name for run in runs] == [
        f"kind={k},seed={s}" for k in ("grpo", "rloo") for s in (0, 1)
    ]
    assert [run.variant for run in runs] == ["kind=grpo", "kind=grpo", "kind=rloo", "kind=rloo"]
    assert runs[3].config == TinyConfig(1, 2, Loss("rloo", None))
    assert sweep_runs.describe({"a.kind": 1, "b.kind": 2, "c.x": 3}) == "a.kind=1,b.kind=2,x=3"


def test_a_variant_may_have_a_name(tmp_path):
    named = [
        {"variant": "REINFORCE, leave one out", "loss.kind": "rloo", "seed": seed}
        for seed in (0, 1)
    ]
    runs = make_runs(tmp_path, [*named, {"loss.kind": "grpo"}])
    folders = [f"variant=REINFORCE,_leave_one_out,seed={seed}" for seed in (0, 1)]
    assert [run.workdir.name for run in runs] == [*folders, "kind=grpo"]
    assert [run.variant for run in runs] == ["REINFORCE, leave one out"] * 2 + ["kind=grpo"]
    assert runs[1].overrides == {"loss.kind": "rloo", "seed": 1}


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        ([{"loss.kidn": "grpo"}], r"config\.loss\.kidn, which the config does not have"),
        ([{"seed.x": 1}], r"config\.seed\.x, which the config does not have"),
        ([{"steps": "many"}], r"the run steps=many: config\.steps = 'many': expected int"),
        ([], "get_sweep\\(\\) gives no runs"),
        ([{"seed": 1}, {"seed": 1}], "seed=1 twice"),
        (
            [{"variant": "a", "steps": 1}, {"variant": "a", "steps": 3}],
            "'a' both steps=1 and steps=3",
        ),
    ],
)
def test_a_wrong_override_is_refused_before_anything_runs(tmp_path, overrides, complaint):
    with pytest.raises(ConfigError, match=complaint):
        make_runs(tmp_path, overrides)


@pytest.mark.parametrize("jobs", [1, 3])
def test_a_failed_run_is_repeated_and_a_finished_one_is_not(tmp_path, jobs):
    runs = make_runs(tmp_path)
    command = [sys.executable, "-c", TRAINER, "--config=c.py"]
    (tmp_path / "broken").write_text("3")
    assert execute(runs, command, jobs) == ["kind=rloo"] * 2
    assert [run.finished() for run in runs] == [True, True, False, False]
    (tmp_path / "broken").unlink()
    assert execute(runs, command, jobs) == []
    assert [len(calls(run)) for run in runs] == [1, 1, 2, 2]
    assert calls(runs[3])[0].split()[:3] == [
        "--config=c.py",
        "--config.loss.kind=rloo",
        "--config.seed=1",
    ]


def test_a_run_that_would_fail_again_is_said_to(tmp_path, capsys):
    run, *_ = make_runs(tmp_path)
    for code, again in ((1, False), (2, True)):
        assert not running.record(run, code, seconds=1.0)
        told = capsys.readouterr().out
        assert f"kind=grpo,seed=0 failed with exit code {code}" in told
        assert ("does not help before something is changed" in told) == again


def test_a_run_takes_over_the_warm_start_of_a_finished_one_that_starts_alike(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(running.sft, "may_differ", lambda config: ("loss",))
    runs = make_runs(tmp_path)
    command = [sys.executable, "-c", TRAINER]
    for run in runs[:2]:  # as if these had been trained before, each with its own warm start
        write_results(run, before=1, after=2)
        (run.workdir / "sft").mkdir()
        (run.workdir / "sft" / "weights").write_text(run.workdir.name)
    (tmp_path / "kind=rloo,seed=1" / "sft").mkdir(parents=True)  # has begun its own
    execute(runs, command, jobs=1)
    assert (runs[2].workdir / "sft" / "weights").read_text() == "kind=grpo,seed=0"
    assert list((runs[3].workdir / "sft").iterdir()) == []
    assert (
        "kind=rloo,seed=0 takes over the warm start of kind=grpo,seed=0" in capsys.readouterr().out
    )
    # a run of another sweep takes it over too, and one that starts otherwise does not
    elsewhere = list(finished(tmp_path))
    other = make_runs(tmp_path / "other")
    running.take_over_warm_start(other[2], other, elsewhere)
    assert (other[2].workdir / "sft" / "weights").read_text() == "kind=grpo,seed=0"
    monkeypatch.setattr(running.sft, "may_differ", lambda config: ())
    running.take_over_warm_start(other[3], other, elsewhere[:1])
    assert not other[3].workdir.exists()


def test_warm_starts_of_a_folder_without_runs_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"--warm_starts=.*none holds no finished run"):
        finished_in([str(tmp_path / "none")])


def test_a_run_finished_with_another_config_is_not_taken_for_this_one(tmp_path):
    write_results(make_runs(tmp_path)[0], before=1, after=2)
    changed = config()
    changed.steps = 9
    with pytest.raises(ConfigError, match="finished with another config; steps differ"):
        sweep_runs.plan(changed, [{"loss.kind": "grpo", "seed": 0}], tmp_path)[0].finished()


def command(folder, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What the command sweep does with two runs, rloo and grpo."""
    return sweep_programs.run(folder, ("rloo", "grpo"), *arguments)


@pytest.mark.long
def test_the_overrides_of_a_sweep_are_those_of_its_runs(tmp_path):
    done = command(tmp_path, "--config.sft=None", "--config.train.steps=3")
    assert done.returncode == 0, done.stderr
    (line,) = (tmp_path / "variant=grpo,seed=1" / "calls.txt").read_text().splitlines()
    assert {"--config.sft=None", "--config.train.steps=3"} <= set(line.split())
    done = command(tmp_path, "--config.train.steps", "3")
    assert done.returncode == 2
    assert "write --config.train.steps=<value>" in " ".join(done.stderr.split())


@pytest.mark.long
def test_one_run_of_a_sweep_runs_alone_and_the_table_is_made_afterwards(tmp_path):
    names = ("variant=rloo,seed=1", "variant=grpo,seed=1")
    (tmp_path / "broken").write_text("2")  # the config of the run rloo is wrong
    done = command(tmp_path, "--run=1")
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / name / "calls.txt").exists() for name in names] == [False, True]
    assert not (tmp_path / "sweep.txt").exists()
    (tmp_path / names[1] / "sft").mkdir()
    (tmp_path / names[1] / "sft" / "weights").write_text("of grpo")
    assert command(tmp_path, "--run=0").returncode == 2
    assert (tmp_path / names[0] / "sft" / "weights").read_text() == "of grpo"
    told = command(tmp_path, "--jobs=0")
    assert told.returncode == 1
    assert f"1 of 2 runs have not finished: {names[0]}" in " ".join(told.stderr.split())
    done, missing = (tmp_path / "sweep.txt").read_text().split("not finished")
    assert "grpo" in done and "rloo" not in done
    assert "rloo" in missing and "failed with exit code 2" in missing and "grpo" not in missing
    (tmp_path / "broken").unlink()
    assert command(tmp_path, "--run=0").returncode == 0
    assert command(tmp_path, "--jobs=0").returncode == 0
    text = (tmp_path / "sweep.txt").read_text()
    assert "rloo" in text and "not finished" not in text
    for name, calls_made in zip(names, (2, 1), strict=True):
        assert len((tmp_path / name / "calls.txt").read_text().splitlines()) == calls_made


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--run=2"], "--run=2: the sweep has 2 runs, counted from 0"),
        (["--run=1", "--jobs=0"], "--run=1 and --jobs=0: leave one of the two out"),
        (["--run=1", "--figure=a.png"], "--run=1 makes no figure: leave --figure=a.png out"),
        (["--workdir=none", "--jobs=0"], "there is no folder --workdir=none"),
    ],
)
def test_a_run_that_is_not_there_is_refused(tmp_path, arguments, complaint):
    done = command(tmp_path, *arguments)
    assert done.returncode == 2
    assert complaint in " ".join(done.stderr.split())


def test_a_stopped_sweep_makes_its_table_however_often_it_is_asked(tmp_path):
    """A terminal, a launcher and a supervisor may each send their own signal."""
    variants = ("grpo", "rloo", "third")
    folders = [tmp_path / f"variant={variant},seed=1" for variant in variants]
    assert sweep_programs.run(tmp_path, variants[:1]).returncode == 0
    (tmp_path / "slow").touch()
    process = sweep_programs.start(tmp_path, variants, "--jobs=2")
    while not all((folder / "calls.txt").exists() for folder in folders):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    (tmp_path / "sweep.txt").unlink()
    while process.poll() is None and not (tmp_path / "sweep.txt").exists():
        process.send_signal(signal.SIGTERM)
        time.sleep(0.02)
    _, told = process.communicate(timeout=400)
    assert process.returncode == 130, told
    done, missing = (tmp_path / "sweep.txt").read_text().split("not finished")
    assert "grpo" in done and "rloo" in missing and "third" in missing
    assert "failed" not in missing


def test_a_stop_reaches_the_runs_and_leaves_none_behind(tmp_path, monkeypatch):
    (tmp_path / "slow").touch()
    runs = make_runs(tmp_path)
    started = []

    def start(run, command, to_log, start=running.start):
        started.append(start(run, command, to_log))
        if len(started) == 2:
            threading.Thread(target=stop_when_running).start()
        return started[-1]

    def stop_when_running():
        while not all(calls(run) for run in runs[:2]):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(running, "start", start)
    with pytest.raises(KeyboardInterrupt):
        execute(runs, [sys.executable, "-c", TRAINER], jobs=2)
    assert [process.returncode for process in started] == [130, 130]
    assert not any(run.finished() for run in runs)


def write_results(run: SweepRun, before: int, after: int, rows: Sequence[dict] = ()) -> None:
    """A finished run with ``before`` and ``after`` of 4 tasks solved, and metrics."""
    run.workdir.mkdir(parents=True)
    for label, step, solved in (("before", 0, before), ("after", 2, after)):
        # the more are solved, the more tokens each episode has
        tasks = tuple(
            TaskResult(f"t{i}", 1, int(i < solved), 0, 0, 5.0 * solved, calls=3, mean_seconds=0.5)
            for i in range(4)
        )
        SuiteResult("held_out", label, step, {}, tasks).save(run.workdir)
    lines = [json.dumps({"step": step, **row}) + "\n" for step, row in enumerate(rows)]
    (run.workdir / "metrics.jsonl").write_text("".join(lines))
    running.record(run, 0, seconds=120.0)


def row(reward: float, seconds: float, age: int) -> dict[str, float]:
    """Metrics of a step; ``age`` of all its tokens."""
    ages = {f"staleness/{other}": float(other == age) for other in range(age + 1)}
    return {"reward/total": reward, "time/step_s": seconds, "time/idle": 1 / seconds, **ages}


FIGURE = (
    ("curve", "reward/total", "step", 1),
    ("curve", "reward/total", "minutes", 1),
    ("bars", "time/idle", "reward/total"),
    ("totals", "time/step_s", "reward/total"),
    ("histogram", "staleness/"),
)


def cells(lines: Sequence[str], variant: str) -> list[list[str]]:
    """The row of a variant in each table."""
    return [
        [cell.strip() for cell in line.split("│")[2:-1]] for line in lines if f" {variant} " in line
    ]


def test_the_tables_and_the_figure_put_the_seeds_of_a_variant_together(tmp_path, capsys):
    runs = make_runs(tmp_path)
    for run, after in zip(runs, (3, 4, 2, 2), strict=True):
        write_results(
            run, before=1, after=after, rows=[row(0.1 * after * step, 60.0, 0) for step in range(3)]
        )
    copy = tmp_path / "docs" / "figure.png"
    table.report(
        runs, sweep_figure.parse(FIGURE), tmp_path, rich.console.Console(width=132), str(copy)
    )
    text = (tmp_path / "sweep.txt").read_text()
    assert "mean [lowest, highest] over seeds" in text
    passed, costs, steps, minutes, bars, totals, ages = cells(text.splitlines(), "kind=grpo")
    assert passed == ["2", "25.0 [25.0, 25.0]", "87.5 [75.0, 100.0]", "62.5 [50.0, 75.0]", "2.0"]
    # the last evaluation's
    assert costs == [
        "held_out",
        "18 [15, 20]",
        "3.0 [3.0, 3.0]",
        "0.00 [0.00, 0.00]",
        "0.50 [0.50, 0.50]",
    ]
    assert steps[1] == "0.263 [0.225, 0.300]"  # from 0.5 to 1 step
    assert minutes[0] == "-"  # the first value is known after a minute
    assert bars == ["0.017", "0.350 [0.300, 0.400]"]
    assert totals == ["180.000", "1.050 [0.900, 1.200]"]
    assert copy.read_bytes() == (tmp_path / "sweep.png").read_bytes()
    assert ages == ["1.000"]
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert "sweep.png" in capsys.readouterr().out


def test_a_curve_shows_means_of_steps_in_a_row_and_of_seeds(tmp_path):
    runs = make_runs(tmp_path, [{"seed": 0}, {"seed": 1}])
    write_results(runs[0], 1, 2, [row(reward, 60.0, 0) for reward in (1.0, 2.0, 3.0, 4.0)])
    write_results(runs[1], 1, 2, [row(reward, 120.0, 0) for reward in (3.0, 4.0, 5.0)])
    axis = figure.Figure().subplots()
    sweep_figure.Curve("reward/total", "minutes", 2).draw(
        axis, {"base": [run.workdir for run in runs]}, {"base": "red"}
    )
    (line,) = axis.lines
    assert line.get_xydata().tolist() == [[2.25, 2.5], [3.75, 3.5]]


def test_curves_are_compared_where_all_runs_have_been(tmp_path):
    slow, fast = make_runs(tmp_path, [{"seed": 0}, {"loss.kind": "rloo"}])
    write_results(slow, 1, 2, [row(reward, 120.0, 0) for reward in (1.0, 2.0, 3.0)])
    write_results(fast, 1, 2, [row(reward, 60.0, 0) for reward in (1.0, 2.0, 3.0, 4.0)])
    numbers = sweep_figure.Curve("reward/total", "minutes", 1).numbers(
        {"slow": [slow.workdir], "fast": [fast.workdir]}
    )
    assert list(numbers) == [f"minutes {i} to {i + 1}" for i in range(4)]
    assert [numbers[span]["fast"][0] for span in list(numbers)[1:]] == pytest.approx(
        [1.5, 2.5, 3.5]
    )
    assert [numbers[span]["slow"][0] for span in list(numbers)[2:]] == pytest.approx([1.25, 1.75])


def test_a_curve_against_divergence_is_ordered_by_it(tmp_path):
    (run,) = make_runs(tmp_path, [{"seed": 0}])
    rows = [row(reward, 60.0, 0) for reward in (1.0, 3.0, 2.0)]
    # the policy goes two away from where it began, and half of the way back; one estimate is below 0
    write_results(
        run, 1, 2, [x | {"policy/kl": kl} for x, kl in zip(rows, (-0.1, 4, 1), strict=True)]
    )
    curve = sweep_figure.Curve("reward/total", "sqrt_kl", 1)
    axis = figure.Figure().subplots()
    curve.draw(axis, {"base": [run.workdir]}, {"base": "red"})
    (line,) = axis.lines
    assert line.get_xydata().tolist() == [[0, 1], [2, 3], [1, 2]]
    numbers = curve.numbers({"base": [run.workdir]})
    assert numbers["sqrt_kl 1.5 to 2"]["base"] == pytest.approx([2.75])


def test_a_variant_without_a_metric_has_no_curve(tmp_path):
    without, valued = make_runs(tmp_path, [{"seed": 0}, {"loss.kind": "rloo"}])
    write_results(without, 1, 2, [row(1.0, 60.0, 0)] * 4)
    write_results(valued, 1, 2, [row(1.0, 60.0, 0) | {"value/mean": 0.5}] * 4)
    variants = {"without": [without.workdir], "valued": [valued.workdir]}
    curve = sweep_figure.Curve("value/mean", "step", 1)
    axis = figure.Figure().subplots()
    curve.draw(axis, variants, dict.fromkeys(variants, "red"))
    assert len(axis.lines) == 1
    shown = sweep_figure.table(curve, variants)
    assert list(shown.columns[0].cells) == ["valued"]
    for wrong in ([without.workdir], [valued.workdir, without.workdir]):
        with pytest.raises(ConfigError, match="has no metric 'value/mean'"):
            curve.numbers({"one": wrong})


@pytest.mark.parametrize(("count", "rotation"), [(2, 0.0), (8, 30.0)])
def test_names_of_many_bars_do_not_lie_on_each_other(tmp_path, count, rotation):
    (run,) = make_runs(tmp_path, [{"seed": 0}])
    names = tuple(f"value/error_of_{number}_continuations" for number in range(count))
    write_results(run, 1, 2, [dict.fromkeys(names, 0.5)] * 2)
    axis = figure.Figure().subplots()
    sweep_figure.Bars(names).draw(axis, {"base": [run.workdir]}, {"base": "red"})
    labels = axis.get_xticklabels()
    assert [label.get_text() for label in labels] == list(names)
    assert {label.get_rotation() for label in labels} == {rotation}


def test_a_histogram_counts_what_a_step_lacks_as_nothing(tmp_path):
    young, old = make_runs(tmp_path, [{"seed": 0}, {"loss.kind": "rloo"}])
    write_results(young, 1, 2, [row(1.0, 60.0, 0)] * 4)
    write_results(old, 1, 2, [row(1.0, 60.0, age) for age in (0, 1, 10, 10)])
    numbers = sweep_figure.Histogram("staleness/").numbers(
        {"young": [young.workdir], "old": [old.workdir]}
    )
    assert list(numbers) == [str(age) for age in range(11)]
    assert [numbers[age]["old"][0] for age in ("0", "1", "2", "10")] == [0.25, 0.25, 0.0, 0.5]
    assert sum(share["young"][0] for share in numbers.values()) == numbers["0"]["young"][0] == 1.0


def test_a_single_seed_shows_the_interval_over_tasks(tmp_path):
    (run,) = make_runs(tmp_path, [{"loss.kind": "rloo"}])
    write_results(run, before=1, after=3)
    console = rich.console.Console(width=200)
    with console.capture() as capture:
        console.print(table.table({run.variant: [run.workdir]}))
    assert "+50.0" in capture.get() and "25.0 [0.0, 75.0]" in capture.get()


@pytest.mark.parametrize(
    ("panel", "complaint"),
    [
        (
            ("curve", "reward/totl", "step", 1),
            "no metric 'reward/totl'; it has reward/total, staleness/0, step, time/",
        ),
        (("bars", "time/idle", "time/busy"), "no metric 'time/busy'"),
        (("histogram", "age/"), "begins with 'age/'"),
    ],
)
def test_a_metric_that_was_not_written_is_named(tmp_path, panel, complaint):
    (run,) = make_runs(tmp_path, [{"seed": 1}])
    write_results(run, before=1, after=3, rows=[row(1.0, 60.0, 0)])
    with pytest.raises(ConfigError, match=complaint):
        sweep_figure.draw(
            {run.variant: [run.workdir]}, sweep_figure.parse([panel]), tmp_path / "x.png"
        )


@pytest.mark.parametrize(
    ("panel", "complaint"),
    [
        (("curves", "reward/total"), "'curves' is not one of curve, bars, totals, histogram"),
        (("curve", "reward/total", "hours", 1), "x='hours' is not one of step, minutes"),
        (("curve", "reward/total", "step", 0), "window=0 must be at least 1"),
        (("curve", "reward/total", "step"), "missing 1 required positional argument: 'window'"),
    ],
)
def test_a_panel_that_cannot_be_is_refused(panel, complaint):
    with pytest.raises(ConfigError, match=complaint):
        sweep_figure.parse([panel])
