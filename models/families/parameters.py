"""Names and axes of parameters in checkpoints of other formats.

A checkpoint keeps one matrix for each layer, with the outputs first and the heads flattened. The
model keeps one array for each parameter, with the layers stacked, the inputs first, and an axis of
heads.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Parameter:
    """The names of a parameter in other formats, and the order of its axes there."""

    # Name in a Hugging Face checkpoint; the first "{}" stands for the layer, and another one for
    # the expert where each expert has a tensor of its own.
    huggingface: str
    # Name in a GGUF file; "{}" stands for the layer. None where such files are not read.
    gguf: str | None
    # For each axis of the stored tensor, the axes of the model's array (without layers and experts)
    # that it flattens.
    stored: tuple[tuple[int, ...], ...]

    @property
    def per_expert(self) -> bool:
        """True if each expert has a tensor of its own."""
        return self.huggingface.count("{}") == 2

    def stored_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of one stored tensor; ``shape``: of its array without layers and experts."""
        return tuple(math.prod(shape[axis] for axis in group) for group in self.stored)

    def to_stored(self, array: np.ndarray) -> np.ndarray:
        """The array of one layer, or of one expert of it, as it is stored."""
        order = [axis for group in self.stored for axis in group]
        return np.ascontiguousarray(array.transpose(order).reshape(self.stored_shape(array.shape)))

    def from_stored(
        self,
        read: Callable[[tuple[slice, ...]], np.ndarray],
        shape: Sequence[int],
        index: Sequence[slice],
    ) -> np.ndarray:
        """The part ``index`` of the array of ``shape`` of one layer, or of one expert of it.

        read: a function of one slice for each stored axis. It is asked for the smallest block of
        the stored tensor that holds the part.
        """
        index = [slice(*part.indices(size)) for part, size in zip(index, shape, strict=True)]
        blocks = []
        sizes = []
        inside = []
        for lead, *rest in self.stored:
            # A stored axis that flattens several (say heads and head size) can be cut only along
            # the first of them; the others are cut after reading.
            inner = math.prod(shape[axis] for axis in rest)
            blocks.append(slice(index[lead].start * inner, index[lead].stop * inner))
            sizes += [index[lead].stop - index[lead].start, *(shape[axis] for axis in rest)]
            inside += [slice(None), *(index[axis] for axis in rest)]
        order = [axis for group in self.stored for axis in group]
        return read(tuple(blocks)).reshape(sizes)[tuple(inside)].transpose(np.argsort(order))


# Orders of axes: of a vector, a matrix with the outputs first, one with heads among its outputs or
# inputs, and numbers of heads.
ROW = ((0,),)
_MATRIX = ((0,), (1,))
LINEAR = ((1,), (0,))
HEADS_OUT = ((1, 2), (0,))
HEADS_IN = ((2,), (0, 1))
HEADS = ((0, 1),)
LAYER, _GG = "model.layers.{}.", "blk.{}."

_BEFORE = {
    "embed.table": Parameter("model.embed_tokens.weight", "token_embd.weight", _MATRIX),
    "layers.attention_norm": Parameter(
        LAYER + "input_layernorm.weight", _GG + "attn_norm.weight", ROW
    ),
    "layers.q": Parameter(LAYER + "self_attn.q_proj.weight", _GG + "attn_q.weight", HEADS_OUT),
    "layers.k": Parameter(LAYER + "self_attn.k_proj.weight", _GG + "attn_k.weight", HEADS_OUT),
    "layers.v": Parameter(LAYER + "self_attn.v_proj.weight", _GG + "attn_v.weight", HEADS_OUT),
    "layers.o": Parameter(LAYER + "self_attn.o_proj.weight", _GG + "attn_output.weight", HEADS_IN),
}
_ATTENTION = ("layers.q", "layers.k", "layers.v", "layers.o")
_AFTER = {
    "layers.mlp_norm": Parameter(
        LAYER + "post_attention_layernorm.weight", _GG + "ffn_norm.weight", ROW
    ),
    "layers.gate": Parameter(LAYER + "mlp.gate_proj.weight", _GG + "ffn_gate.weight", LINEAR),
    "layers.up": Parameter(LAYER + "mlp.up_proj.weight", _GG + "ffn_up.weight", LINEAR),
    "layers.down": Parameter(LAYER + "mlp.down_proj.weight", _GG + "ffn_down.weight", LINEAR),
    "final_norm": Parameter("model.norm.weight", "output_norm.weight", ROW),
    "unembed": Parameter("lm_head.weight", "output.weight", LINEAR),
}

# Biases of q, k and v.
QKV_BIAS = {
    "layers.q_bias": Parameter(LAYER + "self_attn.q_proj.bias", _GG + "attn_q.bias", HEADS),
    "layers.k_bias": Parameter(LAYER + "self_attn.k_proj.bias", _GG + "attn_k.bias", HEADS),
    "layers.v_bias": Parameter(LAYER + "self_attn.v_proj.bias", _GG + "attn_v.bias", HEADS),
}
# The bias behind the projection of attention's result.
O_BIAS = {
    "layers.o_bias": Parameter(LAYER + "self_attn.o_proj.bias", _GG + "attn_output.bias", ROW),
}
# RMSNorm on q and k.
QK_NORM = {
    "layers.q_norm": Parameter(LAYER + "self_attn.q_norm.weight", _GG + "attn_q_norm.weight", ROW),
    "layers.k_norm": Parameter(LAYER + "self_attn.k_norm.weight", _GG + "attn_k_norm.weight", ROW),
}


_MLP = ("layers.gate", "layers.up", "layers.down")
# A router and its experts.
EXPERTS = {
    "layers.router": Parameter(LAYER + "mlp.gate.weight", None, LINEAR),
    "layers.expert_gate": Parameter(LAYER + "mlp.experts.{}.gate_proj.weight", None, LINEAR),
    "layers.expert_up": Parameter(LAYER + "mlp.experts.{}.up_proj.weight", None, LINEAR),
    "layers.expert_down": Parameter(LAYER + "mlp.experts.{}.down_proj.weight", None, LINEAR),
}
# What DeepSeek-V3's experts have besides: a bias that ranks, and an expert that all tokens share.
SHARED_EXPERT = {
    "layers.router_bias": Parameter(LAYER + "mlp.gate.e_score_correction_bias", None, ROW),
    "layers.gate": Parameter(LAYER + "mlp.shared_experts.gate_proj.weight", None, LINEAR),
    "layers.up": Parameter(LAYER + "mlp.shared_experts.up_proj.weight", None, LINEAR),
    "layers.down": Parameter(LAYER + "mlp.shared_experts.down_proj.weight", None, LINEAR),
}


def llama_like(*more: dict[str, Parameter]) -> dict[str, Parameter]:
    """The parameters of a decoder like Llama's. more: what its attention has besides."""
    attention = {path: parameter for part in more for path, parameter in part.items()}
    return _BEFORE | attention | _AFTER


def without_attention(mixer: dict[str, Parameter]) -> dict[str, Parameter]:
    """The parameters of a decoder like Llama's whose layers attend by a method with projections of
    its own. mixer: the parameters of that.
    """
    others = {path: parameter for path, parameter in _BEFORE.items() if path not in _ATTENTION}
    return others | mixer | _AFTER


def with_experts(
    dense: dict[str, Parameter], *experts: dict[str, Parameter]
) -> dict[str, Parameter]:
    """The parameters of a decoder whose layers have experts, and whose first layers may be dense.

    dense: those of the same decoder without experts. experts: what the others have in place of the
    dense feed-forward part.
    """
    found = {}
    for path, parameter in dense.items():
        if path.startswith("layers."):
            found[f"first_{path}"] = parameter
    for path, parameter in dense.items():
        if path not in _MLP:
            found[path] = parameter
        if path == "layers.mlp_norm":
            for part in experts:
                found |= part
    return found
