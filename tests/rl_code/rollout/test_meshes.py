"""What is sampled on every mesh of eight devices is what one device samples: tokens and
log-probabilities, behind prompts that are prefilled in chunks.

Not every method and feed-forward part is tried on every mesh, but every two axes with each of them
(``tests.meshes.CASES``).
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest

from models.sharding import MeshConfig, make_mesh
from rl_code.rollout.engine import Engine
from rl_code.rollout.scheduler import Scheduler
from tests.meshes import CASES, MESHES, model_options
from tests.rl_code.rollout import test_documents
from tests.rl_code.rollout.small import (
    ENGINE,
    MODEL,
    SAMPLING,
    STOP,
    Episode,
    Letters,
    model_on,
    task_of,
)
from tests.rl_code.rollout.with_documents import WITH_DOCUMENTS, DocumentEpisode

# MoBA's blocks are pages.
PAGES = dict(page=8, prefill_tokens=8)
# Every axis, and most methods and feed-forward parts, in a few of them. MoBA has its heads cut in
# test_scheduler, and folded experts are in test_experts.
SOME = [
    # whose layers have weights of their own to cut, as those with states
    ("fsdp 2 x context 2 x tensor 2", "nsa", "plain"),
    ("context 4 x expert 2", "window", "experts"),
    ("data 2 x fsdp 2 x tensor 2", "states", "plain"),
    # which are latent too
    ("data 2 x tensor 4", "chosen", "plain"),
    # in layers of which every other one is dense
    ("tensor 8", "documents", "plain"),
]


def sampled(mesh: MeshConfig, methods: str, options: dict) -> list:
    """The trajectories of five groups, or of three whose contexts have documents."""
    model = dataclasses.replace(MODEL, **options)
    documents = methods == "documents"
    config = dataclasses.replace(WITH_DOCUMENTS if documents else ENGINE, **PAGES)
    engine = Engine(model, config, SAMPLING, (STOP,), make_mesh(mesh))
    scheduler = Scheduler(engine, Letters(), workers=4, worker_deadline_s=60.0)
    tasks = test_documents.TASKS if documents else [task_of(seed) for seed in (8, 1, 2, 3, 4)]
    make = functools.partial(DocumentEpisode, page=config.page) if documents else Episode
    weights = model_on(engine.mesh, model)
    way = dict(group_size=2, version=1, key=jax.random.key(7))
    groups, first = scheduler.rollout(weights, tasks, make, **way)
    if not documents:
        # a copy of weights that are cut is made whole once, and prompts of the same ones are found
        assert not first.found_in_tasks
        _, again = scheduler.rollout(weights, tasks[:1], make, **way)
        assert again.found_in_tasks == config.page
    scheduler.close()
    return [trajectory for group in groups for trajectory in group.trajectories]


@functools.cache
def alone(heads: int, methods: str, feed_forward: str) -> list:
    """What one device samples. heads: key/value heads, in which meshes differ."""
    mesh = next(
        x for x in MESHES if model_options(x, methods, feed_forward)["num_kv_heads"] == heads
    )
    return sampled(MeshConfig(), methods, model_options(mesh, methods, feed_forward))


def check(mesh: str, methods: str, feed_forward: str) -> None:
    """Raises AssertionError where a mesh samples something else than one device."""
    options = model_options(mesh, methods, feed_forward)
    wanted = alone(options["num_kv_heads"], methods, feed_forward)
    assert any(len(set(t.tokens[t.sampled])) > 2 for t in wanted)
    for one, other in zip(sampled(MESHES[mesh], methods, options), wanted, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mesh, methods, feed_forward", SOME)
@pytest.mark.long
def test_a_few_meshes_sample_what_one_device_does(mesh, methods, feed_forward):
    check(mesh, methods, feed_forward)


@pytest.mark.slow(reason="compiles for half an hour")
@pytest.mark.parametrize("mesh, methods, feed_forward", CASES)
def test_every_mesh_samples_what_one_device_does(mesh, methods, feed_forward):
    check(mesh, methods, feed_forward)
