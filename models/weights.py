"""Reads checkpoints in other formats straight into the model's sharded layout, and lists what a
checkpoint of a model holds.

Each family (``models.families``) states the names and the layout of its parameters in those
formats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from models import families
from models.families.parameters import Parameter
from models.layers import OF_ATTENTION, is_of_method, place_name
from models.model_config import ModelConfig
from models.padding import cut_config, read_padded
from models.sharding import parameter_shardings
from models.transformer import Transformer, abstract_model

# How a family's names for the parameters of methods begin.
_MIXER = "mixer."


class OpenCheckpoint(Protocol):
    """An open checkpoint."""

    path: Path
    # Names of the tensors, and their shapes.
    shapes: Mapping[str, tuple[int, ...]]

    def read(self, name: str, block: tuple[slice, ...]) -> np.ndarray:
        """A block of a tensor, in any floating dtype that numpy can convert."""


def named_parameters(model: Transformer) -> dict[str, nnx.Variable]:
    """The model's parameters by path, such as "layers.q", in the order in which files have them."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(model, is_leaf=_is_variable)
    found = {_path(path): variable for path, variable in leaves}
    shape = model.config.layer_shape
    places = [at for at, each in enumerate(model.config.attention) if each.parameters(shape)]
    paths = []
    for path in families.of_config(model.config).parameters:
        # a parameter of a method stands at each place of the period that has it
        name = path.removeprefix(_MIXER)
        paths += [path] if name == path else [f"{place_name(at)}.{name}" for at in places]
    return {path: found[path] for path in paths if path in found}


def _described(config: ModelConfig, path: str) -> Parameter:
    """The family's description of a parameter."""
    name = _MIXER + path.split(".", 1)[1] if is_of_method(path) else path
    return families.of_config(config).parameters[name]


def stored_tensors(
    model: Transformer, naming: str
) -> Iterator[tuple[str, Parameter, nnx.Variable, tuple[int, ...]]]:
    """(name, parameter, variable, at) of each tensor that a checkpoint of the model holds.

    Tensors come in the order of the layers. at: where in the variable the tensor is: () for one
    outside of the layers, (row,) for one of a layer, (row, expert) for one of an expert. naming:
    "huggingface" or "gguf". Raises ValueError for a model with parameters that these formats have
    no names for.
    """
    if model.config.lora is not None:
        raise ValueError(
            f"{naming} checkpoints have no place for adapters: merge them (models.lora.merged)"
        )
    methods = model.config.attention
    family = families.of_config(model.config)
    extra = [
        method
        for method in methods
        for name in method.parameters(model.config.layer_shape)
        if _MIXER + name not in family.parameters
    ]
    if extra:
        raise ValueError(
            f"{naming} checkpoints have no place for the parameters of attention="
            f"{', '.join(map(str, dict.fromkeys(extra)))}"
        )
    if naming == "gguf" and (family.experts is not None or family.own_methods):
        raise ValueError(f"gguf checkpoints of {family.architecture} are not supported")
    variables = named_parameters(model)
    layers = {path: _layers(path, model.config) for path in variables}
    done = False
    for path, variable in variables.items():
        if not layers[path]:
            parameter = _described(model.config, path)
            yield getattr(parameter, naming), parameter, variable, ()
        # the first parameter of the layers stands for all of them: a checkpoint goes layer by layer
        elif not done:
            done = True
            for number in range(model.config.num_layers):
                for inner in (inner for inner in variables if number in layers[inner]):
                    row = layers[inner].index(number)
                    parameter = _described(model.config, inner)
                    yield from _of_layer(number, parameter, variables[inner], row, model, naming)


def _layers(path: str, config: ModelConfig) -> range | list[int]:
    """The numbers of the layers that a parameter has, in order; none if it is outside of them."""
    stack, _, name = path.partition(".")
    period = len(config.attention)
    if is_of_method(path):
        return range(int(stack.removeprefix(place_name(""))), config.num_layers, period)
    dense = config.dense_layers
    ranges = {"first_layers": range(dense), "layers": range(dense, config.num_layers)}
    found = ranges.get(stack, range(0))
    if name not in OF_ATTENTION:
        return found
    return [number for number in found if number % period in config.attending]


def _of_layer(
    layer: int,
    parameter: Parameter,
    variable: nnx.Variable,
    row: int,
    model: Transformer,
    naming: str,
) -> Iterator[tuple[str, Parameter, nnx.Variable, tuple[int, ...]]]:
    """The entry of ``stored_tensors`` for one parameter of one layer."""
    name = getattr(parameter, naming)
    if not parameter.per_expert:
        yield name.format(layer), parameter, variable, (row,)
        return
    # those that are padding behind them are in no checkpoint
    for expert in range(model.config.moe.experts):
        yield name.format(layer, expert), parameter, variable, (row, expert)


def load(source: OpenCheckpoint, naming: str, config: ModelConfig, mesh: Mesh) -> Transformer:
    """A model with its parameters from ``source``, converted to ``config.param_dtype``.

    The host holds one parameter at a time, and of it only the shards of this process. A padded
    model is read from the files of the model itself. Before anything is read, raises ValueError
    with the names of all tensors that are missing, have another shape, or are not part of the
    model.
    """
    model = abstract_model(config)
    own = cut_config(config)
    stored = model if own == config else abstract_model(own)
    _check(source, stored, naming)
    stored = named_parameters(stored)

    def put(path: tuple, variable: nnx.Variable, sharding: nnx.Variable) -> nnx.Variable:
        path = _path(path)
        shards: dict[tuple, np.ndarray] = {}  # replicas are read once
        layers = _layers(path, config)
        numbers = layers.__getitem__ if layers else None
        described = _described(config, path)
        read_part = partial(_read_part, source, naming, numbers, described, stored[path])
        axes = variable.get_metadata("logical_axes")
        shapes = stored[path].shape, variable.shape

        def read(index: tuple[slice, ...]) -> np.ndarray:
            index = tuple(
                slice(*part.indices(size)) for part, size in zip(index, variable.shape, strict=True)
            )
            if index not in shards:
                shards[index] = read_padded(read_part, config, axes, *shapes, index)
            return shards[index]

        return variable.replace(
            jax.make_array_from_callback(variable.shape, sharding.get_value(), read)
        )

    return jax.tree_util.tree_map_with_path(
        put, model, parameter_shardings(model, mesh), is_leaf=_is_variable
    )


def _read_part(
    source: OpenCheckpoint,
    naming: str,
    layer_of: Callable[[int], int] | None,
    parameter: Parameter,
    variable: nnx.Variable,
    index: tuple[slice, ...],
) -> np.ndarray:
    """The part ``index`` of a parameter, in the parameter's dtype.

    layer_of: the number of the layer at each place of the first axis; None for a parameter outside
    of the layers. Each layer, and with ``per_expert`` each expert of it, is a tensor of its own.
    """
    shape = variable.shape
    name = getattr(parameter, naming)
    if layer_of is None:
        return parameter.from_stored(partial(source.read, name), shape, index).astype(
            variable.dtype
        )
    # the axes along which tensors are stacked
    stacked = 2 if parameter.per_expert else 1
    out = np.empty([part.stop - part.start for part in index], variable.dtype)
    for at in np.ndindex(out.shape[:stacked]):
        row, *expert = (part.start + place for part, place in zip(index, at, strict=False))
        out[at] = parameter.from_stored(
            partial(source.read, name.format(layer_of(row), *expert)),
            shape[stacked:],
            index[stacked:],
        )
    return out


def _check(source: OpenCheckpoint, model: Transformer, naming: str) -> None:
    expected = {
        name: parameter.stored_shape(variable.shape[len(at) :])
        for name, parameter, variable, at in stored_tensors(model, naming)
    }
    wrong = []
    for name in [*expected, *(name for name in source.shapes if name not in expected)]:
        want = expected.get(name)
        found = source.shapes.get(name)
        if want != found:
            wrong.append(
                f"{name}: expected {want or 'no such tensor'}, found {found or 'no such tensor'}"
            )
    if wrong:
        shown = "\n  ".join(
            wrong[:20] + ([f"and {len(wrong) - 20} more"] if len(wrong) > 20 else [])
        )
        raise ValueError(f"{source.path} does not fit the model:\n  {shown}")


def _is_variable(node: object) -> bool:
    return isinstance(node, nnx.Variable)


def _path(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
