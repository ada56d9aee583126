"""Checksums of arrays' bits, computed where the arrays live.

The bits of every element are mixed with its position and summed modulo 2**32, twice with different
mixes. A sum does not depend on its order, so the result is the same for every sharding, mesh and
number of processes, and several processes can each sum their own parts. For a given position each
mix is a bijection of the bits, so a change of one element always changes both sums. Any other
change, such as two elements that swap places, goes unseen with a probability of about 2**-64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped, UInt32

from rl_code.checkpoint.arrays import any_mesh

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def unsigned(dtype: Any) -> np.dtype:
    """The unsigned integer that holds the bits of a number of 1, 2 or 4 bytes; TypeError for other
    dtypes.
    """
    dtype = np.dtype(dtype)
    if (
        dtype.itemsize not in _UNSIGNED
        or jax.dtypes.itemsize_bits(dtype) != 8 * dtype.itemsize
        or dtype.kind == "b"
    ):
        raise TypeError(
            f"weights of dtype {dtype} are not supported; they must be numbers of 1, 2 or 4 bytes"
        )
    return np.dtype(_UNSIGNED[dtype.itemsize])


@any_mesh()
def checksums(named: Mapping[str, jax.Array]) -> dict[str, str]:
    """Checksum of each array's bits, 16 hex digits. All processes that hold a part have to call."""
    if not named:
        return {}
    sharding = _everywhere(next(iter(named.values())).sharding)
    words = np.asarray(_compiled(sharding)(dict(named)))
    return {name: _in_hex(sums) for name, sums in zip(sorted(named), words, strict=True)}


def array_checksums(named: Mapping[str, jax.Array]) -> dict[str, str]:
    """As ``checksums``, for arrays of any dtype; each array's program is compiled on its own, so
    that states of a few shapes compile fast.
    """
    return finish_checksums(start_checksums(named))


@any_mesh()
def start_checksums(named: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Starts to compute what ``finish_checksums`` waits for; the arrays may be donated at once."""
    sums = {}
    for name, x in named.items():
        sums[name] = _compiled_one(_everywhere(x.sharding))(x)
        if _shares_threads(x.sharding):
            sums[name].block_until_ready()
    return sums


def _shares_threads(sharding: jax.sharding.Sharding) -> bool:
    """True if the devices are several of one CPU. They have few threads between them: of programs
    under way at once some devices may run one and some the other, and each waits for the rest until
    XLA ends the process.
    """
    devices = sharding.device_set
    return len(devices) > 1 and next(iter(devices)).platform == "cpu"


def finish_checksums(sums: Mapping[str, jax.Array]) -> dict[str, str]:
    """Checksum of each array's bits, 16 hex digits."""
    return {name: _in_hex(np.asarray(pair)) for name, pair in sums.items()}


def _in_hex(sums: Sequence[int]) -> str:
    """The checksum of two sums."""
    return "".join(f"{int(total) % 2**32:08x}" for total in sums)


def _everywhere(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    """A copy on every device of a sharding."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec())
    return sharding


@functools.cache
def _compiled_one(sharding: jax.sharding.Sharding) -> Callable[[jax.Array], jax.Array]:
    """The sums of one array, uint32 [2], with a copy on every device."""

    def sums(x: jax.Array) -> jax.Array:
        x = jax.device_put(x, jax.memory.Space.Device)  # moments may be in the host's
        if x.dtype == jnp.bool:
            x = x.astype(jnp.uint8)
        elif x.dtype.itemsize == 8:  # as pairs of words
            x = jax.lax.bitcast_convert_type(x, jnp.uint32)
        return _sums(x)

    return jax.jit(sums, out_shardings=sharding)


@functools.cache
def _compiled(sharding: jax.sharding.Sharding) -> Callable[[dict[str, jax.Array]], jax.Array]:
    """The sums of all arrays, uint32 [arrays, 2], in the order of their names, with a copy on every
    device.
    """
    return jax.jit(
        lambda named: jnp.stack([_sums(named[name]) for name in sorted(named)]),
        out_shardings=sharding,
    )


def _sums(x: Shaped[Array, " ..."]) -> UInt32[Array, " 2"]:
    """The two sums of one array."""
    bits = jax.lax.bitcast_convert_type(x, unsigned(x.dtype)).astype(jnp.uint32)
    mixed = tuple(mix(bits + _positions(x.shape, mix)) for mix in (_murmur, _lowbias))
    # One reduction makes both sums in one pass over the array. On CPU, XLA would write what each of
    # two reductions adds up to memory first: 8 bytes for every element.
    zeros = (jnp.uint32(0),) * len(mixed)
    return jnp.stack(jax.lax.reduce(mixed, zeros, _add, tuple(range(x.ndim))))


def _add(one: Sequence[jax.Array], other: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    return tuple(x + y for x, y in zip(one, other, strict=True))


def _positions(shape: tuple[int, ...], mix: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """A number for each position: the sum of one random-looking number per coordinate."""
    total = jnp.zeros(shape, jnp.uint32)
    for axis, size in enumerate(shape):
        numbers = mix(jnp.arange(size, dtype=jnp.uint32) + _of_axis(axis))
        total += jnp.expand_dims(numbers, _others(axis, len(shape)))
    return total


def _of_axis(axis: int) -> np.uint32:
    """A different offset for each axis, so that coordinates that swap axes are noticed."""
    return np.uint32(0x9E3779B9 * (axis + 1) % 2**32)


def _others(axis: int, rank: int) -> list[int]:
    return [other for other in range(rank) if other != axis]


def _murmur(x: Any) -> Any:
    """MurmurHash3's finaliser, a bijection of 32 bits; of jax or numpy arrays."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _lowbias(x: Any) -> Any:
    """Another bijection of 32 bits, found by C. Wellons' search for low bias."""
    x = (x ^ (x >> 16)) * np.uint32(0x21F0AAAD)
    x = (x ^ (x >> 15)) * np.uint32(0xD35A2D97)
    return x ^ (x >> 15)
