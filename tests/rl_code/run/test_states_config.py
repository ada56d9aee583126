"""Settings that layers with a state do not have are refused by name."""

from __future__ import annotations

import re

import pytest

from configs import quickstart
from rl_code.config.read_config import ConfigError, build
from rl_code.run.agreement import check_states
from rl_code.run.config import RunConfig

STATES = ("gated_delta", "gated_delta", "gated_delta", "dense")


def config(**changes):
    """The quickstart's config with layers that keep a state. changes: by key, "__" for a dot."""
    given = quickstart.get_config("smoke")
    for key, value in {"model__attention": STATES, **changes}.items():
        *sections, name = key.split("__")
        section = given
        for part in sections:
            section = section[part]
        section[name] = value
    return build(RunConfig, given)


def test_a_row_has_a_bound_on_its_runs():
    made = config()
    assert made.train.pack.runs >= 2
    assert [method.mixes for method in made.model.known_methods()] == [True, True, True, False]
    # states pass from device to device
    assert config(mesh__context=2).train.pack.slots % 2 == 0


@pytest.mark.parametrize(
    "key, value",
    [
        ("documents", {}),
        ("rollout.engine.draft_tokens", 2),
        ("train.pack.prompt_slots", 64),
        ("model.lora", {}),
        ("model.pad_for", 3),
        ("rollout.weights", "int8"),
    ],
)
def test_settings_that_are_not_supported_are_named(key, value):
    message = rf"config\.{re.escape(key)} = .* is not supported beside"
    with pytest.raises(ConfigError, match=message):
        config(**{key.replace(".", "__"): value})


@pytest.mark.parametrize("key, value", [("train.pack.prompt_slots", 64), ("model.lora", {})])
def test_so_are_those_that_layers_with_projections_of_their_own_do_not_have(key, value):
    config(model__attention="mla")
    message = rf"config\.{re.escape(key)} = .* beside MLA, which has projections of its own; set it"
    with pytest.raises(ConfigError, match=message):
        config(model__attention="mla", **{key.replace(".", "__"): value})


def test_picks_of_single_tokens_beside_documents_are_refused_by_name():
    config(model__attention="dsa", documents={})
    config(model__attention="dsa", rollout__picks="replay")
    with pytest.raises(
        ConfigError, match=r"config\.rollout\.picks = 'replay' is not supported besi"
    ):
        config(model__attention="dsa", rollout__picks="replay", documents={})


def test_methods_that_only_the_weights_tell_need_the_bound_said():
    made = config(model__attention="dense")
    assert made.train.pack.runs == 0
    with pytest.raises(ConfigError, match="a row must have a bound on its runs; set it, or name"):
        check_states(made, config().model.known_methods())
