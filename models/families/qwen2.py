"""Qwen2 and Qwen2.5: biases on q, k and v; ChatML with calls as JSON in tags (the Hermes format).

Shapes are those of the published ``config.json`` of Qwen2.5-Coder.
"""

from __future__ import annotations

from models.families.family import Family
from models.families.parameters import QKV_BIAS, llama_like
from models.families.windows import Windows
from models.model_config import ModelConfig

_TEMPLATE = r"""
{%- set system = messages[0].content if messages[0].role == "system" else "" -%}
{%- if system or tools -%}
  {{- "<|im_start|>system\n" + system -}}
  {%- if tools -%}
    {{- "\n\n" if system else "" -}}
    {{- "# Tools\n\nThese functions are available:\n<tools>" -}}
    {%- for tool in tools %}{{ "\n" + tool | tojson }}{% endfor -%}
    {{- "\n</tools>\n\nTo call one, write its name and arguments as JSON between tags:\n" -}}
    {{- '<tool_call>\n{"name": <function-name>, "arguments": <arguments-object>}\n</tool_call>' -}}
  {%- endif -%}
  {{- "<|im_end|>\n" -}}
{%- endif -%}
{%- for message in messages if message.role != "system" -%}
  {%- if message.role == "tool" -%}
    {{- "<|im_start|>user" if loop.first or loop.previtem.role != "tool" else "" -}}
    {{- "\n<tool_response>\n" + message.content + "\n</tool_response>" -}}
    {{- "<|im_end|>\n" if loop.last or loop.nextitem.role != "tool" else "" -}}
  {%- else -%}
    {{- "<|im_start|>" + message.role + "\n" + message.content -}}
    {%- for call in message.tool_calls | default([], true) -%}
      {{- "\n" if message.content or not loop.first else "" -}}
      {{- '<tool_call>\n{"name": ' + call.function.name | tojson -}}
      {{- ', "arguments": ' + call.function.arguments | tojson + "}\n</tool_call>" -}}
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
    head: int,
    *,
    vocab: int,
    tied: bool,
) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab,
        embed_dim=embed,
        mlp_dim=mlp,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head,
        rope_theta=1e6,
        norm_eps=1e-6,
        tied_embeddings=tied,
        qkv_bias=True,
    )


FAMILY = Family(
    presets={
        "qwen2.5-coder-0.5b": _shape(896, 4864, 24, 14, 2, 64, vocab=151_936, tied=True),
        "qwen2.5-coder-1.5b": _shape(1536, 8960, 28, 12, 2, 128, vocab=151_936, tied=True),
        "qwen2.5-coder-7b": _shape(3584, 18_944, 28, 28, 4, 128, vocab=152_064, tied=False),
        "qwen2.5-coder-32b": _shape(5120, 27_648, 64, 40, 8, 128, vocab=152_064, tied=False),
    },
    architecture="qwen2",
    huggingface_class="Qwen2ForCausalLM",
    options={"qkv_bias": True, "qk_norm": False},
    parameters=llama_like(QKV_BIAS),
    windows=Windows(switched=True, first=28),
    template=_TEMPLATE.strip(),
    ends=("<|im_end|>", "<|endoftext|>"),
    protocol="hermes",
    call_format="json",
    max_calls=float("inf"),
    declares_tools=True,
)
