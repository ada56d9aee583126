"""Takes requests for all that is served, and records every answer."""

from __future__ import annotations

import functools
import itertools
import secrets
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import Any

from absl import logging

from models.tokenizer import Tokenizer
from models.transformer import Transformer
from people.feedback.identity import AnswerIds, origin_key, user_key
from people.feedback.records import AnswerRecord
from people.serving.begun import Begun
from people.serving.exchanges import (
    ChatExchange,
    CompletionExchange,
    Conversation,
    Conversations,
    Exchange,
)
from people.serving.metrics import Metrics
from people.serving.models import Loaded, Models
from people.serving.running import AskedBy, Running
from people.serving.service import Service
from people.serving.warm_up import warm_up
from people.serving.ways import differs, make_ways
from rl_code.environment.documents import DocumentsConfig
from rl_code.environment.protocols.protocol import Protocol
from rl_code.harness.endpoint.answers import Accepted, Pending
from rl_code.harness.endpoint.chat_text import ChatText
from rl_code.harness.endpoint.fields import ApiError, Request
from rl_code.harness.endpoint.requests import ChatRequest
from rl_code.rollout.sampling import SamplingConfig
from rl_code.run.serving import ServingConfig

# The longest time after which a client is told to ask again, in seconds.
_LONGEST_RETRY_S = 60.0
# Seconds after which a client asks again that came before the first version was there.
_OPENING_RETRY_S = 1.0
# Seconds that the last records may take.
_RECORD_S = 30.0
# The weight of the newest answer in the mean time that one takes.
_NEWEST = 0.1


class Fleet:
    """The models that are served, and the requests for them. A context manager, which ends it.

    make_service: starts an engine with weights of a version. secret: makes ids of answers and
    users' keys (``feedback.identity``). on_answer: keeps the record of each answer; its client gets
    the end of it when this has returned, or when the future that it returns is done. May be called
    from several threads at once.
    """

    def __init__(
        self,
        make_service: Callable[[Transformer, int], Service],
        *,
        protocol: Protocol,
        tokenizer: Tokenizer,
        secret: bytes,
        config: ServingConfig | None = None,
        on_answer: Callable[[AnswerRecord], Future | None] = lambda record: None,
        begun: Begun | None = None,
        documents: DocumentsConfig | None = None,
        document_tools: Collection[str] = (),
    ):
        """documents, document_tools: as of ``ChatText``. begun: notes what is being sampled, for
        the record of what a kill cuts off; what is left there of a server before is recorded now.
        None for no such notes.
        """
        self.text = ChatText(protocol, tokenizer, documents, document_tools)
        self.models = Models(make_service)
        self.metrics = Metrics(lambda: self.models.running)
        self.config = config or ServingConfig()
        self._tokenizer = tokenizer
        self._secret = secret
        self._ids = AnswerIds(secret)
        # Starts anywhere, so that no two servers with one secret make the same id.
        self._counter = itertools.count(secrets.randbits(64))
        self._on_answer = on_answer
        self._conversations = Conversations(self.text, tokenizer)
        self._lock = threading.Lock()
        # Requests that were taken and have not ended, and the pages that those of each engine ask
        # for.
        self._running = 0
        self._pages: dict[Service, int] = {}
        self._mean_s = 1.0
        self._draining = False
        # Why no requests are taken yet; "" once they are. For who loads several things and routers
        # before anybody may ask.
        self.opening = ""
        self._begun = begun
        for record in begun.left if begun is not None else ():
            self._recorded(record).add_done_callback(functools.partial(self._note_end, [record.id]))

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def not_ready(self) -> str:
        """Reason why the fleet takes no requests now; "" if it takes them."""
        if self._draining:
            return "the server ends"
        if self.opening:
            return self.opening
        services = self.models.services
        if not services:
            return "no model is loaded"
        errors = [str(service.error) for service in services if service.error is not None]
        return f"an engine has stopped: {errors[0]}" if errors else ""

    def user_of(self, api_key: str) -> str:
        """The user as records name them."""
        return user_key(self._secret, api_key)

    def origin_of(self, organisation: str) -> str:
        """Keyed hash of an organisation, as records name it; "" for no organisation."""
        return origin_key(self._secret, organisation) if organisation else ""

    def session_of(self, user: str, request: Request) -> str:
        """The session of a request that has no name for it. Completions of a user are all of one,
        since nothing tells them apart.
        """
        if isinstance(request, ChatRequest):
            return self._conversations.name_of(user, request)
        return "default"

    def warm_up(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Has all programs compiled that answers need, before anybody asks; as
        ``warm_up.warm_up``.
        """
        for service in self.models.services:
            warm_up(service, stop)

    def refuse(self) -> None:
        """Takes no more requests from now on. Waits for nothing, so a handler of signals may."""
        self._draining = True

    def forget(self, user: str) -> None:
        """Forgets the chats of a user that are kept for later requests, and the arms of their
        sessions.
        """
        self._conversations.forget(user)
        self.models.forget(user)
        if self._begun is not None:
            self._begun.compact()

    def drain(self) -> bool:
        """Takes no more requests, and waits for the answers that are on their way, for
        ``config.drain_s`` at most; whether all have ended.
        """
        self.refuse()
        return self.models.wait_idle(self.config.drain_s)

    def close(self) -> None:
        """Cuts off what is in progress, waits until that is recorded, and lets everything go."""
        self.refuse()
        self.models.close()
        self.models.wait_idle(_RECORD_S)

    def ask(
        self,
        user: str,
        session: str,
        pending: Pending,
        on_end: Callable[[Running], None] = lambda running: None,
        *,
        origin: str = "",
    ) -> Accepted:
        """Takes a request. It may take the time to tokenise the prompt. Raises ApiError.

        session: which of the user's it is; "" where nothing of it is to be kept for later
        requests. on_end: called once, when all its answers have ended or none will come; not where
        ApiError is raised. origin: where the user's key comes from (``origin_of``).
        """
        request = pending.request
        self._enter()
        try:
            loaded, arm = self.models.take(request.model, user, session)
        except BaseException:
            self._leave()
            raise
        ended = False

        def end(running: Running) -> None:
            nonlocal ended
            ended = True
            if self._begun is not None:
                self._begun.end(running.asked.ids)
            self._end(running, loaded, conversation)
            on_end(running)

        name = user_key(self._secret, f"session {session} of {user}") if session else ""
        conversation = None
        if request.kind == "chat":
            conversation = self._conversations.find(user, session)
        try:
            sampling = loaded.host.service.sampling
            vocab = self._tokenizer.vocab_size
            ways = make_ways(request, sampling, self.text, vocab)
            asked = self._asked(request, loaded, user, name or secrets.token_hex(16), arm, origin)
            exchange = self._exchange(request, loaded, conversation)
        except BaseException:
            self.models.give_back(loaded)
            self._leave()
            raise
        running = Running(
            pending,
            asked,
            exchange,
            self.text,
            self._tokenizer,
            adapter=loaded.adapter,
            ways=ways,
            kept=self._kept(request, sampling, user),
            on_answer=self._recorded,
            on_end=end,
        )
        service = loaded.host.service
        if conversation is None:
            self._begin(running, service)
        else:
            conversation.enter(lambda: self._begin(running, service))

        def leave() -> None:
            running.left = True
            if not ended:
                service.cancel(running)

        return Accepted(asked.ids[0], asked.shown, leave)

    def _exchange(
        self, request: Request, loaded: Loaded, conversation: Conversation | None
    ) -> Exchange:
        if conversation is not None:
            return ChatExchange(request, conversation, self.config)
        length = loaded.host.service.length
        gaps = self.config.fill_in
        return CompletionExchange(request, self.text, self._tokenizer, gaps, length)

    def _kept(self, request: Request, sampling: SamplingConfig, user: str) -> dict[str, Any]:
        """Fields of a request that the record of its answer keeps."""
        kept: dict[str, Any] = {}
        if asked := differs(request, sampling):
            kept["sampling"] = asked
        if request.stop:
            kept["stop"] = list(request.stop)
        if request.store is False:
            kept["store"] = False
        if request.metadata:
            kept["metadata"] = dict(request.metadata)
        if request.end_user:
            kept["end_user"] = user_key(self._secret, f"end user {request.end_user} of {user}")
        return kept

    def _asked(
        self, request: Request, loaded: Loaded, user: str, session: str, arm: str, origin: str
    ) -> AskedBy:
        base = loaded.base or loaded
        make = self._ids.make
        return AskedBy(
            user=user,
            session=session,
            model=base.name,
            version=loaded.version,
            adapter=loaded.name if loaded.base else "",
            arm=arm,
            origin=origin,
            shown=request.model or loaded.name,
            ids=[make(user, loaded.version, next(self._counter)) for _ in range(request.n)],
            at=time.time(),
            clock=time.monotonic(),
        )

    def _begin(self, running: Running, service: Service) -> bool:
        """Hands a request to its engine; False where it has ended instead."""
        if running.left:
            running.refuse(ApiError("the client left"))
            return False
        try:
            running.openings = running.exchange.open()
        except ApiError as error:
            running.refuse(error)
            return False
        except Exception as error:  # a bug, which must end this request only
            logging.exception("a request could not be read")
            why = f"the server failed: {type(error).__name__}"
            running.refuse(ApiError(why, status=500, kind="server_error"))
            return False
        try:
            self._reserve(running, service)
        except ApiError as error:
            running.give_up(error)
            return False
        if self._begun is not None:
            self._begun.begin(running.begun())
        running.began = True
        service.submit(running).add_done_callback(running.submitted)
        return True

    def _reserve(self, running: Running, service: Service) -> None:
        """Raises ApiError for a request that is too long, or has to wait until others end."""
        tokens = len(running.openings[0].tokens)
        if tokens >= service.length:
            raise ApiError(
                f"the conversation has {tokens} tokens; the longest has {service.length - 1}",
                code="context_length_exceeded",
                param="messages" if running.request.kind == "chat" else "prompt",
            )
        most = min(running.request.max_tokens or 0, service.length - tokens)
        pages = -(-tokens // service.page) + running.request.n * -(-most // service.page)
        with self._lock:
            asked = self._pages.get(service, 0)
            if asked and asked + pages > self.config.pages_ahead * service.pages:
                raise self._busy(f"requests ask for {asked} pages of the cache already")
            self._pages[service] = asked + pages
            running.pages = pages
            running.service = service

    def _enter(self) -> None:
        if self._draining:
            ends = dict(status=503, kind="server_error", retry_after_s=self.config.drain_s)
            raise ApiError("the server ends", **ends)
        if self.opening:
            # not 404: what is asked for is about to be there
            begins = dict(status=503, kind="server_error", retry_after_s=_OPENING_RETRY_S)
            raise ApiError(f"{self.opening}; ask again soon", **begins)
        with self._lock:
            if self._running >= self.config.most_requests:
                raise self._busy(f"{self._running} requests wait already")
            self._running += 1

    def _leave(self) -> None:
        with self._lock:
            self._running -= 1

    def _busy(self, why: str) -> ApiError:
        again = min(_LONGEST_RETRY_S, self._mean_s)
        busy = dict(status=429, kind="rate_limit_error", code="server_busy", retry_after_s=again)
        return ApiError(f"{why}; ask again later", **busy)

    def _end(self, running: Running, loaded: Loaded, conversation: Conversation | None) -> None:
        """A request has ended, in whatever way."""
        with self._lock:
            self._running -= 1
            if running.service is not None:
                self._pages[running.service] -= running.pages
                if not self._pages[running.service]:
                    del self._pages[running.service]
                taken_s = time.monotonic() - running.asked.clock
                self._mean_s += _NEWEST * (taken_s - self._mean_s)
        self.models.give_back(loaded)
        if conversation is not None and running.began:
            conversation.leave()

    def _note_end(self, ids: Sequence[str], kept: Future) -> None:
        """Lets the next server record what could not be recorded now."""
        if self._begun is not None and kept.exception() is None:
            self._begun.end(ids)

    def _recorded(self, record: AnswerRecord) -> Future:
        kept = self._on_answer(record)
        if kept is None:
            kept = Future()
            kept.set_result(None)

        def count(kept: Future) -> None:
            if kept.exception() is None:
                self.metrics.answered(record)

        kept.add_done_callback(count)
        return kept
