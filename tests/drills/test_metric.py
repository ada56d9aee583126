"""A metric and a writer from outside of the tree, as docs/adding.md adds them."""

from __future__ import annotations

import sys

import pytest

from configs import quickstart
from rl_code.config.read_config import ConfigError, build
from rl_code.metrics.values import read_metrics
from rl_code.metrics.writers import MetricLog
from rl_code.run.config import RunConfig
from rl_code.run.step_metrics import episode_metrics, extra_metrics
from rl_code.train import _score
from tests.rl_code.trajectories import group_of_one


def configured(**metrics) -> RunConfig:
    settings = quickstart.get_config("smoke").to_dict()
    return build(RunConfig, settings | {"metrics": metrics})


def test_a_metric_from_outside_is_written_with_the_others(outside, tmp_path):
    outside("A metric")
    extra = (dict(name="my_lab.metrics:EditDistance", trajectories=1), "sampled_lengths")
    config = configured(extra=extra)
    groups = [group_of_one(), group_of_one()]
    known = episode_metrics(groups, 7)
    found = extra_metrics(config.metrics.extra_functions(), groups, known)
    # the reference is "pass", and what was written is "x"
    assert found["edits/distance"] == 1.0
    assert found["lengths/sampled_max"] == len(b"return 1")
    with MetricLog(tmp_path, 0, config.metrics.open_settings()) as log:
        log.write(0, known | found)
    assert read_metrics(tmp_path)[0]["edits/distance"] == 1.0


def test_a_wrong_metric_is_named_when_the_config_is_built(outside):
    outside("A metric")
    for name, words in {
        "my_lab.metrics:EditDistanse": r"metrics\.extra.*my_lab\.metrics has no 'EditDistanse'",
        "sampled_length": r"metrics\.extra.*Did you mean 'sampled_lengths'",
    }.items():
        with pytest.raises(ConfigError, match=words):
            configured(extra=(name,))
    with pytest.raises(ConfigError, match="trajectorys"):
        configured(extra=(dict(name="my_lab.metrics:EditDistance", trajectorys=1),))


def test_a_name_that_another_metric_has_is_refused():
    with pytest.raises(ValueError, match=r"'reward/total'.* no other metric has"):
        total = {"reward/total": 0.0}
        extra_metrics([lambda groups, known: total], [], {"reward/total": 1.0}, stops=True)
    with pytest.raises(ValueError, match="'distance'"):
        extra_metrics([lambda groups, known: {"distance": 0.0}], [], {}, stops=True)


def _leaves(groups, known):
    sys.exit(3)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda groups, known: {"own/share": 1 / len(groups)},
        _leaves,
        lambda groups, known: {"own/name": "text"},
        lambda groups, known: {"reward/total": 0.0},
        lambda groups, known: {3: 0.0},
        lambda groups, known: None,
    ],
)
def test_an_exception_of_a_metric_is_counted_or_stops_the_run(wrong):
    def right(groups, known):
        return {"own/right": len(groups)}

    known = {"reward/total": 1.0}
    found = extra_metrics([wrong, right], [], known)
    assert found == {"metrics/errors": 1.0, "own/right": 0}
    with pytest.raises((Exception, SystemExit)):
        extra_metrics([wrong, right], [], known, stops=True)


def test_what_becomes_of_exceptions_is_a_key_of_the_config():
    assert configured().metrics.on_error == "count"
    assert configured(on_error="stop").metrics.on_error == "stop"
    with pytest.raises(ConfigError, match="on_error='ignore' must be 'count' or 'stop'"):
        configured(on_error="ignore")


def test_the_best_checkpoint_is_not_chosen_by_a_metric_that_failed():
    settings = quickstart.get_config("smoke").to_dict()
    settings["checkpoint"] = settings["checkpoint"] | {"best": "own/share"}
    config = build(RunConfig, settings)
    assert _score(config, {"metrics/errors": 1.0}) is None
    with pytest.raises(ConfigError, match=r"own/share.*no such metric"):
        _score(config, {"metrics/errors": 0.0})
