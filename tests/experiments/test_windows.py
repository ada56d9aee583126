"""Windows of old data: the sweep makes as many updates in each, and the report reads them so."""

from __future__ import annotations

import json

import pytest

from configs import windows as config
from experiments.tab import stale as windows
from experiments.tab.windows.__main__ import main
from rl_code.metrics.values import METRICS_FILE
from sweeps import DONE
from sweeps.runs import plan


def test_every_window_has_as_many_updates(tmp_path):
    for arg in ("", "smoke"):
        runs = plan(config.get_config(arg), config.get_sweep(arg), tmp_path)
        made = {(run.config.train.steps - 1) * run.config.train.epochs for run in runs}
        assert made == {4 if arg else config.UPDATES}
        names = {run.variant for run in runs}
        assert len(runs) == len(names) * (1 if arg else 3) and "window 4, unclipped" in names


def test_the_report_counts_updates(tmp_path):
    for seed in (0, 1):
        for name, epochs, rewards in (("window_1", 1, (0, 1, 2)), ("window_2", 2, (0, 1))):
            folder = tmp_path / f"variant={name},seed={seed}"
            folder.mkdir()
            (folder / DONE).write_text(json.dumps({"config": {"train": {"epochs": epochs}}}))
            rows = [{"step": i, "reward/total": r + seed} for i, r in enumerate(rewards)]
            (folder / METRICS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = windows.curves(tmp_path)
    assert list(found["window 1"].updates) == [0, 1, 2] and list(found["window 2"].updates) == [
        0,
        2,
    ]
    view = windows.rewards(found)
    assert list(view.columns[-1].cells) == ["+2.500 [+2.000, +3.000]", "+1.500 [+1.000, +2.000]"]
    assert list(view.columns[-2].cells) == ["+2.500 [+2.000, +3.000]", "+1.500 [+1.000, +2.000]"]
    windows.draw(found, tmp_path / "windows.png")
    assert (tmp_path / "windows.png").stat().st_size > 5_000


def test_a_folder_without_runs_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["windows", str(tmp_path)])
    assert "holds no run" in capsys.readouterr().err
