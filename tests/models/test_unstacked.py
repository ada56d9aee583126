"""Layers that lie apart: the same numbers, no stack left, matrices joined where one device has them."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx

from attention.methods.dense import Dense
from models.sharding import MeshConfig, make_mesh, own_axes
from models.side_by_side import JOINED
from models.unstacked import unstacked
from tests.models.small import small_model


def stacked(model) -> list[str]:
    """The parameters of a model that hold several layers."""
    leaves = jax.tree_util.tree_leaves_with_path(
        model, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    return [jax.tree_util.keystr(path) for path, leaf in leaves if "layers" in own_axes(leaf)]


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_sampler_has_each_layer_alone(tensor):
    model = small_model((Dense(),), num_layers=2)
    mesh = make_mesh(MeshConfig(tensor=tensor), jax.devices()[:tensor])
    own = unstacked(model, mesh)
    assert stacked(model) and not stacked(own)
    assert unstacked(own, mesh) is own
    for (layer, _), (given, _) in zip(own.unstacked(), model.unstacked(), strict=True):
        for name, parts in JOINED.items():
            expected = [np.asarray(getattr(given, part)[...]) for part in parts]
            if tensor == 1:
                flat = [x.reshape(len(x), -1) for x in expected]
                np.testing.assert_array_equal(
                    getattr(layer, name)[...], np.concatenate(flat, axis=1)
                )
            else:  # each device has some heads of each matrix
                for part, values in zip(parts, expected, strict=True):
                    np.testing.assert_array_equal(getattr(layer, part)[...], values)
        np.testing.assert_array_equal(layer.down[...], given.down[...])
