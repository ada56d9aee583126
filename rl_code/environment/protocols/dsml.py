"""DSML, the format of DeepSeek-V3.2: calls in tags, each with one special token in it.

    prompt       <｜begin▁of▁sentence｜>instructions, functions<｜User｜>…<｜Assistant｜><think>
    assistant    a thought</think>text

                 <｜DSML｜function_calls>
                 <｜DSML｜invoke name="NAME">
                 <｜DSML｜parameter name="KEY" string="true">a text</｜DSML｜parameter>
                 <｜DSML｜parameter name="KEY" string="false">other JSON</｜DSML｜parameter>
                 </｜DSML｜invoke>
                 </｜DSML｜function_calls><｜end▁of▁sentence｜>
    observation  two new lines, <function_results>, a line <result>…</result> for each result,
                 </function_results>, two new lines, <think>

Where the model shall not think, </think> stands in place of <think>. Texts are not escaped. One
ends at the first end tag behind which another tag of the call stands; parameters that are opened
and closed inside of a text belong to it. Nothing but white space stands between tags or behind the
calls. The published format drops thoughts in front of the last message of the user; here they stay
as they were sampled.

Source: ``encoding/encoding_dsv32.py`` in the published repository of DeepSeek-V3.2, which the tests
compare with. The sentences around the functions are this project's.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, get_args

from models.marks import unquote, unquote_all
from rl_code.environment.protocols.grammar import grammar_of_dsml
from rl_code.environment.protocols.marked import Marked, as_messages, complained
from rl_code.environment.protocols.protocol import check_declaration, declared
from rl_code.environment.protocols.reading import (
    THINK,
    THOUGHT,
    Reading,
    Written,
    behind_space,
    scan,
)
from rl_code.environment.tools.schema import Arguments, json_decoder
from rl_code.environment.tools.text import one_line
from rl_code.environment.tools.tool import Tool
from rl_code.types import ToolCall, ToolResult

_DSML = "｜DSML｜"
_BEGIN, _END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
_USER, _ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
_CALLS, _CALLED = f"<{_DSML}function_calls>", f"</{_DSML}function_calls>"
_INVOKED = f"</{_DSML}invoke>"
# Names in tags are short, so that a text of many tags is read in one pass.
_NAME = r'[^<>"\n]{1,200}+'
_KEY = re.compile(_NAME)
_MARKS = re.compile(f"{THINK}|<{_DSML}(?:function_calls>?|invoke)")
_INVOKE = re.compile(f'<{_DSML}invoke name="({_NAME})">')
_PARAMETER = re.compile(f'<{_DSML}parameter name="({_NAME})" string="(true|false)">')
# The beginning of a parameter, or its end; and the tags that may stand behind an end.
_EDGE = re.compile(f'<{_DSML}parameter name="|(</{_DSML}parameter>)')
_BEHIND = re.compile(rf"\s*+(?:<{_DSML}parameter |{_INVOKED})")
_JSON = json_decoder(repeated=False)
_FORM = f"end the message with calls between {_CALLS} and {_CALLED}, as invoke and parameter tags"
_DECLARATION = f"""## Tools

These functions can be called. A message that calls some of them ends like this:
{_CALLS}
<{_DSML}invoke name="FUNCTION">
<{_DSML}parameter name="PARAMETER" string="true|false">VALUE</{_DSML}parameter>
</{_DSML}invoke>
{_CALLED}

Write a text as it is, with string="true", and any other value as JSON, with string="false". The
results follow between <function_results> and </function_results>.

<functions>
{{functions}}
</functions>
"""

Mode = Literal["thinking", "chat"]


@dataclasses.dataclass(frozen=True)
class Dsml(Marked):
    """Turns and calls in the format of DeepSeek-V3.2. A chat template that came with a tokenizer is
    not used.
    """

    # "thinking": each message begins inside a thought. "chat": the model answers at once.
    mode: Mode = "thinking"
    # The text that declares functions; their schemas, one a line, take the place of {functions}.
    declaration: str = _DECLARATION
    stop_tokens: tuple[str, ...] = dataclasses.field(default=(_END,), kw_only=True)
    tells_marks: ClassVar[bool] = True
    SPECIAL_TOKENS: ClassVar[tuple[str, ...]] = (
        *("<｜▁pad▁｜>", _BEGIN, _END, _USER, _ASSISTANT, _DSML, THINK, THOUGHT),
    )

    def __post_init__(self):
        if self.mode not in get_args(Mode):
            known = " or ".join(map(repr, get_args(Mode)))
            raise ValueError(f"mode={self.mode!r} must be {known}")
        check_declaration(self.declaration)

    def conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        schemas: Sequence[Mapping[str, Any]],
        opening: bool,
    ) -> str:
        if not messages:
            raise ValueError("a conversation needs at least one message")
        first = messages[0] if messages[0]["role"] in ("system", "developer") else None
        told = (first["content"] or "") if first else ""
        if schemas:
            told += "\n\n" + declared(self.declaration, schemas)
        return _BEGIN + told + self._turns(messages[first is not None :], opening, _ASSISTANT)

    @property
    def form(self) -> str:
        return _FORM

    def settled(self, text: str) -> bool:
        values = [call.value for call in self._read(text).calls]
        return all(value is None or value.settled for value in values)

    def grammar(
        self,
        functions: Sequence[Mapping[str, Any]],
        special: Callable[[str], str],
        *,
        many: bool = True,
        content: str = "",
    ) -> str:
        if content and self._thinks:
            raise ValueError("a thought stands in front of all that is said, so no message is JSON")
        thinks = self._thinks
        return grammar_of_dsml(functions, special, many=many, thinking=thinks, content=content)

    def observation(self, results: Sequence[ToolResult]) -> str:
        """As ``Protocol.observation``. What answers no call of a function is said by the user."""
        return self._turns(as_messages(results), True, "")

    @property
    def _thinks(self) -> bool:
        """True if messages begin inside of thoughts."""
        return self.mode == "thinking"

    def _turns(self, messages: Sequence[Mapping[str, Any]], opening: bool, opener: str) -> str:
        """Messages behind the first one of the system.

        opening: whether the assistant's next message is opened. opener: its beginning, if it is
        the first of them.
        """
        parts = []
        before = ""  # the role of the message before
        for at, message in enumerate(messages):
            role, content = message["role"], message["content"] or ""
            if before == "tool" and role != "tool":
                parts.append("\n</function_results>")
            if before in ("user", "tool") and role != "assistant" and not role == before == "tool":
                parts.append(opener + THOUGHT)  # the assistant says nothing between them
            match role:
                case "user":
                    parts.append(_USER + content)
                    opener = _ASSISTANT
                case "tool":
                    parts.append("" if before == "tool" else "\n\n<function_results>")
                    parts.append(f"\n<result>{content}</result>")
                    opener = "\n\n"
                case "assistant":
                    parts.append(opener + _said(message, self._thinks) + _END)
                    opener = _ASSISTANT
                case _:
                    raise ValueError(
                        f"message {at} behind the first has role {role!r}; only user, assistant "
                        "and tool can stand there"
                    )
            before = role
        if before == "tool":
            parts.append("\n</function_results>")
        if opening:
            parts.append(opener + (THINK if self._thinks else THOUGHT))
        return "".join(parts)

    def _read(self, text: str) -> Reading:
        def call_at(start: int) -> tuple[list[Written], int]:
            return _calls(text, start), len(text)

        return scan(text, self._thinks, call_at, _MARKS)

    def _call(self, written: Written, tools: Mapping[str, Tool]) -> ToolCall:
        name = "" if written.value is None else unquote(written.value.name)
        if written.error:
            return ToolCall(name, {}, f"the call is malformed: {written.error}; {_FORM}")
        known = Arguments(tools[name].schema if name in tools else {})
        values = {}
        for key, (value, is_text) in written.value.parameters.items():
            key = unquote(key)
            if is_text:
                values[key] = unquote(value)
                continue
            try:
                values[key] = known.normal(key, unquote_all(_JSON.decode(value)))
            except (ValueError, RecursionError, MemoryError) as error:
                wrong = f"the value of {one_line(key, 40)!r} is not valid JSON ({error})"
                return ToolCall(name, {}, f'{wrong}; a text has string="true"')
        return ToolCall(name, values)


@dataclasses.dataclass(frozen=True)
class _Invoke:
    """A call as its tags say it."""

    name: str
    # Key -> the text of the value, and True if that text is the value.
    parameters: Mapping[str, tuple[str, bool]]
    # False where tags inside of a text have no partner.
    settled: bool


def _calls(text: str, start: int) -> list[Written]:
    """The calls of a text from the place of the first tag on, at least one. Behind tags that are
    broken nothing is read.
    """
    if not text.startswith(_CALLS, start):
        return [Written(start, error=f"the calls do not stand between {_CALLS} and {_CALLED}")]
    at = start + len(_CALLS)
    found = _invokes(text, at, nested=True)
    if any(one.error for one in found):
        # a text may hold the beginning of a parameter that ends nowhere
        again = _invokes(text, at, nested=False)
        found = found if any(one.error for one in again) else again
    return [dataclasses.replace(found[0], start=start), *found[1:]]


def _invokes(text: str, at: int, nested: bool) -> list[Written]:
    """As ``_calls``, from behind the tag that opens them. nested: as for ``_end_of_value``."""
    found: list[Written] = []
    while True:
        at = behind_space(text, at)
        if at == len(text):
            return complained(found, at, f"{_CALLED} is missing")
        if text.startswith(_CALLED, at):
            rest = text[at + len(_CALLED) :].strip()
            if rest:
                return complained(found, at, f"{one_line(rest, 40)!r} stands behind the calls")
            return found or complained(found, at, "no call stands between the tags")
        head = _INVOKE.match(text, at)
        if head is None:
            wrong = f"{one_line(text[at : at + 200], 40)!r} stands where a call must begin"
            return [*found, Written(at, error=wrong)]
        parameters, at, error = _parameters(text, head.end(), nested)
        found.append(Written(head.start(), _Invoke(head[1], parameters, nested), error))
        if error:
            return found


def _parameters(
    text: str, at: int, nested: bool
) -> tuple[Mapping[str, tuple[str, bool]], int, str]:
    """The parameters of a call from behind its first tag on, the place behind its last tag, and
    what is wrong with them.
    """
    found: dict[str, tuple[str, bool]] = {}
    while True:
        at = behind_space(text, at)
        if text.startswith(_INVOKED, at):
            return found, at + len(_INVOKED), ""
        head = _PARAMETER.match(text, at)
        if head is None:
            rest = one_line(text[at : at + 200], 40)
            wrong = f"{rest!r} stands where a parameter must begin" if rest else "it is not closed"
            return {}, at, wrong
        key = one_line(head[1], 40)
        if head[1] in found:
            return {}, at, f"the parameter {key!r} stands twice"
        edge = _end_of_value(text, head.end(), nested)
        if edge is None:
            return {}, at, f"the parameter {key!r} is not closed"
        found[head[1]] = (text[head.end() : edge.start()], head[2] == "true")
        at = edge.end()


def _end_of_value(text: str, at: int, nested: bool) -> re.Match[str] | None:
    """The tag that ends a value; None where none does.

    nested: whether parameters that are opened inside of the value end there too.
    """
    depth = 0
    for edge in _EDGE.finditer(text, at):
        if edge[1] is None:
            depth += nested
        elif depth:
            depth -= 1
        elif _BEHIND.match(text, edge.end()):
            return edge
    return None


def _said(message: Mapping[str, Any], thinks: bool) -> str:
    """A message of the assistant in a conversation. Content with the end of a thought is as it was
    sampled. thinks: whether messages have thoughts. Raises ValueError for calls that tags cannot
    name.
    """
    thought, content = message.get("reasoning_content"), message["content"] or ""
    if thinks and thought:
        content = f"{THINK}{thought}{THOUGHT}{content}"
    elif thinks and THOUGHT in content:
        content = THINK + content.removeprefix(THINK)
    else:
        content = THOUGHT + content
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    if not calls:
        return content
    written = "\n".join(_tags(call["name"], call["arguments"]) for call in calls)
    return f"{content}\n\n{_CALLS}\n{written}\n{_CALLED}"


def _tags(name: str, arguments: Mapping[str, Any]) -> str:
    """A call of a function, in tags."""
    for each in (name, *arguments):
        if not _KEY.fullmatch(each):
            raise ValueError(f"a tag cannot name {one_line(each, 40)!r}")
    lines = []
    for key, value in arguments.items():
        is_text = isinstance(value, str)
        body = value if is_text else json.dumps(value, ensure_ascii=False)
        head = f'<{_DSML}parameter name="{key}" string="{"true" if is_text else "false"}">'
        lines.append(f"{head}{body}</{_DSML}parameter>")
    return f'<{_DSML}invoke name="{name}">\n{"\n".join(lines)}\n{_INVOKED}'
