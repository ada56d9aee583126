"""launch.evaluate plays a suite that is read from a path, and writes predictions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from absl.testing import flagsaver

from configs import quickstart
from launch import evaluate
from rl_code.config.read_config import ConfigError
from tests import programs
from tests.rl_code.tasks import projects

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def parsed():
    if not evaluate.FLAGS.is_parsed():
        evaluate.FLAGS(["evaluate"])


def test_a_suite_of_a_path_is_checked():
    section = evaluate.suite_of_path("leetcode", "x.jsonl")
    assert section == {"name": "leetcode", "path": "x.jsonl", "settings": {}}
    for name in ("humaneval", "nothing", None):
        with pytest.raises(ConfigError, match=r"with --path it must be one of .*leetcode"):
            evaluate.suite_of_path(name, "x.jsonl")


@pytest.mark.long
def test_a_suite_of_repositories_is_played_and_predicted(tmp_path):
    """With the untrained model of a shipped config: what comes out has the right form."""
    shop = projects.make_shop(tmp_path / "repositories" / "lab" / "shop")
    rows = projects.write_rows(tmp_path / "tasks.jsonl", projects.swe_row(shop))
    packages = projects.install_pytest(tmp_path / "packages")
    places = {"repositories": str(tmp_path / "repositories"), "packages": str(packages)}
    predictions = tmp_path / "predictions.jsonl"
    line = [
        f"--config={ROOT / 'configs' / 'repositories.py'}:smoke",
        "--suite=swe",
        f"--path={rows}",
        f"--suite_settings={json.dumps({'places': places})}",
        f"--config.sandbox.layers={tmp_path / 'layers'}",
        "--config.suites=()",
        "--config.model.preset=tests.models.small:SHALLOW",
        "--config.limits.tokens=768",
        "--config.rollout.engine.prompt_length=384",
        f"--predictions={predictions}",
    ]
    done = programs.run("launch.evaluate", *line, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "pass@1" in done.stdout and "cheats" in done.stdout
    (row,) = map(json.loads, predictions.read_text().splitlines())
    assert row["instance_id"] == "lab__shop-1" and row["model_name_or_path"] == "start"
    (result,) = (tmp_path / "runs" / "untrained_repositories" / "evaluations").glob("swe.*.json")
    assert json.loads(result.read_text())["tasks"][0]["id"] == "lab__shop-1"
    # a saved result is compared with, and not played again
    done = programs.run("launch.evaluate", *line, f"--against={result}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"before: {result}, start; after: start, start" in done.stdout


def test_no_folder_is_made_for_weights_that_are_not_there(tmp_path):
    workdir = tmp_path / "typo"
    given = flagsaver.as_parsed(suite="held_out")
    with given, pytest.raises(ConfigError, match="typo has no checkpoint"):
        evaluate.main(quickstart.get_config("smoke"), str(workdir))
    assert not workdir.exists()
