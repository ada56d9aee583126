"""Penalty for a dissatisfied follow-up message, as a small classifier reads it.

Logistic regression on hashed features of the message: words, pairs of words, and pieces of words
(Weinberger et al. 2009, arXiv 0902.2206). It is trained in a second on messages that
``follow_up_data.py`` makes, always with the same result, so no file of weights has to be kept.
`experiments/follow_up` judges it on families of messages that it never saw: docs/feedback.md has
the numbers. They are of made messages; on real ones it is worse, so give messages of your own to
``train`` (or a signal of your own to the config) before paying much for it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import re
import zlib
from collections.abc import Iterator, Sequence

import numpy as np
import scipy  # reads its parts when they are first used
from jaxtyping import Float64

from people.feedback.records import Event
from people.feedback.rewards.answered import Answered
from people.feedback.rewards.follow_up_data import (
    VALIDATION,
    Message,
    messages,
    training_families,
)

# Places of the features' hashes. Some 3,000 features are in use, so few share one.
_PLACES = 1 << 14
# Characters of a message that are read; dissatisfaction is said at the beginning.
_READ = 500
_WORD = re.compile(r"\w+(?:'\w+)?|[^\w\s]")
# Strength of the penalty on squared weights, for each message.
_PENALTY = 1e-3
_MESSAGES = 3_000


@dataclasses.dataclass(frozen=True)
class Classifier:
    """The chance that a message is dissatisfied: sigmoid of a sum of weights of its features."""

    weights: Float64[np.ndarray, " places"]
    bias: float

    def chances(self, texts: Sequence[str]) -> Float64[np.ndarray, " texts"]:
        """0 to 1 for each text."""
        return scipy.special.expit(_features(texts) @ self.weights + self.bias)

    @functools.cached_property
    def digest(self) -> str:
        """Hash of the learned weights, rounded to 6 digits: processors round differently."""
        rounded = np.round([*self.weights, self.bias], 6) + 0.0
        return hashlib.sha256(rounded.tobytes()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class FollowUp:
    """Minus the chance that the message after the answer is dissatisfied, above what is usual."""

    # The chance up to which nothing is taken away: that of an ordinary message.
    usual: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.usual < 1:
            raise ValueError(f"{self.usual=} must be at least 0 and below 1")

    @property
    def learned(self) -> str:
        """Hash of the learned weights, for the version of the reward."""
        return standard().digest

    def __call__(self, given: Answered) -> float:
        """-1 to 0. The text is judged where it was sent (``extra["text"]``), otherwise the value
        that the client sent counts; 0 without a message.
        """
        event = given.first("follow_up")
        if event is None:
            return 0.0
        return -max((chance_of(event) or 0.0) - self.usual, 0.0) / (1 - self.usual)


def chance_of(event: Event) -> float | None:
    """The chance that a follow-up is dissatisfied: of its text where it was sent, otherwise what
    the client says; None where nobody knows.
    """
    text = event.extra.get("text")
    return float(standard().chances([text])[0]) if isinstance(text, str) else event.value


@functools.cache
def standard(seed: int = 0) -> Classifier:
    """The classifier of the made messages."""
    return train(
        messages(training_families(), _MESSAGES, seed),
        messages(VALIDATION, _MESSAGES // 4, seed + 1),
    )


def train(learned: Sequence[Message], calibrated: Sequence[Message]) -> Classifier:
    """A classifier with the least penalised log-loss on some messages.

    calibrated: messages of other families; all logits are divided by the temperature that fits them
    best (Guo et al. 2017, arXiv 1706.04599), since on new families it is less sure than on its own.
    """
    inputs, wanted = _features([one.text for one in learned]), _labels(learned)

    def loss(values: np.ndarray) -> tuple[float, np.ndarray]:
        logits = inputs @ values[:-1] + values[-1]
        error = (scipy.special.expit(logits) - wanted) / len(wanted)
        penalty = _PENALTY * float(values[:-1] @ values[:-1]) / 2
        gradient = np.append(inputs.T @ error + _PENALTY * values[:-1], error.sum())
        return _log_loss(logits, wanted) + penalty, gradient

    start = np.zeros(_PLACES + 1)
    found = scipy.optimize.minimize(loss, start, jac=True, method="L-BFGS-B", tol=1e-8).x
    logits = _features([one.text for one in calibrated]) @ found[:-1] + found[-1]
    labels = _labels(calibrated)
    temperature = scipy.optimize.minimize_scalar(
        lambda log: _log_loss(logits / np.exp(log), labels), bounds=(-3, 3), method="bounded"
    )
    found = found / np.exp(temperature.x)
    return Classifier(found[:-1], float(found[-1]))


def _labels(those: Sequence[Message]) -> np.ndarray:
    return np.array([one.dissatisfied for one in those], np.float64)


def _log_loss(logits: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.mean(np.logaddexp(0, logits) - wanted * logits))


def _features(texts: Sequence[str]) -> scipy.sparse.csr_array:
    """A row for each text, of length 1, with 1 at each feature's hash before that."""
    starts, places, values = [0], [], []
    for text in texts:
        found = {zlib.crc32(name.encode("utf-8", "replace")) % _PLACES for name in _names(text)}
        places += sorted(found)
        values += [len(found) ** -0.5] * len(found)
        starts.append(len(places))
    shape = len(texts), _PLACES
    return scipy.sparse.csr_array((values, places, starts), shape, dtype=np.float64)


def _names(text: str) -> Iterator[str]:
    """The features of a message."""
    words = ["^", *_WORD.findall(text[:_READ].lower())]
    yield from words[1:]
    yield from (f"{first} {second}" for first, second in itertools.pairwise(words))
    for word in words[1:]:
        padded = f"<{word}>"
        yield from (f"#{padded[i : i + 4]}" for i in range(len(padded) - 3))
