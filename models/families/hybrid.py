"""Families whose layers keep a state in three of four layers: what their files call these, and how
they group the rows of matrices.

The model keeps the projections of a layer with a state in one matrix with an axis of key heads, so
that it can be cut by them: of each key head q, k, the values and their gates z. Files may have the
q of all heads first, then their k, and so on, in one tensor or in several.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from attention.methods.dense import Dense
from attention.methods.gated_delta import GatedDelta
from attention.methods.method import Method
from models.families.parameters import HEADS, HEADS_IN, HEADS_OUT, LAYER, LINEAR, ROW, Parameter
from models.families.windows import period_of
from models.model_config import ModelConfig

_LINEAR_ATTENTION = LAYER + "linear_attn."
# Parameters of a layer with a state; the names are those of Qwen3-Next's files.
STATE = {
    "mixer.qkvz": Parameter(_LINEAR_ATTENTION + "in_proj_qkvz.weight", None, HEADS_OUT),
    "mixer.ba": Parameter(_LINEAR_ATTENTION + "in_proj_ba.weight", None, HEADS_OUT),
    "mixer.convolution": Parameter(
        _LINEAR_ATTENTION + "conv1d.weight by heads", None, ((0, 1), (2,))
    ),
    "mixer.decay": Parameter(_LINEAR_ATTENTION + "A_log", None, HEADS),
    "mixer.step_bias": Parameter(_LINEAR_ATTENTION + "dt_bias", None, HEADS),
    "mixer.norm": Parameter(_LINEAR_ATTENTION + "norm.weight", None, ROW),
    "mixer.out": Parameter(_LINEAR_ATTENTION + "out_proj.weight", None, HEADS_IN),
}
# A shared expert with a gate of its own.
GATED_SHARED_EXPERT = {
    "layers.gate": Parameter(LAYER + "mlp.shared_expert.gate_proj.weight", None, LINEAR),
    "layers.up": Parameter(LAYER + "mlp.shared_expert.up_proj.weight", None, LINEAR),
    "layers.down": Parameter(LAYER + "mlp.shared_expert.down_proj.weight", None, LINEAR),
    "layers.shared_gate": Parameter(LAYER + "mlp.shared_expert_gate.weight", None, LINEAR),
}

# What a key head has: a vector of q or k, its values, one number for each of these.
Section = Literal["key", "values", "each"]


@dataclasses.dataclass(frozen=True)
class Regrouped:
    """One tensor by key heads, which files hold as sections of all heads."""

    # The name by which ``Parameter`` knows it.
    name: str
    # The names of the files' tensors, and the sections that stand in each one after the other.
    stored: Mapping[str, tuple[Section, ...]]
    # Axes of 1 behind the first one in the files.
    ones: tuple[int, ...] = ()

    def of_layer(self, layer: int) -> Regrouped:
        """With the names of one layer."""
        stored = {name.format(layer): sections for name, sections in self.stored.items()}
        return dataclasses.replace(self, name=self.name.format(layer), stored=stored)

    def together(self, config: ModelConfig, arrays: Sequence[Any]) -> Any:
        """The tensor by key heads of the files' tensors, numpy arrays."""
        heads, sizes = _sections(config)
        parts = []
        for array, sections in zip(arrays, self.stored.values(), strict=True):
            at = 0
            for section in sections:
                rows = heads * sizes[section]
                parts.append(array[at : at + rows].reshape(heads, sizes[section], -1))
                at += rows
        whole = np.concatenate(parts, axis=1)
        return whole.reshape(-1, whole.shape[-1])

    def apart(self, config: ModelConfig, array: np.ndarray) -> list[np.ndarray]:
        """The files' tensors of the tensor by key heads."""
        heads, sizes = _sections(config)
        by_head = array.reshape(heads, -1, array.shape[-1])
        found = []
        at = 0
        for sections in self.stored.values():
            parts = []
            for section in sections:
                parts.append(by_head[:, at : at + sizes[section]].reshape(-1, array.shape[-1]))
                at += sizes[section]
            rows = np.concatenate(parts)
            found.append(np.ascontiguousarray(rows.reshape(len(rows), *self.ones, -1)))
        return found

    def shapes(self, config: ModelConfig, width: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the files' tensors. width: the last axis."""
        heads, sizes = _sections(config)
        return {
            name: (heads * sum(sizes[section] for section in sections), *self.ones, width)
            for name, sections in self.stored.items()
        }


def _sections(config: ModelConfig) -> tuple[int, dict[str, int]]:
    """(key heads, rows of each section for one of them)."""
    state, *_ = (method for method in config.attention if isinstance(method, GatedDelta))
    heads, each, key, value = state.sizes(config.layer_shape)
    return heads, {"key": key, "values": each * value, "each": each}


_CONVOLUTION = Regrouped(
    _LINEAR_ATTENTION + "conv1d.weight by heads",
    {_LINEAR_ATTENTION + "conv1d.weight": ("key", "key", "values")},
    ones=(1,),
)
# Qwen3-Next's files have the matrices by key heads too.
BY_HEADS = (_CONVOLUTION,)
BY_SECTIONS = (
    Regrouped(
        _LINEAR_ATTENTION + "in_proj_qkvz.weight",
        {
            _LINEAR_ATTENTION + "in_proj_qkv.weight": ("key", "key", "values"),
            _LINEAR_ATTENTION + "in_proj_z.weight": ("values",),
        },
    ),
    Regrouped(
        _LINEAR_ATTENTION + "in_proj_ba.weight",
        {
            _LINEAR_ATTENTION + "in_proj_b.weight": ("each",),
            _LINEAR_ATTENTION + "in_proj_a.weight": ("each",),
        },
    ),
    _CONVOLUTION,
)

_KINDS = {"linear_attention": True, "full_attention": False}


def read_methods(hf: Mapping[str, Any], need: Callable[[str], Any]) -> tuple[Method, ...]:
    """The methods of a period, from a config.json. need: the value of a key of it, or ValueError.

    Raises ValueError for kinds of layers that are unknown.
    """
    count = need("num_hidden_layers")
    kinds = hf.get("layer_types")
    if not kinds:
        every = hf.get("full_attention_interval") or 4
        kinds = [
            "linear_attention" if (at + 1) % every else "full_attention" for at in range(count)
        ]
    if len(kinds) != count or set(kinds) != set(_KINDS):
        raise ValueError(
            f"config.json has layer_types={kinds!r}; it must name {' and '.join(_KINDS)}, once "
            f"for each of num_hidden_layers={count!r}"
        )
    state = GatedDelta(
        key_heads=need("linear_num_key_heads"),
        value_heads=need("linear_num_value_heads"),
        key_size=need("linear_key_head_dim"),
        value_size=need("linear_value_head_dim"),
        width=hf.get("linear_conv_kernel_dim") or 4,
        eps=need("rms_norm_eps"),
    )
    return tuple(state if _KINDS[kind] else Dense() for kind in period_of(kinds))


def write_methods(config: ModelConfig) -> dict[str, Any]:
    """The part of a config.json that tells the methods. Raises ValueError where it cannot."""
    states = {method for method in config.attention if isinstance(method, GatedDelta)}
    others = set(config.attention) - states
    if len(states) != 1 or others != {Dense()}:
        raise ValueError(
            f"config.json has no words for attention={config.attention}, only for one kind of "
            f"layers with a state, and {Dense()}"
        )
    state = states.pop()
    heads, each, key, value = state.sizes(config.layer_shape)
    names = {mixes: kind for kind, mixes in _KINDS.items()}
    return {
        "layer_types": [names[method.mixes] for method in config.attention] * config.periods,
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads * each,
        "linear_key_head_dim": key,
        "linear_value_head_dim": value,
        "linear_conv_kernel_dim": state.width,
    }
