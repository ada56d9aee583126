"""Requests of the server's own, which have all programs of an engine compiled before others ask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait

from people.serving.service import Service
from people.serving.ways import Way
from rl_code.environment.documents import OUTSIDE
from rl_code.harness.endpoint.completions import CompletionRequest
from rl_code.harness.endpoint.fields import Request

# Tokens that are sampled of each answer.
_SAMPLED = 2
# Seconds between two looks whether it is to stop.
_LOOK_S = 0.2


class Trial:
    """Answers that nobody reads: a ``service.EngineRequest``. ``done`` when all have ended."""

    adapter = -1
    owner = ""

    def __init__(self, prompt_length: int, ways: Sequence[Way] | None, document: int = 0):
        """document: tokens of a document that the prompt begins with, whole pages."""
        count = 2  # so that they share a prompt, and copy its last page
        kinds = [1] * document + [OUTSIDE] * (prompt_length - document)
        self.kinds = [kinds] * count if document else None
        self.request: Request = CompletionRequest(prompt="", n=count, max_tokens=_SAMPLED, seed=0)
        self.prompts: Sequence[list[int]] = [[0] * prompt_length for _ in range(count)]
        self.ways = ways
        self.done: Future = Future()
        self._left = count

    def sampled(self, index: int, tokens: Sequence[int]) -> None:
        """As ``service.EngineRequest``."""

    def answered(self, index: int, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """As ``service.EngineRequest``."""
        self._left -= 1
        if not self._left:
            self.done.set_result(None)

    def cut_off(self, index: int, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """As ``service.EngineRequest``."""
        if not self.done.done():
            self.done.set_exception(RuntimeError("the engine has stopped while it was tried"))


def warm_up(service: Service, stop: Callable[[], bool] = lambda: False) -> None:
    """Has an engine answer prompts of one chunk and of several, in the server's way and in another,
    so that no later request waits for its programs.

    stop: asked meanwhile; what has begun then goes on. Raises RuntimeError where the engine stops,
    and ApiError where it has stopped before.
    """
    chunk = service.prefill_tokens + 1
    longest = service.length - _SAMPLED - 1
    own = CompletionRequest(prompt="", temperature=0.0, top_p=0.5)
    trials = [
        Trial(min(length, longest), ways)
        for length in (3, chunk + service.page)
        for ways in (None, [Way(own, service.sampling, None)] * 2)
    ]
    if service.longest_document is not None:
        # a short document is prefilled as a short result of a tool is
        trials.append(Trial(min(service.page + 3, longest), None, service.page))
    for trial in trials:
        service.submit(trial).result()
        while not stop():
            if wait([trial.done], timeout=_LOOK_S).done:
                trial.done.result()
                break
