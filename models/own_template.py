"""The chat template that came with a tokenizer, rendered as Hugging Face's libraries do.

Such a template is a program of others: it runs in jinja2's sandbox, and no clock is given to it, so
that the same conversation always gives the same text.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

_NOT_ASCII = re.compile(r"[^\x00-\x7f\ud800-\udfff]")
# Stands for an assistant's answer, to find where it ends.
_ANSWER = "the answer of the assistant"


@dataclasses.dataclass(frozen=True)
class OwnTemplate:
    """A chat template and the special tokens that it may write."""

    # The template in jinja2, as in tokenizer_config.json.
    text: str
    # Text of the token that ends a turn in it.
    end: str
    # Texts of the tokens that begin and end a text; "" where the tokenizer has none.
    bos: str = ""
    eos: str = ""

    def __post_init__(self):
        self._compiled()

    @property
    def declares_tools(self) -> bool:
        """Whether it has a place for the schemas of tools."""
        parsed = _environment().parse(self.text)
        return "tools" in jinja2.meta.find_undeclared_variables(parsed)

    @functools.cached_property
    def opens_thought(self) -> bool:
        """True if it opens the assistant's turn inside a thought."""
        return self.render([{"role": "user", "content": "go"}]).rstrip().endswith("<think>")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
    ) -> str:
        """A conversation as text. Raises ValueError when the template refuses it."""
        try:
            return self._compiled().render(
                messages=list(messages),
                tools=list(tools) or None,
                add_generation_prompt=add_generation_prompt,
                bos_token=self.bos,
                eos_token=self.eos,
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"the tokenizer's chat template cannot write this: {error}") from error

    def render_tool_results(self, contents: Sequence[str]) -> str:
        """What follows an assistant's turn, after its end token: the results of its calls, and the
        next turn's opening.
        """
        messages = [{"role": "user", "content": "go"}, {"role": "assistant", "content": _ANSWER}]
        messages += [{"role": "tool", "content": content} for content in contents]
        after = self.render(messages).partition(_ANSWER)[2]
        if not after.startswith(self.end):
            raise ValueError(
                f"the tokenizer's chat template goes on with {after[:20]!r} where the turn should "
                f"end with {self.end!r}"
            )
        return after.removeprefix(self.end)

    def _compiled(self) -> jinja2.Template:
        return _compile(self.text)


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    return environment


@functools.lru_cache(maxsize=16)
def _compile(text: str) -> jinja2.Template:
    try:
        return _environment().from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the tokenizer's chat template is not valid jinja2: {error}") from error


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **rest: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, indent=indent, **rest)
    if not ensure_ascii:
        return text
    # lone surrogates stay: they quote marks (``models.marks``), and no other text has them
    return _NOT_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], text)


def _refuse(message: str) -> None:
    """What templates call to refuse a conversation."""
    raise jinja2.TemplateError(message)
