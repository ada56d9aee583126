"""Conversations as text in the format each model family was trained on, by its jinja2 template.

The marks of a format (turn tokens, call and result tags) are those of the family. The sentences
around the declaration of tools are this project's.

A message is ``{"role": "system" | "user" | "assistant" | "tool", "content": str}``. A message of
the assistant may have ``tool_calls``, a list of ``{"function": {"name": str, "arguments":
{...}}}``. Tools are declared by function schemas, ``{"type": "function", "function": {"name",
"description", "parameters"}}``.

Training never renders a conversation twice. An episode renders its prompt once. After that it
renders only what follows the sampled tokens (``render_tool_results``). By construction this is the
text that ``render`` would have put there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from models.families import FAMILIES

ROLES = ("system", "user", "assistant", "tool")


def _environment() -> jinja2.Environment:
    templates = {name: family.template for name, family in FAMILIES.items()}
    environment = jinja2.Environment(
        loader=jinja2.DictLoader(templates), undefined=jinja2.StrictUndefined, autoescape=False
    )
    # jinja2's own filter escapes for HTML, which is not what models were trained on.
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment


_ENVIRONMENT = _environment()


def render(
    family: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    add_generation_prompt: bool = True,
) -> str:
    """A conversation as text, opening the assistant's next turn if ``add_generation_prompt``.

    Raises ValueError for an unknown family or role, a system message that is not the first, and
    tools or calls that the family's format has no place for or cannot write.
    """
    _check(family, messages, tools)
    template = _ENVIRONMENT.get_template(family)
    try:
        return template.render(
            messages=messages, tools=tools, add_generation_prompt=add_generation_prompt
        )
    # schemas and calls of others may lack what a template asks for, or hold something else
    except (jinja2.TemplateError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the format of {family=} cannot write this: {error}") from error


def render_tool_results(family: str, contents: Sequence[str]) -> str:
    """The text after the end token of an assistant's turn: the results of its calls, and the
    opening of the next turn.
    """
    if not contents:
        raise ValueError("no tool results to render")
    # Render a conversation with and without the results. Both begin with the same turns. What
    # follows the end token of the last one is the text of the results. That token is written with
    # the turn, or it is the mark of what speaks next.
    turn = [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}]
    before = render(family, turn, add_generation_prompt=False)
    after = render(family, [*turn, *({"role": "tool", "content": content} for content in contents)])
    end = FAMILIES[family].end
    at = after.index(end, len(before)) if FAMILIES[family].ends_open else before.rindex(end)
    return after[at + len(end) :]


def _check(
    family: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> None:
    if family not in FAMILIES:
        raise ValueError(f"unknown {family=}; known are {', '.join(FAMILIES)}")
    if not messages:
        raise ValueError("a conversation needs at least one message")
    if tools and not FAMILIES[family].declares_tools:
        raise ValueError(
            f"the format of {family=} has no place for tools: "
            f"{[t['function']['name'] for t in tools]}"
        )
    for i, message in enumerate(messages):
        if message["role"] not in ROLES:
            raise ValueError(
                f"messages[{i}] has role {message['role']!r}; known are {', '.join(ROLES)}"
            )
        if message["role"] == "system" and i > 0:
            raise ValueError(f"messages[{i}] is a system message; only the first may be")
        if not isinstance(message.get("content"), str):
            raise ValueError(
                f"messages[{i}] has content {message.get('content')!r}, which is not text"
            )
        calls = message.get("tool_calls") or ()
        if len(calls) > FAMILIES[family].max_calls:
            raise ValueError(
                f"messages[{i}] has {len(calls)} calls; {family=} can hold "
                f"{FAMILIES[family].max_calls}"
            )
