"""Llama 3.1: grouped queries, no biases, RoPE whose low frequencies are stretched.

Shapes are those of the published ``config.json``. Turns stand under headers between special
tokens; a call is bare JSON with "parameters"; results come from the role "ipython".
"""

from __future__ import annotations

from models.families.family import Family
from models.families.parameters import O_BIAS, QKV_BIAS, llama_like
from models.model_config import ModelConfig
from models.rope_scaling import RopeScaling

_TEMPLATE = r"""
{%- macro turn(role, content) -%}
  {{- "<|start_header_id|>" + role + "<|end_header_id|>\n\n" + content + "<|eot_id|>" -}}
{%- endmacro -%}
{%- set system = messages[0].content if messages[0].role == "system" else "" -%}
{{- "<|begin_of_text|>" -}}
{%- if system or tools -%}
  {%- set parts = namespace(text="Environment: ipython" if tools else "") -%}
  {%- if tools -%}
    {%- set parts.text = parts.text + "\n\nThese functions are available:\n" -%}
    {%- for tool in tools %}{% set parts.text = parts.text + "\n" + tool | tojson %}{% endfor -%}
    {%- set parts.text = parts.text + "\n\nTo call one, answer with JSON and nothing else:\n" -%}
    {%- set form = '{"name": <function-name>, "parameters": <arguments-object>}' -%}
    {%- set parts.text = parts.text + form -%}
  {%- endif -%}
  {{- turn("system", parts.text + ("\n\n" if tools and system else "") + system) -}}
{%- endif -%}
{%- for message in messages if message.role != "system" -%}
  {%- if message.tool_calls | default([], true) -%}
    {%- set call = message.tool_calls[0].function -%}
    {%- set arguments = call.arguments | tojson -%}
    {%- set json = '{"name": ' + call.name | tojson + ', "parameters": ' + arguments + "}" -%}
    {{- turn("assistant", message.content + json) -}}
  {%- else -%}
    {{- turn("ipython" if message.role == "tool" else message.role, message.content) -}}
  {%- endif -%}
{%- endfor -%}
{{- "<|start_header_id|>assistant<|end_header_id|>\n\n" if add_generation_prompt else "" -}}
"""

FAMILY = Family(
    presets={
        "llama-3.1-8b": ModelConfig(
            vocab_size=128_256,
            embed_dim=4096,
            mlp_dim=14_336,
            num_layers=32,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            rope_theta=5e5,
            norm_eps=1e-5,
            tied_embeddings=False,
            rope_scaling=RopeScaling(
                factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
            ),
        ),
    },
    architecture="llama",
    huggingface_class="LlamaForCausalLM",
    options={"qkv_bias": False, "qk_norm": False},
    switches={"attention_bias": ("qkv_bias", "o_bias")},
    parameters=llama_like(QKV_BIAS, O_BIAS),
    template=_TEMPLATE.strip(),
    ends=("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
    protocol="llama3",
    call_format="bare",
    max_calls=1,
    declares_tools=True,
    interleaved_in_gguf=True,
)
