"""Meshes by name, and the one table from logical axes to mesh axes.

Every parameter and every sharded activation names its logical axes. Only this table says over which
devices they are split.

The axes ``data``, ``fsdp`` and ``expert`` split the rows of a batch. ``fsdp`` also splits
parameters, gradients and optimizer moments, so that each device keeps a part of them (fully sharded
data parallelism, ZeRO stage 3, 1910.02054). A layer computes with whole parameters, which
``gathered`` makes just before and which are not kept. ``expert`` also splits the experts of a layer
(expert parallelism, GShard, 2006.16668); all other parameters are the same on its devices.

``context`` cuts the tokens of long rows. Every device computes the hidden states of its own slots;
attention alone reads keys of the others (``attention.ring``). Devices that sample take it for
another axis of rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
)

MESH_AXES = ("data", "fsdp", "context", "expert", "tensor")
# The axes over which the rows of a batch are split.
ROW_AXES = ("data", "fsdp", "expert")
# The axes over which the rows of a sampler are split.
SAMPLER_AXES = ("data", "fsdp", "context", "expert")

# Logical axis -> mesh axis, or several. None is replicated.
RULES: dict[str, str | tuple[str, ...] | None] = {
    "batch": ROW_AXES,
    "layers": None,
    # Of parameters alone: activations have all of the model's width on every device.
    "embed": "fsdp",
    # Of activations: the tokens of a row.
    "slots": "context",
    # Of activations between the products of a layer, with ``ModelConfig.sequence_parallel``.
    "tokens": ("context", "tensor"),
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "mlp": "tensor",
    "experts": "expert",
    # The same with ``MoE.fold``: whole experts are on each device.
    "folded_experts": ("expert", "tensor"),
    # of a router, which scores all experts
    "scores": None,
    # the inner size of adapters, which is small
    "rank": None,
    "adapters": None,
}


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each mesh axis."""

    # Devices along the axis data, over which the rows of a batch are split; 0 for all that are
    # left.
    data: int = 1
    # Devices along the axis tensor, over which the matrices of a layer are split.
    tensor: int = 1
    # Devices along the axis fsdp, over which rows are split as over data, and parameters, gradients
    # and moments too. It must divide the model's width (``embed_dim``). For devices that learn.
    # None for 1.
    fsdp: int | None = None
    # Devices along the axis expert, over which rows are split as over data, and the experts of each
    # layer too: their number must divide by it. None for 1.
    expert: int | None = None
    # Devices along the axis context, over which the tokens of a row are split. It must divide the
    # slots of a row. For devices that learn. None for 1.
    context: int | None = None

    def __post_init__(self):
        if min(self.sizes) < 0 or min(self.sizes[1:]) < 1:
            raise ValueError(
                f"data={self.data} must be at least 0 (all devices that are left), and "
                f"fsdp={self.fsdp}, expert={self.expert}, context={self.context} and "
                f"tensor={self.tensor} at least 1"
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Devices along each of ``MESH_AXES``; the first is 0 where it is not known yet."""
        found = (getattr(self, name) for name in MESH_AXES)
        return tuple(1 if size is None else size for size in found)

    @property
    def row_shards(self) -> int:
        """Parts that the rows of a batch are cut into; 0 where ``data`` is not known yet."""
        sizes = zip(MESH_AXES, self.sizes, strict=True)
        return math.prod(size for name, size in sizes if name in ROW_AXES)

    @property
    def devices(self) -> int:
        """Devices of the mesh, or the least that it needs where ``data`` is not known yet."""
        return math.prod(max(size, 1) for size in self.sizes)


MESHES = {
    "one": MeshConfig(data=1, tensor=1),
    "data": MeshConfig(data=0, tensor=1),
    "cpu2": MeshConfig(data=2, tensor=1),
    "cpu8": MeshConfig(data=4, tensor=2),
    "fsdp8": MeshConfig(data=1, tensor=1, fsdp=8),
    "host8": MeshConfig(data=1, tensor=8),
    "nvl72": MeshConfig(data=1, tensor=72),
}


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Mesh with the axes ``MESH_AXES``; raises ValueError when the devices do not suffice."""
    devices = list(jax.devices() if devices is None else devices)
    data, *others = config.sizes
    sizes = (data or len(devices) // math.prod(others), *others)
    needed = math.prod(sizes)
    if not 0 < needed <= len(devices):
        axes = dict(zip(MESH_AXES, config.sizes, strict=True))
        named = [f"{x}={n}" for x, n in axes.items() if n != 1] or ["data=1"]
        advice = f"the product of its sizes must be at most {len(devices)}"
        # none are left where learners took them all
        if (devices or jax.devices())[0].platform == "cpu":
            advice = (
                "on CPU set XLA_FLAGS=--xla_force_host_platform_device_count=N before the program "
                "starts"
            )
        raise ValueError(
            f"a mesh of {' x '.join(named)} does not fit on {len(devices)} devices; {advice}"
        )
    auto = (AxisType.Auto,) * len(MESH_AXES)
    return jax.make_mesh(sizes, MESH_AXES, axis_types=auto, devices=devices[:needed])


def abstract_mesh(config: MeshConfig, device: AbstractDevice) -> AbstractMesh:
    """A mesh of devices that need not be here, to trace programs for them.

    config: with a number for ``data``. device: its platform decides which kernels they have.
    """
    auto = (AxisType.Auto,) * len(MESH_AXES)
    return AbstractMesh(config.sizes, MESH_AXES, axis_types=auto, abstract_device=device)


def row_shards(mesh: Mesh | AbstractMesh) -> int:
    """Parts that the rows of a batch are cut into."""
    return math.prod(mesh.shape[name] for name in ROW_AXES)


def use_mesh(mesh: Mesh | AbstractMesh) -> contextlib.AbstractContextManager:
    """The context in which programs on a mesh are run, or on an abstract one are traced."""
    if isinstance(mesh, AbstractMesh):
        return jax.sharding.use_abstract_mesh(mesh)
    return jax.set_mesh(mesh)


def partition_spec(logical_axes: Sequence[str | None], *, whole: bool = False) -> PartitionSpec:
    """PartitionSpec of an array whose dimensions have these logical axes; an axis without a rule is
    a KeyError.

    whole: of a parameter that is not cut over ``fsdp``, as layers compute with it.
    """
    entries = (None if axis is None else RULES[axis] for axis in logical_axes)
    return PartitionSpec(*(None if whole and entry == "fsdp" else entry for entry in entries))


def parameter_shardings(
    model: nnx.Module, mesh: Mesh | AbstractMesh, *, whole: bool = False
) -> nnx.Module:
    """The pytree of NamedShardings that belongs to a (concrete or abstract) model's parameters.

    whole: for a copy that is not cut over ``fsdp``, to sample with.

    Raises ValueError naming the parameter when a dimension is not divisible by its mesh axis.
    """

    def sharding(path: tuple, param: nnx.Variable) -> nnx.Variable:
        spec = partition_spec(own_axes(param), whole=whole)
        for size, axis in zip(param.shape, spec, strict=True):
            names = axis if isinstance(axis, tuple) else (axis,)
            devices = math.prod(mesh.shape[name] for name in names if name is not None)
            if size % devices:
                key = "pad_experts_for" if "expert" in names else "pad_for"
                raise ValueError(
                    f"{jax.tree_util.keystr(path)} of shape {param.shape}: {size} must be "
                    f"divisible by {' x '.join(names)}={devices}; config.model.{key} pads models"
                )
        return param.replace(NamedSharding(mesh, spec))

    return jax.tree_util.tree_map_with_path(
        sharding, model, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )


def own_axes(parameter: nnx.Variable) -> tuple[str | None, ...]:
    """The logical axes of a parameter, without that of layers where it is one of a single layer."""
    axes = parameter.get_metadata("logical_axes")
    return axes[len(axes) - len(parameter.shape) :]


def constrain_parameters(parameters: Any) -> Any:
    """A pytree of nnx.Variable as samplers keep them: cut by the current mesh, whole along
    ``fsdp``. Without a mesh it comes back as it is.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return parameters

    def fixed(parameter: nnx.Variable) -> nnx.Variable:
        spec = partition_spec(own_axes(parameter), whole=True)
        return parameter.replace(jax.lax.with_sharding_constraint(parameter[...], spec))

    return jax.tree.map(fixed, parameters, is_leaf=lambda x: isinstance(x, nnx.Variable))


def shard_specs(model: Any, names: Collection[str]) -> Any:
    """Specs by which a model's parameters come into a ``jax.shard_map`` over these axes of the
    mesh: as layers compute with them, whole along ``fsdp``.
    """

    def spec(parameter: nnx.Variable) -> nnx.Variable:
        entries = partition_spec(own_axes(parameter), whole=True)
        return parameter.replace(_only(entries, names))

    return jax.tree.map(spec, model, is_leaf=lambda x: isinstance(x, nnx.Variable))


def _only(spec: PartitionSpec, names: Collection[str]) -> PartitionSpec:
    """The spec as far as it cuts over these axes of the mesh."""

    def of(entry: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        if isinstance(entry, tuple):
            return tuple(name for name in entry if name in names) or None
        return entry if entry in names else None

    return PartitionSpec(*map(of, spec))


def gathered(parameters: Any, but: Collection[str] = ()) -> Any:
    """Parameters as a layer computes with them: whole along ``fsdp``, in a program under a mesh.

    Gradients go the other way: they are added over the devices, and each keeps its part.

    parameters: a pytree of nnx.Variable. One of a single layer has lost the first of its logical
      axes. but: names of parameters that stay as they are.
    """

    def gather(path: tuple, parameter: nnx.Variable) -> nnx.Variable:
        if jax.tree_util.keystr(path[-1:], simple=True) in but:
            return parameter
        return parameter.replace(gathered_array(parameter[...], own_axes(parameter)))

    if not cuts_parameters():
        return parameters
    return jax.tree_util.tree_map_with_path(
        gather, parameters, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )


def gathered_array(x: jax.Array, logical_axes: Sequence[str | None]) -> jax.Array:
    """``gathered`` of one array with these logical axes."""
    if not cuts_parameters():
        return x
    # The gradient of these two lines is the same two in the other order. Whole first: a sum over
    # devices of which each keeps its part is a reduce-scatter. Cut at once, the compiler would
    # exchange the activations instead, which are larger.
    x = jax.lax.with_sharding_constraint(x, partition_spec(logical_axes))
    return jax.lax.with_sharding_constraint(x, partition_spec(logical_axes, whole=True))


def cuts_parameters() -> bool:
    """True if the current mesh cuts parameters over ``fsdp``, and leaves it to the compiler.

    Inside a shard_map parameters are as they were handed to it.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if any(kind == AxisType.Manual for kind in mesh.axis_types):
        return False
    return mesh.shape.get("fsdp", 1) > 1


def all_but_whole_parameters(primitive: Any, *_: Any, **given: Any) -> bool:
    """A policy for ``jax.checkpoint``: the backward pass keeps everything but what ``gathered`` and
    ``gathered_part`` made, and gathers it again.
    """
    if primitive.name == "all_gather":
        return "fsdp" not in given["axis_name"]
    # Products read a parameter through a reshape and a conversion, which would keep it as well.
    return primitive.name not in ("sharding_constraint", "reshape", "convert_element_type")


def per_shard(function: Callable, in_axes: Any, out_axes: Any, *, whole: bool = True) -> Callable:
    """A function that every device runs on its own part of the arguments.

    It is for code that loops over rows or heads, and for kernels, which XLA cannot cut. Without a
    mesh (``jax.set_mesh``) it is the function itself. Inside another shard_map it cuts over those
    axes of the mesh that the other one has left to the compiler; the arguments are then the other
    one's parts.

    in_axes, out_axes: the logical axes of arguments and results, as prefixes of their pytrees like
      the specs of ``jax.shard_map``. whole: parameters come whole along ``fsdp``; else as they lie,
      for ``gathered_part``.
    """
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    free = {name for name, kind in kinds if kind != AxisType.Manual}
    if not free:
        return function

    def spec(axes: Sequence[str | None]) -> PartitionSpec:
        return _only(partition_spec(axes, whole=whole), free)

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


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gathered_part(x: jax.Array, logical_axes: Sequence[str | None], dtype: Any) -> jax.Array:
    """Inside a ``per_shard`` function: a parameter of which x is this device's part, whole along
    ``fsdp``, in another dtype.

    Gradients are added in x's own dtype, and each device gets those of its part.
    """
    at = _place_of_fsdp(logical_axes)
    x = x.astype(dtype)
    return x if at is None else jax.lax.all_gather(x, "fsdp", axis=at, tiled=True)


def _part_forward(x, logical_axes, dtype):
    return gathered_part(x, logical_axes, dtype), jnp.zeros((), x.dtype)


def _part_backward(logical_axes, dtype, own, gradient):
    return (scattered_gradient(gradient.astype(own.dtype), logical_axes),)


gathered_part.defvjp(_part_forward, _part_backward)


def scattered_gradient(gradient: jax.Array, logical_axes: Sequence[str | None]) -> jax.Array:
    """The gradient of ``gathered_part``'s argument from that of its result: the sum over the
    devices along ``fsdp``, of which each gets its part.
    """
    at = _place_of_fsdp(logical_axes)
    if at is None:
        return gradient
    return jax.lax.psum_scatter(gradient, "fsdp", scatter_dimension=at, tiled=True)


def _place_of_fsdp(logical_axes: Sequence[str | None]) -> int | None:
    """The axis of a parameter that is cut over ``fsdp``; None for none."""
    entries = [None if axis is None else RULES[axis] for axis in logical_axes]
    return entries.index("fsdp") if "fsdp" in entries else None


def sum_parts(x: jax.Array, logical_axis: str) -> jax.Array:
    """Inside a ``per_shard`` function: the sum of what the devices along a logical axis hold.

    It completes a product whose contracted axis is cut. Elsewhere it returns x as it is.
    """
    axes = shared_by(logical_axis)
    return jax.lax.psum(x, axes) if axes else x


def shared_by(logical_axis: str) -> tuple[str, ...]:
    """Inside a ``per_shard`` function: the mesh axes, of more than one device, over which a logical
    axis is cut. Elsewhere, and where it is whole, none.
    """
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    entry = RULES[logical_axis]
    names = entry if isinstance(entry, tuple) else (entry,)
    return tuple(
        name for name in names if kinds.get(name) == AxisType.Manual and mesh.shape[name] > 1
    )


def cut_over(logical_axis: str) -> tuple[str, ...]:
    """The mesh axes, of more than one device, over which ``per_shard`` would cut a logical axis."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    entry = RULES[logical_axis]
    names = entry if isinstance(entry, tuple) else (entry,)
    return tuple(
        x for x in names if x in kinds and kinds[x] != AxisType.Manual and mesh.shape[x] > 1
    )


def _is_axes(x: Any) -> bool:
    """True if x is the logical axes of one array, and not a tuple of several."""
    return isinstance(x, tuple) and all(axis is None or isinstance(axis, str) for axis in x)


def constrain(x: jax.Array, *logical_axes: str | None) -> jax.Array:
    """Fixes how an activation is split over the current mesh (``jax.set_mesh``).

    Without a mesh, and inside a shard_map, it returns the activation as it is.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or any(kind == AxisType.Manual for kind in mesh.axis_types):
        return x
    return jax.lax.with_sharding_constraint(x, partition_spec(logical_axes))


def cut_tokens(x: jax.Array) -> jax.Array:
    """Hidden states [B, T, D] of which each device along ``tensor`` has some of the tokens.

    Where the tokens do not divide by the devices, each has all those of its part of the context.
    """
    return constrain(x, "batch", "tokens" if cuts_tokens(x.shape[1]) else "slots", None)


def cuts_tokens(count: int) -> bool:
    """True if so many tokens of a row divide by the devices along ``context`` and ``tensor``."""
    shape = jax.sharding.get_abstract_mesh().shape
    return count % (context_size() * shape.get("tensor", 1)) == 0


def context_size() -> int:
    """Devices over which the current mesh cuts the tokens of rows; 1 inside a shard_map."""
    mesh = jax.sharding.get_abstract_mesh()
    if any(kind == AxisType.Manual for kind in mesh.axis_types):
        return 1
    return mesh.shape.get("context", 1)
