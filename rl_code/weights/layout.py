"""Devices of each part of an array, and the layout in which an actor wants a model."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from models.model_config import ModelConfig
from models.quantised import Kind
from models.transformer import Transformer, abstract_model, cast
from rl_code.checkpoint import arrays
from rl_code.checkpoint.arrays import any_mesh

# A part of an array: (start, stop) along each axis.
Box = tuple[tuple[int, int], ...]


def sampling_model(
    config: ModelConfig, dtype: str, mesh: Mesh, quantised: Kind | None = None
) -> Transformer:
    """The abstract model that a subscriber asks for, sharded over ``mesh``: what
    ``models.transformer.cast`` makes with the same arguments.
    """
    own = dict(dtype=dtype, param_dtype=dtype, quantised=quantised)
    return abstract_model(dataclasses.replace(config, **own), mesh)


@any_mesh()
def in_dtype(model: Transformer, dtype: str, quantised: Kind | None = None) -> dict[str, jax.Array]:
    """The parameters by name as ``models.transformer.cast`` makes them; those that were so already
    are the model's own.
    """
    return arrays.flatten(cast(model, dtype, quantised))


@any_mesh()
def detached(model: Transformer, dtype: str, quantised: Kind | None = None) -> dict[str, jax.Array]:
    """Copies of ``in_dtype``. They share no memory with the model, which may be donated afterwards.

    ``device_put(may_alias=False)`` does not ensure that: when an array goes from one device to a
    sharding over several, the first device keeps its part without a copy.
    """
    own = arrays.flatten(model)
    return {
        name: x.copy() if name in own and x.dtype == own[name].dtype else x
        for name, x in in_dtype(model, dtype, quantised).items()
    }


def to_box(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """Box of the slices with which a sharding describes a part."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def to_slices(box: Box, origin: Box | None = None) -> tuple[slice, ...]:
    """Slices of a box within the array, or within the part of it that ``origin`` is."""
    starts = [0] * len(box) if origin is None else [start for start, _ in origin]
    return tuple(
        slice(start - at, stop - at) for (start, stop), at in zip(box, starts, strict=True)
    )


def overlap(one: Box, other: Box) -> Box | None:
    """Overlap of two boxes, None if nothing."""
    box = tuple((max(a, b), min(c, d)) for (a, c), (b, d) in zip(one, other, strict=True))
    return None if any(start >= stop for start, stop in box) else box


def own_parts(x: jax.Array) -> Iterator[tuple[Box, jax.Array]]:
    """Parts of an array that this process answers for: over all processes, each part comes exactly
    once.
    """
    for shard in x.addressable_shards:
        if shard.replica_id == 0:
            yield to_box(shard.index, x.shape), shard.data


def wanted_parts(target: jax.ShapeDtypeStruct) -> dict[Box, list[jax.Device]]:
    """The parts that this process's devices hold in the target's sharding, and which devices hold
    each.
    """
    found: dict[Box, list[jax.Device]] = {}
    for device, index in target.sharding.addressable_devices_indices_map(target.shape).items():
        found.setdefault(to_box(index, target.shape), []).append(device)
    return found


def assemble(
    target: jax.ShapeDtypeStruct, parts: Mapping[Box, np.ndarray | jax.Array]
) -> jax.Array:
    """The array of the target's shape and sharding from the parts that ``wanted_parts`` names."""
    copies = [
        jax.device_put(parts[box], device)
        for box, devices in wanted_parts(target).items()
        for device in devices
    ]
    return jax.make_array_from_single_device_arrays(target.shape, target.sharding, copies)


@any_mesh()
def join(box: Box, pieces: Mapping[Box, jax.Array]) -> jax.Array:
    """A part from pieces on one device that cover it."""
    if list(pieces) == [box]:
        return pieces[box]
    offsets = tuple(tuple(part.start for part in to_slices(piece, box)) for piece in pieces)
    return _join(tuple(stop - start for start, stop in box), offsets, *pieces.values())


@functools.partial(jax.jit, static_argnums=(0, 1))
def _join(
    shape: tuple[int, ...], offsets: tuple[tuple[int, ...], ...], *pieces: jax.Array
) -> jax.Array:
    whole = jnp.zeros(shape, pieces[0].dtype)
    for offset, piece in zip(offsets, pieces, strict=True):
        whole = jax.lax.dynamic_update_slice(whole, piece, offset)
    return whole
