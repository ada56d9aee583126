"""The contexts of an episode in progress: its own, and those of sub-agents that it asked.

One context is at work at a time. When a message asks a sub-agent, a new context begins with the
question, and the one that asked waits. When the sub-agent is done, it goes on where it stopped,
with the sub-agent's last message as the result of the call.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from models.tokenizer import Tokenizer
from rl_code.environment.documents import DocumentsConfig
from rl_code.environment.parts import encode, prompt_parts, result_parts
from rl_code.environment.protocols.protocol import Protocol
from rl_code.environment.tools.sub_agent import answer_of
from rl_code.environment.tools.tool import Delegation, Tool
from rl_code.environment.transcript import Transcript
from rl_code.types import Context, Limits, Task, ToolCall, ToolResult, Turn


@dataclasses.dataclass(frozen=True)
class Elsewhere:
    """Continuation in another context than that of the last message, which waits meanwhile."""

    # Index of the context in ``Trajectory.contexts``.
    context: int
    # Tokens to append to that context: the prompt of a new context, or an observation.
    tokens: list[int]

    # True if ``tokens`` are the whole context instead, and the one before is given up.
    whole: ClassVar[bool] = False


class Rewritten(Elsewhere):
    """Continuation of a third-party agent in another context, which may keep a beginning of the one
    before. ``tokens`` are the whole context.
    """

    whole = True


@dataclasses.dataclass
class Frame:
    """One context."""

    # Its index in ``Trajectory.contexts``.
    number: int
    # The task that its prompt was made of.
    task: Task
    tools: Mapping[str, Tool]
    transcript: Transcript
    # The most messages of the assistant, and places.
    turns: int
    tokens: int
    # The context that waits for its result, and the name of the tool that it called; None for the
    # episode's own.
    asked_by: Frame | None = None
    called: str = ""
    messages: int = 0
    # State of the message that is being carried out: its calls that are still to come, the results
    # of the others, whether it was cut, and the number of its calls beyond the limit.
    pending: collections.deque[ToolCall] = dataclasses.field(default_factory=collections.deque)
    results: list[ToolResult] = dataclasses.field(default_factory=list)
    cut: bool = False
    beyond: int = 0
    # The text of its last message, and whether that is the last message of a sub-agent.
    said: str = ""
    answered: bool = False

    def copy(self) -> Frame:
        """Another context that has come the same way, between two messages."""
        return dataclasses.replace(
            self,
            transcript=self.transcript.copy(),
            pending=collections.deque(self.pending),
            results=list(self.results),
        )


class Frames:
    """All contexts of an episode so far, and the one at work.

    task, tools: of the episode's own context, which is there from the start.
    """

    def __init__(
        self,
        task: Task,
        tools: Mapping[str, Tool],
        *,
        protocol: Protocol,
        tokenizer: Tokenizer,
        limits: Limits,
        documents: DocumentsConfig | None,
    ):
        self._task = task
        self._tools = tools
        self._protocol = protocol
        self._tokenizer = tokenizer
        self._limits = limits
        self._documents = documents
        self.own = Frame(0, task, tools, self._transcript(), limits.turns, limits.tokens)
        self.at_work = self.own
        self.all = [self.own]

    def copy(self) -> Frames:
        """Others that have come the same way, between two messages of the episode's own context."""
        other = copy.copy(self)
        other.all = [frame.copy() for frame in self.all]
        other.own = other.at_work = other.all[0]
        return other

    def places_left(self, frame: Frame) -> int:
        """Number of tokens that a context may still hold. The episode's limit counts the tokens of
        all contexts.
        """
        places = sum(len(one.transcript) for one in self.all)
        return min(frame.tokens - len(frame.transcript), self._limits.tokens - places)

    @property
    def samples_left(self) -> int:
        """Number of tokens that may still be sampled in all contexts together. Batches have room
        for them (``derive.sampled_tokens``). A single context never reaches this limit.
        """
        sampled = sum(one.transcript.sampled for one in self.all)
        return self._limits.turns * self._limits.turn_tokens - sampled

    def prompt(self, frame: Frame) -> tuple[list[int], list[int] | None]:
        """Ids of a context's prompt, and document number of each place (``Context.documents``)."""
        parts = prompt_parts(
            self._protocol, frame.task, frame.tools, self._documents, self._tokenizer.marks
        )
        return encode(parts, self._tokenizer, self._documents)

    def observation(self, frame: Frame) -> tuple[list[int], list[int] | None]:
        """Ids of the results of a message, and what each place is; a message that was cut is closed
        first, by a stop token that nobody sampled.
        """
        closing = self._protocol.stop_tokens[0] if frame.cut else ""
        parts = result_parts(
            self._protocol, frame.results, self._tools, self._documents, self._tokenizer.marks
        )
        number = max(frame.transcript.documents or [0])
        return encode(
            [(closing, False), *parts],
            self._tokenizer,
            self._documents,
            at=len(frame.transcript),
            number=number,
        )

    def end(self, frame: Frame) -> None:
        """Puts the results of a context's last message on record, without an observation."""
        nothing = None if self._documents is None else []
        frame.transcript.add_given("tool", [], nothing, tuple(frame.results))

    def end_all(self) -> None:
        """As ``end``, of the context at work and of those that wait for it."""
        frame = self.at_work
        while frame is not None:
            self.end(frame)
            frame = frame.asked_by

    def delegate(self, frame: Frame, call: ToolCall, allowed: Delegation) -> list[int] | None:
        """Begins the context of a sub-agent, and returns its prompt; None, with a result, where
        there is no room for one.
        """
        question = {"role": "user", "content": call.arguments["question"]}
        child = Frame(
            number=len(self.all),
            task=dataclasses.replace(self._task, messages=(question,), prefill=""),
            tools={
                name: tool
                for name, tool in frame.tools.items()
                if tool.delegation is None and name != "submit"
            },
            transcript=self._transcript(),
            turns=allowed.turns,
            tokens=min(allowed.tokens, self._limits.tokens),
            asked_by=frame,
            called=call.name,
        )
        tokens, kinds = self.prompt(child)
        if len(tokens) >= self.places_left(child) or not self.samples_left:
            frame.results.append(ToolResult(call.name, "no tokens are left for it", ok=False))
            return None
        child.transcript.add_given("prompt", tokens, kinds)
        self.all.append(child)
        self.at_work = child
        return tokens

    def return_to(self, frame: Frame, child: Frame) -> None:
        """Goes on with the context that asked a sub-agent, with its last message as the result."""
        said = answer_of(child.said, verbose=self._protocol.verbose)
        frame.results.append(ToolResult(child.called, said, ok=child.answered))
        self.at_work = frame

    def go_back(self, frame: Frame, count: int) -> None:
        """Goes on with a context, as when there were ``count`` of them."""
        del self.all[count:]
        self.at_work = frame

    def recorded(self) -> tuple[tuple[Context, ...], tuple[Turn, ...]]:
        """The contexts and all their turns, as the episode's record has them."""
        turns = tuple(
            turn if frame.number == 0 else dataclasses.replace(turn, context=frame.number)
            for frame in self.all
            for turn in frame.transcript.turns
        )
        return tuple(frame.transcript.context() for frame in self.all), turns

    def _transcript(self) -> Transcript:
        return Transcript(self._tokenizer, None if self._documents is None else [])
