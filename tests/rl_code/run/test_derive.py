"""What follows from a config: every value has its right relation to the others, and the configs of
this repository train with the shapes that they were measured with.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import ml_collections
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs import ablation, asynchrony, faults, own_model, quickstart, smollm2_mbpp
from rl_code.config import read_config
from rl_code.config.read_config import ConfigError, build, lookup
from rl_code.learner.batching import PackConfig
from rl_code.learner.optimizer import learning_rate
from rl_code.rollout.engine_config import EngineConfig
from rl_code.run import derive
from rl_code.run.config import RunConfig
from rl_code.tasks.api import find_source
from rl_code.types import Limits

# What these keys were before they were derived; of the quickstart's pages there were 520.
MEASURED = {
    quickstart: {
        "train.optimizer.total_steps": 72,
        "sft.optimizer.total_steps": 340,
        "train.micro_batches": 8,
        "train.pack": dict(rows=128, slots=288, targets=224),
        "rollout.engine": dict(
            slots=24, episodes=40, pages=568, prompt_length=96, length=288, cache_dtype="float32"
        ),
        "asynchrony.weights.keep": 2,
    },
    smollm2_mbpp: {
        "train.optimizer.total_steps": 40,
        # 4 while it ran on two devices: one row a device, which changes no update
        "train.micro_batches": 8,
        "train.loss.constant_length": 64,
        "train.pack": dict(rows=8, slots=704, targets=512),
        "rollout.engine": dict(
            slots=32, episodes=32, pages=144, prompt_length=192, length=256, cache_dtype="bfloat16"
        ),
    },
    ablation: {"train.loss.constant_length": 64, "train.pack": dict(rows=128, slots=288)},
    asynchrony: {"train.optimizer.total_steps": 24, "asynchrony.weights.keep": 6},
    faults: {
        "train.optimizer.total_steps": 240,
        "train.pack": dict(rows=8, slots=288),
        "asynchrony.max_staleness": 1,
        "asynchrony.weights.keep": 3,
    },
}


@pytest.mark.parametrize("module", MEASURED, ids=lambda module: module.__name__)
def test_the_configs_train_with_the_shapes_that_were_measured(module):
    config = build(RunConfig, module.get_config())
    for key, wanted in MEASURED[module].items():
        found = lookup(config, key)
        if isinstance(wanted, dict):
            found = {name: found[name] for name in wanted}
        assert found == wanted, key


def test_the_suite_of_humaneval_has_an_engine_of_its_own():
    config = build(RunConfig, smollm2_mbpp.get_config())
    shapes = config.suites[-1].engine
    assert (shapes.prompt_length, shapes.length, shapes.pages) == (128, 288, 224)
    assert shapes.cache_dtype == "float32" and config.suites[0].engine is None


@pytest.mark.parametrize("steps", [1, 6, 200])
def test_a_run_learns_to_its_last_step(steps):
    given = quickstart.get_config()
    given.train.steps = steps
    optimizer = build(RunConfig, given).train.optimizer
    assert optimizer.total_steps == max(steps, optimizer.warmup_steps + 1)
    assert learning_rate(optimizer, steps - 1) > 0


def test_what_a_config_says_is_kept():
    given = quickstart.get_config()
    given.train.optimizer.total_steps = 100
    given.train.pack.rows = 256
    given.rollout.engine.pages = 400
    config = build(RunConfig, given)
    assert config.train.optimizer.total_steps == 100 and config.train.pack.rows == 256
    assert config.rollout.engine.pages == 400


def test_values_that_must_be_equal_are_one():
    given = quickstart.get_config()
    given.rollout.sampling = dict(temperature=0.7)
    given.asynchrony = dict(mode="in_flight", max_staleness=3)
    config = build(RunConfig, given)
    assert config.train.loss.temperature == 0.7 and config.train.pack.max_staleness == 3
    # greedy sampling trains the policy itself
    given.rollout.sampling.temperature = 0.0
    assert build(RunConfig, given).train.loss.temperature == 1.0


limits = st.builds(
    Limits,
    turns=st.integers(1, 8),
    tokens=st.integers(2, 4096),
    turn_tokens=st.integers(1, 1024),
    test_runs=st.just(0),
    command_s=st.just(1.0),
)


@settings(max_examples=200, deadline=None)
@given(limits, st.integers(1, 64), st.integers(1, 16), st.sampled_from([8, 16, 32]))
def test_an_engine_has_room_for_every_open_episode(limits, slots, group_size, page):
    given = EngineConfig(slots=slots, page=page, view_block=page)
    shapes = derive.engine(given, limits, "float32", group_size)
    assert shapes.length == limits.tokens and 1 <= shapes.prompt_length <= shapes.length
    assert shapes.episodes >= shapes.slots
    # each in a group of its own would share nothing; a page beyond each for its next token
    one = -(-(shapes.length - shapes.prompt_length) // page) + 1
    groups = -(-shapes.episodes // group_size)
    assert shapes.pages >= shapes.episodes * one + groups * (-(-shapes.prompt_length // page))


@settings(max_examples=200, deadline=None)
@given(limits, st.integers(1, 16), st.integers(1, 16), st.data())
def test_a_batch_has_room_for_the_longest_trajectories(limits, tasks, group_size, data):
    prompt = data.draw(st.integers(1, limits.tokens))
    shapes = derive.pack(PackConfig(), limits, prompt, tasks, group_size)
    # any prompt up to the longest, and what then may follow
    shortest = data.draw(st.integers(1, prompt))
    completion = limits.tokens - shortest
    if limits.turns == 1:
        completion = min(limits.turn_tokens, completion)
    per_row = tasks * group_size // shapes.rows
    assert per_row * shapes.rows == tasks * group_size and per_row in (1, group_size)
    assert shapes.slots >= shortest + per_row * completion
    assert shapes.targets >= max(1, per_row * min(derive.sampled_tokens(limits), completion))


@pytest.mark.parametrize("module", MEASURED, ids=lambda module: module.__name__)
def test_every_key_can_be_set_though_the_file_leaves_it_out(module):
    given = module.get_config()
    whole = read_config.complete(RunConfig, given)
    assert build(RunConfig, whole) == build(RunConfig, given)
    whole.lock()
    whole.train.optimizer.total_steps = 1000
    whole.rollout.engine.pages = 4000
    config = build(RunConfig, whole)
    assert (config.train.optimizer.total_steps, config.rollout.engine.pages) == (1000, 4000)
    with pytest.raises(AttributeError):
        whole.train.optimizer.totl_steps = 3


def test_an_experiment_of_ones_own_is_at_most_forty_lines(tmp_path):
    assert len(Path(own_model.__file__).read_text().splitlines()) <= 40
    config = build(RunConfig, own_model.get_config())
    assert config.tasks.name == "records" and config.train.pack.rows == 128
    assert config.model.dtype == config.rollout.dtype == "bfloat16"  # which GPUs have kernels for


def test_the_sample_of_ones_own_tasks_is_cut_into_training_and_held_out():
    config = build(RunConfig, own_model.get_config())
    named = {"training": config.tasks, "held out": config.suites[0].tasks}
    tasks = {key: find_source(one, key).load(None, None) for key, one in named.items()}
    ids = {key: {task.id for task in found} for key, found in tasks.items()}
    assert (len(ids["training"]), len(ids["held out"])) == (16, 8)
    assert not ids["training"] & ids["held out"]
    for task in [*tasks["training"], *tasks["held out"]]:
        assert len(task.hidden_tests.cases) == 3 and task.reference


def test_memory_bounds_the_pages():
    given = EngineConfig(pages_mb=2.0, page=16)
    shapes = derive.engine(given, Limits(5, 288, 64, 0, 1.0), "float32", 8)
    fewer = shapes.within_memory(page_bytes=2**15)
    assert fewer.pages == 64 < shapes.pages and fewer.length == shapes.length
    assert shapes.within_memory(page_bytes=1) == shapes
    with pytest.raises(ValueError, match=r"pages_mb=2\.0 holds 2 pages of 1\.00 MiB"):
        shapes.within_memory(page_bytes=2**20)


def test_a_part_that_is_off_is_none():
    given = ml_collections.ConfigDict(quickstart.get_config())
    given.sft = None
    assert build(RunConfig, given).sft is None
    given.sft = dict(steps=0, optimizer=dict(learning_rate=1e-3))
    with pytest.raises(ConfigError, match=r"config\.sft: steps=0 must be at least 1"):
        build(RunConfig, given)


def test_the_words_are_about_values_that_are_derived():
    settings = quickstart.get_config()
    with settings.unlocked():
        settings.documents = {}
        settings.train.value = dict(optimizer=dict(learning_rate=1e-3))
        settings.train.pack.drop_uninformative = False
        settings.train.teacher = dict(average=0.9)
    config = build(RunConfig, settings)
    for key in derive.WHY:
        if not key.startswith("suites."):
            assert lookup(config, key) is not None, key
    assert dataclasses.is_dataclass(config)
