"""gpt-oss: a sink for each head, windows in every second layer, and experts with biases and a
clipped activation.

Files keep the matrices of all experts of a layer in one tensor with the inputs first, where columns
of gate and up alternate. Published ones have them in MXFP4, which is expanded when they are loaded;
files of ours have them in the dtype of the rest. The template here writes what the protocol
"harmony" does, with calls in content as it was sampled, and has no place for tools.

Shapes are those of the published ``config.json`` of gpt-oss-20b and gpt-oss-120b (2508.10925).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from attention.methods.sinks import Sinks
from models.families.family import HARMLESS, Experts, Family
from models.families.parameters import (
    LAYER,
    LINEAR,
    O_BIAS,
    QKV_BIAS,
    ROW,
    Parameter,
    llama_like,
    with_experts,
)
from models.families.windows import FULL, SLIDING, check_kinds, period_of
from models.model_config import ModelConfig, MoE
from models.rope_scaling import Yarn

_TEMPLATE = r"""
{{- "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n" -}}
{{- "Knowledge cutoff: 2024-06\n\nReasoning: medium\n\n" -}}
{{- "# Valid channels: analysis, commentary, final. " -}}
{{- "Channel must be included for every message.<|end|>" -}}
{%- for message in messages -%}
  {%- if message.role == "assistant" -%}
    {%- set opened = message.content[:11] == "<|channel|>" or message.content[:4] == " to=" -%}
    {{- "<|start|>assistant" + ("" if opened else "<|channel|>final<|message|>") -}}
    {%- set last = message.content.split("<|start|>")[-1].split("<|message|>")[0] -%}
    {{- message.content + ("<|call|>" if opened and "to=" in last else "<|return|>") -}}
  {%- elif message.role == "system" -%}
    {%- if message.content -%}
      {{- "<|start|>developer<|message|># Instructions\n\n" + message.content + "<|end|>" -}}
    {%- endif -%}
  {%- elif message.role == "tool" and message.name | default("") -%}
    {{- "<|start|>functions." + message.name + " to=assistant<|channel|>commentary" -}}
    {{- "<|message|>" + message.content + "<|end|>" -}}
  {%- else -%}
    {{- "<|start|>user<|message|>" + message.content + "<|end|>" -}}
  {%- endif -%}
{%- endfor -%}
{{- "<|start|>assistant" if add_generation_prompt else "" -}}
"""

_EXPERTS = LAYER + "mlp.experts."
# As files have them: experts, inputs, outputs.
_STACK = ((0,), (1,), (2,))
_PLAIN = ((0,), (1,))
# Tensors of files, and those of the model whose last axes alternate in them.
ALTERNATING = {
    _EXPERTS + "gate_up_proj": (_EXPERTS + "gate_proj", _EXPERTS + "up_proj"),
    _EXPERTS + "gate_up_proj_bias": (_EXPERTS + "gate_proj_bias", _EXPERTS + "up_proj_bias"),
}
_ROUTED = {
    "layers.router": Parameter(LAYER + "mlp.router.weight", None, LINEAR),
    "layers.router_logit_bias": Parameter(LAYER + "mlp.router.bias", None, ROW),
    "layers.expert_gate": Parameter(_EXPERTS + "gate_proj", None, _STACK),
    "layers.expert_up": Parameter(_EXPERTS + "up_proj", None, _STACK),
    "layers.expert_gate_bias": Parameter(_EXPERTS + "gate_proj_bias", None, _PLAIN),
    "layers.expert_up_bias": Parameter(_EXPERTS + "up_proj_bias", None, _PLAIN),
    "layers.expert_down": Parameter(_EXPERTS + "down_proj", None, _STACK),
    "layers.expert_down_bias": Parameter(_EXPERTS + "down_proj_bias", None, _PLAIN),
}
_SINKS = {"mixer.sinks": Parameter(LAYER + "self_attn.sinks", None, ROW)}
# transformers has no key for it.
_LIMIT = 7.0


def read_methods(hf: Mapping[str, Any], layers: int) -> tuple[Sinks, ...]:
    """The methods of a period, from a config.json; without ``layer_types`` every second layer from
    the first one on has a window.

    Raises ValueError for kinds of layers that are unknown, or no window.
    """
    kinds = hf.get("layer_types") or [FULL if at % 2 else SLIDING for at in range(layers)]
    check_kinds(kinds, (FULL, SLIDING), layers)
    window = hf.get("sliding_window", 128)
    if SLIDING in kinds and (type(window) is not int or window < 1):
        raise ValueError(
            f"config.json has sliding_window={window!r}; it must be a whole number from 1 on"
        )
    return tuple(Sinks(window if kind == SLIDING else None) for kind in period_of(kinds))


def write_methods(config: ModelConfig) -> dict[str, Any]:
    """The part of a config.json that tells the methods. Raises ValueError where it cannot."""
    windows = {m.window for m in config.attention if isinstance(m, Sinks)} - {None}
    if len(windows) > 1 or not all(isinstance(method, Sinks) for method in config.attention):
        raise ValueError(
            f"config.json has no words for attention={config.attention}, only for {Sinks()} and "
            "one size of windows"
        )
    kinds = [
        FULL if isinstance(method, Sinks) and method.window is None else SLIDING
        for method in config.attention
    ]
    return {
        "layer_types": kinds * config.periods,
        "sliding_window": windows.pop() if windows else 128,
    }


EXPERTS_OF_32 = MoE(experts=32, active=4, mlp_dim=2880, biases=True, limit=_LIMIT)
SHAPE = ModelConfig(
    vocab_size=201_088,
    embed_dim=2880,
    mlp_dim=2880,
    num_layers=24,
    num_heads=64,
    num_kv_heads=8,
    head_dim=64,
    rope_theta=150_000.0,
    norm_eps=1e-5,
    tied_embeddings=False,
    qkv_bias=True,
    o_bias=True,
    rope_scaling=Yarn(factor=32.0, original_max_positions=4096, truncate=False),
    attention=(Sinks(128), Sinks()),
    moe=EXPERTS_OF_32,
)

FAMILY = Family(
    presets={
        "gpt-oss-20b": SHAPE,
        "gpt-oss-120b": dataclasses.replace(
            SHAPE, num_layers=36, moe=dataclasses.replace(EXPERTS_OF_32, experts=128)
        ),
    },
    architecture="gpt_oss",
    huggingface_class="GptOssForCausalLM",
    options={"qkv_bias": True, "o_bias": True, "qk_norm": False},
    parameters=with_experts(llama_like(QKV_BIAS, O_BIAS, _SINKS), _ROUTED),
    template=_TEMPLATE.strip(),
    ends=("<|return|>", "<|call|>", "<|endoftext|>"),
    protocol="harmony",
    experts=Experts(
        keys={
            "experts": "num_local_experts",
            "active": "num_experts_per_tok",
            "mlp_dim": "intermediate_size",
        },
        options={"biases": True, "limit": _LIMIT},
    ),
    harmless={
        **HARMLESS,
        "attention_bias": (True, None),
        "swiglu_limit": (_LIMIT,),
        "swiglu_alpha": (1.702,),
    },
    sinks=True,
    alternating=ALTERNATING,
    written={"attention_bias": True, "swiglu_limit": _LIMIT},
)
