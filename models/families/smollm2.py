"""SmolLM2-Instruct: a small Llama with tied embeddings that talks in ChatML.

There is always a system turn; there are no tools, and what a tool said is a user's message.
"""

from __future__ import annotations

import dataclasses

from models.families import llama
from models.model_config import ModelConfig

_TEMPLATE = r"""
{%- if messages[0].role != "system" -%}
  {{- "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, " -}}
  {{- "trained by Hugging Face<|im_end|>\n" -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == "tool" -%}
    {{- "<|im_start|>user\n" if loop.first or loop.previtem.role != "tool" else "\n" -}}
    {{- message.content -}}
    {{- "<|im_end|>\n" if loop.last or loop.nextitem.role != "tool" else "" -}}
  {%- else -%}
    {{- "<|im_start|>" + message.role + "\n" + message.content + "<|im_end|>\n" -}}
  {%- endif -%}
{%- endfor -%}
{{- "<|im_start|>assistant\n" if add_generation_prompt else "" -}}
"""

FAMILY = dataclasses.replace(
    llama.FAMILY,
    presets={
        "smollm2-135m": ModelConfig(
            vocab_size=49_152,
            embed_dim=576,
            mlp_dim=1536,
            num_layers=30,
            num_heads=9,
            num_kv_heads=3,
            head_dim=64,
            rope_theta=1e5,
            norm_eps=1e-5,
            tied_embeddings=True,
        ),
    },
    template=_TEMPLATE.strip(),
    ends=("<|im_end|>", "<|endoftext|>"),
    protocol="completion",
    call_format=None,
    max_calls=0,
    declares_tools=False,
)
