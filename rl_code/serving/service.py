"""Serves the weights of a run: requests of any client, through the scheduler and the engine.

Each request is an episode of one message (``Served``). Requests with one API key are a session:
what was sampled for an earlier one is kept token by token when a later one continues it. Every
answer is recorded before its client gets it: ids, log-probabilities, version of the weights.
"""

from __future__ import annotations

import collections
import dataclasses
import queue
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from absl import logging

from models.tokenizer import Tokenizer
from models.transformer import Transformer
from rl_code.environment.protocols.protocol import Protocol
from rl_code.rollout.sampling import SamplingConfig
from rl_code.rollout.scheduler import Scheduler
from rl_code.serving.answers import Answer, Pending
from rl_code.serving.chat_text import ChatText
from rl_code.serving.requests import ApiError, ChatRequest
from rl_code.serving.session import Session, Step
from rl_code.serving.stops import Stopping
from rl_code.types import Context, Reward, Task, Trajectory

# Sessions that are kept; those that were used longest ago are forgotten, and a request that would
# have continued one is tokenised as a whole.
_SESSIONS = 1024
# Tokens of a session, after which it is forgotten.
_LONGEST_SESSION = 1_000_000
# Requests that wait at most; others are refused, to be made again later.
_WAITING = 1024
_IDLE_S = 0.5

_TASK = Task(id="served", messages=())

# What the scheduler gets for an episode whose record is kept elsewhere.
_NOTHING = Trajectory(
    task_id=_TASK.id,
    group=0,
    index=0,
    contexts=(
        Context(
            tokens=np.zeros(0, np.int32),
            sampled=np.zeros(0, bool),
            logprobs=np.zeros(0, np.float32),
            versions=np.zeros(0, np.int32),
        ),
    ),
    prompt_length=0,
    turns=(),
    status="submitted",
    reward=Reward(0.0, {}),
)


@dataclasses.dataclass
class _Conversation:
    """A session, and the requests in it that wait until the one before them is answered."""

    session: Session
    waiting: collections.deque[tuple[Pending, str]] = dataclasses.field(
        default_factory=collections.deque
    )
    busy: bool = False


class ServedClient:
    """The endpoint's side of one API key."""

    def __init__(self, service: Service, key: str):
        self._service, self._key = service, key
        self.text, self.model = service.text, service.model

    def ask(self, pending: Pending, id: str) -> None:
        """As ``endpoint.Client.ask``."""
        self._service.ask(self._key, pending, id)

    def execute(self, command: str, timeout_s: float | None) -> dict[str, Any]:
        """There is no workspace here."""
        raise ApiError("no workspace belongs to this API key", status=404)


class Served:
    """A request as an episode of one message (the interface of ``environment.episode.Episode``)."""

    starts_at_once = True
    documents = None
    group = 0
    index = 0

    def __init__(
        self, service: Service, conversation: _Conversation, step: Step, pending: Pending, id: str
    ):
        self.task = _TASK
        self._service, self._conversation = service, conversation
        self._step, self._pending, self._id = step, pending, id
        stop = step.request.stop
        protocol = service.text.protocol
        self.protocol: Protocol = Stopping.around(protocol, stop) if stop else protocol
        self._versions: list[int] = []

    @property
    def budget(self) -> int:
        """The most tokens that the message may have."""
        room = self._service.length - len(self._step.tokens)
        return min(room, self._step.request.max_tokens or room)

    def start(self) -> list[int]:
        """The whole conversation."""
        return self._step.tokens

    def share(self, length: int) -> None:
        """Nothing is shared with anybody."""

    def sampling(self, tokens: Sequence[int]) -> None:
        """The tokens so far, for a stream."""
        self._pending.sampled(tokens)

    def step(
        self, tokens: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]
    ) -> None:
        """Records the message and answers with it."""
        self._service.answer(
            self._conversation, self._step, self._pending, self._id, tokens, logprobs, versions
        )

    def finish(self) -> Trajectory:
        """Nothing is graded; who keeps the record is told by ``answer``."""
        return _NOTHING

    def close(self) -> None:
        """The request was given up."""
        self._pending.fail(ApiError("the server ends", status=503, kind="server_error"))


class Service:
    """Answers requests in a thread of its own, which is the only one that touches the scheduler.

    on_answer: called with the record of each answer before its client gets it. A context manager,
    which ends it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        weights: Transformer,
        *,
        model: str,
        version: int,
        protocol: Protocol,
        tokenizer: Tokenizer,
        on_answer: Callable[[dict[str, Any]], None] = lambda record: None,
    ):
        self.text = ChatText(protocol, tokenizer)
        self.model = model
        self.length = scheduler.engine.config.length
        self._tokenizer = tokenizer
        self._sampling: SamplingConfig = scheduler.engine.sampling
        self._scheduler = scheduler
        self._on_answer = on_answer
        self._new: queue.Queue[tuple[str, Pending, str]] = queue.Queue(_WAITING)
        # Conversations whose request was answered, so that the next one can begin.
        self._done: queue.Queue[_Conversation] = queue.Queue()
        self._conversations: collections.OrderedDict[str, _Conversation] = collections.OrderedDict()
        self._stop = threading.Event()
        self._error: BaseException | None = None
        scheduler.load(weights, version)
        self._thread = threading.Thread(target=self._run, name="service", daemon=True)
        self._thread.start()

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def find(self, key: str) -> ServedClient:
        """The client of an API key; every key is known, and the empty one too."""
        return ServedClient(self, key)

    def close(self) -> None:
        """Gives up what is in progress."""
        self._stop.set()
        self._thread.join()

    def ask(self, key: str, pending: Pending, id: str) -> None:
        """Takes a request, from any thread. Raises ApiError."""
        request = pending.request
        if self._error is not None:
            raise ApiError(
                f"the engine has stopped: {self._error}", status=503, kind="server_error"
            )
        for name in ("temperature", "top_p"):
            asked, own = getattr(request, name), getattr(self._sampling, name)
            if asked not in (None, own):
                raise ApiError(
                    f"{name}={asked:g}: this server samples with {name}={own:g}",
                    code="unsupported_value",
                    param=name,
                )
        try:
            self._new.put_nowait((key, pending, id))
        except queue.Full:
            raise ApiError(
                f"{_WAITING} requests wait already", status=429, kind="rate_limit_error"
            ) from None

    def answer(
        self,
        conversation: _Conversation,
        step: Step,
        pending: Pending,
        id: str,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        versions: Sequence[int],
    ) -> None:
        """Records a message and answers with it, in a thread of the scheduler's."""
        session = conversation.session
        request = step.request
        message, _ = session.answer(step.context, tokens, logprobs, versions, request.stop)
        node = session.nodes[step.context]
        stopped = tokens[-1] in self.text.stop_ids or any(
            each in self._tokenizer.decode(tokens) for each in request.stop
        )
        reason = "tool_calls" if message.calls else "stop" if stopped else "length"
        self._on_answer(
            {
                "id": id,
                "context": step.context,
                "parent": node.parent,
                "kept": step.kept,
                "given": list(step.given),
                "tokens": [int(token) for token in tokens],
                "logprobs": [float(logprob) for logprob in logprobs],
                "versions": [int(version) for version in versions],
                "finish_reason": reason,
            }
        )
        # before the client hears of it: its next request finds this one done
        conversation.busy = False
        self._done.put(conversation)
        pending.answer(
            Answer(
                id=id,
                model=self.model,
                message=message,
                finish_reason=reason,
                tokens=list(tokens),
                logprobs=list(logprobs),
                prompt_tokens=len(step.tokens),
                kept_tokens=step.kept,
                version=int(versions[-1]),
            )
        )

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._take(wait=self._scheduler.groups == 0)
                if self._scheduler.groups:
                    self._scheduler.step()
        except BaseException as error:  # a thread has nobody to raise it to
            self._error = error
            logging.exception("the engine has stopped")
        finally:
            self._scheduler.abort()
            self._refuse()

    def _refuse(self) -> None:
        """Refuses what waits."""
        ended = ApiError("the server ends", status=503, kind="server_error")
        while not self._new.empty():
            self._new.get()[1].fail(ended)
        for conversation in self._conversations.values():
            for pending, _ in conversation.waiting:
                pending.fail(ended)

    def _take(self, *, wait: bool) -> None:
        """Begins requests that came, and those that waited for another one of their session."""
        try:
            while True:
                key, pending, id = (
                    self._new.get(timeout=_IDLE_S) if wait else self._new.get_nowait()
                )
                wait = False
                conversation = self._conversation(key)
                conversation.waiting.append((pending, id))
                self._begin(conversation)
        except queue.Empty:
            pass
        while not self._done.empty():
            self._begin(self._done.get())

    def _conversation(self, key: str) -> _Conversation:
        """The conversation of a key; a new one where there is no key."""
        found = self._conversations.pop(key, None)
        if found is None or (not found.busy and found.session.num_tokens > _LONGEST_SESSION):
            found = _Conversation(
                Session(self.text, self._tokenizer, f"call_{secrets.token_hex(4)}")
            )
        if key:
            self._conversations[key] = found
        while len(self._conversations) > _SESSIONS:
            self._conversations.popitem(last=False)
        return found

    def _begin(self, conversation: _Conversation) -> None:
        """Begins the next request of a conversation, unless one is being answered."""
        while conversation.waiting and not conversation.busy:
            pending, id = conversation.waiting.popleft()
            try:
                step = conversation.session.ask(pending.request)
                if len(step.tokens) >= self.length:
                    raise ApiError(
                        f"the conversation has {len(step.tokens)} tokens; the longest has "
                        f"{self.length - 1}",
                        code="context_length_exceeded",
                        param="messages",
                    )
            except ApiError as error:
                pending.fail(error)
                continue
            conversation.session.take(step)
            conversation.busy = True
            served = Served(self, conversation, step, pending, id)
            self._scheduler.submit(
                _TASK,
                lambda task, group, index, served=served: served,
                group=0,
                group_size=1,
                key=_key_of(pending.request),
            )


def _key_of(request: ChatRequest) -> tuple[int, int]:
    """The words of the random key: of the seed, or any."""
    seed = secrets.randbits(64) if request.seed is None else request.seed
    low, high = np.array([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF], np.uint32).tolist()
    return high, low
