"""Data of older policies: arms differ in its age alone, and the report reads them so."""

from __future__ import annotations

import json

import pytest

from configs import windows as config
from experiments.tab import stale as windows
from experiments.tab.windows.__main__ import main
from rl_code.metrics.values import METRICS_FILE
from sweeps import DONE
from sweeps.runs import plan


def test_every_age_has_as_many_updates_and_uses_a_batch_once(tmp_path):
    for arg in ("", "smoke"):
        runs = plan(config.get_config(arg), config.get_sweep(arg), tmp_path)
        ages = {run.variant: run.config.asynchrony.max_staleness for run in runs}
        measured = {run.config.train.steps - 1 - ages[run.variant] for run in runs}
        assert measured == {4 if arg else config.UPDATES}
        assert {run.config.train.epochs for run in runs} == {1}
        # with one update of each batch nothing else would weight old data otherwise
        ways = {run.variant: run.config.train.loss.correction for run in runs}
        assert ways == {name: "decoupled" if name.endswith("weighted") else "none" for name in ages}
        assert set(ages.values()) == set(config.AGES[:2] if arg else config.AGES)
        assert len(runs) == len(ages) * (1 if arg else 3) and "age 3, weighted" in ages


def test_the_report_counts_the_updates_of_who_filled_the_holes(tmp_path):
    for seed in (0, 1):
        for name, age, rewards in (("age_0", 0, (0, 1, 2)), ("age_2", 2, (9, 9, 0, 1, 3))):
            folder = tmp_path / f"variant={name},seed={seed}"
            folder.mkdir()
            done = {"config": {"asynchrony": {"max_staleness": age}}}
            (folder / DONE).write_text(json.dumps(done))
            rows = [{"step": i, "reward/total": r + seed} for i, r in enumerate(rewards)]
            (folder / METRICS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = windows.curves(tmp_path)
    assert [list(one.updates) for one in found.values()] == [[0, 1, 2]] * 2
    view = windows.rewards(found)
    assert list(view.columns[-1].cells) == ["+2.500 [+2.000, +3.000]", "+3.500 [+3.000, +4.000]"]
    assert list(view.columns[-3].cells) == ["+0.500 [+0.000, +1.000]"] * 2
    windows.draw(found, tmp_path / "windows.png")
    assert (tmp_path / "windows.png").stat().st_size > 5_000


def test_a_folder_without_runs_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["windows", str(tmp_path)])
    assert "holds no run" in capsys.readouterr().err
