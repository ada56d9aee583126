"""Sampling of the answers to a request that asks for another way than the server's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from people.serving.forms import start_forms
from rl_code.harness.endpoint.chat_text import ChatText
from rl_code.harness.endpoint.fields import Request, refuse
from rl_code.harness.endpoint.grammars import Answer
from rl_code.harness.endpoint.requests import ChatRequest
from rl_code.rollout.sampling import SamplingConfig

# The least share of the probability that is kept, since top_p=0 is to keep the most likely token.
_LEAST_TOP_P = 1e-9


class Way:
    """The way of one answer: a ``rollout.own_way.OwnWay``."""

    def __init__(self, request: Request, own: SamplingConfig, answer: Answer | None):
        """own: the server's. answer: what the text has to be; None for any."""
        top_p = own.top_p if request.top_p is None else request.top_p
        self.temperature = own.temperature if request.temperature is None else request.temperature
        self.top_p = max(top_p, _LEAST_TOP_P)
        self._answer = answer
        self._bias = request.logit_bias
        self._presence, self._frequency = request.presence_penalty, request.frequency_penalty
        self.one_by_one = bool(self._presence or self._frequency)
        self.redrawn = 0
        # For each token of the answer the most likely ones and their log-probabilities.
        self.alternatives: list[tuple[list[int], list[float]]] = []

    def prepare(self, message: Sequence[int], biases: np.ndarray, allowed: np.ndarray) -> None:
        """As ``OwnWay``."""
        for token, bias in self._bias:
            biases[token] += bias
        if self._presence or self._frequency:
            tokens, counts = np.unique(np.asarray(message, np.int64), return_counts=True)
            biases[tokens] -= self._presence + self._frequency * counts
        if self._answer is not None:
            found = self._answer.allowed()[: len(allowed)]
            allowed[: len(found)] = found
            allowed[len(found) :] = False

    def kept(self, tokens: Sequence[int]) -> int:
        """As ``OwnWay``."""
        if self._answer is None:
            return len(tokens)
        count = self._answer.read(tokens)
        self.redrawn += count < len(tokens)
        return count

    def note(self, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """As ``OwnWay``."""
        self.alternatives += zip(tokens.tolist(), logprobs.tolist(), strict=True)


def make_ways(
    request: Request, own: SamplingConfig, text: ChatText, vocab: int
) -> list[Way] | None:
    """The ways of the answers to a request; None where the server's own will do.

    own: how the server samples. vocab: tokens of the tokenizer. Raises ApiError.
    """
    forms = start_forms(request, text.protocol, text.grammars)
    if not (differs(request, own) or request.alternatives):
        return None
    for token, _ in request.logit_bias:
        if token >= vocab:
            raise refuse("logit_bias", f"token {token} must be below {vocab}")
    return [Way(request, own, form) for form in forms]


def differs(request: Request, own: SamplingConfig) -> dict[str, Any]:
    """Sampling settings of a request that differ from the server's, as its record keeps them."""
    asked: dict[str, Any] = {
        name: getattr(request, name)
        for name in ("temperature", "top_p")
        if getattr(request, name) not in (None, getattr(own, name))
    }
    for name in ("presence_penalty", "frequency_penalty"):
        if getattr(request, name):
            asked[name] = getattr(request, name)
    if request.logit_bias:
        asked["logit_bias"] = {str(token): bias for token, bias in request.logit_bias}
    if request.json_schema:
        asked["json_schema"] = request.json_schema
    if isinstance(request, ChatRequest) and request.forced:
        asked["tool_choice"] = list(request.forced)
    return asked
