"""Layers that lie apart: the same numbers, no stack left, matrices joined where one device has them."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx

from attention.methods.dense import Dense
from attention.methods.mla import MLA
from attention.methods.nsa import NSA
from attention.methods.window import Window
from models.model_config import MoE
from models.sharding import MeshConfig, make_mesh, own_axes
from models.side_by_side import JOINED
from models.unstacked import unstacked
from pallas_kernels.tokens import Tokens
from tests.models.small import small_model

SPARSE = NSA(length=8, stride=4, block=16, picks=2, initial=1, local=1, window=16)


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


@pytest.mark.parametrize(
    ("methods", "changes"),
    [
        ((Dense(), Window(5)), {}),
        ((Dense(), SPARSE), dict(num_layers=2)),
        ((MLA(12, 10, 6, 4),), dict(qk_norm=False, num_layers=3, moe=MoE(4, 2, 8, first_dense=1))),
    ],
    ids=["period", "runs", "experts behind a dense layer"],
)
@pytest.mark.quick(first=1)
def test_hidden_states_are_those_of_the_stacks(methods, changes):
    model = small_model(methods, **changes)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    tokens = np.arange(48, dtype=np.int32).reshape(2, 24) % 32
    places = np.broadcast_to(np.arange(24, dtype=np.int32), tokens.shape)
    real = (places < 20).astype(np.int32)
    where = Tokens(segments=real, branches=0 * real, documents=0 * real, order=places)
    align = model.config.alignment
    # NSA lays its rows out for two runs
    with jax.set_mesh(mesh):
        found, expected = (
            jax.jit(lambda m: m.hidden(tokens, places, where, runs=2, align=align))(each)
            for each in (unstacked(model, mesh), model)
        )
    found, expected = (np.asarray(x)[:, :20] for x in (found, expected))
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)
