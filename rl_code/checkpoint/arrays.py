"""A pytree of jax arrays as a flat dict from dotted names to plain arrays, and back.

Random keys are stored as their words. Storage refuses empty arrays, so they are left out, and made
again when the pytree is rebuilt.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp


@contextlib.contextmanager
def any_mesh() -> Iterator[None]:
    """Arrays may be of any mesh, whichever one the caller has set: publishing and reading are
    between two.
    """
    with jax.set_mesh(None):
        yield


def flatten(state: Any) -> dict[str, jax.Array]:
    """The arrays to store, by the dotted path of their leaf.

    Raises:
      TypeError: a leaf is no jax array.
      ValueError: two leaves have the same dotted path.
    """
    found: dict[str, jax.Array] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        name = _name(path)
        if not isinstance(leaf, jax.Array):
            raise TypeError(f"state leaf {name} is {type(leaf).__name__}, not a jax array")
        if name in found:
            raise ValueError(f"two leaves of the state are called {name}")
        found[name] = jax.random.key_data(leaf) if _is_key(leaf) else leaf
    return {name: array for name, array in found.items() if array.size}


def describe(state: Any) -> dict[str, str]:
    """dtype and shape of every leaf in words, as in ``float32[2, 3]`` or ``threefry2x32[]``; leaves
    may be abstract.
    """
    return {
        name: f"{_key_impl(leaf) if _is_key(leaf) else leaf.dtype}{list(leaf.shape)}"
        for name, leaf in _named(state).items()
    }


def from_words(words: str, sharding: jax.sharding.Sharding | None = None) -> jax.ShapeDtypeStruct:
    """The abstract array that ``describe`` put into these words; not for random keys."""
    dtype, _, shape = words.rstrip("]").partition("[")
    sizes = tuple(int(size) for size in shape.split(",") if size)
    return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype), sharding=sharding)


def targets(abstract: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape, dtype and sharding of what ``flatten`` gives; the default device where a leaf has no
    sharding.
    """
    found = {}
    for name, leaf in _named(abstract).items():
        data = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
        sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
        if leaf.size:
            found[name] = jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)
    return found


def rebuild(abstract: Any, stored: Mapping[str, jax.Array]) -> Any:
    """The pytree of ``abstract`` with the arrays that ``flatten`` named."""

    def leaf_of(name: str, leaf: Any) -> jax.Array:
        if not leaf.size:
            return jnp.zeros(leaf.shape, leaf.dtype)
        return (
            jax.random.wrap_key_data(stored[name], impl=_key_impl(leaf))
            if _is_key(leaf)
            else stored[name]
        )

    return jax.tree_util.tree_map_with_path(lambda path, leaf: leaf_of(_name(path), leaf), abstract)


def _named(tree: Any) -> dict[str, Any]:
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _key_impl(leaf: Any) -> str:
    """Name of a random key's implementation; a key that is only a shape tells it inside a trace."""
    found: list[str] = []
    jax.eval_shape(lambda key: found.append(str(jax.random.key_impl(key))), leaf)
    return found[0]
