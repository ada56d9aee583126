"""Tests of the meshes that models are laid out over."""

import types

import pytest

from models.sharding import MeshConfig, make_mesh


@pytest.mark.parametrize(
    ("platform", "told"),
    [("cpu", "XLA_FLAGS=--xla_force_host_platform"), ("gpu", "sizes must be at most 1$")],
)
def test_a_mesh_that_does_not_fit_is_refused_with_what_to_do(platform, told):
    device = types.SimpleNamespace(platform=platform)
    with pytest.raises(ValueError, match=rf"data=2 x tensor=4 does not fit on 1 devices; .*{told}"):
        make_mesh(MeshConfig(data=2, tensor=4), [device])
