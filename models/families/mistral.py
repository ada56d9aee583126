"""Mistral: a Llama of another name, whose turns stand between [INST] and [/INST].

All layers may have a sliding window, as those of Mistral 7B v0.1; without one transformers computes
what it does for Llama. Nothing declares tools or writes calls: published
tokenizers bring templates of their own for that.
"""

from __future__ import annotations

import dataclasses

from models.families import llama
from models.families.family import HARMLESS
from models.families.parameters import llama_like
from models.families.windows import Windows

_TEMPLATE = r"""
{{- "<s>" -}}
{%- for message in messages -%}
  {%- set before = none if loop.first else loop.previtem.role -%}
  {%- set next = none if loop.last else loop.nextitem.role -%}
  {%- if message.role == "assistant" -%}
    {{- message.content + "</s>" -}}
  {%- else -%}
    {{- "" if before == "system" or before == message.role == "tool" else "[INST] " -}}
    {{- message.content -}}
    {%- if message.role == "system" and next in ("user", "tool") -%}
      {{- "\n\n" -}}
    {%- else -%}
      {{- "\n" if next == message.role == "tool" else "[/INST]" -}}
    {%- endif -%}
  {%- endif -%}
{%- endfor -%}
"""

FAMILY = dataclasses.replace(
    llama.FAMILY,
    presets={},
    architecture="mistral",
    huggingface_class="MistralForCausalLM",
    # a file that leaves the window out has one of 4096 tokens, in all layers
    windows=Windows(),
    switches={},
    parameters=llama_like(),
    harmless={**HARMLESS, "layer_types": ([], None)},
    template=_TEMPLATE.strip(),
    ends=("</s>",),
    protocol="mistral",
    call_format=None,
    max_calls=0,
    declares_tools=False,
)
