"""Kimi K2: the architecture of DeepSeek-V3 with more experts in one group, and fewer heads.

The template here writes what the protocol "kimi_k2" does, with calls in content as it was sampled,
and has no place for tools. Shapes are those of the published ``config.json`` of Kimi-K2-Instruct.
"""

from __future__ import annotations

import dataclasses

from models.families import deepseek_v3
from models.families.latent import score_factor
from models.model_config import MoE
from models.rope_scaling import Yarn

_TEMPLATE = r"""
{%- if messages[0].role != "system" -%}
  {{- "<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot AI." -}}
  {{- "<|im_end|>\n" -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == "assistant" -%}
    {{- "<|im_assistant|>assistant<|im_middle|>" -}}
  {%- elif message.role == "user" -%}
    {{- "<|im_user|>user<|im_middle|>" -}}
  {%- elif message.role == "tool" -%}
    {{- "<|im_system|>" + message.name | default("tool") + "<|im_middle|>## Return of " -}}
    {{- message.tool_call_id | default("") + "\n" -}}
  {%- else -%}
    {{- "<|im_system|>system<|im_middle|>" -}}
  {%- endif -%}
  {{- message.content + "<|im_end|>" -}}
{%- endfor -%}
{{- "<|im_assistant|>assistant<|im_middle|>" if add_generation_prompt else "" -}}
"""

_SCALING = Yarn(
    factor=32.0,
    original_max_positions=4096,
    beta_fast=1.0,
    beta_slow=1.0,
    mscale=1.0,
    mscale_all_dim=1.0,
)
_LAYER = dataclasses.replace(deepseek_v3.LAYER, score_factor=score_factor(_SCALING))

FAMILY = dataclasses.replace(
    deepseek_v3.FAMILY,
    presets={
        "kimi-k2": dataclasses.replace(
            deepseek_v3.SHAPE,
            architecture="kimi_k2",
            vocab_size=163_840,
            num_heads=64,
            num_kv_heads=64,
            rope_theta=5e4,
            rope_scaling=_SCALING,
            attention=(_LAYER,),
            moe=MoE(
                experts=384,
                active=8,
                mlp_dim=2048,
                scores="sigmoid",
                scale=2.827,
                ranking_bias=True,
                shared=1,
                first_dense=1,
            ),
        ),
    },
    architecture="kimi_k2",
    template=_TEMPLATE.strip(),
    ends=("<|im_end|>", "[EOS]"),
    protocol="kimi_k2",
)
