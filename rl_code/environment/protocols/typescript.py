"""Functions as types of TypeScript, as the harmony format declares them (``openai-harmony``)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_NAMES = {"string": "string", "number": "number", "integer": "number", "boolean": "boolean"}
_DEEPER = "    "


def declaration(function: Mapping[str, Any]) -> str:
    """The type of a function, ``{"name": ..., "description": ..., "parameters": {...}}``, behind
    its description as a comment.
    """
    described = function.get("description") or ""
    lines = [f"// {line}".rstrip(" ") for line in described.splitlines()]
    parameters = function.get("parameters")
    if parameters is None:
        lines.append(f"type {function['name']} = () => any;")
    else:
        lines.append(f"type {function['name']} = (_: {_type(parameters, '')}) => any;")
    return "\n".join(lines)


def _type(schema: Any, indent: str) -> str:
    """The type of a schema, whose further lines are indented."""
    if not isinstance(schema, Mapping):
        return "any"
    if variants := schema.get("oneOf"):
        return "".join(_variants(variants, indent))
    match schema.get("type"):
        case "object":
            return f"{{\n{''.join(_properties(schema, indent))}{indent}}}"
        case "array":
            items = schema.get("items")
            return "Array<any>" if items is None else f"{_type(items, indent)}[]"
        case "string" if texts := schema.get("enum"):
            found = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
        case str(kind) if kind in _NAMES:
            found = _NAMES[kind]
        case list(kinds):
            return " | ".join("null" if one == "null" else _NAMES.get(one, one) for one in kinds)
        case _:
            return "any"
    return f"{found} | null" if schema.get("nullable") else found


def _properties(schema: Mapping[str, Any], indent: str) -> Iterator[str]:
    required = schema.get("required") or ()
    for key, value in (schema.get("properties") or {}).items():
        value = value if isinstance(value, Mapping) else {}
        name = key if key in required else f"{key}?"
        if title := value.get("title"):
            yield f"{indent}// {title}\n{indent}//\n"
        if described := value.get("description"):
            yield f"{indent}// {described}\n"  # its further lines are no comments there either
        if examples := value.get("examples"):
            yield f"{indent}// Examples:\n"
            yield from (f"{indent}// - {json.dumps(one, ensure_ascii=False)}\n" for one in examples)
        default = _default(value)
        if variants := value.get("oneOf"):
            yield f"{indent}{default}\n" if default else ""
            yield f"{indent}{name}:{''.join(_variants(variants, indent))}\n{indent},\n"
        else:
            yield f"{indent}{name}: {_type(value, indent + _DEEPER)},{default and f' {default}'}\n"


def _variants(variants: Sequence[Any], indent: str) -> Iterator[str]:
    for one in variants:
        described = one.get("description") if isinstance(one, Mapping) else None
        comment = f" // {described}" if described else ""
        yield f"\n{indent} | {_type(one, indent + ' ' * 3)}{comment}"


def _default(schema: Mapping[str, Any]) -> str:
    if "default" not in schema:
        return ""
    value = schema["default"]
    bare = isinstance(value, str) and "enum" in schema
    return f"// default: {value if bare else json.dumps(value, ensure_ascii=False)}"
