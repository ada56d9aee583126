"""Answers of the endpoint: how they come from the engine to the client that waits for them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from rl_code.serving.fields import ApiError, Request
from rl_code.serving.requests import Message


@dataclasses.dataclass(frozen=True)
class Answer:
    """A sampled message, and what it took."""

    id: str
    model: str
    message: Message
    # Why it ended: "stop", "length" or "tool_calls".
    finish_reason: str
    tokens: Sequence[int]
    logprobs: Sequence[float]
    # Tokens that the model read, and those of them whose exchange was kept.
    prompt_tokens: int
    kept_tokens: int
    # Version of the weights that sampled the last token.
    version: int
    # Which of the ``n`` answers to a request it is, from 0.
    index: int = 0


@dataclasses.dataclass(frozen=True)
class Accepted:
    """A request that was taken: what is known of its answer before it comes."""

    id: str
    # The name of the model as the client asked for it.
    model: str
    # Called when the client has left, or its answers have come; then none are needed any more.
    leave: Callable[[], None] = lambda: None


@dataclasses.dataclass(frozen=True)
class Progress:
    """All tokens so far of one of the answers to a request."""

    index: int
    tokens: Sequence[int]


class Pending:
    """A request that waits for its answers. Made in the server's event loop, where ``events`` is
    read; ``sampled``, ``answer`` and ``fail`` may be called from any thread.

    Of each answer only the newest progress is kept, so that a client that reads slowly costs no
    memory.
    """

    def __init__(self, request: Request):
        self.request = request
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._progress: dict[int, list[int]] = {}
        self._answers: list[Answer] = []
        self._error: ApiError | None = None

    def sampled(self, tokens: Sequence[int], index: int = 0) -> None:
        """All tokens of an answer so far."""
        if self.request.stream:
            self._call(self._progress.__setitem__, index, list(tokens))

    def answer(self, answer: Answer) -> None:
        """An answer is whole."""
        self._call(self._answers.append, answer)

    def fail(self, error: ApiError) -> None:
        """There will be no further answers."""
        self._call(setattr, self, "_error", error)

    def check(self) -> None:
        """Raises ApiError where it is known already that there will be no answer."""
        if self._error is not None:
            raise self._error

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        def change() -> None:
            function(*arguments)
            self._news.set()

        try:
            self._loop.call_soon_threadsafe(change)
        except RuntimeError:  # the server was closed, so nobody waits
            pass

    async def events(self) -> AsyncIterator[Progress | Answer]:
        """What comes, up to the last answer. Raises ApiError."""
        left = self.request.n
        while left:
            await self._news.wait()
            self._news.clear()
            answers, self._answers = self._answers, []
            progress, self._progress = self._progress, {}
            for index, tokens in progress.items():
                if index not in {answer.index for answer in answers}:
                    yield Progress(index, tokens)
            for answer in answers:
                left -= 1
                yield answer
            if left:
                self.check()

    async def whole(self) -> list[Answer]:
        """All answers, in their order. Raises ApiError."""
        answers = [event async for event in self.events() if isinstance(event, Answer)]
        return sorted(answers, key=lambda answer: answer.index)
