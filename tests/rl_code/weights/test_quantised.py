"""Versions of weights whose matrices are quantised: what is published is what every actor gets, and
it is smaller.
"""

from __future__ import annotations

import jax
import numpy as np
import pytest

from models.transformer import Transformer, cast
from rl_code.weights.layout import sampling_model
from rl_code.weights.local import LocalWeights
from rl_code.weights.stored_publisher import StoredPublisher
from rl_code.weights.stored_subscriber import StoredSubscriber
from rl_code.weights.transfer_publisher import TransferPublisher
from rl_code.weights.transfer_subscriber import TransferSubscriber
from tests.rl_code.weights.small import CONFIG, DTYPE, KEPT, mesh, model_of


def bytes_of(tree) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def assert_same(found: Transformer, wanted: Transformer) -> None:
    assert found.config == wanted.config
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.quick(first=1)
def test_actors_get_the_bits_that_are_published(kind, tmp_path):
    learners = mesh(1, 2) if kind == "int8" else mesh(1, 2, 2)
    actors = mesh(2, 1)
    wanted = sampling_model(CONFIG, DTYPE, actors, kind)
    stored = StoredPublisher(tmp_path, DTYPE, KEPT, quantised=kind)
    live = TransferPublisher(stored, host="127.0.0.1")
    reader = StoredSubscriber(tmp_path, wanted, name="actor-1")
    follower = TransferSubscriber(reader, host="127.0.0.1", pull_s=30.0)
    local = LocalWeights(wanted, keep=2)
    for number in range(3):
        model = cast(model_of(number, mesh()), DTYPE, kind)
        published = model_of(number, learners)
        with jax.set_mesh(learners):
            made = live.publish(number, published)
            assert local.publish(number, published) == made
        assert_same(follower.wait(exactly=number, deadline_s=30.0)[1], model)
        assert_same(local.wait(exactly=number, deadline_s=1.0)[1], model)
        # a version that is read again is published with the same checksum
        assert LocalWeights(wanted, keep=1).publish(number, model) == made
    live.close()
    late = StoredSubscriber(tmp_path, wanted, name="late")
    assert_same(late.wait(exactly=2, deadline_s=9.0)[1], model)
    matrices = sum(x.size for x in jax.tree.leaves(model) if x.dtype.itemsize == 1)
    outputs = sum(x.size for x in jax.tree.leaves(model) if x.dtype == np.float32)
    whole = cast(model_of(2, mesh()), DTYPE)
    assert bytes_of(model) == bytes_of(whole) - matrices + 4 * outputs
    assert 0 < 4 * outputs < matrices / 2
