"""What policies earn with the simulator they were trained on, and with another."""

from __future__ import annotations

import json

import pytest

from configs import simulators
from experiments.simulators import __main__ as command
from experiments.simulators.judged import Judged
from experiments.tab.asked import Asked
from models.families import PRESETS
from rl_code import sft
from rl_code.config import read_config
from rl_code.metrics.values import read_metrics
from rl_code.run.config import RunConfig
from rl_code.train import train
from rl_code.types import Group
from sweeps import DONE
from tests.experiments.test_tab import TASK, episode
from tests.models.small import narrow_preset


def built(**overrides) -> RunConfig:
    given = simulators.get_config("smoke")
    with given.ignore_type():
        given.update_from_flattened_dict(overrides)
    return read_config.build(RunConfig, given)


def test_each_judge_says_what_it_would_pay():
    right = TASK.meta["wanted"]
    picky, lenient = (Asked(habits) for habits in simulators.HABITS)
    assert picky.expected(TASK, "") == 0.0
    assert picky.expected(TASK, right) < lenient.expected(TASK, right)
    chance = lenient.chance(TASK, right)
    assert lenient.expected(TASK, right) == pytest.approx(chance - 0.25)
    group = Group(TASK, (episode(right), episode("", 1)))
    found = Judged(simulators.HABITS)([group], {})
    assert found["judged/shown"] == 0.5
    assert found["judged/lenient"] == pytest.approx((chance - 0.25) / 2)


def a_run(folder, habits: str, seed: int, picky: float, lenient: float) -> None:
    """The folder of a finished run, whose first step earned nothing."""
    folder.mkdir(parents=True)
    config = read_config.to_dict(built(**{"reward.signals": (simulators.asked(habits),)}))
    (folder / DONE).write_text(json.dumps({"config": {**config, "seed": seed}, "seconds": 1.0}))
    rows = [{"step": step, "judged/picky": 0.0, "judged/lenient": 0.0} for step in range(3)]
    rows.append({"step": 3, "judged/picky": picky, "judged/lenient": lenient})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_table_has_the_loss_within_each_seed(tmp_path, capsys):
    for seed in range(3):
        a_run(tmp_path / f"a{seed}", "picky", seed, 0.2 + 0.1 * seed, 0.3)
        a_run(tmp_path / f"b{seed}", "lenient", seed, 0.1 + 0.1 * seed, 0.5)
    command.main(["", str(tmp_path)])
    told = capsys.readouterr().out
    assert "picky (3 seeds)" in told and "lenient (3 seeds)" in told
    # the seeds differ, and what is lost does not
    assert "-0.100 [-0.100, -0.100]" in told and "-0.200 [-0.200, -0.200]" in told


def test_a_folder_without_runs_is_refused(tmp_path, capsys):
    a_run(tmp_path / "a", "picky", 0, 0.1, 0.2)
    with pytest.raises(SystemExit):
        command.main(["", str(tmp_path)])
    assert "no finished run that was trained on lenient" in capsys.readouterr().err


def test_both_runs_of_a_seed_share_the_warm_start():
    first, second = (
        built(**{"reward.signals": arm["reward.signals"]}) for arm in simulators.get_sweep("smoke")
    )
    differing = read_config.diff(first, second)
    assert differing and all(key.startswith("reward") for key in differing)
    assert read_config.diff(first, second, without=sft.may_differ(second)) == []


@pytest.mark.long
def test_the_smoke_run_measures_what_the_figure_shows(tmp_path, monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny", narrow_preset())
    train(built(), tmp_path)
    rows = read_metrics(tmp_path)
    for kind, metric, *_ in simulators.get_figure("smoke"):
        assert kind == "curve" and any(metric in row for row in rows), metric
