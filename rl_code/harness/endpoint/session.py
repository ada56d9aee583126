"""Requests of one agent and their answers: a tree of contexts, token in, token out.

A request carries its whole conversation. Where its first messages are those of a context that is
known here, it keeps that context's tokens as they are, sampled ones too, and only the messages
behind them become new tokens. Where a request goes on from the end of a context, the context grows.
Where it leaves messages out or says other ones, a new context starts, which keeps the longest
beginning that both share (``Context.parent``, ``Context.kept``).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from models.tokenizer import Tokenizer
from rl_code.environment.transcript import Transcript
from rl_code.harness.endpoint.chat_text import Behind, ChatText, Pieces
from rl_code.harness.endpoint.conversation import Message
from rl_code.harness.endpoint.requests import ChatRequest
from rl_code.types import Context, ToolCall, Turn


@dataclasses.dataclass
class Node:
    """A context that grows with every exchange."""

    # Index of the context that it continues; -1 for none.
    parent: int
    # Tokens and messages that it keeps of the whole parent.
    kept: int
    transcript: Transcript
    # Schemas of the tools that its conversation declared.
    tools: tuple[Mapping[str, Any], ...]
    # All its messages, those of its parent that it keeps included, and where each one ends in its
    # whole tokens; None where nothing may be cut off.
    messages: list[Message]
    ends: list[int | None]


@dataclasses.dataclass(frozen=True)
class Step:
    """A request as the sampler gets it, and as ``take`` records it."""

    request: ChatRequest
    # Index of the context that it belongs to, and whether the request starts this context.
    context: int
    fresh: bool
    # The context that a fresh one keeps something of, and how many of its messages; (-1, 0) for
    # none.
    parent: int
    shared: int
    # The whole context, and how many of its tokens stood there before this request.
    tokens: list[int]
    kept: int
    # The tokens behind them, which nobody has sampled.
    pieces: Pieces
    # What each place of the whole context is (``Context.documents``); None without documents.
    kinds: list[int] | None = None

    @property
    def given(self) -> list[int]:
        """The tokens that are new."""
        return self.pieces.tokens


class Session:
    """The contexts of one agent. One thread at a time; ``ask``, then ``answer``, in turns."""

    def __init__(self, text: ChatText, tokenizer: Tokenizer, name: str):
        """name: begins the ids of calls, so that those of two sessions differ."""
        self._text, self._tokenizer, self._name = text, tokenizer, name
        self.nodes: list[Node] = []
        self._answers = itertools.count()

    @property
    def num_tokens(self) -> int:
        """Tokens of all contexts, each once."""
        return sum(len(node.transcript) for node in self.nodes)

    def ask(self, request: ChatRequest) -> Step:
        """Finds what a request continues, and tokenises what is new of it. Changes nothing.

        Raises ApiError for messages that the protocol cannot write.
        """
        request = self._text.marked(request)
        parent, shared = self._longest(request)
        if parent >= 0 and shared == len(self.nodes[parent].messages) < len(request.messages):
            whole, kinds = self.whole(parent), self._kinds(parent)
            more = request.messages[shared:]
            pieces = self._text.follow(more, last=whole[-1], behind=_behind(len(whole), kinds))
            tokens = whole + pieces.tokens, len(whole), pieces, _joined(kinds, pieces)
            return Step(request, parent, False, -1, 0, *tokens)
        while shared > 0:
            pieces = self._behind(parent, request, shared)
            if pieces is not None:
                kept = self.nodes[parent].ends[shared - 1]
                kinds = self._kinds(parent)
                kinds = kinds and kinds[:kept]
                tokens = self.whole(parent)[:kept] + pieces.tokens
                tokens = tokens, kept, pieces, _joined(kinds, pieces)
                return Step(request, len(self.nodes), True, parent, shared, *tokens)
            shared -= 1
        pieces = self._text.begin(request.messages, request.tools)
        return Step(request, len(self.nodes), True, -1, 0, pieces.tokens, 0, pieces, pieces.kinds)

    def continued(self, request: ChatRequest) -> int:
        """Number of a request's first messages that are known here, up to the last one that was an
        answer of this session; 0 where none was. Messages that the client made up do not count.
        """
        most = 0
        request = self._text.marked(request)
        for node in self.nodes:
            known = zip(node.messages, node.ends, request.messages, strict=False)
            for count, (message, end, asked) in enumerate(known, start=1):
                if not message.same_as(asked):
                    break
                if end and message.role == "assistant" and self._was_sampled(node, end):
                    most = max(most, count)
        return most

    def take(self, step: Step) -> None:
        """Records what is new of a request as given tokens. step: the newest of ``ask``."""
        request = step.request
        if step.fresh:
            parent = self.nodes[step.parent] if step.parent >= 0 else None
            self.nodes.append(
                Node(
                    parent=step.parent,
                    kept=step.kept,
                    transcript=Transcript(
                        self._tokenizer, None if self._text.documents is None else []
                    ),
                    tools=request.tools,
                    messages=list(parent.messages[: step.shared]) if parent else [],
                    ends=list(parent.ends[: step.shared]) if parent else [],
                )
            )
        node = self.nodes[step.context]
        node.messages += request.messages[len(node.messages) :]
        node.ends += [end if end is None else step.kept + end for end in step.pieces.ends]
        role = "prompt" if step.context == 0 and step.fresh else "tool"
        node.transcript.add_given(role, step.given, step.pieces.kinds)

    def answer(
        self,
        context: int,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        versions: Sequence[int],
        stop: Sequence[str] = (),
        *,
        may_be_json: bool = False,
    ) -> tuple[Message, tuple[ToolCall, ...]]:
        """Records what was sampled behind a context, and returns it as a message of the API.

        stop: texts that end the message and are not shown. may_be_json: as of ``ChatText.read``.
        """
        node = self.nodes[context]
        name = f"{self._name}_{next(self._answers)}"
        form = dict(may_be_json=may_be_json)
        message, calls = self._text.read(tokens, node.tools, name, stop, **form)
        node.transcript.add_sampled(list(tokens), list(logprobs), list(versions), calls)
        node.messages.append(message)
        node.ends.append(node.kept + len(node.transcript))
        return message, calls

    def drop(self, step: Step) -> None:
        """Forgets a request that was taken and never answered, so that later ones do not go on from
        a message that is not there.
        """
        node = self.nodes[step.context]
        continued = any(other.parent == step.context for other in self.nodes)
        if step.fresh or continued:
            # its tokens stay for the contexts that keep some of them, but nothing else finds it
            node.messages.clear()
            node.ends.clear()
            return
        count = len(step.pieces.ends)
        del node.messages[-count:]
        del node.ends[-count:]
        node.transcript.undo()

    def whole(self, context: int) -> list[int]:
        """The tokens of a context and of what it keeps."""
        node = self.nodes[context]
        before = self.whole(node.parent)[: node.kept] if node.parent >= 0 else []
        return before + node.transcript.tokens

    def _kinds(self, context: int) -> list[int] | None:
        """Kinds of the places of ``whole``; None without documents."""
        node = self.nodes[context]
        own = node.transcript.documents
        if own is None or node.parent < 0:
            return own
        return (self._kinds(node.parent) or [])[: node.kept] + own

    def contexts(self) -> tuple[tuple[Context, ...], tuple[Turn, ...]]:
        """The record: contexts, and the turns of all of them. Given tokens behind the last sampled
        one of a context are left out, and so is a context in which nothing was sampled and that no
        other one continues.
        """
        continued = {node.parent for node in self.nodes}
        number: dict[int, int] = {-1: -1}
        contexts: list[Context] = []
        turns: list[Turn] = []
        for index, node in enumerate(self.nodes):
            own = list(node.transcript.turns)
            if index not in continued:
                while own and own[-1].role != "assistant" and (index > 0 or len(own) > 1):
                    own.pop()
            if not own:
                continue
            number[index] = len(contexts)
            end = own[-1].end
            context = node.transcript.context()
            fields = ["tokens", "sampled", "logprobs", "versions"]
            fields += [] if context.documents is None else ["documents"]
            contexts.append(
                dataclasses.replace(
                    context,
                    parent=number[node.parent],
                    kept=node.kept,
                    **{name: getattr(context, name)[:end] for name in fields},
                )
            )
            turns += [dataclasses.replace(turn, context=number[index]) for turn in own]
        return tuple(contexts), tuple(turns)

    def _behind(self, parent: int, request: ChatRequest, shared: int) -> Pieces | None:
        """Text behind the first ``shared`` messages, which a context keeps; None if that cannot be
        told.
        """
        node = self.nodes[parent]
        end = node.ends[shared - 1]
        if not end:
            return None
        rest = request.messages[shared:]
        kinds = self._kinds(parent)
        behind = _behind(end, kinds and kinds[:end])
        if not self._was_sampled(node, end):
            try:
                return self._text.begin(request.messages, request.tools, shared, behind)
            except ValueError:
                return None
        if not rest:
            return None
        last = self.whole(parent)[end - 1]
        return self._text.follow(rest, last=last, behind=behind)

    def _was_sampled(self, node: Node, end: int) -> bool:
        """True if the message that ends behind ``end`` tokens of a context was sampled, not given
        as text.
        """
        while end <= node.kept:
            node = self.nodes[node.parent]
        return node.transcript.sampled_at(end - node.kept - 1)

    def _longest(self, request: ChatRequest) -> tuple[int, int]:
        """(context, messages) of the longest beginning that a context shares with a request; (-1,
        0) for none. Of several it is one that the request goes on from the end of, else the oldest.
        """
        best = (0, False, 1)
        for index, node in enumerate(self.nodes):
            if node.tools != request.tools:
                continue
            count = 0
            for known, asked in zip(node.messages, request.messages, strict=False):
                if not known.same_as(asked):
                    break
                count += 1
            if count:
                best = max(best, (count, count == len(node.messages), -index))
        count, _, index = best
        return (-index, count) if count else (-1, 0)


def _behind(places: int, kinds: Sequence[int] | None) -> Behind:
    """Places before some pieces."""
    return Behind(places, max([0, *(kinds or ())]))


def _joined(kinds: list[int] | None, pieces: Pieces) -> list[int] | None:
    """Kinds of the places of a context with some pieces behind it; None without documents."""
    return None if pieces.kinds is None else [*(kinds or ()), *pieces.kinds]
