"""Matrices of layers in 8 bits, for models that sample.

A matrix W is kept as numbers Q of 8 bits and scales s in float32, with W close to Q s. There is a
scale for each output of the matrix, symmetric, by the greatest absolute value that contributes to
it (qwix, "absmax"). A product converts Q to the dtype of the activations, which is exact for int8
and fp8 alike, and multiplies its result by s: activations are not quantised.

All projections of attention and feed-forward parts have this form, those of experts too. Norms,
biases, the router, adapters, embeddings and logits, and what methods of attention add keep the
dtype of the sampling model: they are small, or errors in them change what is chosen.

Under a mesh the numbers are cut like the matrix, and the scales like its outputs. The greatest
value and a rounded quotient do not depend on an order, so every mesh makes the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import qwix
from flax import nnx
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Float, Int

from attention.products import project
from models.cut_products import cut_product
from models.sharding import cuts_parameters
from pallas_kernels.grouped.api import grouped_product

Kind = Literal["int8", "fp8"]
# fp8 is e4m3: 4 bits of exponent and 3 of mantissa, up to 448.
DTYPES = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}

# The matrices by name, and which of their axes they contract; axis 0 is that of layers.
MATRICES = {
    "q": (1,),
    "k": (1,),
    "v": (1,),
    "o": (1, 2),
    "gate": (1,),
    "up": (1,),
    "down": (1,),
    # axis 1 is that of experts
    "expert_gate": (2,),
    "expert_up": (2,),
    "expert_down": (2,),
}


def scale_name(name: str) -> str:
    """The name of a matrix's scales, which stand beside it."""
    return f"{name}_scale"


def cast_name(name: str) -> str:
    """The name of a matrix's cast (``models.casts``), which stands beside it."""
    return f"{name}_cast"


def check_kind(kind: str | None) -> None:
    """Raises ValueError for a kind that does not exist; None is for no quantisation."""
    if kind is not None and kind not in DTYPES:
        raise ValueError(f"quantised={kind!r} must be one of {', '.join(get_args(Kind))}, or None")


def take_quantised(layers: nnx.Module, kind: Kind) -> dict[str, nnx.Variable]:
    """Takes the matrices out of a stack of layers; returns their numbers and scales by name.

    They are made from the matrices in float32, whichever dtype these have. ``put_quantised`` puts
    them back.
    """
    found = {}
    for name, contracted in MATRICES.items():
        matrix = getattr(layers, name, None)
        if matrix is None:
            continue
        axes = matrix.get_metadata("logical_axes")
        numbers, scales = _quantise(matrix[...], kind, contracted)
        found[name] = matrix.replace(numbers)
        found[scale_name(name)] = nnx.Param(scales, logical_axes=_without(axes, contracted))
        delattr(layers, name)
    return found


def put_quantised(layers: nnx.Module, taken: Mapping[str, nnx.Variable]) -> None:
    """Puts what ``take_quantised`` gave into a stack of layers."""
    for name, variable in taken.items():
        setattr(layers, name, variable)


def product(
    layer: nnx.Module, name: str, y: Float[Array, "B T *D"], contract: int = 1
) -> Float[Array, "B T *F"]:
    """The product of y with a matrix of one layer, quantised or not, in y's dtype.

    A matrix that is cut over ``fsdp`` is gathered in that dtype, in fewer bytes.

    name: of the matrix, such as "q". contract: how many last axes of y it contracts.
    """
    parameter = getattr(layer, name)
    cast = getattr(layer, cast_name(name), None)
    matrix = parameter[...].astype(y.dtype) if cast is None else _cast(parameter[...], cast[...])
    if cuts_parameters():
        # the axis of layers is gone
        return cut_product(y, matrix, parameter.get_metadata("logical_axes")[1:], contract)
    out = project(y, matrix, contract)
    scales = getattr(layer, scale_name(name), None)
    return out if scales is None else _scaled(out, scales[...])


@jax.custom_vjp
def _cast(matrix: jax.Array, cast: jax.Array) -> jax.Array:
    """The cast of a matrix, with the gradient of ``matrix.astype``."""
    return cast


def _cast_backward(empty: jax.Array, gradient: jax.Array) -> tuple[jax.Array, None]:
    return gradient.astype(empty.dtype), None


_cast.defvjp(lambda matrix, cast: (cast, jnp.zeros((0,), matrix.dtype)), _cast_backward)


def expert_product(
    parameters: Mapping[str, jax.Array],
    name: str,
    x: Float[Array, "P D"],
    sizes: Int[Array, " E"],
    experts: Int[Array, " P"],
) -> Float[Array, "P F"]:
    """The product of every row of x with the matrix of its expert, quantised or not, in x's dtype.

    The kernels of grouped products read x's dtype, so all experts of the layer are converted first.

    parameters: those of one layer by name. name: of the matrix, such as "expert_up". sizes: the
    rows of each expert, which stand together. experts: of each row; E for a row of no expert, whose
    result means nothing.
    """
    out = grouped_product(x, parameters[name].astype(x.dtype), sizes)
    scales = parameters.get(scale_name(name))
    return out if scales is None else _scaled(out, scales.at[experts].get(mode="clip"))


def _scaled(out: jax.Array, scales: jax.Array) -> jax.Array:
    return (out.astype(jnp.float32) * scales).astype(out.dtype)


def _quantise(
    matrix: jax.Array, kind: Kind, contracted: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """(numbers, scales) of a matrix; sharded like it, unless this is called in a trace."""
    if isinstance(matrix, Tracer):
        return _both(kind, contracted, matrix)
    return _compiled(kind, contracted, _shardings(matrix, contracted))(matrix)


@functools.cache
def _compiled(
    kind: Kind, contracted: tuple[int, ...], shardings: tuple[Sharding, Sharding]
) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
    return jax.jit(functools.partial(_both, kind, contracted), out_shardings=shardings)


def _both(kind: Kind, contracted: tuple[int, ...], matrix: jax.Array):
    outputs = _without(range(matrix.ndim), contracted)
    found = qwix.quantize(matrix.astype(jnp.float32), DTYPES[kind], channelwise_axes=outputs)
    return found.qvalue, jnp.squeeze(found.scale, contracted)


def _shardings(matrix: jax.Array, contracted: tuple[int, ...]) -> tuple[Sharding, Sharding]:
    """Shardings of the numbers and of the scales."""
    own = matrix.sharding
    if not isinstance(own, NamedSharding):
        return own, own
    spec = (*own.spec, *(None,) * (matrix.ndim - len(own.spec)))
    return own, NamedSharding(own.mesh, PartitionSpec(*_without(spec, contracted)))


def _without(values: Any, places: tuple[int, ...]) -> tuple:
    """The values that do not stand at these places."""
    return tuple(value for place, value in enumerate(values) if place not in places)
