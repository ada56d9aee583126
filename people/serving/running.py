"""A request from the moment when it is taken until all its answers are recorded."""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
import types
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from absl import logging

from models.tokenizer import Tokenizer
from people.feedback.records import DOCUMENTS, AnswerRecord, run_lengths
from people.serving.exchanges import Exchange, Opening
from people.serving.service import Service
from people.serving.ways import Way
from rl_code.harness.endpoint.answers import Answer, Pending
from rl_code.harness.endpoint.chat_text import ChatText
from rl_code.harness.endpoint.fields import ApiError, Request


@dataclasses.dataclass(frozen=True)
class AskedBy:
    """Origin of a request for an answer: its user, its session, the model and the time."""

    # As ``AnswerRecord`` has them.
    user: str
    session: str
    model: str
    version: int
    adapter: str
    arm: str
    # Keyed hash of the organisation that the user's key was issued to; "" where nobody says.
    origin: str
    # The name that the client gets to see.
    shown: str
    # One id for each of the ``n`` answers.
    ids: Sequence[str]
    # Unix seconds, and seconds of ``time.monotonic``.
    at: float
    clock: float


class Running:
    """The request as a job of ``service.Service``.

    ways: how each answer is sampled; None for as the server samples. kept: what the record keeps of
    the request (``AnswerRecord.extra``). on_answer: called with each record; the client gets the
    end of the answer when the future that it returns is done, and an error instead where it raises.
    on_end: called once when all answers have ended, or none will come, before the client hears of
    the last one.
    """

    def __init__(
        self,
        pending: Pending,
        asked: AskedBy,
        exchange: Exchange,
        text: ChatText,
        tokenizer: Tokenizer,
        *,
        adapter: int,
        ways: Sequence[Way] | None = None,
        kept: Mapping[str, Any] = types.MappingProxyType({}),
        on_answer: Callable[[AnswerRecord], Future],
        on_end: Callable[[Running], None],
    ):
        self.request: Request = pending.request
        self.asked = asked
        self.adapter = adapter
        self.ways = ways
        self._kept = kept
        self.exchange = exchange
        self.openings: list[Opening] = []
        # Set when the client has left.
        self.left = False
        # Tokens that were read and sampled.
        self.tokens = 0
        # The engine, whether it was asked, and the pages that are kept for the request there.
        self.service: Service | None = None
        self.began = False
        self.pages = 0
        self._pending, self._text, self._tokenizer = pending, text, tokenizer
        self._on_answer, self._on_end = on_answer, on_end
        self._first: dict[int, float] = {}
        self._lock = threading.Lock()
        self._open = self.request.n

    def begun(self) -> list[AnswerRecord]:
        """The records of its answers if the server dies before they have ended. Of what they were
        asked and had sampled nothing is kept.
        """
        return [
            self._record_of(
                index,
                answered_at=self.asked.at,
                first_token_s=0.0,
                finish_reason="aborted",
                context=0,
                parent=-1,
                kept=0,
                given=(),
                tokens=(),
                logprobs=(),
                versions=(),
                extra={"server_died": True},
            )
            for index in range(self.request.n)
        ]

    @property
    def prompts(self) -> list[list[int]]:
        """As ``service.EngineRequest``."""
        return [opening.tokens for opening in self.openings]

    @property
    def kinds(self) -> list[list[int]] | None:
        """As ``service.EngineRequest``."""
        kinds = [opening.kinds for opening in self.openings if opening.kinds is not None]
        return kinds or None

    @property
    def owner(self) -> str:
        """As ``service.EngineRequest``: the organisation of the user. Keys of no organisation are
        the server's own, together.
        """
        return self.asked.origin

    def sampled(self, index: int, tokens: Sequence[int]) -> None:
        """As ``service.EngineRequest``."""
        self._first.setdefault(index, time.monotonic() - self.asked.clock)
        self._pending.sampled(tokens, index)

    def answered(self, index: int, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """As ``service.EngineRequest``."""
        lost = ApiError("the answer could not be recorded", status=503, kind="server_error")
        try:
            answer, parent, did = self._read(index, tokens, logprobs)
            kept = self._record(index, answer.finish_reason, parent, tokens, logprobs, did)
        except Exception as error:  # of whoever keeps records: the engine goes on
            answer, kept = None, _failed(error)
        give = functools.partial(self._pending.answer, answer)
        self._end_when(kept, index, give, functools.partial(self._pending.fail, lost))

    def cut_off(self, index: int, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """As ``service.EngineRequest``."""
        try:
            parent = -1
            if tokens:
                _, parent, _ = self._read(index, tokens, logprobs)
            else:
                self.exchange.drop(self.openings[index])
            # what it did is not known: it might have done more
            kept = self._record(index, "aborted", parent, tokens, logprobs, {})
        except Exception as error:
            kept = _failed(error)
        why = "the answer was cut off: the server ends"
        error = ApiError(why, status=503, kind="server_error")
        give = functools.partial(self._pending.fail, error)
        self._end_when(kept, index, give, give)

    def _end_when(
        self,
        kept: Future,
        index: int,
        give: Callable[[], None],
        otherwise: Callable[[], None],
    ) -> None:
        """Ends an answer once its record is kept, or is not."""

        def end(kept: Future) -> None:
            error = kept.exception()
            if error is not None:
                logging.error("answer %s", self.asked.ids[index], exc_info=error)
            try:
                # before the client hears of it: its next request finds this one done
                self._ended(1)
            finally:
                (give if error is None else otherwise)()

        kept.add_done_callback(end)

    def submitted(self, future: Future) -> None:
        """Give the request up if the engine did not take the job: no answers will come then."""
        error = future.exception()
        if error is not None:
            self.give_up(error if isinstance(error, ApiError) else ApiError(str(error)))

    def give_up(self, error: ApiError) -> None:
        """The prompts were made, and nothing will be sampled."""
        for opening in reversed(self.openings):
            self.exchange.drop(opening)
        self.refuse(error)

    def refuse(self, error: ApiError) -> None:
        """Nothing was begun, and nothing will be."""
        self._ended(self.request.n)
        self._pending.fail(error)

    def _read(
        self, index: int, tokens: Sequence[int], logprobs: Sequence[float]
    ) -> tuple[Answer, int, Mapping[str, Any]]:
        opening = self.openings[index]
        versions = [self.asked.version] * len(tokens)
        message, parent, did = self.exchange.read(
            opening, list(tokens), [float(logprob) for logprob in logprobs], versions
        )
        stopped = tokens[-1] in self._text.stop_ids or any(
            each in self._tokenizer.decode(tokens) for each in self.request.stop
        )
        answer = Answer(
            id=self.asked.ids[index],
            model=self.asked.shown,
            message=message,
            finish_reason="tool_calls" if message.calls else "stop" if stopped else "length",
            tokens=list(tokens),
            logprobs=list(logprobs),
            prompt_tokens=len(opening.tokens),
            kept_tokens=opening.kept,
            version=self.asked.version,
            index=index,
            alternatives=self.ways[index].alternatives[: len(tokens)] if self.ways else None,
        )
        return answer, parent, did

    def _record(
        self,
        index: int,
        reason: str,
        parent: int,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        did: Mapping[str, Any],
    ) -> Future:
        """Done when the record is kept. did: what the answer did."""
        opening = self.openings[index]
        seconds = time.monotonic() - self.asked.clock
        with self._lock:
            self.tokens += len(tokens) + (0 if index else len(opening.tokens))
        return self._on_answer(
            self._record_of(
                index,
                answered_at=self.asked.at + seconds,
                first_token_s=self._first.get(index, seconds),
                finish_reason=reason,
                context=opening.context,
                parent=parent,
                kept=opening.kept,
                given=tuple(opening.given),
                tokens=tuple(int(token) for token in tokens),
                logprobs=tuple(float(logprob) for logprob in logprobs),
                versions=(self.asked.version,) * len(tokens),
                extra={**did, **self._kept, **_documents(opening)},
            )
        )

    def _record_of(self, index: int, *, extra: Mapping[str, Any], **became: Any) -> AnswerRecord:
        """The record of an answer. became: the fields that its request does not say."""
        asked = self.asked
        origin = {"origin": asked.origin} if asked.origin else {}
        return AnswerRecord(
            id=asked.ids[index],
            user=asked.user,
            session=asked.session,
            model=asked.model,
            version=asked.version,
            adapter=asked.adapter,
            arm=asked.arm,
            asked_at=asked.at,
            kind=self.request.kind,
            extra={"index": index, **origin, **extra},
            **became,
        )

    def _ended(self, count: int) -> None:
        with self._lock:
            self._open -= count
            last = self._open == 0
        if last:
            self._on_end(self)


def _documents(opening: Opening) -> dict[str, Any]:
    """Kinds of the tokens of ``AnswerRecord.given``, as a record keeps them; nothing of a model
    without documents.
    """
    if opening.kinds is None:
        return {}
    return {DOCUMENTS: run_lengths(opening.kinds[opening.kept :])}


def _failed(error: Exception) -> Future:
    future: Future = Future()
    future.set_exception(error)
    return future
