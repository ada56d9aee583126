"""How the model's parameters lie in checkpoints of others, and reading them straight into their
sharded layout.

Checkpoints keep one matrix per layer, outputs first and heads flattened; the model keeps one array
per parameter with the layers stacked, inputs first and heads apart. ``PARAMETERS`` states the
correspondence once for every format.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from models.sharding import parameter_shardings
from models.transformer import ModelConfig, Transformer, abstract_model


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter's names in other formats ("{}" stands for the layer) and the order of its axes
    there.

    stored: for each axis of the stored tensor, the axes of the model's array (without layers) that
    it flattens.
    """

    huggingface: str
    gguf: str
    stored: tuple[tuple[int, ...], ...]

    def stored_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the stored tensor of one layer, whose array has ``shape``."""
        return tuple(math.prod(shape[axis] for axis in group) for group in self.stored)

    def to_stored(self, array: np.ndarray) -> np.ndarray:
        """One layer's array as it is stored."""
        order = [axis for group in self.stored for axis in group]
        return np.ascontiguousarray(array.transpose(order).reshape(self.stored_shape(array.shape)))

    def from_stored(
        self,
        read: Callable[[tuple[slice, ...]], np.ndarray],
        shape: Sequence[int],
        index: Sequence[slice],
    ) -> np.ndarray:
        """The part ``index`` of one layer's array of ``shape``, from the smallest block of the
        stored tensor.

        ``read`` gets one slice per stored axis.
        """
        index = [slice(*part.indices(size)) for part, size in zip(index, shape, strict=True)]
        blocks = []
        sizes = []
        inside = []
        for lead, *rest in self.stored:
            inner = math.prod(shape[axis] for axis in rest)
            blocks.append(slice(index[lead].start * inner, index[lead].stop * inner))
            sizes += [index[lead].stop - index[lead].start, *(shape[axis] for axis in rest)]
            inside += [slice(None), *(index[axis] for axis in rest)]
        order = [axis for group in self.stored for axis in group]
        return read(tuple(blocks)).reshape(sizes)[tuple(inside)].transpose(np.argsort(order))


_ROW = ((0,),)
_MATRIX = ((0,), (1,))
_LINEAR = ((1,), (0,))
_HEADS_OUT = ((1, 2), (0,))
_HEADS_IN = ((2,), (0, 1))
_HEADS = ((0, 1),)
_HF, _GG = "model.layers.{}.", "blk.{}."

# Path in the model -> names and axes elsewhere, in the order in which checkpoints are written.
PARAMETERS = {
    "embed.table": Parameter("model.embed_tokens.weight", "token_embd.weight", _MATRIX),
    "layers.attention_norm": Parameter(
        _HF + "input_layernorm.weight", _GG + "attn_norm.weight", _ROW
    ),
    "layers.q": Parameter(_HF + "self_attn.q_proj.weight", _GG + "attn_q.weight", _HEADS_OUT),
    "layers.k": Parameter(_HF + "self_attn.k_proj.weight", _GG + "attn_k.weight", _HEADS_OUT),
    "layers.v": Parameter(_HF + "self_attn.v_proj.weight", _GG + "attn_v.weight", _HEADS_OUT),
    "layers.o": Parameter(_HF + "self_attn.o_proj.weight", _GG + "attn_output.weight", _HEADS_IN),
    "layers.q_bias": Parameter(_HF + "self_attn.q_proj.bias", _GG + "attn_q.bias", _HEADS),
    "layers.k_bias": Parameter(_HF + "self_attn.k_proj.bias", _GG + "attn_k.bias", _HEADS),
    "layers.v_bias": Parameter(_HF + "self_attn.v_proj.bias", _GG + "attn_v.bias", _HEADS),
    "layers.q_norm": Parameter(_HF + "self_attn.q_norm.weight", _GG + "attn_q_norm.weight", _ROW),
    "layers.k_norm": Parameter(_HF + "self_attn.k_norm.weight", _GG + "attn_k_norm.weight", _ROW),
    "layers.mlp_norm": Parameter(
        _HF + "post_attention_layernorm.weight", _GG + "ffn_norm.weight", _ROW
    ),
    "layers.gate": Parameter(_HF + "mlp.gate_proj.weight", _GG + "ffn_gate.weight", _LINEAR),
    "layers.up": Parameter(_HF + "mlp.up_proj.weight", _GG + "ffn_up.weight", _LINEAR),
    "layers.down": Parameter(_HF + "mlp.down_proj.weight", _GG + "ffn_down.weight", _LINEAR),
    "final_norm": Parameter("model.norm.weight", "output_norm.weight", _ROW),
    "unembed": Parameter("lm_head.weight", "output.weight", _LINEAR),
}


class Source(Protocol):
    """An open checkpoint: where it is, the names of its tensors and their shapes, and slices of
    them.
    """

    path: Path
    shapes: Mapping[str, tuple[int, ...]]

    def read(self, name: str, block: tuple[slice, ...]) -> np.ndarray:
        """A block of a tensor, in any floating dtype that numpy can convert."""


def named_parameters(model: Transformer) -> dict[str, nnx.Variable]:
    """The model's parameters by path, such as "layers.q", in the order of ``PARAMETERS``."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(model, is_leaf=_is_variable)
    found = {_path(path): variable for path, variable in leaves}
    return {path: found[path] for path in PARAMETERS if path in found}


def stored_tensors(
    model: Transformer, naming: str
) -> Iterator[tuple[str, Parameter, nnx.Variable, int | None]]:
    """(name, parameter, variable, layer) of each tensor a checkpoint of the model holds, in the
    order of the layers.

    naming: "huggingface" or "gguf". layer: None for tensors outside the layers. Raises ValueError
    for a model with parameters that these formats have no names for.
    """
    if extra := model.stacked()[1]:
        raise ValueError(
            f"{naming} checkpoints have no place for the parameters {', '.join(extra)} of "
            "attention="
            f"{model.config.attention}"
        )
    variables = named_parameters(model)
    layers = [path for path in variables if path.startswith("layers.")]
    for path, variable in variables.items():
        if path not in layers:
            yield getattr(PARAMETERS[path], naming), PARAMETERS[path], variable, None
        elif path == layers[0]:
            for layer in range(model.config.num_layers):
                for inner in layers:
                    name = getattr(PARAMETERS[inner], naming).format(layer)
                    yield name, PARAMETERS[inner], variables[inner], layer


def load(source: Source, naming: str, config: ModelConfig, mesh: Mesh) -> Transformer:
    """A model with its parameters from ``source``, each read, converted to ``config.param_dtype``
    and put in place.

    The host holds one parameter at a time, and of it only the shards of this process. Raises
    ValueError naming every tensor that is missing, of another shape, or not part of the model,
    before anything is read.
    """
    model = abstract_model(config)
    _check(source, model, naming)

    def put(path: tuple, variable: nnx.Variable, sharding: nnx.Variable) -> nnx.Variable:
        path = _path(path)
        shards: dict[tuple, np.ndarray] = {}  # replicas are read once

        def read(index: tuple[slice, ...]) -> np.ndarray:
            index = tuple(
                slice(*part.indices(size)) for part, size in zip(index, variable.shape, strict=True)
            )
            if index not in shards:
                shards[index] = _read_part(source, naming, path, variable, index)
            return shards[index]

        return variable.replace(
            jax.make_array_from_callback(variable.shape, sharding.get_value(), read)
        )

    return jax.tree_util.tree_map_with_path(
        put, model, parameter_shardings(model, mesh), is_leaf=_is_variable
    )


def _read_part(
    source: Source, naming: str, path: str, variable: nnx.Variable, index: tuple[slice, ...]
) -> np.ndarray:
    """The part ``index`` of a parameter, layers included, in the parameter's dtype."""
    parameter = PARAMETERS[path]
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
