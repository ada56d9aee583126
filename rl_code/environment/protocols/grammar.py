"""Grammars of messages that must be calls, in Lark's notation as ``llguidance`` reads it.

Calls have the layout of the chat templates, and arguments the schemas of their functions. A message
may begin with a thought. What a grammar allows the protocol's reader reads as these calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rl_code.environment.protocols.reading import CALL, CALLED, THINK, THOUGHT
from rl_code.environment.tools.schema import Arguments

# Any text, and the white space behind a thought.
_TERMINALS = ("TEXT: /(?s:.*)/", r"SPACE: /\s+/")
# Keys that can stand in a tag.
_KEY = re.compile(r"[^<>\s](?:[^<>\n]{0,198}[^<>\s])?")
_DEFINITIONS = ("$defs", "definitions")

type Special = Callable[[str], str]


def grammar_of_message(
    form: str,
    functions: Sequence[Mapping[str, Any]],
    special: Special,
    *,
    many: bool,
    thinking: bool,
    content: str,
) -> str:
    """Grammar of a message that is calls, behind at most one thought, or else JSON.

    form: a key of FORMS. functions: what may be called, as ``{"name": ..., "parameters": {...}}``;
    the parameters are the schema of an object. special: gives the name of a mark that is one
    special token, "" for other texts. many: True if there may be several calls. thinking: True if
    the message begins inside a thought. content: the schema of JSON, as text, that may stand in
    place of calls; "" for none. Raises ValueError for functions that cannot be called in this form.
    """
    choices = [f"call_{number}" for number in range(len(functions))]
    calls = 'call ("\\n" call)*' if many else "call"
    thought = f"rest_of_thought SPACE? {calls}"
    starts = [thought] if thinking else [f"{_mark(THINK, special)} {thought}", calls]
    if content:
        starts.append(f"%json {content}")
    rules = [
        f"start: {' | '.join(starts)}",
        f"call: {' | '.join(choices)}",
        _rest("rest_of_thought", THOUGHT, special),
    ]
    for name, function in zip(choices, functions, strict=True):
        rules += FORMS[form](name, function, special)
    return "\n".join((*rules, *_TERMINALS))


def grammar_of_harmony(functions: Sequence[Mapping[str, Any]], special: Special) -> str:
    """Grammar of a message in the harmony format that is one call, behind at most one thought;
    arguments as for ``grammar_of_message``.
    """
    channel, message = _mark("<|channel|>", special), _mark("<|message|>", special)
    opening = f'{_mark("<|start|>", special)} "assistant"'
    choices = [f"call_{number}" for number in range(len(functions))]
    rules = [
        "start: thought? call",
        f'thought: {channel} "analysis" {message} rest_of_thought {opening}',
        _rest("rest_of_thought", "<|end|>", special),
        f"call: {' | '.join(choices)}",
    ]
    for name, function in zip(choices, functions, strict=True):
        receiver = _quoted(f"commentary to=functions.{function['name']} ")
        kind = f'{_mark("<|constrain|>", special)} "json"'
        body = f"%json {json.dumps(function['parameters'])}"
        rules.append(f"{name}: {channel} {receiver} {kind} {message} {body}")
    return "\n".join((*rules, _TERMINALS[0]))


def grammar_of_dsml(
    functions: Sequence[Mapping[str, Any]],
    special: Special,
    *,
    many: bool,
    thinking: bool,
    content: str,
) -> str:
    """Grammar of a message in the format DSML that is calls, or else JSON; arguments and errors as
    for ``grammar_of_message``.
    """
    mark = _mark("｜DSML｜", special)
    choices = [f"call_{number}" for number in range(len(functions))]
    more = r' ("\n" call)*' if many else ""
    opening = rf'"\n\n<" {mark} "function_calls>\n"'
    starts = ["rest_of_thought calls" if thinking else "calls"]
    starts += [f"%json {content}"] if content else []
    rules = [
        f"start: {' | '.join(starts)}",
        rf'calls: {opening} call{more} "\n" "</" {mark} "function_calls>"',
        f"call: {' | '.join(choices)}",
        _rest("rest_of_thought", THOUGHT, special),
        # a text up to the first end tag of a parameter
        rf'text: UP_TO_TAG {mark} "parameter>\n"'
        if special("｜DSML｜")
        else r'text[lazy]: TEXT "</｜DSML｜parameter>\n"',
        r"UP_TO_TAG: /(?s:.*)<\//",
    ]
    for name, function in zip(choices, functions, strict=True):
        parts = []
        for part, key, value, needed in _parameters(name, function):
            is_text = "false" if value.startswith("%json") else "true"
            head = f'"<" {mark} {_quoted(f'parameter name="{key}" string="{is_text}">')}'
            ending = f'{value} "</" {mark} "parameter>\\n"' if value else "text"
            rules.append(f"{part}: {head} {ending}")
            parts.append(part if needed else f"{part}?")
        head = _quoted(f'invoke name="{function["name"]}">\n')
        body = " ".join([*parts, rf'"</" {mark} "invoke>"'])
        rules.append(f'{name}: "<" {mark} {head} {body}')
    return "\n".join((*rules, *_TERMINALS))


def grammar_of_kimi(
    functions: Sequence[Mapping[str, Any]], special: Special, *, many: bool, content: str
) -> str:
    """Grammar of a message of Kimi K2 that is calls, behind at most one thought, or else JSON;
    arguments as for ``grammar_of_message``.
    """
    choices = [f"call_{number}" for number in range(len(functions))]
    begin, end = (_mark(f"<|tool_calls_section_{word}|>", special) for word in ("begin", "end"))
    starts = ["section", f"{_mark(THINK, special)} rest_of_thought SPACE? section"]
    starts += [f"%json {content}"] if content else []
    rules = [
        f"start: {' | '.join(starts)}",
        f"section: {begin} call{'+' if many else ''} {end}",
        f"call: {' | '.join(choices)}",
        _rest("rest_of_thought", THOUGHT, special),
        "NUMBER: /[0-9]{1,9}/",
    ]
    opening, arguments, closing = (
        _mark(f"<|tool_call_{word}|>", special) for word in ("begin", "argument_begin", "end")
    )
    for name, function in zip(choices, functions, strict=True):
        head = _quoted(f"functions.{function['name']}:")
        body = f"%json {json.dumps(function['parameters'])}"
        rules.append(f"{name}: {opening} {head} NUMBER {arguments} {body} {closing}")
    return "\n".join((*rules, *_TERMINALS))


def grammar_of_deepseek(
    functions: Sequence[Mapping[str, Any]],
    special: Special,
    *,
    many: bool,
    thinking: bool,
    content: str,
    in_blocks: bool = True,
) -> str:
    """Grammar of a message of DeepSeek-V3 that is calls, or else JSON; arguments as for
    ``grammar_of_message``. in_blocks: as V3 writes arguments, not V3.1.
    """
    choices = [f"call_{number}" for number in range(len(functions))]
    begin, end = (_mark(f"<｜tool▁calls▁{word}｜>", special) for word in ("begin", "end"))
    starts = ["rest_of_thought SPACE? section" if thinking else "section"]
    starts += [f"%json {content}"] if content else []
    between = r'"\n" ' if in_blocks else ""
    more = f" ({between}call)*" if many else ""
    rules = [
        f"start: {' | '.join(starts)}",
        f"section: {begin} call{more} {end}",
        f"call: {' | '.join(choices)}",
        _rest("rest_of_thought", THOUGHT, special),
    ]
    opening, closing = (_mark(f"<｜tool▁call▁{word}｜>", special) for word in ("begin", "end"))
    separator = _mark("<｜tool▁sep｜>", special)
    for name, function in zip(choices, functions, strict=True):
        body = f"%json {json.dumps(function['parameters'])}"
        if in_blocks:
            head = _quoted(f"{function['name']}\n```json\n")
            body = f'"function" {separator} {head} {body} "\\n```"'
        else:
            body = f"{_quoted(function['name'])} {separator} {body}"
        rules.append(f"{name}: {opening} {body} {closing}")
    return "\n".join((*rules, *_TERMINALS))


def _json_call(name: str, function: Mapping[str, Any], special: Special) -> list[str]:
    """Rules of a call of one function, as JSON between marks. name: of the first rule."""
    body = _json_body(function, "arguments")
    return [f'{name}: {_mark(CALL, special)} "\\n" {body} "\\n" {_mark(CALLED, special)}']


def _bare_call(name: str, function: Mapping[str, Any], special: Special) -> list[str]:
    """As ``_json_call``, without marks."""
    return [f"{name}: {_json_body(function, 'parameters')}"]


def _json_body(function: Mapping[str, Any], key: str) -> str:
    head = f'{{"name": {json.dumps(function["name"])}, "{key}": '
    return f'{_quoted(head)} %json {json.dumps(function["parameters"])} "}}"'


def _parameters(name: str, function: Mapping[str, Any]) -> Iterator[tuple[str, str, str, bool]]:
    """(name of its rule, key, rule of its value or "" for a text, True if it is required) of the
    parameters that tags can name. Raises ValueError for a required one that they cannot.
    """
    arguments = Arguments(function)
    for number, key in enumerate(arguments.properties):
        needed = key in arguments.required
        if _KEY.fullmatch(key):
            value = _value(arguments, key, function["parameters"])
            yield f"{name}_{number}", key, value, needed
        elif needed:
            raise ValueError(f"a tag cannot name the parameter {key[:40]!r}")


def _tag_call(name: str, function: Mapping[str, Any], special: Special) -> list[str]:
    """As ``_json_call``, as tags. Texts end at the first line that is the end tag of a parameter.
    Only parameters that the schema names are written, in its order.
    """
    rules = [_rest(f"{name}_text", "\n</parameter>\n", special)]
    parts = []
    for part, key, value, needed in _parameters(name, function):
        ending = f'{value} "\\n</parameter>\\n"' if value else f"{name}_text"
        rules.append(f"{part}: {_quoted(f'<parameter={key}>\n')} {ending}")
        parts.append(part if needed else f"{part}?")
    opening = _quoted(f"\n<function={function['name']}>\n")
    begin, end = _mark(CALL, special), _mark(CALLED, special)
    body = " ".join([opening, *parts, '"</function>\\n"'])
    return [f"{name}: {begin} {body} {end}", *rules]


def _pairs_call(name: str, function: Mapping[str, Any], special: Special) -> list[str]:
    """As ``_tag_call``, as a name and pairs of keys and values. Texts end at the first end tag of a
    value.
    """
    end = _mark("</arg_value>", special)
    rules = [_rest(f"{name}_text", "</arg_value>", special)]
    parts = []
    for part, key, value, needed in _parameters(name, function):
        ending = f"{value} {end}" if value else f"{name}_text"
        tags = [_mark("<arg_key>", special), _quoted(key), _mark("</arg_key>", special)]
        opening = " ".join([*tags, '"\\n"', _mark("<arg_value>", special)])
        rules.append(f'{part}: {opening} {ending} "\\n"')
        parts.append(part if needed else f"{part}?")
    body = " ".join([_quoted(f"{function['name']}\n"), *parts])
    return [f"{name}: {_mark(CALL, special)} {body} {_mark(CALLED, special)}", *rules]


FORMS: Mapping[str, Callable[[str, Mapping[str, Any], Special], list[str]]] = {
    "json": _json_call,
    "bare": _bare_call,
    "tags": _tag_call,
    "pairs": _pairs_call,
}


def _value(arguments: Arguments, key: str, root: Mapping[str, Any]) -> str:
    """The rule of a parameter's value in tags; "" for any text."""
    schema = arguments.properties[key]
    texts = schema.get("enum", [schema.get("const")]) if isinstance(schema, Mapping) else ()
    if texts and all(isinstance(text, str) for text in texts):
        return f"({' | '.join(map(_quoted, texts))})"
    if "string" in arguments.kinds(key):
        return ""
    # references lead to the definitions of the whole schema
    whole = {word: root[word] for word in _DEFINITIONS if word in root} | dict(schema)
    return f"%json {json.dumps(whole)}"


def _mark(text: str, special: Special) -> str:
    """A mark, which is one special token or a text."""
    return special(text) or _quoted(text)


def _rest(rule: str, end: str, special: Special) -> str:
    """A rule for any text up to the first end of its kind."""
    name = special(end)
    return f"{rule}: TEXT {name}" if name else f"{rule}[lazy]: TEXT {_quoted(end)}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
