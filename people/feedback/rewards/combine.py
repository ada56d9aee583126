"""All signals of what people did by name, which a config makes active, and their sum.

A signal is a function of an answer and what happened to it. One with settings is a frozen dataclass
whose fields are its settings and which is called in the same way.

    reward = dict(signals=("tab", dict(name="retention", weight=0.5), dict(name="latency",
                  cap=(-0.1, 0.0))))
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from people.feedback.rewards.answered import Answered
from people.feedback.rewards.asked import Asked
from people.feedback.rewards.follow_up import FollowUp
from people.feedback.rewards.latency import Latency
from people.feedback.rewards.leaving import Left, switched
from people.feedback.rewards.merged import Merged
from people.feedback.rewards.re_edited import ReEdited
from people.feedback.rewards.retention import retention
from people.feedback.rewards.tab import Tab
from people.feedback.rewards.thumbs import thumbs
from rl_code.config import named, read_config
from rl_code.config.read_config import ConfigError
from rl_code.rewards.combine import (
    SIGNAL_ERROR,
    ActiveSignal,
    SignalConfig,
    check_on_error,
    components_of,
)
from rl_code.types import Reward

# One with settings is its class.
SIGNALS: dict[str, Any] = {
    "tab": Tab,
    "retention": retention,
    "re_edited": ReEdited,
    "follow_up": FollowUp,
    "switched": switched,
    "left": Left,
    "merged": Merged,
    "latency": Latency,
    "asked": Asked,
    "thumbs": thumbs,
}


def _signal(name: str, **own: Any) -> SignalConfig:
    return SignalConfig(named.Named(name), **own)


# For suggestions in an editor.
TAB_SIGNALS = (
    _signal("tab"),
    _signal("retention", weight=0.25),
    _signal("latency", cap=(-0.1, 0.0)),
)
# For an agent's turns.
AGENT_SIGNALS = (
    _signal("retention"),
    _signal("re_edited", weight=0.5),
    _signal("follow_up", weight=0.25),
    _signal("switched", weight=0.25),
    _signal("left", weight=0.25),
    _signal("merged"),
    _signal("asked"),
    _signal("latency", cap=(-0.1, 0.0)),
)


# By the kind of an answer (``AnswerRecord.kind``), where a config names no signals.
STANDARD: Mapping[str, tuple[SignalConfig, ...]] = {
    "completion": TAB_SIGNALS,
    "chat": AGENT_SIGNALS,
}


@dataclasses.dataclass(frozen=True)
class FeedbackRewardConfig:
    """The reward of an answer: a weighted sum of signals."""

    # They are logged and added up in this order. None for those of suggestions (``TAB_SIGNALS``)
    # and of an agent's turns (``AGENT_SIGNALS``), each paid by its own.
    signals: tuple[SignalConfig, ...] | None = None
    # An exception of a signal: "count" it as an outcome of the answer, or "stop" the run.
    on_error: str = "count"

    def __post_init__(self) -> None:
        check_on_error(self.on_error)
        if self.signals is None:
            return
        names = [signal.component for signal in self.signals]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"signals {names} must have names of their own; give one a label")


@dataclasses.dataclass(frozen=True)
class FeedbackReward:
    """The reward function of a config. Made by ``make_reward``."""

    # Kind of an answer -> the signals that pay it.
    signals: Mapping[str, tuple[ActiveSignal[Answered], ...]]

    @property
    def components(self) -> list[str]:
        """Names of the parts that a reward of any kind may have."""
        every = (one.config.component for own in self.signals.values() for one in own)
        return list(dict.fromkeys(every))

    def __call__(self, given: Answered) -> Reward:
        """The reward of an answer; its total is the sum of its components. Raises ConfigError, and
        what a signal raises that stops the run.
        """
        signals = self.signals[given.answer.kind]
        components, error = components_of(given, signals, f"answer {given.answer.id}")
        flags = (SIGNAL_ERROR,) if error else ()
        return Reward(float(sum(components.values())), components, flags)

    @functools.cached_property
    def version(self) -> str:
        """Digest of all that the reward depends on: signals, settings, weights, and their code.

        It is recorded with a reward, so that rewards of two functions are never mixed unseen.
        """
        found = hashlib.sha256()
        for kind, one in ((kind, one) for kind, own in self.signals.items() for one in own):
            config, signal = one.config, one.signal
            made = signal if inspect.isfunction(signal) else type(signal)
            settings = read_config.to_json(signal) if dataclasses.is_dataclass(signal) else ""
            code = inspect.getsource(sys.modules[made.__module__])
            learned = getattr(signal, "learned", "")  # what the code cannot say, as of a classifier
            for part in (kind, read_config.to_json(config), settings, code, learned):
                found.update(hashlib.sha256(part.encode()).digest())
        return found.hexdigest()[:16]


def make_reward(config: FeedbackRewardConfig, path: str = "config.reward") -> FeedbackReward:
    """Finds the signals of a config.

    Raises:
      ConfigError: a signal that does not exist, or settings that it does not take.
    """
    if config.signals is None:
        found = {kind: _active(own, config, path) for kind, own in STANDARD.items()}
    else:
        found = dict.fromkeys(STANDARD, _active(config.signals, config, path))
    return FeedbackReward(found)


def _active(
    signals: Sequence[SignalConfig], config: FeedbackRewardConfig, path: str
) -> tuple[ActiveSignal[Answered], ...]:
    found = []
    for i, one in enumerate(signals):
        signal = named.make(SIGNALS, one.signal, f"{path}.signals[{i}]")
        if not callable(signal):
            raise ConfigError(
                f"{path}.signals[{i}] = {one.signal.name!r}: {signal!r} cannot be called with an "
                "answer"
            )
        found.append(ActiveSignal(signal, one, config.on_error == "stop"))
    return tuple(found)
