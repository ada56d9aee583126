"""Shapes of engine and batch that follow from summaries, and configs in which none could be."""

from __future__ import annotations

import dataclasses

import pytest

from configs import quickstart
from rl_code.config.read_config import ConfigError, build
from rl_code.environment.summaries import SummariesConfig
from rl_code.learner.batching import PackConfig
from rl_code.rollout.engine_config import EngineConfig
from rl_code.run import derive
from rl_code.run.config import RunConfig
from rl_code.types import Limits

LIMITS = Limits(turns=6, tokens=1200, turn_tokens=64, test_runs=0, command_s=1.0)
SUMMARIES = SummariesConfig(trigger=200, context=384, tokens=48, most=3)


def config_with(summaries, **changes):
    given = quickstart.get_config()
    given.summaries = summaries
    for key, value in changes.items():
        section, _, name = key.partition("__")
        given[section][name] = value
    return build(RunConfig, given)


def test_an_engine_holds_one_context_and_a_batch_the_whole_tree():
    shapes = derive.engine(EngineConfig(), LIMITS, "float32", 4, summaries=SUMMARIES)
    alone = dataclasses.replace(LIMITS, tokens=384)
    assert shapes == derive.engine(EngineConfig(), alone, "float32", 4)
    assert shapes.length == 384
    packed = derive.pack(PackConfig(), LIMITS, 192, 2, 4, summaries=SUMMARIES)
    assert packed.slots >= 1200
    # six messages of 64 tokens, three summaries of 48
    assert derive.sampled_tokens(LIMITS, SUMMARIES) == packed.targets == 6 * 64 + 3 * 48
    # each context is a run behind the prompt where layers choose blocks
    assert derive.pack(PackConfig(), LIMITS, 192, 2, 4, True).runs == 2
    assert derive.pack(PackConfig(), LIMITS, 192, 2, 4, True, summaries=SUMMARIES).runs == 5


def test_without_summaries_nothing_differs():
    assert derive.sampled_tokens(LIMITS) == 6 * 64
    assert derive.pack(PackConfig(align=8), LIMITS, 192, 2, 4).slots == 1200
    assert build(RunConfig, quickstart.get_config()).summaries is None


def test_a_run_takes_its_shapes_from_them():
    limits = {"limits__tokens": 900}
    config = config_with(dict(trigger=150, context=288, tokens=40, most=2), **limits)
    assert config.rollout.engine.length == 288 and config.summaries.most == 2
    plain = config_with(None, **limits)
    assert plain.rollout.engine.length == 900
    more = config.train.loss.constant_length - plain.train.loss.constant_length
    assert more == 80


@pytest.mark.parametrize(
    ("summaries", "changes", "said"),
    [
        (dict(trigger=10_000), {}, "it must be at most"),
        (dict(trigger=100), {"limits__turns": 1}, "between two messages"),
        (dict(trigger=100, context=200, tokens=50), {"rollout__engine": {"length": 150}}, "exceed"),
    ],
)
def test_configs_without_a_place_for_summaries_are_refused(summaries, changes, said):
    with pytest.raises(ValueError, match=said):
        config_with(summaries, **changes)


def test_a_protocol_that_writes_no_results_is_refused():
    given = quickstart.get_config()
    given.summaries = dict(trigger=100, tokens=20)
    given.protocol = "raw_completion"
    given.sft = None
    with pytest.raises(ConfigError, match="writes no results"):
        build(RunConfig, given)
