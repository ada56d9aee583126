"""Qwen3.5: the layers of Qwen3-Next, dense or with experts, in a model that also sees pictures.

Its folders nest the text model's config under ``text_config``. The part that sees is skipped, and
so are the layers that guess further tokens. Files of ours are those of the text model alone. Shapes
are those of the published ``config.json`` of each model.
"""

from __future__ import annotations

import dataclasses

from models.families import hybrid, qwen3_coder, qwen3_next
from models.families.family import Experts
from models.families.parameters import QK_NORM, llama_like
from models.model_config import ModelConfig, MoE

# The turns of Qwen3-Coder with other new lines: two in front of calls behind text, none between the
# last result and the end of its turn, and none around a message. The published template takes white
# space away around results too; here they are put behind a message as they are.
_SYSTEM = '{%- set system = messages[0].content | trim if messages[0].role == "system" else "" -%}'
_TURNS = r"""
{%- for message in messages if message.role != "system" -%}
  {%- if message.role == "tool" -%}
    {{- "<|im_start|>user" if loop.first or loop.previtem.role != "tool" else "" -}}
    {{- "\n<tool_response>\n" + message.content + "\n</tool_response>" -}}
    {{- "<|im_end|>\n" if loop.last or loop.nextitem.role != "tool" else "" -}}
  {%- else -%}
    {%- set content = message.content | trim -%}
    {{- "<|im_start|>" + message.role + "\n" + content -}}
    {%- for call in message.tool_calls | default([], true) -%}
      {{- "\n" if not loop.first else "\n\n" if content else "" -}}
      {{- "<tool_call>\n<function=" + call.function.name + ">\n" -}}
      {%- for name, value in call.function.arguments | items -%}
        {{- "<parameter=" + name + ">\n" + text(value) + "\n</parameter>\n" -}}
      {%- endfor -%}
      {{- "</function>\n</tool_call>" -}}
    {%- endfor -%}
    {{- "<|im_end|>\n" -}}
  {%- endif -%}
{%- endfor -%}
{{- "<|im_start|>assistant\n" if add_generation_prompt else "" -}}
"""


def _shape(
    embed: int,
    mlp: int,
    layers: int,
    heads: int,
    kv_heads: int,
    value_heads: int,
    *,
    tied: bool = False,
    moe: MoE | None = None,
) -> ModelConfig:
    state = dataclasses.replace(qwen3_next.STATE, value_heads=value_heads)
    return dataclasses.replace(
        qwen3_next.SHAPE_80B,
        # with experts, Qwen3-Next's options are the same
        architecture="qwen3_5_text" if moe is None else "qwen3_5_moe_text",
        vocab_size=248_320,
        embed_dim=embed,
        mlp_dim=mlp,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        tied_embeddings=tied,
        attention=(state,) * 3 + qwen3_next.SHAPE_80B.attention[3:],
        moe=moe,
    )


def _experts(experts: int, active: int, mlp: int) -> MoE:
    return MoE(experts=experts, active=active, mlp_dim=mlp, shared=1, shared_gate=True)


FAMILY = dataclasses.replace(
    qwen3_next.FAMILY,
    presets={
        "qwen3.5-4b": _shape(2560, 9216, 32, 16, 4, 32, tied=True),
        "qwen3.5-9b": _shape(4096, 12_288, 32, 16, 4, 32),
        "qwen3.5-27b": _shape(5120, 17_408, 64, 24, 4, 48),
    },
    architecture="qwen3_5_text",
    huggingface_class="Qwen3_5ForCausalLM",
    nested=("qwen3_5", "Qwen3_5ForConditionalGeneration"),
    parameters=llama_like(QK_NORM, hybrid.STATE),
    experts=None,
    template=_SYSTEM + (qwen3_coder.SYSTEM_TURN + _TURNS).strip(),
    protocol="qwen3_5",
    call_format=qwen3_coder.FAMILY.call_format,
    harmless={**qwen3_next.FAMILY.harmless, "attn_output_gate": (True, None)},
    regrouped=hybrid.BY_SECTIONS,
    skipped=("mtp.", "model.visual."),
    prefix="model.language_model.",
)

MOE_FAMILY = dataclasses.replace(
    FAMILY,
    presets={
        "qwen3.5-35b-a3b": _shape(2048, 512, 40, 16, 2, 32, moe=_experts(256, 8, 512)),
        "qwen3.5-122b-a10b": _shape(3072, 1024, 48, 32, 2, 64, moe=_experts(256, 8, 1024)),
        "qwen3.5-397b-a17b": _shape(4096, 1024, 60, 32, 2, 64, moe=_experts(512, 10, 1024)),
    },
    architecture="qwen3_5_moe_text",
    huggingface_class="Qwen3_5MoeForCausalLM",
    nested=("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
    parameters=qwen3_next.PARAMETERS,
    experts=Experts(
        keys={
            "experts": "num_experts",
            "active": "num_experts_per_tok",
            "mlp_dim": "moe_intermediate_size",
        },
        options={"shared_gate": True},
        aliases={"intermediate_size": "moe_intermediate_size"},
        shared_size="shared_expert_intermediate_size",
        fused=True,
    ),
)
