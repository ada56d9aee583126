"""A metric and a writer from outside of the tree, as docs/adding.md adds them."""

from __future__ import annotations

import pytest

from configs import quickstart
from rl_code.metric_writers import MetricLog
from rl_code.metrics import read_metrics
from rl_code.read_config import ConfigError, build
from rl_code.run_config import RunConfig
from rl_code.step_metrics import episode_metrics, extra_metrics
from tests.rl_code.test_metrics import _group


def configured(**metrics) -> RunConfig:
    settings = quickstart.get_config("smoke").to_dict()
    return build(RunConfig, settings | {"metrics": metrics})


def test_a_metric_from_outside_is_written_with_the_others(outside, tmp_path):
    outside("A metric")
    extra = (dict(name="my_lab.metrics:EditDistance", trajectories=1), "sampled_lengths")
    config = configured(extra=extra)
    groups = [_group(), _group()]
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
        extra_metrics([lambda groups, known: {"reward/total": 0.0}], [], {"reward/total": 1.0})
    with pytest.raises(ValueError, match="'distance'"):
        extra_metrics([lambda groups, known: {"distance": 0.0}], [], {})
