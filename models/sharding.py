"""Meshes by name, and the one table from logical axes to mesh axes.

Every parameter and every sharded activation names its logical axes. Only this table says over which
devices they are split.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
)

MESH_AXES = ("data", "tensor")

# Logical axis -> mesh axis. None is replicated.
RULES: dict[str, str | None] = {
    "batch": "data",
    "layers": None,
    "embed": None,
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "mlp": "tensor",
    # every device has a part of each expert's "mlp", not some of the experts
    "experts": None,
}


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each mesh axis."""

    # Devices along the axis data, over which the rows of a batch are split; 0 for all that are
    # left.
    data: int = 1
    # Devices along the axis tensor, over which the matrices of a layer are split.
    tensor: int = 1

    def __post_init__(self):
        if self.data < 0 or self.tensor < 1:
            raise ValueError(
                f"data={self.data} must be at least 0 (all devices that are left) and "
                f"tensor={self.tensor} at least 1"
            )


MESHES = {
    "one": MeshConfig(data=1, tensor=1),
    "data": MeshConfig(data=0, tensor=1),
    "cpu2": MeshConfig(data=2, tensor=1),
    "cpu8": MeshConfig(data=4, tensor=2),
    "host8": MeshConfig(data=1, tensor=8),
    "nvl72": MeshConfig(data=1, tensor=72),
}


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Mesh with axes ``data`` and ``tensor``; raises ValueError when the devices do not suffice."""
    devices = list(jax.devices() if devices is None else devices)
    data = config.data or len(devices) // config.tensor
    needed = data * config.tensor
    if not 0 < needed <= len(devices):
        raise ValueError(
            f"a mesh of data={config.data} x tensor={config.tensor} does not fit on {len(devices)} "
            "devices; "
            "on CPU set XLA_FLAGS=--xla_force_host_platform_device_count=N before the program "
            "starts"
        )
    auto = (AxisType.Auto,) * len(MESH_AXES)
    return jax.make_mesh(
        (data, config.tensor), MESH_AXES, axis_types=auto, devices=devices[:needed]
    )


def abstract_mesh(config: MeshConfig, device: AbstractDevice) -> AbstractMesh:
    """A mesh of devices that need not be here, to trace programs for them.

    config: with a number for ``data``. device: its platform decides which kernels they have.
    """
    auto = (AxisType.Auto,) * len(MESH_AXES)
    sizes = (config.data, config.tensor)
    return AbstractMesh(sizes, MESH_AXES, axis_types=auto, abstract_device=device)


def use_mesh(mesh: Mesh | AbstractMesh) -> contextlib.AbstractContextManager:
    """The context in which programs on a mesh are run, or on an abstract one are traced."""
    if isinstance(mesh, AbstractMesh):
        return jax.sharding.use_abstract_mesh(mesh)
    return jax.set_mesh(mesh)


def partition_spec(logical_axes: Sequence[str | None]) -> PartitionSpec:
    """PartitionSpec of an array whose dimensions have these logical axes; an axis without a rule is
    a KeyError.
    """
    return PartitionSpec(*(None if axis is None else RULES[axis] for axis in logical_axes))


def parameter_shardings(model: nnx.Module, mesh: Mesh | AbstractMesh) -> nnx.Module:
    """The pytree of NamedShardings that belongs to a (concrete or abstract) model's parameters.

    Raises ValueError naming the parameter when a dimension is not divisible by its mesh axis.
    """

    def sharding(path: tuple, param: nnx.Variable) -> nnx.Variable:
        spec = partition_spec(param.get_metadata("logical_axes"))
        for size, axis in zip(param.shape, spec, strict=True):
            if axis is not None and size % mesh.shape[axis]:
                raise ValueError(
                    f"{jax.tree_util.keystr(path)} of shape {param.shape}: {size} must be "
                    "divisible by "
                    f"{axis}={mesh.shape[axis]}"
                )
        return param.replace(NamedSharding(mesh, spec))

    return jax.tree_util.tree_map_with_path(
        sharding, model, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )


def per_shard(function: Callable, in_axes: Any, out_axes: Any) -> Callable:
    """A function that every device runs on its own part of the arguments.

    It is for code that loops over rows or heads, and for kernels, which XLA cannot cut. Without a
    mesh (``jax.set_mesh``) it is the function itself. Inside another shard_map it cuts over those
    axes of the mesh that the other one has left to the compiler; the arguments are then the other
    one's parts.

    in_axes, out_axes: the logical axes of arguments and results, as prefixes of their pytrees like
      the specs of ``jax.shard_map``.
    """
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    free = {name for name, kind in kinds if kind != AxisType.Manual}
    if not free:
        return function

    def spec(axes: Sequence[str | None]) -> PartitionSpec:
        return PartitionSpec(*(name if name in free else None for name in partition_spec(axes)))

    def specs(tree: Any) -> Any:
        return jax.tree.map(spec, tree, is_leaf=_is_axes)

    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=tuple(specs(axes) for axes in in_axes),
        out_specs=specs(out_axes),
        axis_names=free,
        check_vma=False,
    )


def sum_parts(x: jax.Array, logical_axis: str) -> jax.Array:
    """Inside a ``per_shard`` function: the sum of what the devices along a logical axis hold.

    It completes a product whose contracted axis is cut. Elsewhere it returns x as it is.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axis = RULES[logical_axis]
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if kinds.get(axis) != AxisType.Manual or mesh.shape[axis] == 1:
        return x
    return jax.lax.psum(x, axis)


def _is_axes(x: Any) -> bool:
    """Whether x is the logical axes of one array, and not a tuple of several."""
    return isinstance(x, tuple) and all(axis is None or isinstance(axis, str) for axis in x)


def constrain(x: jax.Array, *logical_axes: str | None) -> jax.Array:
    """Fixes how an activation is split over the current mesh (``jax.set_mesh``).

    Without a mesh, and inside a shard_map, it returns the activation as it is.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or any(kind == AxisType.Manual for kind in mesh.axis_types):
        return x
    return jax.lax.with_sharding_constraint(x, partition_spec(logical_axes))
