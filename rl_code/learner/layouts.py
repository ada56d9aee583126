"""Layouts of what an optimizer keeps: over devices, and in the memory of device or host."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.sharding import constrain
from rl_code.learner import offload
from rl_code.learner.optimizer import OptimizerConfig


def float32(tree: Any) -> Any:
    """The same pytree with float32 leaves."""
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def pinned(tree: Any) -> Any:
    """Parameters and moments laid out by their logical axes, everything else replicated."""

    def pin(leaf: Any) -> Any:
        if not isinstance(leaf, nnx.Variable):
            return constrain(leaf)
        if not jax.tree.leaves(leaf):  # where another optimizer keeps this parameter's moments
            return leaf
        return leaf.replace(constrain(leaf[...], *leaf.get_metadata("logical_axes")))

    return jax.tree.map(pin, tree, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def placed(state: Any, config: OptimizerConfig) -> Any:
    """A state with the field ``opt_state`` whose moments are where the config wants them."""
    shardings = jax.tree.map(lambda x: x.sharding, state)
    if config.offload:
        moments = offload.host_shardings(state.opt_state)
        shardings = dataclasses.replace(shardings, opt_state=moments)
    return jax.device_put(state, shardings)


def of_results(lowered: jax.stages.Lowered) -> Any:
    """Shapes, dtypes and shardings of a program's results. Compiles it."""
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        lowered.out_info,
        lowered.compile().output_shardings,
    )


def offloaded(opt_state: Any, config: OptimizerConfig) -> Any:
    """An abstract state of an optimizer whose moments are where the config wants them."""
    if not config.offload:
        return opt_state
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        opt_state,
        offload.host_shardings(opt_state),
    )
