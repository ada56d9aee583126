"""GLM-4.5: half of each head is rotated, and experts route as DeepSeek-V3's do.

Shapes are those of the published ``config.json`` of GLM-4.5 and GLM-4.5-Air. The layers that guess
further tokens are not read. No token ends a turn: the model writes the mark of whoever speaks next.
"""

from __future__ import annotations

import dataclasses

from models.families import dots1, qwen3
from models.families.parameters import (
    EXPERTS,
    QK_NORM,
    QKV_BIAS,
    SHARED_EXPERT,
    llama_like,
    with_experts,
)
from models.model_config import ModelConfig, MoE

_TEMPLATE = r"""
{%- macro text(value) %}{{ value if value is string else value | tojson }}{% endmacro -%}
{{- "[gMASK]<sop>" -}}
{%- if tools -%}
  {{- "<|system|>\n# Tools\n\nThese functions are available:\n<tools>" -}}
  {%- for tool in tools %}{{ "\n" + tool | tojson }}{% endfor -%}
  {{- "\n</tools>\n\nTo call one, write its name, and each argument between tags:\n" -}}
  {{- "<tool_call>function_name\n<arg_key>key</arg_key>\n<arg_value>value</arg_value>\n" -}}
  {{- "</tool_call>" -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == "tool" -%}
    {{- "<|observation|>" if loop.first or loop.previtem.role != "tool" else "" -}}
    {{- "\n<tool_response>\n" + message.content + "\n</tool_response>" -}}
  {%- else -%}
    {{- "<|" + message.role + "|>\n" + message.content -}}
    {%- for call in message.tool_calls | default([], true) -%}
      {{- "\n" if message.content or not loop.first else "" -}}
      {{- "<tool_call>" + call.function.name + "\n" -}}
      {%- for name, value in call.function.arguments | items -%}
        {{- "<arg_key>" + name + "</arg_key>\n<arg_value>" + text(value) + "</arg_value>\n" -}}
      {%- endfor -%}
      {{- "</tool_call>" -}}
    {%- endfor -%}
  {%- endif -%}
{%- endfor -%}
{{- "<|assistant|>\n" if add_generation_prompt else "" -}}
"""

EXPERTS_OF_160 = MoE(
    experts=160,
    active=8,
    mlp_dim=1536,
    scores="sigmoid",
    scale=2.5,
    ranking_bias=True,
    shared=1,
    first_dense=3,
)
SHAPE = ModelConfig(
    vocab_size=151_552,
    embed_dim=5120,
    mlp_dim=12_288,
    num_layers=92,
    num_heads=96,
    num_kv_heads=8,
    head_dim=128,
    rope_theta=1e6,
    norm_eps=1e-5,
    tied_embeddings=False,
    partial_rotary=0.5,
    qkv_bias=True,
    qk_norm=True,
    moe=EXPERTS_OF_160,
)

FAMILY = dataclasses.replace(
    qwen3.FAMILY,
    presets={
        "glm-4.5": SHAPE,
        "glm-4.5-air": dataclasses.replace(
            SHAPE,
            embed_dim=4096,
            mlp_dim=10_944,
            num_layers=46,
            qk_norm=False,
            moe=dataclasses.replace(
                EXPERTS_OF_160, experts=128, mlp_dim=1408, scale=1.0, first_dense=1
            ),
        ),
    },
    architecture="glm4_moe",
    huggingface_class="Glm4MoeForCausalLM",
    options={},
    switches={"attention_bias": ("qkv_bias",), "use_qk_norm": ("qk_norm",)},
    parameters=with_experts(llama_like(QKV_BIAS, QK_NORM), EXPERTS, SHARED_EXPERT),
    windows=None,
    partial_rotary=0.5,
    experts=dots1.DEEPSEEK_EXPERTS,
    skipped=("model.layers.{layers}.",),
    written={"num_nextn_predict_layers": 0},
    template=_TEMPLATE.strip(),
    ends=("<|observation|>", "<|user|>", "<|endoftext|>"),
    ends_open=True,
    protocol="glm",
    call_format="pairs",
)
