"""DeepSeek-V3.2: DeepSeek-V3 whose layers attend to the keys that an indexer chooses.

Published files have no chat template. The one here writes what the protocol "dsml" does, with
thoughts and calls in content as it was sampled, and has no place for tools. Shapes are those of the
published ``config.json`` of DeepSeek-V3.2-Exp.
"""

from __future__ import annotations

import dataclasses

from attention.methods.dsa import DSA
from models.families import deepseek_v3
from models.families.latent import INDEXED
from models.families.parameters import EXPERTS, SHARED_EXPERT, with_experts, without_attention

_TEMPLATE = r"""
{{- "<｜begin▁of▁sentence｜>" -}}
{%- set talk = namespace(opener="<｜Assistant｜>", before="") -%}
{%- for message in messages -%}
  {%- set role = message.role -%}
  {%- if talk.before == "tool" and role != "tool" -%}
    {{- "\n</function_results>" -}}
  {%- endif -%}
  {%- if talk.before in ("user", "tool") and role != "assistant"
      and not (talk.before == "tool" and role == "tool") -%}
    {{- talk.opener + "</think>" -}}
  {%- endif -%}
  {%- if role == "system" -%}
    {{- message.content -}}
  {%- elif role == "user" -%}
    {{- "<｜User｜>" + message.content -}}
  {%- elif role == "tool" -%}
    {{- "" if talk.before == "tool" else "\n\n<function_results>" -}}
    {{- "\n<result>" + message.content + "</result>" -}}
  {%- else -%}
    {{- talk.opener + ("<think>" if "</think>" in message.content else "</think>") -}}
    {{- message.content + "<｜end▁of▁sentence｜>" -}}
  {%- endif -%}
  {%- set talk.opener = "\n\n" if role == "tool" else "<｜Assistant｜>" -%}
  {%- set talk.before = role -%}
{%- endfor -%}
{{- "\n</function_results>" if talk.before == "tool" else "" -}}
{{- talk.opener + "<think>" if add_generation_prompt else "" -}}
"""

_LAYER = DSA(**dataclasses.asdict(deepseek_v3.LAYER))

FAMILY = dataclasses.replace(
    deepseek_v3.FAMILY,
    presets={
        "deepseek-v3.2": dataclasses.replace(
            deepseek_v3.SHAPE, architecture="deepseek_v32", attention=(_LAYER,)
        ),
    },
    architecture="deepseek_v32",
    huggingface_class="DeepseekV32ForCausalLM",
    parameters=with_experts(without_attention(INDEXED), EXPERTS, SHARED_EXPERT),
    harmless={**deepseek_v3.FAMILY.harmless, "indexer_rope_interleave": (False, None)},
    index_interleaved=False,
    template=_TEMPLATE.strip(),
    protocol="dsml",
)
