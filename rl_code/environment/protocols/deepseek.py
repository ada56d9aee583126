"""The format of DeepSeek-V3 and DeepSeek-R1: calls in sections, results in sections of their own.

    prompt       <｜begin▁of▁sentence｜>instructions, functions<｜User｜>…<｜Assistant｜>
    assistant    text<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME
                 ```json
                 {…}
                 ```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>
    observation  <｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>…<｜tool▁output▁end｜>
                 <｜tool▁outputs▁end｜>, all of it without new lines

A new line stands between two calls, and between two results. The model goes on right behind
results. DeepSeek-R1's messages begin inside of a thought (those of R1-0528 open it). Calls as
DeepSeek-V3.1 writes them, NAME<｜tool▁sep｜>{…}, are read too. Published templates drop earlier
thoughts; here they stay as they were sampled. They declare no functions: the sentences that do are
this project's.

Source: the published chat template of DeepSeek-V3-0324, and the package ``renderers``, with both of
which the tests compare.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from rl_code.environment.protocols.grammar import grammar_of_deepseek
from rl_code.environment.protocols.marked import as_messages
from rl_code.environment.protocols.protocol import check_declaration, declared
from rl_code.environment.protocols.reading import THINK, THOUGHT
from rl_code.environment.protocols.sections import Layout, Sectioned
from rl_code.types import ToolResult

_BEGIN, _END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
SEPARATOR = "<｜tool▁sep｜>"
_RESULTS, _RESULTS_END = "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"
_RESULT, _RESULT_END = "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"
_NAME = r"(?P<name>[\w.:-]{1,200})\s*+"
LAYOUT = Layout(
    begin="<｜tool▁calls▁begin｜>",
    end="<｜tool▁calls▁end｜>",
    call="<｜tool▁call▁begin｜>",
    called="<｜tool▁call▁end｜>",
    head=re.compile(
        rf"\s*+(?P<kind>function{SEPARATOR})?+{_NAME}(?(kind)```(?:json)?|{SEPARATOR})"
    ),
    form=(
        f"<｜tool▁call▁begin｜>function{SEPARATOR}NAME, the arguments as a JSON object in a block "
        "of json, and <｜tool▁call▁end｜>"
    ),
    tail="```",
)
_LINE = "\n"
_OPENED = f"{THINK}{_LINE}"
_DECLARATION = f"""## Tools

These functions can be called. A message that calls some of them ends like this:
{LAYOUT.begin}{LAYOUT.call}function{SEPARATOR}NAME
```json
ARGUMENTS
```{LAYOUT.called}{LAYOUT.end}

{{functions}}"""


@dataclasses.dataclass(frozen=True)
class DeepSeek(Sectioned):
    """Turns and calls in the format of DeepSeek-V3. A chat template that came with a tokenizer is
    not used.
    """

    # True for DeepSeek-R1: each message begins inside of a thought.
    thoughts: bool = False
    # The text that declares functions; their schemas, one a line, take the place of {functions}.
    declaration: str = _DECLARATION
    stop_tokens: tuple[str, ...] = dataclasses.field(default=(_END,), kw_only=True)
    layout: ClassVar[Layout] = LAYOUT
    # Whether arguments stand in blocks of json, with the kind of the call in front of its name.
    in_blocks: ClassVar[bool] = True
    SPECIAL_TOKENS: ClassVar[tuple[str, ...]] = (
        *("<｜▁pad▁｜>", _BEGIN, _END, USER, ASSISTANT, SEPARATOR),
        *(LAYOUT.begin, LAYOUT.end, LAYOUT.call, LAYOUT.called),
        *(_RESULTS, _RESULTS_END, _RESULT, _RESULT_END),
    )

    def __post_init__(self):
        check_declaration(self.declaration)

    @property
    def thinks(self) -> bool:
        return self.thoughts

    def conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        schemas: Sequence[Mapping[str, Any]],
        opening: bool,
    ) -> str:
        """As ``Protocol.conversation``. Messages of the system behind the first others are said by
        the user.
        """
        if not messages:
            raise ValueError("a conversation needs at least one message")
        roles = [message["role"] for message in messages]
        first = next((at for at, role in enumerate(roles) if role not in SYSTEM), len(roles))
        told = [message["content"] for message in messages[:first] if message["content"]]
        told += [declared(self.declaration, schemas)] if schemas else []
        return _BEGIN + "\n\n".join(told) + self._turns(messages[first:], opening)

    def grammar(
        self,
        functions: Sequence[Mapping[str, Any]],
        special: Callable[[str], str],
        *,
        many: bool = True,
        content: str = "",
    ) -> str:
        if content and self.thoughts:
            raise ValueError("a thought stands in front of all that is said, so no message is JSON")
        how = dict(thinking=self.thoughts, in_blocks=self.in_blocks)
        return grammar_of_deepseek(functions, special, many=many, content=content, **how)

    def observation(self, results: Sequence[ToolResult]) -> str:
        """As ``Protocol.observation``. What answers no call of a function is said by the user."""
        return self._turns(as_messages(results), True)

    def _turns(self, messages: Sequence[Mapping[str, Any]], opening: bool) -> str:
        """Messages behind those of the system. opening: whether the next one is opened."""
        parts = []
        before = ""  # the role of the message before
        for message in messages:
            role, content = message["role"], message["content"] or ""
            if before == "tool" and role != "tool":
                parts.append(_RESULTS_END)
            if role == "tool":
                parts.append("\n" if before == "tool" else _RESULTS)
                parts.append(f"{_RESULT}{content}{_RESULT_END}")
            elif role == "assistant":
                parts.append("" if before == "tool" else ASSISTANT)
                parts.append(_said(message, self.thoughts) + _END)
            elif role == "user" or role in SYSTEM:
                parts.append(USER + content)
            else:
                raise ValueError(f"a message has role {role!r}, for which there is no place")
            before = role
        parts.append(_RESULTS_END if before == "tool" else "")
        if opening:
            parts.append("" if before == "tool" else ASSISTANT)
            parts.append(_OPENED if self.thoughts else "")
        return "".join(parts)


SYSTEM = ("system", "developer")


def _said(message: Mapping[str, Any], thinks: bool) -> str:
    """A message of the assistant in a conversation. Content with the end of a thought is as it was
    sampled. thinks: whether messages have thoughts.
    """
    thought, content = message.get("reasoning_content"), message["content"] or ""
    if thinks and thought:
        content = f"{_OPENED}{thought}\n{THOUGHT}\n\n{content}"
    elif thinks and THOUGHT in content:
        content = _OPENED + content.removeprefix(_OPENED)
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    written = [
        f"{LAYOUT.call}function{SEPARATOR}{call['name']}\n```json\n"
        f"{json.dumps(call['arguments'], ensure_ascii=False)}\n```{LAYOUT.called}"
        for call in calls
    ]
    return f"{content}{LAYOUT.begin}{_LINE.join(written)}{LAYOUT.end}" if calls else content
