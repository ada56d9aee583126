"""An actor with the real engine, in a thread beside the learner: its bound holds and its record
gives the same weights.

Nothing here is replaced: tasks, episodes, sandboxes, engine, store, weights, update.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

from configs import asynchrony
from models.families import PRESETS
from rl_code.config.read_config import build
from rl_code.evaluation.during import EvaluateConfig
from rl_code.evaluation.suite import load_all
from rl_code.metrics.values import read_metrics
from rl_code.recording.replay_training import replay
from rl_code.run.config import RunConfig
from rl_code.run.run import Run
from rl_code.run.workdir import STORE
from rl_code.store import audit
from rl_code.store.store import GroupStore
from rl_code.train import train
from tests.models.small import narrow_preset

pytestmark = pytest.mark.usefixtures("traced_once")

STEPS = 4


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny", narrow_preset())


def make_config(mode: str, bound: int, recompute: bool) -> RunConfig:
    """The ablation's smoke config, smaller, with pages for a few episodes only."""
    settings = asynchrony.get_config("smoke")
    settings.suites = ()
    settings.sft = None
    settings.tokenizer.update(texts=20, vocab_size=300)
    settings.limits.update(turns=3, tokens=224, turn_tokens=32)
    settings.rollout.engine.update(pages=60, decode_steps=4)
    settings.train.update(steps=STEPS, tasks_per_step=2, group_size=4, micro_batches=1)
    settings.train.pack.update(rows=8, drop_uninformative=False)
    settings.asynchrony.update(mode=mode, max_staleness=bound, recompute=recompute)
    return build(RunConfig, settings)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Callable[[str, int, bool], Path]:
    """Trains a run the first time that it is asked for, and returns its workdir."""

    @functools.cache
    def record(mode: str, bound: int, recompute: bool) -> Path:
        workdir = tmp_path_factory.mktemp(mode)
        train(make_config(mode, bound, recompute), workdir)
        return workdir

    return record


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "bound", "recompute"),
    [("one_step", 1, False), ("behind", 2, False), ("in_flight", 2, True)],
)
def test_a_run_keeps_its_bound_and_can_be_replayed(recorded, mode, bound, recompute):
    config = make_config(mode, bound, recompute)
    workdir = recorded(mode, bound, recompute)
    report = audit.check(workdir / STORE, bound)
    assert report.problems == [] and report.consumed == STEPS and report.staleness_max <= bound
    with Run(config, workdir, "learner") as run, jax.set_mesh(run.mesh):
        assert [step.same for step in replay(run)] == [True] * STEPS
    rows = read_metrics(workdir)
    assert {age for row in rows for age in range(9) if row.get(f"staleness/{age}")} <= set(
        range(bound + 1)
    )
    assert any(row.get("staleness/1") for row in rows)
    # by the same weights the sampler and the trainer agree to rounding, however keys were shared
    assert all(
        row["policy/mismatch_max"] < 1e-3 for row in rows if row["rollout/staleness_max"] == 0
    )
    assert sum(row["engine/generated_tokens"] for row in rows) > 0


@pytest.mark.long
def test_evaluations_beside_the_actor_leave_training_as_it_is(recorded, tmp_path):
    plain = make_config("one_step", 1, False)
    suite = build(RunConfig, asynchrony.get_config("smoke")).suites[0]
    evaluated = dataclasses.replace(
        plain,
        suites=(dataclasses.replace(suite, count=2, samples=1),),
        evaluate=EvaluateConfig(every=1),
    )
    train(evaluated, tmp_path)
    checksums = []
    for workdir in (recorded("one_step", 1, False), tmp_path):
        store = GroupStore(workdir / STORE)
        checksums.append([store.consumption(step)["weights"] for step in range(STEPS)])
    assert checksums[0] == checksums[1]
    assert [result.step for result in load_all(tmp_path)] == list(range(STEPS + 1))
    rows = read_metrics(tmp_path)
    assert all(row["time/evaluate_s"] > 0 for row in rows)
