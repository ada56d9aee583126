"""Answers of the endpoint: how they come from the engine to the client that waits for them."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence

from rl_code.harness.endpoint.conversation import Message
from rl_code.harness.endpoint.fields import ApiError, Request


@dataclasses.dataclass(frozen=True)
class Answer:
    """A sampled message, and what it took."""

    id: str
    model: str
    message: Message
    # The reason why it ended: "stop", "length" or "tool_calls".
    finish_reason: str
    tokens: Sequence[int]
    logprobs: Sequence[float]
    # Tokens that the model read, and those of them whose exchange was kept.
    prompt_tokens: int
    kept_tokens: int
    # Version of the weights that sampled the last token.
    version: int
    # Number of this answer among the ``n`` answers to a request, from 0.
    index: int = 0
    # For each token the most likely ones with their log-probabilities; None where nobody asked.
    alternatives: Sequence[tuple[Sequence[int], Sequence[float]]] | None = None


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


class Mailbox:
    """Calls that threads leave for an event loop. Those that come while it is on its way to them
    wake it only once, which costs more than most of the calls.

    Made in the loop; ``post`` may be called from any thread.
    """

    def __init__(self):
        self._loop = asyncio.get_running_loop()
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        self._woken = False

    def post(self, call: Callable[[], None]) -> None:
        """Has the loop call a function, after those that were posted before."""
        self._calls.append(call)
        if not self._woken:
            self._woken = True
            try:
                self._loop.call_soon_threadsafe(self.read)
            except RuntimeError:  # the server was closed, so nobody waits
                pass

    def read(self) -> None:
        """Makes the calls that were posted, now. Only in the loop."""
        self._woken = False  # before the calls are taken: one that comes from now on wakes it again
        while self._calls:
            self._calls.popleft()()


class Pending:
    """A request that waits for its answers. ``news`` is for the event loop of its mailbox; the
    other methods may be called from any thread.

    Of each answer only the newest progress is kept, so that a client that reads slowly costs no
    memory.
    """

    def __init__(self, request: Request, mailbox: Mailbox):
        self.request = request
        self._mailbox = mailbox
        self._come = asyncio.Event()
        self._progress: dict[int, Sequence[int]] = {}
        self._answers: list[Answer] = []
        self._error: ApiError | None = None

    def sampled(self, tokens: Sequence[int], index: int = 0) -> None:
        """All tokens of an answer so far. The sequence is not changed any more."""

        def note() -> None:
            self._progress[index] = tokens
            self._come.set()

        if self.request.stream:
            self._mailbox.post(note)

    def answer(self, answer: Answer) -> None:
        """An answer is whole."""

        def note() -> None:
            # looked up here: whoever reads the news puts a new list in place of the one he takes
            self._answers.append(answer)
            self._come.set()

        self._mailbox.post(note)

    def fail(self, error: ApiError) -> None:
        """There will be no further answers."""

        def note() -> None:
            self._error = error
            self._come.set()

        self._mailbox.post(note)

    def check(self) -> None:
        """Raises ApiError where it is known already that there will be no answer."""
        if self._error is not None:
            raise self._error

    async def news(self) -> AsyncIterator[list[Progress | Answer]]:
        """Yield the news since the last time, until the last answer has come. Raises ApiError."""
        left = self.request.n
        while left:
            await self._come.wait()
            self._come.clear()
            answers, self._answers = self._answers, []
            progress, self._progress = self._progress, {}
            whole = {answer.index for answer in answers}
            left -= len(answers)
            found = [Progress(*one) for one in progress.items() if one[0] not in whole]
            yield [*found, *answers]
            if left:
                self.check()

    async def whole(self) -> list[Answer]:
        """All answers, in their order. Raises ApiError."""
        answers = [one async for found in self.news() for one in found if isinstance(one, Answer)]
        return sorted(answers, key=lambda answer: answer.index)
