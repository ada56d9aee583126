"""The small model that is trained from scratch: a Llama with one special token per mark.

Nothing marks who asks, and calls are written into the content.
"""

from __future__ import annotations

import dataclasses

from models.families import llama
from models.model_config import ModelConfig

_TEMPLATE = r"""
{{- "<|bos|>" -}}
{%- for message in messages -%}
  {%- if message.role == "tool" -%}
    {{- "<|tool|>" if loop.first or loop.previtem.role != "tool" else "\n" -}}
  {%- elif message.role == "user" and not loop.first -%}
    {{- "\n" if loop.previtem.role == "system" else "" -}}
  {%- endif -%}
  {{- message.content -}}
  {%- set next = none if loop.last else loop.nextitem.role -%}
  {%- set goes_on = message.role == "system" or (message.role == "tool" and next == "tool") -%}
  {{- "" if goes_on else "<|eot|>" -}}
{%- endfor -%}
"""

FAMILY = dataclasses.replace(
    llama.FAMILY,
    presets={
        # Trains from scratch on two CPU cores in minutes.
        "tiny": ModelConfig(
            vocab_size=512,
            embed_dim=128,
            mlp_dim=384,
            num_layers=4,
            num_heads=4,
            num_kv_heads=4,
            head_dim=32,
            rope_theta=1e4,
            norm_eps=1e-6,
            tied_embeddings=True,
        ),
        # The same for an agent that has to find what it read: long wavelengths of RoPE and large
        # random embeddings, as in "tiny_reader". 1 M parameters with a vocabulary of 896.
        "small_reader": ModelConfig(
            vocab_size=896,
            embed_dim=128,
            mlp_dim=256,
            num_layers=4,
            num_heads=4,
            num_kv_heads=2,
            head_dim=64,
            rope_theta=1e6,
            norm_eps=1e-6,
            tied_embeddings=False,
            embed_std=0.5,
        ),
        # "small_reader" made wide and deep: 8 M parameters with a vocabulary of 896.
        "reader": ModelConfig(
            vocab_size=896,
            embed_dim=320,
            mlp_dim=864,
            num_layers=6,
            num_heads=5,
            num_kv_heads=5,
            head_dim=64,
            rope_theta=1e6,
            norm_eps=1e-6,
            tied_embeddings=False,
            embed_std=0.5,
        ),
        # Learns to look things up in thousands of tokens. Long wavelengths of RoPE and large random
        # embeddings let a query find a name by the name alone, wherever it stands.
        "tiny_reader": ModelConfig(
            vocab_size=704,
            embed_dim=64,
            mlp_dim=128,
            num_layers=3,
            num_heads=4,
            num_kv_heads=2,
            head_dim=64,
            rope_theta=1e6,
            norm_eps=1e-6,
            tied_embeddings=False,
            embed_std=0.5,
        ),
    },
    template=_TEMPLATE.strip(),
    ends=("<|eot|>",),
    protocol="compact",
    call_format=None,
    max_calls=0,
    declares_tools=False,
)
