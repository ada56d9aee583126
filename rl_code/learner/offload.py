"""Moments of the optimizer that wait in the host's memory between updates (``pinned_host``).

An update brings the moments of one layer to the device, changes them and sends them back, layer
after layer, so that few layers' moments are on the device at a time. What is not stacked over
layers, as embeddings, is updated in one piece. Gradients stay on the device. What is computed is
the same: an optimizer looks at a layer alone but for the norm by which it clips, and that is given
to it.

The compiled program says what is saved: ``memory_analysis()`` counts memory of host and device
apart. On CPU both are the same, and nothing is saved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

KIND = "pinned_host"


def has_host_memory(device: jax.Device) -> bool:
    """True if a device reads and writes pinned memory of its host."""
    return KIND in {memory.kind for memory in device.addressable_memories()}


def host_shardings(opt_state: Any) -> Any:
    """The shardings of an optimizer's state that are its own, with moments in the host's memory.

    Counts stay on the device. Leaves may be abstract.
    """

    def of(leaf: Any) -> Any:
        if not isinstance(leaf, nnx.Variable):
            return leaf.sharding
        return jax.tree.map(lambda x: x.sharding.with_memory_kind(KIND), leaf)

    return jax.tree.map(of, opt_state, is_leaf=_is_variable)


def is_offloaded(opt_state: Any) -> bool:
    """In a trace: whether moments are in the host's memory."""
    return any(
        jax.typeof(x).memory_space == jax.memory.Space.Host for x in jax.tree.leaves(opt_state)
    )


def update_by_layers(
    optimizer: optax.GradientTransformation,
    grads: Any,
    opt_state: Any,
    parameters: Any,
    moves: jax.Array,
) -> tuple[Any, Any]:
    """(parameters, opt_state) after one step, or as they were where ``moves`` is false.

    optimizer: what it does to a layer depends on that layer alone. grads: float32. opt_state: with
    moments in the host's memory, where they stay.
    """

    def step(grads: Any, opt_state: Any, parameters: Any) -> tuple[Any, Any]:
        before = jax.device_put(opt_state, jax.memory.Space.Device)
        wide = jax.tree.map(lambda x: x.astype(jnp.float32), parameters)
        updates, after = optimizer.update(grads, before, wide)
        changed = optax.apply_updates(parameters, updates), after
        chosen = jax.tree.map(lambda x, y: jnp.where(moves, x, y), changed, (parameters, before))
        spaces = jax.tree.map(lambda x: jax.typeof(x).memory_space, opt_state)
        return chosen[0], jax.tree.map(jax.device_put, chosen[1], spaces)

    given = grads, opt_state, parameters
    one_piece, state = step(*(_part(tree, lambda x: not _is_stacked(x)) for tree in given))
    parameters, found = _filled(one_piece, parameters), _filled(state, opt_state)
    layers = {x.shape[0] for x in _leaves(given[2]) if _is_variable(x) and _is_stacked(x)}
    for count in sorted(layers):
        own, state, stack = (_part(tree, lambda x, n=count: _is_stacked(x, n)) for tree in given)

        # The counts of the state are those before the update for every layer, so they are no part
        # of what the loop changes.
        def body(layer: jax.Array, carry: tuple, own: Any = own, state: Any = state) -> tuple:
            stack, moments = carry
            at = _filled(_layer(moments, layer), state)
            new, after = step(_layer(own, layer), at, _layer(stack, layer))
            return _with_layer(stack, layer, new), _with_layer(moments, layer, _moments(after))

        stack, moments = jax.lax.fori_loop(0, count, body, (stack, _moments(state)))
        parameters, found = _filled(stack, parameters), _filled(moments, found)
    return parameters, found


# Parts of pytrees: what is left out is an empty node in its place.


def _part(tree: Any, wanted: Callable[[nnx.Variable], bool]) -> Any:
    """The tree with those of its variables that are wanted, and all that is no variable."""
    return jax.tree.map(
        lambda x: x if not _is_variable(x) or wanted(x) else optax.MaskedNode(),
        tree,
        is_leaf=_is_variable,
    )


def _moments(opt_state: Any) -> Any:
    """The state without its counts."""
    return jax.tree.map(
        lambda x: x if _is_variable(x) else optax.MaskedNode(), opt_state, is_leaf=_is_variable
    )


def _filled(part: Any, whole: Any) -> Any:
    """Leaves of a part, and from the whole tree those that it lacks."""
    tree = jax.tree.structure(whole, is_leaf=_is_entry)
    pairs = zip(_leaves(part), _leaves(whole), strict=True)
    return jax.tree.unflatten(tree, [y if isinstance(x, optax.MaskedNode) else x for x, y in pairs])


def _layer(tree: Any, layer: jax.Array) -> Any:
    """One layer of stacked arrays, which keep their axis of layers."""
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, layer, 1), tree)


def _with_layer(tree: Any, layer: jax.Array, one: Any) -> Any:
    """Stacked arrays with one layer replaced."""
    return jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, layer, 0), tree, one)


def _is_stacked(variable: nnx.Variable, layers: int | None = None) -> bool:
    """True if a variable has an axis of layers in front; of so many, if given."""
    if variable.get_metadata("logical_axes")[0] != "layers":
        return False
    arrays = jax.tree.leaves(variable)
    return layers is None or not arrays or arrays[0].shape[0] == layers


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def _is_entry(x: Any) -> bool:
    return _is_variable(x) or isinstance(x, optax.MaskedNode)


def _leaves(tree: Any) -> list:
    return jax.tree.leaves(tree, is_leaf=_is_entry)
