"""The chat template that came with a tokenizer, rendered as Hugging Face's libraries do.

Such a template is a program of others: it runs in jinja2's sandbox, and it gets a date instead of
a clock, so that the same conversation always gives the same text.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_NOT_ASCII = re.compile(r"[^\x00-\x7f\ud800-\udfff]")
# Stands for an assistant's answer, to find where it ends.
_ANSWER = "the answer of the assistant"


# The date on which Llama's templates fall back where they find no clock.
DATE = "2024-07-26"
# Variables of templates that are not settings.
_RESERVED = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "strftime_now", "raise_exception")
)


@dataclasses.dataclass(frozen=True)
class TemplateSettings:
    """The variables that templates are rendered with, beside the conversation."""

    # Variables of the template, such as enable_thinking.
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # The day that ``strftime_now`` tells.
    date: str = DATE

    def __post_init__(self):
        try:
            datetime.date.fromisoformat(self.date)
        except (TypeError, ValueError) as error:
            raise ValueError(f"date = {self.date!r} must be a day, such as {DATE!r}") from error
        for name in self.arguments:
            if name in _RESERVED or name.endswith("_token") or not name.isidentifier():
                raise ValueError(f"arguments has {name!r}, which is no setting of a template")


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
    # Text of the token that fills.
    pad: str = ""
    # The template of conversations with tools, where there is one of their own ("tool_use").
    with_tools: str | None = None
    settings: TemplateSettings = TemplateSettings()

    def __post_init__(self):
        texts = [self.text] if self.with_tools is None else [self.text, self.with_tools]
        known = frozenset().union(*map(_variables, texts))
        for name in self.settings.arguments:
            if name not in known:
                raise ValueError(f"the tokenizer's chat template has no variable {name!r}")

    def __hash__(self) -> int:
        return hash((self.text, self.end, self.with_tools))

    @property
    def declares_tools(self) -> bool:
        """True if it has a place for the schemas of tools."""
        return self.with_tools is not None or "tools" in _variables(self.text)

    @functools.cached_property
    def opens_thought(self) -> bool:
        """True if it opens the assistant's turn inside a thought."""
        for before in ((), ({"role": "system", "content": "go"},)):
            try:
                text = self.render([*before, {"role": "user", "content": "go"}])
            except ValueError:  # it wants another conversation
                continue
            return text.rstrip().endswith("<think>")
        return False

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
    ) -> str:
        """A conversation as text. Raises ValueError when the template refuses it."""
        uses_tools = tools or any(
            message.get("role") == "tool" or message.get("tool_calls") for message in messages
        )
        text = self.with_tools if self.with_tools is not None and uses_tools else self.text
        day = datetime.datetime.fromisoformat(self.settings.date)
        try:
            return _compile(text).render(
                **self.settings.arguments,
                messages=list(messages),
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                bos_token=self.bos,
                eos_token=self.eos,
                pad_token=self.pad,
                strftime_now=lambda form: day.strftime(form),
            )
        # a program of others may raise anything
        except Exception as error:
            why = str(error) or type(error).__name__
            raise ValueError(f"the tokenizer's chat template cannot write this: {why}") from error

    def render_tool_results(self, contents: Sequence[str]) -> str:
        """The text that follows an assistant's turn, after its end token: the results of its calls,
        and the next turn's opening.
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


class _Generation(jinja2.ext.Extension):
    """The blocks ``{% generation %}``, in which templates for training put what the assistant says.

    They change no text. Which tokens were sampled is recorded while they are sampled.
    """

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

    def _said(self, caller: Any) -> str:
        return caller()


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _Generation],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    return environment


@functools.lru_cache(maxsize=16)
def _compile(text: str) -> jinja2.Template:
    try:
        return _environment().from_string(text)
    except Exception as error:  # not only of its syntax: constants are computed here
        raise ValueError(f"the tokenizer's chat template is not valid jinja2: {error}") from error


@functools.lru_cache(maxsize=16)
def _variables(text: str) -> frozenset[str]:
    """Names that a template takes from its caller. Raises ValueError for what is no template."""
    _compile(text)
    return frozenset(jinja2.meta.find_undeclared_variables(_environment().parse(text)))


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **rest: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, indent=indent, **rest)
    if not ensure_ascii:
        return text
    # lone surrogates stay: they quote marks (``models.marks``), and no other text has them
    return _NOT_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], text)


def _refuse(message: str) -> None:
    """The function that templates call to refuse a conversation."""
    raise jinja2.TemplateError(message)
