"""The format of DeepSeek-V3.1, V3.1-Terminus and V3.2-Exp: that of DeepSeek-V3 in fewer words.

    prompt       <｜begin▁of▁sentence｜>instructions, functions<｜User｜>…<｜Assistant｜></think>
    assistant    text<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}
                 <｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>, without new lines
    observation  <｜tool▁output▁begin｜>…<｜tool▁output▁end｜>

Behind a question the message is opened with ``</think>`` or, with ``thoughts``, inside of a thought
(``thinking`` of the published templates). Nothing opens a message behind results: published
templates have none there. With ``thoughts`` one is opened here too, so that every message begins
alike; the published models call functions without thinking. Earlier thoughts stay as they were
sampled, which published templates drop. The sentences that declare functions are this project's.

Source: the published chat templates of DeepSeek-V3.1 and V3.1-Terminus, with which the tests
compare.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rl_code.environment.protocols.deepseek import (
    ASSISTANT,
    LAYOUT,
    SEPARATOR,
    SYSTEM,
    USER,
    DeepSeek,
)
from rl_code.environment.protocols.reading import THINK, THOUGHT
from rl_code.environment.protocols.sections import Layout

_END = "<｜end▁of▁sentence｜>"
_RESULT, _RESULT_END = "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"
_LAYOUT = dataclasses.replace(
    LAYOUT,
    head=re.compile(rf"\s*+(?P<name>[\w.:-]{{1,200}})\s*+{SEPARATOR}"),
    form=(
        f"{LAYOUT.call}NAME{SEPARATOR}, the arguments as a JSON object and {LAYOUT.called}, "
        "without new lines,"
    ),
    tail="",
)
_DECLARATION = f"""## Tools

These functions can be called. A message that calls some of them ends like this:
{LAYOUT.begin}{LAYOUT.call}NAME{SEPARATOR}ARGUMENTS{LAYOUT.called}{LAYOUT.end}

{{functions}}"""


@dataclasses.dataclass(frozen=True)
class DeepSeek31(DeepSeek):
    """Turns and calls in the format of DeepSeek-V3.1. A chat template that came with a tokenizer is
    not used.
    """

    declaration: str = _DECLARATION
    layout: ClassVar[Layout] = _LAYOUT
    in_blocks: ClassVar[bool] = False

    def _turns(self, messages: Sequence[Mapping[str, Any]], opening: bool) -> str:
        """As of DeepSeek-V3."""
        parts = []
        before = ""  # the role of the message before
        for message in messages:
            role, content = message["role"], message["content"] or ""
            if role == "tool":
                parts.append(f"{_RESULT}{content}{_RESULT_END}")
            elif role == "assistant":
                parts.append(self._said(message, behind_results=before == "tool") + _END)
            elif role == "user" or role in SYSTEM:
                parts.append(USER + content)
            else:
                raise ValueError(f"a message has role {role!r}, for which there is no place")
            before = role
        if opening and before == "tool":
            parts.append(THINK if self.thoughts else "")
        elif opening:
            parts.append(ASSISTANT + (THINK if self.thoughts else THOUGHT))
        return "".join(parts)

    def _said(self, message: Mapping[str, Any], behind_results: bool) -> str:
        """A message of the assistant with what opens it. Content with the end of a thought is as it
        was sampled.
        """
        thought, content = message.get("reasoning_content"), message["content"] or ""
        if self.thoughts and thought:
            content = f"{THINK}{thought}{THOUGHT}{content}"
        elif self.thoughts and THOUGHT in content:
            content = THINK + content.removeprefix(THINK)
        elif not behind_results:
            content = THOUGHT + content
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        written = "".join(
            f"{LAYOUT.call}{call['name']}{SEPARATOR}"
            f"{json.dumps(call['arguments'], ensure_ascii=False)}{LAYOUT.called}"
            for call in calls
        )
        said = f"{content}{LAYOUT.begin}{written}{LAYOUT.end}" if calls else content
        return said if behind_results else ASSISTANT + said
