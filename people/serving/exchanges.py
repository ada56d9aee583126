"""Requests and their answers as tokens: those of a chat, which go on from each other, and single
completions.
"""

from __future__ import annotations

import collections
import dataclasses
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from models.tokenizer import Tokenizer
from people.serving.counted import counted
from rl_code.harness.endpoint.chat_text import ChatText, cut_at
from rl_code.harness.endpoint.completions import CompletionRequest, FillInTheMiddle
from rl_code.harness.endpoint.conversation import Message
from rl_code.harness.endpoint.requests import ChatRequest
from rl_code.harness.endpoint.session import Session, Step
from rl_code.run.serving import ServingConfig

# Conversations that are kept; those that were used longest ago are forgotten, and a request that
# would have continued one is tokenised as a whole.
_CONVERSATIONS = 1024
# Of these, the most chats of one user that have no name of their own, so that somebody who asks
# many single questions does not have others' conversations forgotten.
_UNNAMED = 128
# What the names begin with that such chats get here.
_PREFIX = "chat "
# Tokens of a conversation, after which it is forgotten.
_LONGEST = 1_000_000
# The most tokens of all that are kept.
_MOST_TOKENS = 20_000_000


@dataclasses.dataclass(frozen=True, eq=False)
class Opening:
    """The prompt of one answer."""

    # All its tokens, and the part of them that is new in its session.
    tokens: list[int]
    given: list[int]
    # The context of the session that it belongs to, and how many of its tokens were there before.
    context: int = 0
    kept: int = 0
    # The step of its session; None outside of a conversation.
    step: Step | None = None
    # What each of its tokens is (``Context.documents``); None for a model without documents.
    kinds: list[int] | None = None


class Exchange(Protocol):
    """A request, and what is sampled for it. Its methods may be called from any thread."""

    def open(self) -> list[Opening]:
        """The tokens that each of its ``n`` answers follows. Raises ApiError."""
        ...

    def read(
        self,
        opening: Opening,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        versions: Sequence[int],
    ) -> tuple[Message, int, Mapping[str, Any]]:
        """Takes a sampled answer, whole or cut off; its message, the parent of its context, and
        what it did (``counted``).
        """
        ...

    def drop(self, opening: Opening) -> None:
        """Nothing was sampled for an answer, and nothing will be."""
        ...


class Conversation:
    """The session of an agent. A request waits until the one before it is answered, since it may go
    on from that answer.
    """

    def __init__(self, text: ChatText, tokenizer: Tokenizer):
        self.session = Session(text, tokenizer, f"call_{secrets.token_hex(4)}")
        # The session's, which is touched in threads of several engines.
        self.lock = threading.Lock()
        self._waiting: collections.deque[Callable[[], bool]] = collections.deque()
        self._busy = False
        # Tokens of the session when it last was not busy.
        self.size = 0

    @property
    def busy(self) -> bool:
        """True while a request is being answered."""
        return self._busy

    def enter(self, begin: Callable[[], bool]) -> None:
        """Has a request begun: now, or when those before it have left.

        begin: returns whether the request is in progress now, so that it will leave.
        """
        with self.lock:
            self._waiting.append(begin)
            if self._busy:
                return
            self._busy = True
        self.leave()

    def leave(self) -> None:
        """No request is in progress: the next one begins."""
        while True:
            with self.lock:
                if not self._waiting:
                    self._busy = False
                    self.size = self.session.num_tokens
                    return
                begin = self._waiting.popleft()
            if begin():
                return


class Conversations:
    """The conversations of all users."""

    def __init__(self, text: ChatText, tokenizer: Tokenizer):
        self._text, self._tokenizer = text, tokenizer
        self._lock = threading.Lock()
        # By user and session, the one that was used last at the end.
        self._known: collections.OrderedDict[tuple[str, str], Conversation]
        self._known = collections.OrderedDict()

    def name_of(self, user: str, request: ChatRequest) -> str:
        """The session of a chat that its client gave no name to: that of the answer which it goes
        on from, else a new one. So chats that share no answer do not wait for each other, however
        much of their prompts is the same.
        """
        best, best_rank = "", (0, False)
        # a first question goes on from nothing
        if any(message.role == "assistant" for message in request.messages):
            for session, conversation in self._unnamed(user):
                with conversation.lock:
                    count = conversation.session.continued(request)
                rank = count, not conversation.busy
                if count and rank > best_rank:
                    best, best_rank = session, rank
        return best or f"{_PREFIX}{secrets.token_hex(8)}"

    def _unnamed(self, user: str) -> list[tuple[str, Conversation]]:
        """A user's chats without a name of their own, by the names they got here, newest first."""
        with self._lock:
            known = reversed(self._known.items())
            return [(name[1], one) for name, one in known if _is_unnamed(name, user)]

    def find(self, user: str, session: str) -> Conversation:
        """The conversation of a user's session; a new one where the session has no name."""
        name = user, session
        with self._lock:
            found = self._known.pop(name, None)
            if found is None or (not found.busy and found.size > _LONGEST):
                found = Conversation(self._text, self._tokenizer)
            if session:
                self._known[name] = found
            if session.startswith(_PREFIX):
                unnamed = [each for each in self._known if _is_unnamed(each, user)]
                if len(unnamed) > _UNNAMED:
                    del self._known[unnamed[0]]
            size = sum(each.size for each in self._known.values())
            while len(self._known) > _CONVERSATIONS or (size > _MOST_TOKENS and self._known):
                size -= self._known.popitem(last=False)[1].size
            return found

    def forget(self, user: str) -> None:
        """Forgets all conversations of a user. One that is being answered goes with its answer."""
        with self._lock:
            for name in [name for name in self._known if name[0] == user]:
                del self._known[name]


def _is_unnamed(name: tuple[str, str], user: str) -> bool:
    return name[0] == user and name[1].startswith(_PREFIX)


class ChatExchange:
    """A request in a conversation; its answers are siblings there."""

    def __init__(self, request: ChatRequest, conversation: Conversation, config: ServingConfig):
        self._request, self._conversation, self._config = request, conversation, config

    def open(self) -> list[Opening]:
        session = self._conversation.session
        steps: list[Step] = []
        with self._conversation.lock:
            try:
                for _ in range(self._request.n):
                    steps.append(session.ask(self._request))
                    session.take(steps[-1])
            except BaseException:
                for step in reversed(steps):
                    session.drop(step)
                raise
        return [
            Opening(step.tokens, step.given, step.context, step.kept, step, step.kinds)
            for step in steps
        ]

    def read(
        self,
        opening: Opening,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        versions: Sequence[int],
    ) -> tuple[Message, int, Mapping[str, Any]]:
        session = self._conversation.session
        with self._conversation.lock:
            sampled = tokens, logprobs, versions, self._request.stop
            may_be_json = bool(self._request.json_schema)
            message, calls = session.answer(opening.context, *sampled, may_be_json=may_be_json)
            parent = session.nodes[opening.context].parent
        declared = [schema["name"] for schema in self._request.tools]
        return message, parent, counted(calls, message.content, declared, self._config)

    def drop(self, opening: Opening) -> None:
        with self._conversation.lock:
            self._conversation.session.drop(opening.step)


class CompletionExchange:
    """A request that stands alone."""

    def __init__(
        self,
        request: CompletionRequest,
        text: ChatText,
        tokenizer: Tokenizer,
        gaps: FillInTheMiddle | None,
        longest: int,
    ):
        """gaps, longest: as of ``CompletionRequest.tokens``."""
        self._request, self._text, self._tokenizer = request, text, tokenizer
        self._gaps, self._longest = gaps, longest

    def open(self) -> list[Opening]:
        request = self._request
        tokens = request.tokens(self._tokenizer, self._gaps, self._longest)
        tokens, kinds = request.behind_documents(tokens, self._tokenizer, self._text.documents)
        return [Opening(tokens, tokens, kinds=kinds) for _ in range(request.n)]

    def read(
        self,
        opening: Opening,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        versions: Sequence[int],
    ) -> tuple[Message, int, Mapping[str, Any]]:
        return Message("assistant", cut_at(self._text.text(tokens), self._request.stop)), -1, {}

    def drop(self, opening: Opening) -> None:
        """There is nothing to forget."""
