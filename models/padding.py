"""Models whose heads, feed-forward size, vocabulary or experts do not divide by the devices that
share a layer, padded so that they do. What they compute stays the same.

A model of 64 query heads that share 8 key/value heads has 72 of each on 72 devices: every key/value
head stands 8 times, each time with one of its 8 query heads, and the last 8 are zeros.

A padded model is an ordinary one of a larger shape (``pad_config``). Its parameters are those of
the other one, copied and filled up with zeros (``pad``, and back by ``cut``). Then

- heads of zeros have results, and the matrix after attention multiplies them by 0;
- hidden units of zeros are 0, since SwiGLU of 0 is 0;
- logits of tokens that do not exist are replaced (``functions.hide_padding``);
- experts of zeros are never chosen, since the router has no scores for them (``MoE.slots``).

Gradients have to keep it so (``tied``): copies of a key/value head each get the sum of the copies'
gradients, and heads of zeros get none. Hidden units, tokens and experts of zeros get none by
themselves. The norm of a gradient counts copies once (``gradient_norm``). Then an optimizer that
treats every number alike, such as AdamW, changes a padded model as it changes the model itself.

Dimensions: N query heads, K key/value heads, G = N / K.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from models.model_config import ModelConfig, Sizes
from models.transformer import Transformer


class Axis(Protocol):
    """Padding of one axis of an array. It works on numpy's arrays and on JAX's."""

    def pad(self, x: Any, axis: int) -> Any:
        """x with the axis copied and filled up with zeros."""

    def cut(self, x: Any, axis: int) -> Any:
        """The opposite of ``pad``: of copies the first."""

    def add(self, x: Any, axis: int) -> Any:
        """The transpose of ``pad``: the sum of copies."""


@dataclasses.dataclass(frozen=True)
class Tail:
    """Zeros at the end."""

    size: int
    padded: int

    def pad(self, x, axis):
        return _fill(x, axis, self.padded)

    def cut(self, x, axis):
        return _first(x, axis, self.size)

    add = cut


@dataclasses.dataclass(frozen=True)
class KeyHeads:
    """Each key/value head several times, one after the other, and zeros at the end."""

    size: int
    copies: int
    padded: int

    def pad(self, x, axis):
        return _fill(_numpy(x).repeat(x, self.copies, axis), axis, self.padded)

    def cut(self, x, axis):
        return self._by_head(x, axis).take(0, axis + 1)

    def add(self, x, axis):
        return self._by_head(x, axis).sum(axis + 1)

    def _by_head(self, x, axis):
        """[..., padded, ...] -> [..., size, copies, ...]."""
        return _split(_first(x, axis, self.size * self.copies), axis, self.size)


@dataclasses.dataclass(frozen=True)
class QueryHeads:
    """The query heads of each key/value head, divided among its copies in order; zeros where they
    do not suffice.
    """

    keys: KeyHeads
    # Query heads of a key/value head, and of a copy of it.
    group: int
    padded_group: int

    def pad(self, x, axis):
        x = _split(x, axis, self.keys.size)
        x = _fill(x, axis + 1, self.keys.copies * self.padded_group)
        return _fill(_merge(x, axis), axis, self.keys.padded * self.padded_group)

    def cut(self, x, axis):
        real = self.keys.size * self.keys.copies * self.padded_group
        x = _split(_first(x, axis, real), axis, self.keys.size)
        return _merge(_first(x, axis + 1, self.group), axis)

    add = cut


def pad_config(config: ModelConfig, devices: int, expert_devices: int = 1) -> ModelConfig:
    """The shape of a model whose heads, feed-forward size and vocabulary divide by ``devices``, and
    whose experts, if it has any, divide by ``expert_devices``.

    Of all ways to divide the heads one with the fewest, of both kinds together, is taken. Where a
    layer chooses blocks for all query heads of a key/value head together, these stay together, and
    whole groups of zeros are added. A shape that divides already is returned as it is.

    Raises:
      ValueError: one of the two is less than 1, or the shape is padded already.
    """
    if min(devices, expert_devices) < 1:
        raise ValueError(f"{devices=} must be at least 1, and {expert_devices=} too")
    if config.unpadded is not None:
        raise ValueError(f"the shape is padded already, from {config.unpadded}")
    heads, kv_heads = _padded_heads(config, devices)
    moe = config.moe
    own = Sizes.of(config)
    sizes = Sizes(
        vocab_size=_up(config.vocab_size, devices),
        mlp_dim=_up(config.mlp_dim, devices),
        num_heads=heads,
        num_kv_heads=kv_heads,
        expert_mlp_dim=None if moe is None else _up(moe.mlp_dim, devices),
        experts=None if moe is None else _up(moe.slots or moe.experts, expert_devices),
    )
    return config if sizes == own else dataclasses.replace(sizes.given_to(config), unpadded=own)


def cut_config(config: ModelConfig) -> ModelConfig:
    """The shape that ``pad_config`` got, with the other settings of ``config``."""
    if config.unpadded is None:
        return config
    return dataclasses.replace(config.unpadded.given_to(config), unpadded=None)


def _padded_heads(config: ModelConfig, devices: int) -> tuple[int, int]:
    """(query heads, key/value heads) that divide by ``devices``."""
    group = config.num_heads // config.num_kv_heads
    together = any(method.noted_picks() is not None for method in config.attention)
    ways = []
    for copies in range(1, 2 if together else group + 1):
        keys = _up(config.num_kv_heads * copies, devices)
        ways.append((keys * -(-group // copies), keys))
    return min(ways, key=sum)


def axis_of(config: ModelConfig, name: str | None, size: int, padded: int) -> Axis | None:
    """Padding of an axis of a parameter; None where it is not.

    config: the padded shape. name: of the logical axis. size, padded: before and after.
    """
    if size == padded:
        return None
    if name not in ("heads", "kv_heads"):
        return Tail(size, padded)
    keys = _key_heads(config)
    if name == "kv_heads":
        return keys
    return QueryHeads(keys, size // keys.size, padded // keys.padded)


def _key_heads(config: ModelConfig) -> KeyHeads:
    before = config.unpadded
    group = before.num_heads // before.num_kv_heads
    padded_group = config.num_heads // config.num_kv_heads
    return KeyHeads(before.num_kv_heads, -(-group // padded_group), config.num_kv_heads)


def pad(model: Transformer, like: Transformer) -> Transformer:
    """The parameters of a model in a padded shape. Call it in a jitted function: it makes copies.

    like: the padded model, which may be abstract.
    """
    return _converted(model, like, like.config, "pad")


def cut(model: Transformer, like: Transformer) -> Transformer:
    """The parameters of a padded model in the shape that it had before: the opposite of ``pad``.

    like: the model without padding, which may be abstract.
    """
    return _converted(model, like, model.config, "cut")


def _converted(model, like, config: ModelConfig, direction: str):
    def one(variable: nnx.Variable, target: nnx.Variable) -> nnx.Variable:
        x = variable[...]
        for at, name in enumerate(variable.get_metadata("logical_axes")):
            axis = axis_of(config, name, *sorted((variable.shape[at], target.shape[at])))
            if axis is not None:
                x = getattr(axis, direction)(x, at)
        return target.replace(x)

    variables, targets = (jax.tree.leaves(x, is_leaf=_is_variable) for x in (model, like))
    return jax.tree.unflatten(
        jax.tree.structure(like, is_leaf=_is_variable), map(one, variables, targets)
    )


def read_padded(
    read: Callable[[tuple[slice, ...]], np.ndarray],
    config: ModelConfig,
    axes: Sequence[str | None],
    size: Sequence[int],
    padded: Sequence[int],
    index: Sequence[slice],
) -> np.ndarray:
    """The part ``index`` of a padded parameter whose other form is read from somewhere.

    read: a function of one slice for each axis, of the parameter before it was padded. It is asked
      for the smallest block that has all of the part. axes: the logical axes. size, padded: the
      shape before and after.
    """
    if tuple(size) == tuple(padded):
        return read(tuple(index))
    blocks: list[slice] = []
    places: list[np.ndarray] = []
    for name, before, after, part in zip(axes, size, padded, index, strict=True):
        axis = axis_of(config, name, before, after)
        numbers = np.arange(1, before + 1)
        # 0 for what is filled up
        wanted = (numbers if axis is None else axis.pad(numbers, 0))[part]
        real = wanted[wanted > 0]
        block = slice(real.min() - 1, real.max()) if real.size else slice(0, 1)
        blocks.append(block)
        places.append(np.where(wanted > 0, wanted - 1 - block.start, -1))
    found = read(tuple(blocks))
    for at, place in enumerate(places):
        found = found.take(place, at)
        found[(slice(None),) * at + (place < 0,)] = 0
    return found


def tied(gradients: Any) -> Any:
    """The gradients that keep the padding what it is, from those of a padded model's parameters.

    Each copy of a key/value head gets the sum of what the copies have, and heads of zeros get 0.

    gradients: a model, whose config says how it is padded; any other pytree stays as it is.
    """
    config = getattr(gradients, "config", None)
    if config is None or config.unpadded is None:
        return gradients
    before = dict(heads=config.unpadded.num_heads, kv_heads=config.unpadded.num_kv_heads)

    def tie(variable: nnx.Variable) -> nnx.Variable:
        x = variable[...]
        for at, name in enumerate(variable.get_metadata("logical_axes")):
            axis = axis_of(config, name, before.get(name, x.shape[at]), x.shape[at])
            if isinstance(axis, KeyHeads):
                x = axis.pad(axis.add(x, at), at)
            elif isinstance(axis, QueryHeads):
                # no head stands twice, and to choose needs no exchange between devices
                real = axis.pad(np.ones(axis.keys.size * axis.group, bool), 0)
                x = jnp.where(real.reshape(-1, *(1,) * (x.ndim - at - 1)), x, 0)
        return variable.replace(x)

    return jax.tree.map(tie, gradients, is_leaf=_is_variable)


def gradient_norm(gradients: Any) -> jax.Array:
    """The global norm of a model's gradients, as it is without padding.

    gradients: a model, whose config says how it is padded, or any other pytree of arrays.
    """
    config = getattr(gradients, "config", None)
    copies = 1 if getattr(config, "unpadded", None) is None else _key_heads(config).copies
    if copies == 1:
        return optax.tree.norm(gradients)

    def once(variable: nnx.Variable) -> jax.Array:
        several = "kv_heads" in variable.get_metadata("logical_axes")
        return variable[...] * (copies**-0.5 if several else 1.0)

    return optax.tree.norm(jax.tree.map(once, gradients, is_leaf=_is_variable))


def _up(size: int, devices: int) -> int:
    return -(-size // devices) * devices


def _fill(x, axis: int, size: int):
    """x with zeros at the end of an axis."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return _numpy(x).pad(x, widths)


def _first(x, axis: int, size: int):
    return x[(slice(None),) * axis + (slice(size),)]


def _split(x, axis: int, count: int):
    """An axis as two, of which the first has ``count`` elements."""
    return x.reshape(*x.shape[:axis], count, -1, *x.shape[axis + 1 :])


def _merge(x, axis: int):
    """An axis and the next one as one."""
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def _numpy(x) -> Any:
    return np if isinstance(x, np.ndarray) else jnp


def _is_variable(node: object) -> bool:
    return isinstance(node, nnx.Variable)
