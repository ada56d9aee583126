"""Properties of weights within one process, without storage and with it."""

from __future__ import annotations

import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_code.weights.layout import sampling_model
from rl_code.weights.local import LocalWeights
from rl_code.weights.stored_publisher import StoredPublisher
from rl_code.weights.stored_subscriber import StoredSubscriber
from rl_code.weights.versions import WeightError, WeightsConfig, WeightTimeout
from tests.rl_code.weights.small import CONFIG, DTYPE, assert_is, mesh, model_of, wanted


def weights(where=None, *, keep: int = 2) -> LocalWeights:
    return LocalWeights(wanted(where or mesh()), keep=keep)


@pytest.mark.parametrize(
    "learner, actors",
    [((1, 2), (2, 2)), ((1, 2, 2), (1, 2)), ((1, 2), (1, 1)), ((1, 2), (1, 1, 4))],
)
@pytest.mark.quick(first=2)
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


overwrite = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)


@pytest.mark.parametrize(
    ("dtype", "actors"), [("float32", (1, 1)), ("float32", (2, 1)), ("bfloat16", (1, 1))]
)
def test_published_weights_survive_updates_that_donate_the_learners_state(dtype, actors):
    model = model_of(0, mesh())
    expected = [np.asarray(x).astype(jnp.dtype(dtype)) for x in jax.tree.leaves(model)]
    local = LocalWeights(sampling_model(CONFIG, dtype, mesh(*actors)), keep=1)
    local.publish(0, model)
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


# --- With storage behind --------------------------------------------------------------------------
# What memory lacks comes from storage, bit for bit; what neither has is waited for in memory alone.

STORED = WeightsConfig(full_every=3, keep=4, deadline_s=60.0)
LONG_S = 30.0


@pytest.fixture
def start(tmp_path):
    """Starts a learner in the same workdir: weights with so many versions in memory."""
    made = []

    def start(keep: int, *versions: int) -> LocalWeights:
        subscriber = StoredSubscriber(tmp_path, wanted(mesh()), name="actor")
        publisher = StoredPublisher(tmp_path, DTYPE, STORED)
        made.append(LocalWeights(wanted(mesh()), keep=keep, stored=(publisher, subscriber)))
        for version in versions:
            assert made[-1].publish(version, model_of(version, mesh())).number == version
        return made[-1]

    yield start
    for backed in made:
        backed.close()


def assert_gives(backed: LocalWeights, version: int, source: str, **asked: int) -> None:
    """Where a version comes from, "memory", "storage" or what was "held" of it, and that its bits
    are right.
    """
    number, model = backed.wait(**asked, deadline_s=LONG_S)
    assert number == backed.fetched.version == version
    assert_is(model, version, mesh())
    read = backed.fetched.full_bytes + backed.fetched.delta_bytes
    assert (read > 0) == (source == "storage")


def test_versions_that_memory_no_longer_keeps_come_from_storage(start):
    backed = start(2, *range(5))
    assert backed.newest() == 4
    assert_gives(backed, 4, "memory", exactly=4)
    assert_gives(backed, 3, "memory", exactly=3)
    assert_gives(backed, 2, "storage", exactly=2)
    assert_gives(backed, 1, "storage", exactly=1)
    assert_gives(backed, 4, "memory", at_least=0)
    assert (
        backed.published.version >= 3
        and backed.published.full_bytes + backed.published.delta_bytes > 0
    )


def test_a_restarted_learner_has_what_was_published_before(start):
    start(2, 0, 1, 2, 3).close()
    backed = start(2, 2)
    assert backed.newest() == 2
    assert_gives(backed, 2, "memory", exactly=2)
    assert_gives(backed, 1, "storage", exactly=1)


def test_what_was_published_before_a_restart_is_not_waited_for(start):
    """The groups of a step may want weights that the restarted learner has still to make again."""
    start(2, 0, 1, 2, 3).close()
    backed = start(2, 1)
    assert_gives(backed, 3, "storage", exactly=3)
    assert_gives(backed, 3, "held", at_least=2)
    assert_gives(backed, 1, "memory", at_least=1)
    for version in (2, 3, 4):
        backed.publish(version, model_of(version, mesh()))
    assert_gives(backed, 4, "memory", at_least=2)
    assert_gives(backed, 1, "storage", exactly=1)


def test_versions_that_are_to_come_are_waited_for(start):
    backed = start(2, 0)
    found = {}

    def act(asked: tuple[str, int]) -> None:
        found[asked] = backed.wait(**dict([asked]), deadline_s=LONG_S)[0]

    actors = [
        threading.Thread(target=act, args=(asked,)) for asked in [("exactly", 1), ("at_least", 1)]
    ]
    for actor in actors:
        actor.start()
    backed.publish(1, model_of(1, mesh()))
    for actor in actors:
        actor.join(LONG_S)
    assert found == {("exactly", 1): 1, ("at_least", 1): 1}


@pytest.mark.parametrize("asked", [{"exactly": 7}, {"at_least": 7}])
def test_a_learner_of_this_process_may_take_longer_than_the_deadline(start, asked):
    """It may have to go through the steps since its checkpoint again; it ends the wait when it ends
    itself.
    """
    backed = start(2, 0, 1)
    threading.Timer(0.3, lambda: backed.publish(7, model_of(7, mesh()))).start()
    assert backed.wait(**asked, deadline_s=0.05)[0] == 7
    threading.Timer(0.3, backed.close).start()
    with pytest.raises(
        WeightError, match=r"version 8 will not come: the learner closed after version 7"
    ):
        backed.wait(**{name: 8 for name in asked}, deadline_s=0.05)


def test_what_nobody_keeps_is_an_error_and_no_timeout(start):
    backed = start(2, *range(9))
    backed.wait(exactly=8, deadline_s=LONG_S)
    with pytest.raises(WeightError, match=r"version 1 is not kept any more") as caught:
        backed.wait(exactly=1, deadline_s=LONG_S)
    assert not isinstance(caught.value, WeightTimeout)


def test_nobody_waits_for_a_learner_with_storage_that_has_closed(start):
    backed = start(1, 0, 1)
    closing = threading.Timer(0.1, backed.close)
    closing.start()
    with pytest.raises(
        WeightError, match="version 2 will not come: the learner closed after version 1"
    ) as caught:
        backed.wait(exactly=2, deadline_s=LONG_S)
    assert not isinstance(caught.value, WeightTimeout)
    closing.join()
    assert_gives(backed, 1, "memory", exactly=1)
    assert_gives(backed, 0, "storage", exactly=0)


def test_a_number_published_again_with_other_bits_is_refused(start):
    start(2, 0, 1, 2).close()
    backed = start(2, 1)
    with pytest.raises(WeightError, match=r"version 2 was published to .* with checksum"):
        backed.publish(2, model_of(3, mesh()))
