"""Qwen3-Coder: declares and calls functions in XML-like tags, with unquoted values.

Its dense shapes are those of Qwen3; it has no preset of its own.
"""

from __future__ import annotations

import dataclasses

from models.families import qwen3

# The turn of the system, of the text ``system``, with functions declared in it.
SYSTEM_TURN = r"""
{%- macro text(value) %}{{ value if value is string else value | tojson }}{% endmacro -%}
{%- if system or tools -%}
  {{- "<|im_start|>system\n" + system -}}
  {%- if tools -%}
    {{- "\n\n" if system else "" -}}
    {{- "# Tools\n\nThese functions are available:\n\n<tools>" -}}
    {%- for tool in tools -%}
      {{- "\n<function>\n<name>" + tool.function.name + "</name>" -}}
      {{- "\n<description>" ~ tool.function.description | default("", true) ~ "</description>" -}}
      {{- "\n<parameters>" -}}
      {%- set schema = tool.function.parameters | default({}, true) -%}
      {%- set properties = schema.properties if schema.properties is mapping else {} -%}
      {%- for name, parameter in properties | items -%}
        {{- "\n<parameter>\n<name>" + name + "</name>" -}}
        {%- for key, value in (parameter if parameter is mapping else {}) | items -%}
          {{- "\n<" + key + ">" + text(value) + "</" + key + ">" -}}
        {%- endfor -%}
        {{- "\n</parameter>" -}}
      {%- endfor -%}
      {%- if schema.required is defined -%}
        {{- "\n<required>" + schema.required | tojson + "</required>" -}}
      {%- endif -%}
      {{- "\n</parameters>\n</function>" -}}
    {%- endfor -%}
    {{- "\n</tools>\n\nTo call one, write it like this, one tag per parameter, " -}}
    {{- "values as they are:\n\n" -}}
    {{- "<tool_call>\n<function=function_name>\n" -}}
    {{- "<parameter=parameter_name>\nvalue\n</parameter>\n" -}}
    {{- "</function>\n</tool_call>" -}}
  {%- endif -%}
  {{- "<|im_end|>\n" -}}
{%- endif -%}
"""
_SYSTEM = '{%- set system = messages[0].content if messages[0].role == "system" else "" -%}'
_TURNS = r"""
{%- for message in messages if message.role != "system" -%}
  {%- if message.role == "tool" -%}
    {{- "<|im_start|>user\n" if loop.first or loop.previtem.role != "tool" else "" -}}
    {{- "<tool_response>\n" + message.content + "\n</tool_response>\n" -}}
    {{- "<|im_end|>\n" if loop.last or loop.nextitem.role != "tool" else "" -}}
  {%- else -%}
    {{- "<|im_start|>" + message.role + "\n" + message.content -}}
    {%- for call in message.tool_calls | default([], true) -%}
      {{- "\n" if message.content or not loop.first else "" -}}
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

FAMILY = dataclasses.replace(
    qwen3.FAMILY,
    presets={},
    template=(_SYSTEM + SYSTEM_TURN + _TURNS).strip(),
    protocol="qwen3_coder",
    call_format="tags",
)
