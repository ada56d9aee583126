"""The contexts of an episode in progress: its own, and those of sub-agents that it asked.

One context is at work at a time. When a message asks a sub-agent, a new context begins with the
question, and the one that asked waits. When the sub-agent is done, it goes on where it stopped,
with the sub-agent's last message as the result of the call. Where the agent was asked for a summary
(``summaries``), a new context of its own begins with it, and the one before is given up.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

from models.tokenizer import Tokenizer
from rl_code.environment.asked import Asked
from rl_code.environment.documents import OUTSIDE
from rl_code.environment.parts import encode, prompt_parts, result_parts
from rl_code.environment.protocols.protocol import Protocol, missing_end
from rl_code.environment.summaries import (
    Closing,
    SummariesConfig,
    left_out,
    longest_context,
    most_sampled,
)
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
    # True if the contexts of the record are those that were announced this way, in their order. A
    # program of others may go back to any of its contexts, and drop some.
    in_order: ClassVar[bool] = True


class Summarised(Elsewhere):
    """Continuation in a new context that begins with the summary of the one before. ``tokens`` are
    the whole context.
    """

    whole = True


class Rewritten(Elsewhere):
    """Continuation of a third-party agent in another context, which may keep a beginning of the one
    before. ``tokens`` are the whole context.
    """

    whole = True
    in_order = False


@dataclasses.dataclass
class Frame:
    """One context."""

    # Its index in ``Trajectory.contexts``.
    number: int
    # The task that its prompt was made of.
    task: Task
    tools: Mapping[str, Tool]
    transcript: Transcript
    # The most messages of the assistant, and places of the whole context.
    turns: int
    tokens: int
    # Index of the context that it continues; -1 for a root. What it keeps of that one: tokens from
    # its start, and the document number of each; None for that without documents.
    parent: int = -1
    kept: tuple[int, ...] = ()
    kept_documents: tuple[int, ...] | None = None
    # The context that waits for its result, and the name of the tool that it called; None for the
    # episode's own.
    asked_by: Frame | None = None
    called: str = ""
    # ``ToolCall.id`` of that call.
    call_id: str = ""
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
    # Settings of the summary that its next message is, or of the last message of the episode; both
    # end it. None for a message of work.
    summary_due: SummariesConfig | Closing | None = None

    @property
    def length(self) -> int:
        """Places of the whole context."""
        return len(self.kept) + len(self.transcript)

    @property
    def documents(self) -> list[int] | None:
        """Document number of each place of the whole context; None without documents."""
        own = self.transcript.documents
        return own if own is None or not self.kept else [*(self.kept_documents or ()), *own]

    def take_calls(self, calls: Sequence[ToolCall], most: int) -> None:
        """A message has asked for these calls, of which no more than so many are carried out."""
        self.messages += 1
        self.results = []
        self.pending = collections.deque(calls[:most])
        self.beyond = len(calls) - len(self.pending)

    def context(self) -> Context:
        """Record of the context so far."""
        found = self.transcript.context()
        return dataclasses.replace(found, parent=self.parent, kept=len(self.kept))

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
        asked: Asked,
    ):
        summaries = asked.summaries
        self._task = task
        self._tools = tools
        self._protocol = protocol
        self._tokenizer = tokenizer
        self._limits = limits
        self._documents = asked.documents
        self._summaries = summaries
        self._most_sampled = most_sampled(limits, summaries, asked.closing)
        self._longest = longest_context(summaries, limits)
        self.first = Frame(0, task, tools, self._transcript(), limits.turns, self._longest)
        self.at_work = self.first
        self.all = [self.first]
        # Summaries that the agent may still be asked for.
        self._summaries_left = summaries.most if summaries and not task.prefill else 0

    def copy(self) -> Frames:
        """Others that have come the same way, between two messages while no sub-agent is asked."""
        other = copy.copy(self)
        other.all = [frame.copy() for frame in self.all]
        other.first = other.all[0]
        other.at_work = other.all[self.at_work.number]
        return other

    def places_left(self, frame: Frame) -> int:
        """Number of tokens that a context may still hold. The episode's limit counts the tokens of
        all contexts.
        """
        places = sum(len(one.transcript) for one in self.all)
        return min(frame.tokens - frame.length, self._limits.tokens - places)

    @property
    def samples_left(self) -> int:
        """Number of tokens that may still be sampled in all contexts together. Batches have room
        for them (``derive.sampled_tokens``). A single context never reaches this limit.
        """
        sampled = sum(one.transcript.sampled for one in self.all)
        return self._most_sampled - sampled

    @property
    def budget(self) -> int:
        """The most tokens of the next message of the context at work."""
        frame = self.at_work
        due = frame.summary_due
        most = self._limits.turn_tokens if due is None else due.tokens
        return min(most, self.places_left(frame), self.samples_left)

    def prompt(self, frame: Frame) -> tuple[list[int], list[int] | None]:
        """Ids of a context's prompt, and document number of each place (``Context.documents``)."""
        parts = prompt_parts(
            self._protocol, frame.task, frame.tools, self._documents, self._tokenizer.marks
        )
        return encode(parts, self._tokenizer, self._documents)

    def follow(self, frame: Frame) -> list[int] | None:
        """Appends the results of a message, and the request for a summary where one is due. Returns
        their ids; None, and nothing is appended, where no token could be sampled behind them.
        """
        results = list(frame.results)
        tokens, kinds = self._observation(frame, results)
        due = self._summary_due(frame.length + len(tokens), frame)
        if due is not None:
            tokens, kinds = self._observation(frame, results, due.request)
            if len(tokens) >= self.places_left(frame):
                results = left_out(results)
                tokens, kinds = self._observation(frame, results, due.request)
        if len(tokens) >= self.places_left(frame):
            return None
        frame.transcript.add_given("tool", tokens, kinds, tuple(results))
        frame.summary_due = due
        return tokens

    def close(self, closing: Closing) -> list[int] | None:
        """Appends the results of the agent's last message, and the request for one more. Returns
        their ids; None, and nothing is appended, where there is no room for it.
        """
        frame = self.at_work
        results = list(frame.results)
        tokens, kinds = self._observation(frame, results, closing.request)
        if len(tokens) >= self.places_left(frame) or not self.samples_left:
            return None
        frame.transcript.add_given("tool", tokens, kinds, tuple(results))
        frame.summary_due = closing
        return tokens

    def _summary_due(self, places: int, frame: Frame) -> SummariesConfig | None:
        """Settings of the summary of a context of so many places; None where none is due. Contexts
        of sub-agents are not summarised.
        """
        summaries = self._summaries
        if summaries is None or not self._summaries_left or frame.asked_by is not None:
            return None
        return summaries if places >= summaries.trigger else None

    def _observation(
        self,
        frame: Frame,
        results: list[ToolResult],
        request: str = "",
        *,
        behind: int = 0,
        last: int | None = None,
    ) -> tuple[list[int], list[int] | None]:
        """Ids of results behind a message and of a request, and what each place is. A message that
        was cut is closed first, by a stop token that nobody sampled.

        behind: places outside of documents that come first, and are no part of the context yet.
        last: the last token of the message, where the context does not have it yet.
        """
        sampled = frame.transcript.tokens[-1:] if last is None else [last]
        end = missing_end(self._protocol, "" if frame.cut else self._tokenizer.decode(sampled))
        parts = result_parts(
            self._protocol, results, self._tools, self._documents, self._tokenizer.marks, request
        )
        return encode(
            [(end, False), *parts],
            self._tokenizer,
            self._documents,
            at=frame.length + behind,
            number=max(frame.documents or [0]),
        )

    def summarised(self, due: SummariesConfig, *, cut: bool) -> list[int] | None:
        """Gives up the context at work, whose last message is a summary, for one that begins with
        the prompt and this summary. Returns the whole of it; None where no token could be sampled
        behind that.

        due: the settings of the summary. cut: True if it ended without a stop token.
        """
        frame = self.at_work
        start = frame.transcript.turns[-1].start
        summary = frame.transcript.tokens[start:]
        prompt = self.first.transcript.turns[0].end
        kinds = self.first.transcript.documents
        child = dataclasses.replace(
            frame,
            number=len(self.all),
            transcript=self._transcript(),
            parent=frame.number,
            kept=tuple(self.first.transcript.tokens[:prompt]),
            kept_documents=None if kinds is None else tuple(kinds[:prompt]),
            pending=collections.deque(),
            results=[],
            cut=cut,
            summary_due=None,
        )
        told, more = self._observation(child, [], due.go_on, behind=len(summary), last=summary[-1])
        tokens = summary + told
        if len(tokens) >= self.places_left(child) or not self.samples_left:
            return None
        outside = None if more is None else [OUTSIDE] * len(summary) + more
        child.transcript.add_given("prompt", tokens, outside)
        child.cut = False
        self.all.append(child)
        self.at_work = child
        self._summaries_left -= 1
        return [*child.kept, *tokens]

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
            tokens=min(allowed.tokens, self._longest),
            asked_by=frame,
            called=call.name,
            call_id=call.id,
        )
        tokens, kinds = self.prompt(child)
        if len(tokens) >= self.places_left(child) or not self.samples_left:
            told = "no tokens are left for it"
            frame.results.append(ToolResult(call.name, told, ok=False, id=call.id))
            return None
        child.transcript.add_given("prompt", tokens, kinds)
        self.all.append(child)
        self.at_work = child
        return tokens

    def return_to(self, frame: Frame, child: Frame) -> None:
        """Goes on with the context that asked a sub-agent, with its last message as the result."""
        said = answer_of(child.said, verbose=self._protocol.verbose)
        frame.results.append(ToolResult(child.called, said, ok=child.answered, id=child.call_id))
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
        return tuple(frame.context() for frame in self.all), turns

    def _transcript(self) -> Transcript:
        return Transcript(self._tokenizer, None if self._documents is None else [])
