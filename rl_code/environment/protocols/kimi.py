"""The format of Kimi K2: turns with the names of their speakers, and calls that have names too.

    prompt       <|im_system|>tool_declare<|im_middle|>[…]<|im_end|>
                 <|im_system|>system<|im_middle|>…<|im_end|><|im_user|>user<|im_middle|>…<|im_end|>
                 <|im_assistant|>assistant<|im_middle|>
    assistant    text<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0
                 <|tool_call_argument_begin|>{…}<|tool_call_end|><|tool_calls_section_end|>
                 <|im_end|>, all of it without new lines
    observation  <|im_system|>NAME<|im_middle|>## Return of functions.NAME:0
                 …<|im_end|><|im_assistant|>assistant<|im_middle|>

The number is that of the call in the conversation. A result repeats what the model wrote there.
With ``thoughts`` (Kimi-K2-Thinking) every message of the assistant begins with a thought,
``<think>…</think>``, which the model opens itself. Earlier thoughts stay as they were sampled; the
published template empties those in front of the last answer.

Source: the published chat template, tokenizer and description of calls of Kimi-K2-Instruct, as the
package ``renderers`` writes and reads them, which the tests compare with; for thoughts the turns
of its Kimi K2.5.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from rl_code.environment.protocols.grammar import grammar_of_kimi
from rl_code.environment.protocols.reading import THINK, THOUGHT
from rl_code.environment.protocols.sections import Layout, Sectioned
from rl_code.types import ToolResult

_END, _MIDDLE = "<|im_end|>", "<|im_middle|>"
_OPENING = f"<|im_assistant|>assistant{_MIDDLE}"
_ARGUMENTS = "<|tool_call_argument_begin|>"
_ID = r"(?:functions\.)?(?P<name>[\w.-]{1,200}):[0-9]{1,9}"
_LAYOUT = Layout(
    begin="<|tool_calls_section_begin|>",
    end="<|tool_calls_section_end|>",
    call="<|tool_call_begin|>",
    called="<|tool_call_end|>",
    head=re.compile(rf"\s*+(?P<id>{_ID})\s*+{re.escape(_ARGUMENTS)}"),
    form=(
        f"<|tool_call_begin|>functions.NAME:NUMBER{_ARGUMENTS}, the arguments as a JSON object and "
        "<|tool_call_end|>"
    ),
)
_LAST_NUMBER = re.compile(r"[0-9]{1,9}\Z")
# The sentence that the published template writes where no message of the system does, and the new
# line that it leaves behind it.
_DEFAULT = (
    f"<|im_system|>system{_MIDDLE}You are Kimi, an AI assistant created by Moonshot AI.{_END}\n"
)


@dataclasses.dataclass(frozen=True)
class Kimi(Sectioned):
    """Turns and calls in the format of Kimi K2. A chat template that came with a tokenizer is not
    used.
    """

    # True for Kimi-K2-Thinking: messages of the assistant that are given begin with a thought, or
    # with an empty one where they have none.
    thoughts: bool = False
    stop_tokens: tuple[str, ...] = dataclasses.field(default=(_END, "[EOS]"), kw_only=True)
    layout: ClassVar[Layout] = _LAYOUT
    names_results: ClassVar[bool] = True
    numbers_calls: ClassVar[bool] = True
    SPECIAL_TOKENS: ClassVar[tuple[str, ...]] = (
        *("[PAD]", "[EOS]", "<|im_system|>", "<|im_user|>", "<|im_assistant|>", _MIDDLE, _END),
        *(_LAYOUT.begin, _LAYOUT.end, _LAYOUT.call, _ARGUMENTS, _LAYOUT.called),
    )

    def conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        schemas: Sequence[Mapping[str, Any]],
        opening: bool,
    ) -> str:
        if not messages:
            raise ValueError("a conversation needs at least one message")
        parts = []
        if schemas:
            # the published tokenizer sorts keys
            told = json.dumps(
                list(schemas), ensure_ascii=False, separators=(",", ":"), sort_keys=True
            )
            parts.append(_turn("system", "tool_declare", told))
        if messages[0]["role"] not in ("system", "developer"):
            parts.append(_DEFAULT)
        called: list[tuple[str, str]] = []  # names and ids of calls whose results are to come
        count = 0
        for message in messages:
            content = message["content"] or ""
            match message["role"]:
                case "system" | "developer":
                    parts.append(_turn("system", "system", content))
                case "user":
                    parts.append(_turn("user", "user", content))
                case "assistant":
                    calls = [call["function"] for call in message.get("tool_calls") or ()]
                    called = [
                        (call["name"], f"functions.{call['name']}:{number}")
                        for number, call in enumerate(calls, start=count)
                    ]
                    said = "".join(_section(calls, [id for _, id in called]))
                    called = called or self._sampled(content)
                    count += len(called)
                    own = self._with_thought(message, content)
                    parts.append(_turn("assistant", "assistant", own + said))
                case "tool":
                    name, id = _named(message, called.pop(0) if called else None)
                    parts.append(_result(name, id, content))
                case role:
                    raise ValueError(f"a message has role {role!r}, for which there is no place")
        return "".join(parts) + (_OPENING if opening else "")

    def _with_thought(self, message: Mapping[str, Any], content: str) -> str:
        """The content of a message of the assistant with its thought. Content with the end of a
        thought is as it was sampled.
        """
        if not self.thoughts or THOUGHT in content:
            return content
        return f"{THINK}{message.get('reasoning_content') or ''}{THOUGHT}{content}"

    def _sampled(self, content: str) -> list[tuple[str, str]]:
        """Names and ids of the calls in content as it was sampled."""
        said = [call.value for call in self._read(content).calls]
        return [(one.name, one.id) if one else ("", "") for one in said]

    def grammar(
        self,
        functions: Sequence[Mapping[str, Any]],
        special: Callable[[str], str],
        *,
        many: bool = True,
        content: str = "",
    ) -> str:
        return grammar_of_kimi(functions, special, many=many, content=content)

    def observation(self, results: Sequence[ToolResult]) -> str:
        """As ``Protocol.observation``. What answers no call of a function is said by the user."""
        parts = [
            _result(one.name, one.id, one.content)
            if one.name
            else _turn("user", "user", one.content)
            for one in results
        ]
        return "".join(parts) + _OPENING


def _turn(kind: str, name: str, content: str) -> str:
    return f"<|im_{kind}|>{name}{_MIDDLE}{content}{_END}"


def _result(name: str, id: str, content: str) -> str:
    return _turn("system", name or "tool", f"## Return of {id}\n{content}")


def _named(message: Mapping[str, Any], call: tuple[str, str] | None) -> tuple[str, str]:
    """The name and the id of the call that a result answers. call: the one in the conversation.
    Where there is none, the number is at the end of the id that a client was given.
    """
    given, name = message.get("tool_call_id") or "", message.get("name") or ""
    if re.fullmatch(_ID, given):
        return name, given
    if call is not None:
        return name or call[0], call[1]
    number = _LAST_NUMBER.search(given)
    return name, f"functions.{name}:{number[0] if number else 0}" if name else ""


def _section(calls: Sequence[Mapping[str, Any]], ids: Sequence[str]) -> Iterator[str]:
    if not calls:
        return
    yield _LAYOUT.begin
    for call, id in zip(calls, ids, strict=True):
        body = json.dumps(call["arguments"], ensure_ascii=False)
        yield f"{_LAYOUT.call}{id}{_ARGUMENTS}{body}{_LAYOUT.called}"
    yield _LAYOUT.end
