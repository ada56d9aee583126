"""Base class of protocols, which turn a model's text into tool calls and their results into text.

Texts of tools and tasks can hold anything, even special tokens. A protocol gets such texts quoted
(``models.marks``) and puts them into its own text as they are. So no output of a program can end a
turn or open another, and the model reads it unchanged.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from models.chat import render_tool_results
from models.families import FAMILIES
from models.own_template import OwnTemplate
from models.tokenizer import Tokenizer
from rl_code.environment.tools.text import one_line
from rl_code.environment.tools.tool import Tool
from rl_code.types import Task, ToolCall, ToolResult


@dataclasses.dataclass(frozen=True, kw_only=True)
class Protocol:
    """One way of writing calls. A frozen dataclass whose fields are the settings of a config.

    A protocol of one's own is such a class (or an instance) anywhere on Python's path, which a
    config names as ``package.module:object``. ``tools`` are those that the task may use, by name.
    """

    # Special tokens that end an assistant message; the first is put in where a message was cut.
    # Those of ChatML unless a protocol says otherwise.
    stop_tokens: tuple[str, ...] = ("<|im_end|>", "<|endoftext|>")
    # True if tools answer in sentences, False if in as few words as will do.
    verbose: bool = True
    # Special tokens of a tokenizer that is trained for it; () where it has none of its own.
    SPECIAL_TOKENS: ClassVar[tuple[str, ...]] = ()
    # True if ``parse`` must know which marks are special tokens: marks that the model spelled in
    # other tokens are then quoted in its text (``models.marks``).
    tells_marks: ClassVar[bool] = False
    # True if ``task.prefill`` is the beginning of a file, in which marks mean nothing. Else it is
    # the beginning of a message, in the protocol's own words.
    continues_file: ClassVar[bool] = False
    # True if it has ``conversation``.
    converses: ClassVar[bool] = False
    # True if results of calls are written with the names of the functions.
    names_results: ClassVar[bool] = False
    # True if the ids of calls end in numbers that results repeat.
    numbers_calls: ClassVar[bool] = False

    @property
    def opens_next(self) -> bool:
        """True if stop tokens are the marks of who speaks next, as GLM has them. A template then
        goes on with one of them, which need not be the one that was sampled.
        """
        return False

    def for_tokenizer(self, tokenizer: Tokenizer, tools: Mapping[str, Tool]) -> Protocol:
        """The protocol with the chat template that came with the tokenizer, where it uses one.

        Raises ValueError when that template has no place for these tools.
        """
        return self

    def check_tools(self, tools: Mapping[str, Tool]) -> None:
        """Raises ValueError when calls of these tools cannot be written."""

    def prompt(self, task: Task, tools: Mapping[str, Tool]) -> str:
        """All text before the first sampled token; it ends in ``task.prefill``. Raises ValueError
        where the task's conversation has no place.
        """
        schemas = [{"type": "function", "function": tool.schema} for tool in tools.values()]
        return self.conversation(task.messages, schemas, True) + task.prefill

    def parse(self, text: str, task: Task, tools: Mapping[str, Tool]) -> list[ToolCall]:
        """The calls of one assistant message in order, at least one; those that are malformed have
        ``error`` set. Raises nothing, whatever the text.

        text: the message without its stop token; the first one with ``task.prefill`` before it.
        """
        raise NotImplementedError

    def has_call(self, text: str) -> bool:
        """True if a message means to call a tool, well-formed or not. A sub-agent's message without
        a call is its last one.
        """
        return True

    def thinking(self, text: str) -> bool:
        """True if a message ends inside a thought. It is then no answer, and its calls do not
        count.
        """
        return False

    def settled(self, text: str) -> bool:
        """True if no further text of a message can change what its calls hold."""
        return True

    def before_calls(self, text: str) -> str:
        """Text in front of the calls of a message that has calls."""
        return ""

    def observation(self, results: Sequence[ToolResult]) -> str:
        """The text after the message's stop token, up to where the assistant goes on."""
        raise NotImplementedError

    def requested(self, results: Sequence[ToolResult], request: str) -> str:
        """As ``observation``, with a request to the policy behind the results, of which there may
        be none. It is written as one more result, since every template has a place for those.
        """
        return self.observation([*results, ToolResult("", request, ok=False)])

    def conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        schemas: Sequence[Mapping[str, Any]],
        opening: bool,
    ) -> str:
        """Any conversation as text, as ``models.chat.render`` takes it: what others send through
        the endpoint (``people.serving``). opening: whether the assistant's next message is opened.

        Raises ValueError for one that the protocol has no place for.
        """
        raise ValueError(f"the protocol {type(self).__name__} has no place for conversations")

    def grammar(
        self,
        functions: Sequence[Mapping[str, Any]],
        special: Callable[[str], str],
        *,
        many: bool = True,
        content: str = "",
    ) -> str:
        """Grammar of a message that must call some functions, or else be JSON, as
        ``protocols.grammar`` writes it.

        many: True if there may be several calls. content: the schema of the JSON; "" for calls
        alone. Raises ValueError where there is none.
        """
        raise ValueError(f"the protocol {type(self).__name__} has no grammar of calls")

    def stopped(self, text: str) -> bool:
        """True if the text sampled so far is complete without a stop token; once True it stays
        True.
        """
        return False


def check_declaration(text: str) -> None:
    """Raises ValueError for a text that cannot declare functions."""
    if text.count("{functions}") != 1:
        raise ValueError(
            f"declaration={one_line(text, 40)!r} must have {{functions}} in it once, where the "
            "schemas of functions stand"
        )


def declared(text: str, schemas: Sequence[Mapping[str, Any]]) -> str:
    """A text with the schemas of functions, one a line, in place of ``{functions}``."""
    lines = (json.dumps(one["function"], ensure_ascii=False) for one in schemas)
    return text.replace("{functions}", "\n".join(lines))


def stop_ids(protocol: Protocol, tokenizer: Tokenizer) -> frozenset[int]:
    """Ids of the tokens that end an assistant message."""
    return frozenset(tokenizer.token_id(token) for token in protocol.stop_tokens)


def missing_end(protocol: Protocol, last: str, first: str = "") -> str:
    """The stop token that is put behind a sampled message before the text that follows it; "" for
    none.

    last: the stop token that was sampled; "" for a message that was cut. first: the stop token
    behind which the text stands in the template; "" for the protocol's first one.
    """
    first = first or protocol.stop_tokens[0]
    put = last != first if protocol.opens_next else not last
    return first if put else ""


def stop_length(protocol: Protocol, tokenizer: Tokenizer, tokens: Sequence[int]) -> int | None:
    """Number of sampled tokens that make up the complete message; None if it is not complete yet.

    The token that completes it is counted: a stop token, or the one at which the rule on text
    applies.
    """
    ends = stop_ids(protocol, tokenizer)
    stop = next((i for i, token in enumerate(tokens) if token in ends), None)
    body = list(tokens if stop is None else tokens[:stop])
    if not protocol.stopped(tokenizer.decode(body)):
        return None if stop is None else stop + 1
    low, high = 0, len(body)  # not stopped after low tokens, stopped after high
    while high - low > 1:
        middle = (low + high) // 2
        if protocol.stopped(tokenizer.decode(body[:middle])):
            high = middle
        else:
            low = middle
    return high


@functools.cache
def _frame(family: str, count: int) -> tuple[str, ...]:
    """The template's text before, between and after ``count`` results; rendered once, since
    rendering is slow.
    """
    return tuple(render_tool_results(family, ["\0"] * count).split("\0"))


def own_template(family: str, tokenizer: Tokenizer) -> OwnTemplate | None:
    """The chat template that came with a tokenizer of a model family; None where none did.

    Raises ValueError for a template that cannot be read, and for settings that it does not have.
    """
    settings = tokenizer.template_settings
    if tokenizer.chat_template is None:
        if settings.arguments:
            names = ", ".join(settings.arguments)
            raise ValueError(f"no chat template came with the tokenizer, to be told {names}")
        return None
    return OwnTemplate(
        tokenizer.chat_template,
        FAMILIES[family].end,
        tokenizer.bos or "",
        tokenizer.eos,
        tokenizer.pad,
        tokenizer.named_templates.get("tool_use"),
        settings,
    )


def results_text(family: str, results: Sequence[ToolResult], own: OwnTemplate | None = None) -> str:
    """Text that follows an assistant's message in the family's template, or in a tokenizer's own
    one: the results and the next opening.
    """
    if own is not None:
        return own.render_tool_results([result.content for result in results])
    first, *others = _frame(family, len(results))
    return first + "".join(
        result.content + after for result, after in zip(results, others, strict=True)
    )
