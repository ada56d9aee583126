"""Reads checkpoints in other formats straight into the model's sharded layout, and lists what a
checkpoint of a model holds.

Each family (``models.families``) states the names and the layout of its parameters in those
formats.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from models import families
from models.families.parameters import Parameter
from models.model_config import ModelConfig
from models.sharding import parameter_shardings
from models.transformer import Transformer, abstract_model


class Source(Protocol):
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
    parameters = families.of_config(model.config).parameters
    return {path: found[path] for path in parameters if path in found}


def stored_tensors(
    model: Transformer, naming: str
) -> Iterator[tuple[str, Parameter, nnx.Variable, int | None]]:
    """(name, parameter, variable, layer) of each tensor that a checkpoint of the model holds.

    Tensors come in the order of the layers; layer is None for those outside of the layers. naming:
    "huggingface" or "gguf". Raises ValueError for a model with parameters that these formats have
    no names for.
    """
    methods = model.config.attention
    if extra := [m for m in methods if m.parameters(model.config.layer_shape)]:
        raise ValueError(
            f"{naming} checkpoints have no place for the parameters of attention="
            f"{', '.join(map(str, dict.fromkeys(extra)))}"
        )
    parameters = families.of_config(model.config).parameters
    variables = named_parameters(model)
    layers = [path for path in variables if path.startswith("layers.")]
    for path, variable in variables.items():
        if path not in layers:
            yield getattr(parameters[path], naming), parameters[path], variable, None
        # the first parameter of the layers stands for all of them: a checkpoint goes layer by layer
        elif path == layers[0]:
            for layer in range(model.config.num_layers):
                for inner in layers:
                    name = getattr(parameters[inner], naming).format(layer)
                    yield name, parameters[inner], variables[inner], layer


def load(source: Source, naming: str, config: ModelConfig, mesh: Mesh) -> Transformer:
    """A model with its parameters from ``source``, converted to ``config.param_dtype``.

    The host holds one parameter at a time, and of it only the shards of this process. Before
    anything is read, raises ValueError with the names of all tensors that are missing, have another
    shape, or are not part of the model.
    """
    model = abstract_model(config)
    _check(source, model, naming)
    parameters = families.of_config(config).parameters

    def put(path: tuple, variable: nnx.Variable, sharding: nnx.Variable) -> nnx.Variable:
        path = _path(path)
        shards: dict[tuple, np.ndarray] = {}  # replicas are read once

        def read(index: tuple[slice, ...]) -> np.ndarray:
            index = tuple(
                slice(*part.indices(size)) for part, size in zip(index, variable.shape, strict=True)
            )
            if index not in shards:
                shards[index] = _read_part(source, naming, path, parameters[path], variable, index)
            return shards[index]

        return variable.replace(
            jax.make_array_from_callback(variable.shape, sharding.get_value(), read)
        )

    return jax.tree_util.tree_map_with_path(
        put, model, parameter_shardings(model, mesh), is_leaf=_is_variable
    )


def _read_part(
    source: Source,
    naming: str,
    path: str,
    parameter: Parameter,
    variable: nnx.Variable,
    index: tuple[slice, ...],
) -> np.ndarray:
    """The part ``index`` of a parameter, in the parameter's dtype.

    For a parameter of layers the first axis of the index is that of the layers, of which each is a
    tensor of its own in the checkpoint.
    """
    shape = variable.shape
    name = getattr(parameter, naming)
    if not path.startswith("layers."):
        return parameter.from_stored(partial(source.read, name), shape, index).astype(
            variable.dtype
        )
    out = np.empty([part.stop - part.start for part in index], variable.dtype)
    for row, layer in enumerate(range(index[0].start, index[0].stop)):
        out[row] = parameter.from_stored(
            partial(source.read, name.format(layer)), shape[1:], index[1:]
        )
    return out


def _check(source: Source, model: Transformer, naming: str) -> None:
    expected = {
        name: parameter.stored_shape(variable.shape if layer is None else variable.shape[1:])
        for name, parameter, variable, layer in stored_tensors(model, naming)
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
