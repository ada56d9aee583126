"""An attention method with parameters from outside of the tree, as docs/adding.md adds it."""

from __future__ import annotations

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import quickstart
from models.families import PRESETS
from models.paged import model_cache
from rl_code.config.read_config import ConfigError, build, complete
from rl_code.metrics.values import read_metrics
from rl_code.run.config import RunConfig
from rl_code.train import train
from tests.attention import properties
from tests.attention.cache.model import PAGE
from tests.models.small import narrow_preset

SECTION = "An attention method with parameters"
NAME = "my_lab.attention:Distance"


@pytest.fixture
def method(outside):
    outside(SECTION)
    return importlib.import_module("my_lab.attention").Distance(start=0.2)


def definition(method, q, keys, inputs, parameters):
    """One head and one query after another."""
    k, v = keys["main"]
    slopes = method.start * jnp.exp(parameters["slopes"])
    rows = []
    for t in range(q.shape[0]):
        heads = []
        for n in range(q.shape[1]):
            own = n * k.shape[1] // q.shape[1]
            scores = k[: t + 1, own] @ q[t, n] / np.sqrt(q.shape[2])
            scores -= slopes[n] * (t - jnp.arange(t + 1))
            heads.append(jax.nn.softmax(scores) @ v[: t + 1, own])
        rows.append(jnp.stack(heads))
    return jnp.stack(rows)


def test_it_has_the_properties_of_every_method(method):
    properties.nothing_leaks(method)
    cache = functools.partial(model_cache, properties.model(method).config, page=PAGE)
    properties.cached_equals_packed(method, cache)
    for kind in ("documents", "packed"):
        properties.padding_may_hold_anything(method, kind)


@pytest.mark.long
def test_it_is_its_definition_packed_or_not(x64, method):
    properties.equals_its_definition(method, definition, 9)
    properties.packed_equals_separate(method)


def config(attention, **changes) -> RunConfig:
    settings = quickstart.get_config("smoke").to_dict()
    settings["model"]["attention"] = attention
    return build(RunConfig, settings | changes)


@pytest.mark.long
def test_a_config_trains_with_it(method, tmp_path, monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny", narrow_preset(num_layers=2))
    settings = quickstart.get_config("smoke").to_dict()
    train_section = dict(steps=1, tasks_per_step=2, group_size=2, micro_batches=1)
    train_section["pack"] = dict(rows=4, drop_uninformative=False)
    settings["train"] |= train_section
    tokenizer = settings["tokenizer"] | dict(texts=20, vocab_size=300)
    made = config(NAME, suites=(), sft=None, tokenizer=tokenizer, train=settings["train"])
    assert made.model.methods() == (type(method)(),)
    train(made, tmp_path)
    (row,) = read_metrics(tmp_path)
    assert row["train/finite"] == 1.0 and row["train/grad_norm"] > 0
    # the sampler, which decodes from pages, computes what the trainer does from rows
    assert row["policy/mismatch_max"] < 1e-3


def test_the_command_line_takes_its_name(method):
    completed = complete(RunConfig, quickstart.get_config("smoke"))
    completed.model.attention = NAME  # what --config.model.attention=... does
    assert build(RunConfig, completed).model.methods() == (type(method)(),)


def test_a_wrong_method_is_named_when_the_config_is_built(method):
    for attention, words in {
        "my_lab.attention:Distanse": r"config\.model\.attention.*has no 'Distanse'",
        "windw": r"config\.model\.attention.*Did you mean 'window'",
    }.items():
        with pytest.raises(ConfigError, match=words):
            config(attention)
    with pytest.raises(ConfigError, match=r"start=-1\.0 must be above 0"):
        config(dict(name=NAME, start=-1.0))
    with pytest.raises(ConfigError, match=r"config\.model\.attention.*slope"):
        config(dict(name=NAME, slope=1.0))
