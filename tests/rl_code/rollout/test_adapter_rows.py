"""Rows of one batch with adapters of their own: each comes out as it does without the others, and
as from a model that has its adapter alone.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib

import jax
import numpy as np
import pytest
from flax import nnx

from models.adapted import with_adapters
from models.adapter_rows import for_rows, with_several
from models.lora import LoRA, new_adapters
from models.model_config import ModelConfig
from models.sharding import MeshConfig, make_mesh
from models.transformer import Transformer
from pallas_kernels.tokens import sequences
from rl_code.rollout.decode_input import empty_input
from rl_code.rollout.engine import Engine
from rl_code.rollout.scheduler import Scheduler
from tests.rl_code.rollout.small import (
    ENGINE,
    MODEL,
    ONE_LAYER,
    SAMPLING,
    SCARCE,
    STOP,
    VOCAB,
    Episode,
    Letters,
    initial,
    make_scheduler,
    task_of,
)
from tests.rl_code.rollout.test_documents import TASKS
from tests.rl_code.rollout.with_documents import WITH_DOCUMENTS, DocumentEpisode

# of different ranks, targets and factors
LORAS = (
    LoRA(rank=3, alpha=4.0),
    LoRA(rank=2, alpha=3.0, targets=("q_proj", "o_proj", "up_proj"), rslora=True),
)
# the adapter of each row
ROWS = np.array([1, -1, 0], np.int32)
PROMPT = 7
STEPS = 10
stacked = jax.jit(with_several)


def random_adapters(model: Transformer, lora: LoRA):
    def draw(path, x):
        rng = np.random.default_rng([zlib.crc32(jax.tree_util.keystr(path).encode()), lora.rank])
        return jax.device_put(0.15 * rng.standard_normal(x.shape, np.float32))

    shapes = jax.eval_shape(lambda: new_adapters(model, lora, nnx.Rngs(0)))
    return jax.tree.map_with_path(draw, shapes)


@functools.cache
def adapters_of(config: ModelConfig) -> list:
    return [random_adapters(initial(config), lora) for lora in LORAS]


@pytest.fixture(scope="module")
def adapters():
    return adapters_of(MODEL)


@pytest.fixture(scope="module")
def several(adapters):
    return stacked(initial(MODEL), adapters)


@functools.cache
def engine_of(tensor: int) -> Engine:
    config = dataclasses.replace(ENGINE, decode="pages", decode_steps=STEPS // 2, prefill_rows=3)
    return Engine(MODEL, config, SAMPLING, (), make_mesh(MeshConfig(1, tensor)))


def sampled(model, rows: np.ndarray | None, active, *, tensor: int = 1):
    """(tokens, logprobs) [rows, STEPS] that the engine samples behind random prompts, two dispatches
    of it. Rows that are not active are left out.
    """
    engine = engine_of(tensor)
    config = engine.config
    model = engine.own(model)
    prompts = np.random.default_rng(5).integers(1, VOCAB, (3, PROMPT)).astype(np.int32)
    pages = np.arange(3 * 5, dtype=np.int32).reshape(3, 5)  # 20 tokens each
    tables = np.full((3, config.table), -1, np.int32)
    tables[:, :5] = pages
    cache = engine.init()
    places = np.broadcast_to(np.arange(PROMPT - 1, dtype=np.int32), (3, PROMPT - 1))
    places = np.where(np.asarray(active)[:, None], places, -1)
    for part in (slice(0, 4), slice(4, PROMPT - 1)):
        chunk = np.pad(prompts[:, part], ((0, 0), (0, 4)))[:, :4]
        at = np.pad(places[:, part], ((0, 0), (0, 4)), constant_values=-1)[:, :4]
        cache = engine.prefill(model, cache, tables, chunk, at, None, rows)
    last, length = prompts[:, -1], PROMPT - 1
    found = []
    for _ in range(2):
        inputs = empty_input(config, 1)
        inputs.active[:] = active
        inputs.tokens[:], inputs.places[:], inputs.budgets[:] = last, length, STEPS // 2
        inputs.samples[:] = range(3)
        inputs.tables[:] = inputs.rows.own[:] = tables
        inputs = dataclasses.replace(inputs, adapters=rows)
        cache, tokens, logprobs, *_ = engine.decode(model, cache, inputs)
        found.append((np.asarray(tokens), np.asarray(logprobs)))
        last, length = found[-1][0][:, -1], length + STEPS // 2
    tokens, logprobs = (np.concatenate(part, axis=1) for part in zip(*found, strict=True))
    return tokens[list(active)], logprobs[list(active)]


@functools.cache
def separate(row: int):
    """(tokens, log-probabilities) of a model that has the adapter of this row alone."""
    plain, number = initial(MODEL), ROWS[row]
    own = plain
    if number >= 0:
        own = with_adapters(plain, LORAS[number], random_adapters(plain, LORAS[number]))
    return sampled(own, None, [row == other for other in range(3)])


@pytest.mark.long
def test_rows_with_other_adapters_beside_them_come_out_as_alone(several):
    together = sampled(several, ROWS, [True] * 3)
    for row in range(3):
        active = [row == other for other in range(3)]
        alone = sampled(several, ROWS, active)
        for x, y, z in zip(together, alone, separate(row), strict=True):
            assert np.array_equal(x[row], y[0])
            np.testing.assert_allclose(x[row], z[0], rtol=1e-4, atol=1e-4)
    # all three adapters matter
    same = sampled(several, np.full(3, -1, np.int32), [True] * 3)
    assert [np.array_equal(x, y) for x, y in zip(together[0], same[0], strict=True)] == [
        False,
        True,
        False,
    ]


@pytest.mark.long
def test_rows_have_their_adapters_on_a_mesh(several):
    one, two = (sampled(several, ROWS, [True] * 3, tensor=tensor) for tensor in (1, 2))
    for x, y in zip(one, two, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.long
def test_a_broken_adapter_reaches_no_other_row(adapters):
    broken = jax.tree.map(lambda x: x * np.nan, adapters[0])
    model = stacked(initial(MODEL), [broken, adapters[1]])
    tokens = np.ones((2, 5), np.int32)
    places = np.broadcast_to(np.arange(5), (2, 5))
    where = sequences(np.full(2, 5), 5)
    compute = jax.jit(lambda model, rows: for_rows(model, rows).hidden(tokens, places, where))
    for rows, broken in (([0, 1], [True, False]), ([-1, -1], [False, False])):
        hidden = compute(model, np.array(rows))
        assert [bool(np.isnan(x).any()) for x in hidden] == broken


def test_several_adapters_need_to_know_their_rows(adapters, several):
    tokens = np.ones((2, 5), np.int32)
    with pytest.raises(ValueError, match="say by for_rows which row has which"):
        several.hidden(tokens, tokens, sequences(np.full(2, 5), 5))
    adapted = with_adapters(initial(MODEL), LORAS[0], adapters[0])
    with pytest.raises(ValueError, match="of the model must be None, and the 1 adapters"):
        with_several(adapted, adapters[:1])
    assert for_rows(adapted, None) is adapted


# what is sampled of one task, with the first documents that there are
PLAYED = {
    "few pages": (SCARCE, Episode, task_of(8)),
    "documents": (WITH_DOCUMENTS, DocumentEpisode, TASKS[0]),
}


@pytest.mark.long
@pytest.mark.parametrize("name", PLAYED)
def test_groups_of_several_adapters_decode_together_and_sample_as_alone(name):
    """All have the same prompt, and share no page of it with another adapter's."""
    config, make, task = PLAYED[name]
    adapters = adapters_of(ONE_LAYER)
    several = stacked(initial(ONE_LAYER), adapters)

    def played(model, numbers, first=0):
        scheduler = make_scheduler(config, ONE_LAYER, timeout_s=60.0)
        way = dict(group_size=2, version=1, key=jax.random.key(7), first_group=first)
        groups, stats = scheduler.rollout(
            model, [task] * len(numbers), make, adapters=numbers, **way
        )
        scheduler.close()
        return [group.trajectories for group in groups], stats

    def only(number):
        """The model in which every other adapter is broken."""
        parts = [
            x if at == number else jax.tree.map(lambda y: y * np.nan, x)
            for at, x in enumerate(adapters)
        ]
        return stacked(initial(ONE_LAYER), parts)

    # the first one twice: a group of the same adapter does share its pages
    numbers = [*ROWS.tolist(), int(ROWS[0])]
    together, stats = played(several, numbers)
    assert (stats.preempted > 0) == (name == "few pages")
    for group, number in enumerate(numbers):
        (alone,), _ = played(only(number), [number], group)
        for x, y in zip(together[group], alone, strict=True):
            assert np.array_equal(x.tokens, y.tokens) and np.array_equal(x.logprobs, y.logprobs)


def test_an_adapter_that_the_weights_lack_is_named(several):
    engine = Engine(MODEL, ENGINE, SAMPLING, (STOP,), make_mesh(MeshConfig()))
    scheduler = Scheduler(engine, Letters(), workers=1, worker_deadline_s=60.0)
    way = dict(group=0, group_size=2, key=(0, 7))
    complaint = "adapter=2 must be -1 or one of the 2 adapters of the weights"
    scheduler.load(several, 1)
    with pytest.raises(ValueError, match=complaint):
        scheduler.submit(task_of(0), Episode, adapter=2, **way)
    scheduler.submit(task_of(0), Episode, adapter=1, **way)
    with pytest.raises(ValueError, match="adapter=1 must be -1 or one of the 0 adapters"):
        scheduler.load(initial(MODEL), 2)
    assert scheduler.version == 1
    scheduler.abort()
    scheduler.close()
