"""Evaluations during training change nothing else, survive kills, and choose the best checkpoint.

The runs here train for real and sample with a stand-in (``tests.rl_code.recorded_runs``). What an
evaluation finds is a function of the weights.
"""

from __future__ import annotations

import dataclasses
import types

import pytest

from configs import quickstart
from rl_code.checkpoint import checkpoint
from rl_code.config.read_config import ConfigError, build
from rl_code.evaluation import during
from rl_code.evaluation.suite import SuiteResult, TaskResult, load_all
from rl_code.metrics.values import read_metrics
from rl_code.run.config import RunConfig
from rl_code.run.run import Run
from rl_code.run.task_sets import TaskSets
from rl_code.run.workdir import STORE
from rl_code.store import audit
from rl_code.store.store import GroupStore
from rl_code.train import train
from rl_code.weights.layout import in_dtype
from rl_code.weights.versions import Version
from tests.rl_code.recorded_runs import (
    STEPS,
    deterministic,
    fail,
    make_config,
    strike,
    with_stand_in,
)

TASKS = 12


def configured(mode="one_step", k=1, best="eval/held_out/pass@1", **evaluate) -> RunConfig:
    """The run of ``recorded_runs`` with two suites."""
    config = make_config(mode, k)
    suites = tuple(
        dataclasses.replace(suite, samples=4) for suite in build_suites(("held_out", "other"))
    )
    chosen = during.EvaluateConfig(**{"every": 2} | evaluate) if evaluate is not None else None
    kept = dataclasses.replace(config.checkpoint, best=best, every=100, keep=1)
    return dataclasses.replace(config, suites=suites, evaluate=chosen, checkpoint=kept)


def build_suites(names):
    settings = quickstart.get_config("smoke")
    suites = build(RunConfig, settings).suites
    return [dataclasses.replace(suites[0], name=name) for name in names]


@pytest.fixture(scope="module", autouse=True)
def stand_in():
    with with_stand_in():
        yield


@pytest.fixture(autouse=True)
def played(monkeypatch):
    """What was played: (suite, label, step, samples), in order."""
    found = []

    def play(run, suite, model, *, label, step, on_finished):
        found.append((suite.name, label, step, suite.samples))
        digest = Version.of(step, in_dtype(model, "float32")).checksum
        tasks = []
        for i in range(TASKS):
            correct = int(digest[i % len(digest)], 16) % (suite.samples + 1)
            tasks.append(TaskResult(f"{i}", suite.samples, correct, 0, 0, 3.0, cheats=0))
            on_finished(types.SimpleNamespace(solved=correct > 0))
        return SuiteResult(suite.name, label, step, {}, tuple(tasks))

    monkeypatch.setattr(Run, "evaluate", play)
    monkeypatch.setattr(TaskSets, "of_suite", lambda sets, suite: range(TASKS))
    return found


def weights(workdir):
    store = GroupStore(workdir / STORE)
    return [store.consumption(step)["weights"] for step in store.consumed()]


def without_evaluations(workdir):
    return [
        {name: value for name, value in row.items() if not name.startswith("eval/")}
        for row in deterministic(workdir)
    ]


def results(workdir):
    return {(r.suite, r.step): (r.label, r.tasks) for r in load_all(workdir)}


@pytest.mark.parametrize(("mode", "k"), [("sync", 0), ("one_step", 1), ("in_flight", 2)])
@pytest.mark.long
def test_evaluations_change_nothing_else(tmp_path, played, mode, k):
    with_them = configured(mode, k, samples=2, suites=("held_out",))
    train(with_them, tmp_path / "with")
    assert played == [
        ("held_out", "before", 0, 4),
        ("other", "before", 0, 4),
        ("held_out", "step_2", 2, 2),
        ("held_out", "step_4", 4, 2),
        ("held_out", "after", STEPS, 4),
        ("other", "after", STEPS, 4),
    ]
    rows = read_metrics(tmp_path / "with")
    evaluated = [row["step"] + 1 for row in rows if "eval/held_out/pass@1" in row]
    assert evaluated == [2, 4, STEPS] and "eval/held_out/pass@2" in rows[1]
    for row in rows:
        if row["step"] + 1 in evaluated:
            low, mean, high = (row[f"eval/held_out/pass@1{end}"] for end in ("_low", "", "_high"))
            assert low <= mean <= high and row["time/evaluate_s"] > 0
            assert row["eval/held_out/cheats"] == 0.0
    if mode != "in_flight":  # where the moment at which weights arrive is not fixed
        without = dataclasses.replace(
            with_them,
            evaluate=None,
            checkpoint=dataclasses.replace(with_them.checkpoint, best=None),
        )
        train(without, tmp_path / "without")
        assert weights(tmp_path / "with") == weights(tmp_path / "without")
        assert without_evaluations(tmp_path / "with") == deterministic(tmp_path / "without")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(What was played in a run that nothing interrupts, its folder); it is made once."""
    made = []

    def record(played):
        if not made:
            workdir = tmp_path_factory.mktemp("whole")
            train(configured(), workdir)
            made.append(([*played], workdir))
            played.clear()
        return made[0]

    return record


@pytest.mark.long
@pytest.mark.parametrize(("at", "suite"), [(4, "held_out"), (2, "other"), (STEPS, "other")])
def test_a_run_that_is_killed_while_it_evaluates_ends_as_one_that_was_not(
    tmp_path, played, whole, monkeypatch, at, suite
):
    config = configured()
    everything, unbroken = whole(played)
    play = Run.evaluate

    def struck(run, of, model, *, step, **how):
        if (of.name, step) == (suite, at):
            raise OSError("struck")
        return play(run, of, model, step=step, **how)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "evaluate", struck)
        with pytest.raises(OSError, match="struck"):
            train(config, tmp_path / "killed")
    train(config, tmp_path / "killed")
    assert played == everything  # what was complete was not played again
    assert weights(tmp_path / "killed") == weights(unbroken)
    assert deterministic(tmp_path / "killed") == deterministic(unbroken)
    assert results(tmp_path / "killed") == results(unbroken)
    assert audit.check(tmp_path / "killed" / STORE, 1).problems == []


@pytest.mark.long
def test_a_run_that_is_killed_between_evaluations_repeats_none(tmp_path, played, monkeypatch):
    config = configured(best=None)
    strike(monkeypatch, 3, fail)
    with pytest.raises(OSError, match="struck"):
        train(config, tmp_path)
    assert checkpoint.steps(tmp_path) == []  # so it begins anew, with the evaluation of step 2
    train(config, tmp_path)
    assert len(played) == len(set(played))


@pytest.mark.long  # test_checkpoint.py has the rule in quick tests
def test_the_best_checkpoint_is_the_one_with_the_best_evaluation(tmp_path):
    config = configured(every=1)
    train(config, tmp_path)
    scores = {row["step"] + 1: row["eval/held_out/pass@1"] for row in read_metrics(tmp_path)}
    assert len(scores) == STEPS
    best = max(scores, key=lambda step: (scores[step], step))
    assert set(checkpoint.steps(tmp_path)) == {best, STEPS}
    assert checkpoint.load_parameters(tmp_path, "best").step == best


@pytest.mark.long
def test_a_run_may_begin_to_evaluate_when_it_goes_on(tmp_path, played):
    first = configured(best=None)
    train(dataclasses.replace(first, evaluate=None), tmp_path)
    assert [label for _, label, *_ in played] == ["before"] * 2 + ["after"] * 2
    longer = dataclasses.replace(first.train, steps=STEPS + 2)
    train(dataclasses.replace(first, train=longer), tmp_path)
    found = results(tmp_path)
    assert {step for _, step in found} == {0, STEPS, STEPS + 1, STEPS + 2}
    assert found["other", STEPS][0] == f"step_{STEPS}"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(evaluate=dict(every=0)), "every=0 must be at least 1"),
        (
            dict(evaluate=dict(every=2, suites=("gone",))),
            r"config\.evaluate\.suites = \('gone',\): expected names of config\.suites, which are ",
        ),
        (dict(evaluate=dict(every=2), suites=()), r"which are none"),
        (
            dict(checkpoint=dict(best="eval/held_out/pass@1")),
            r"config\.checkpoint\.best = 'eval/held_out/pass@1': config\.evaluate = None",
        ),
        (
            dict(evaluate=dict(every=2), checkpoint=dict(best="eval/gone/pass@1")),
            r"config\.checkpoint\.best = 'eval/gone/pass@1': config\.evaluate gives eval/",
        ),
    ],
)
def test_wrong_settings_are_named(change, words):
    settings = quickstart.get_config("smoke").to_dict()
    with pytest.raises(ConfigError, match=words):
        build(RunConfig, settings | change)
