"""Properties of weights within one process."""

from __future__ import annotations

import re
import threading

import jax
import numpy as np
import pytest

from rl_code.weights.layout import sampling_model
from rl_code.weights.local import LocalWeights
from rl_code.weights.versions import WeightError, WeightTimeout
from tests.rl_code.weights.small import CONFIG, assert_is, mesh, model_of, wanted


def weights(where=None, *, keep: int = 2) -> LocalWeights:
    return LocalWeights(wanted(where or mesh()), keep=keep)


@pytest.mark.parametrize(
    "learner, actors",
    [((1, 2), (1, 1)), ((1, 2), (2, 2)), ((1, 2), (1, 1, 4)), ((1, 2, 2), (1, 2))],
)
def test_the_actor_gets_the_learners_weights_in_its_own_layout_and_dtype(learner, actors):
    learner = mesh(*learner)
    actor = mesh(*actors, devices=jax.devices()[4:])
    local = weights(actor)
    with jax.set_mesh(learner):
        for version in (0, 1):
            local.publish(version, model_of(version, learner))
    number, model = local.wait(at_least=0, deadline_s=1.0)
    assert number == local.newest() == 1
    assert_is(model, 1, actor)
    assert local.published.version == 1 and local.published.live_bytes == sum(
        x.nbytes for x in jax.tree.leaves(model)
    )


@pytest.mark.parametrize(
    ("dtype", "actors"), [("float32", (1, 1)), ("float32", (2, 1)), ("bfloat16", (1, 1))]
)
def test_published_weights_survive_updates_that_donate_the_learners_state(dtype, actors):
    model = model_of(0, mesh())
    expected = [np.array(x.astype(dtype)) for x in jax.tree.leaves(model)]
    local = LocalWeights(sampling_model(CONFIG, dtype, mesh(*actors)), keep=1)
    local.publish(0, model)
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)
    for _ in range(2):
        model = overwrite(model)
    _, published = local.wait(exactly=0, deadline_s=1.0)
    for x, y in zip(jax.tree.leaves(published), expected, strict=True):
        assert np.asarray(x).tobytes() == y.tobytes()


def test_actors_that_wait_all_get_the_version_they_wait_for():
    local = weights()
    found = {}

    def act(index: int) -> None:
        found[index] = local.wait(at_least=1, deadline_s=30.0)[0]

    actors = [threading.Thread(target=act, args=(index,)) for index in range(3)]
    for actor in actors:
        actor.start()
    local.publish(0, model_of(0, mesh()))
    local.publish(1, model_of(1, mesh()))
    for actor in actors:
        actor.join(30.0)
    assert found == {0: 1, 1: 1, 2: 1}


def test_a_wait_that_is_too_long_says_who_waits_for_whom():
    local = weights()
    errors = []

    def act() -> None:
        try:
            local.wait(at_least=12, deadline_s=0.1)
        except WeightTimeout as error:
            errors.append(str(error))

    for published in (None, 10):
        if published is not None:
            local.publish(published, model_of(0, mesh()))
        actor = threading.Thread(target=act, name="actor-1")
        actor.start()
        actor.join()
    for error, seen in zip(
        errors, ("no version seen", r"newest seen: 10, written \d+ s ago"), strict=True
    ):
        message = (
            rf"actor-1 waited 0\.1 s for version 12 from the learner \({seen}, in this process\)"
        )
        assert re.fullmatch(message, error)


def test_only_the_newest_are_kept():
    local = weights(keep=2)
    for version in range(4):
        local.publish(version, model_of(version, mesh()))
    assert_is(local.wait(exactly=2, deadline_s=1.0)[1], 2, mesh())
    with pytest.raises(WeightError, match=r"version 1 is not kept any more; there are \[2, 3\]"):
        local.wait(exactly=1, deadline_s=1.0)
    with pytest.raises(ValueError, match="keep=0 must be at least 1"):
        weights(keep=0)


def test_a_number_published_again_must_have_the_same_bits():
    local = weights()
    local.publish(0, model_of(0, mesh()))
    local.publish(0, model_of(0, mesh(1, 2)))
    with pytest.raises(WeightError, match="version 0 was published to this process with checksum"):
        local.publish(0, model_of(1, mesh()))
    assert_is(local.wait(exactly=0, deadline_s=1.0)[1], 0, mesh())


def test_nobody_waits_for_a_learner_that_has_closed():
    local = weights()
    local.publish(0, model_of(0, mesh()))
    threading.Timer(0.1, local.close).start()
    with pytest.raises(
        WeightError, match="version 1 will not come: the learner closed after version 0"
    ):
        local.wait(at_least=1, deadline_s=30.0)
    assert local.wait(at_least=0, deadline_s=1.0)[0] == 0
