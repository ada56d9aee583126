"""Properties of parts of arrays, and of copies that outlive what they were made from."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from models.transformer import abstract_model
from rl_code.checkpoint import arrays
from rl_code.weights.layout import (
    any_mesh,
    assemble,
    detached,
    join,
    overlap,
    own_parts,
    to_slices,
    wanted_parts,
)
from tests.rl_code.weights.small import CONFIG, mesh, numbers

LAYOUTS = (P(), P("data"), P("tensor", "data"), P(None, ("data", "tensor")))


@pytest.mark.parametrize("theirs", LAYOUTS)
@pytest.mark.parametrize("ours", LAYOUTS)
@pytest.mark.quick(first=5)
def test_any_layout_can_be_put_together_from_the_parts_of_any_other(theirs, ours):
    source = jax.device_put(
        jnp.arange(8 * 16 * 3).reshape(8, 16, 3), NamedSharding(mesh(2, 2), theirs)
    )
    target = jax.ShapeDtypeStruct(
        source.shape, source.dtype, sharding=NamedSharding(mesh(2, 4), ours)
    )
    held = dict(own_parts(source))
    assert sum(part.size for part in held.values()) == source.size
    parts = {}
    for box, (device, *_) in wanted_parts(target).items():
        pieces = {}
        for own, part in held.items():
            if (piece := overlap(box, own)) is not None:
                pieces[piece] = jax.device_put(np.asarray(part)[to_slices(piece, own)], device)
        parts[box] = join(box, pieces)
    made = assemble(target, parts)
    assert made.sharding == target.sharding
    np.testing.assert_array_equal(made, source)


def test_a_number_has_one_part():
    ((box, part),) = own_parts(jnp.float32(3.0))
    assert box == () and overlap((), ()) == () and float(part) == 3.0


def test_what_is_set_as_mesh_does_not_matter():
    x = jax.device_put(jnp.ones(4), jax.devices()[5])
    with jax.set_mesh(mesh(2, 1)), any_mesh():
        assert float(jax.jit(jnp.sum)(x)) == 4.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_detached_parameters_survive_the_donation_of_the_model(dtype):
    parameters = {name: jax.device_put(x.copy()) for name, x in numbers(0).items()}
    model = arrays.rebuild(abstract_model(CONFIG), parameters)
    del parameters
    expected = jax.tree.map(lambda x: np.asarray(x).astype(jnp.dtype(dtype)), model)
    copies = detached(model, dtype)
    # a layout to which device_put gives the first device's part without copying it
    moved = {name: jax.device_put(x, NamedSharding(mesh(2, 1), P())) for name, x in copies.items()}
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)
    for _ in range(2):
        model = overwrite(model)
    jax.block_until_ready(model)
    for found in (copies, moved):
        for x, y in zip(found.values(), jax.tree.leaves(expected), strict=True):
            assert np.asarray(x).tobytes() == y.tobytes()
    assert all(isinstance(x.sharding, SingleDeviceSharding) for x in copies.values())
