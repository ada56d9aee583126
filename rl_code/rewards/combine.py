"""All reward signals by name, which of them a config makes active, and their sum.

A signal is a function of one finished episode. One with settings is a frozen dataclass whose fields
are its settings and which is called in the same way. It must not raise on anything that a model can
write: an exception of a signal is a bug and ends the run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl_code import named
from rl_code.named import Named
from rl_code.read_config import ConfigError
from rl_code.rewards.finished import FinishedEpisode
from rl_code.rewards.integrity import integrity
from rl_code.rewards.malformed import malformed
from rl_code.rewards.quality import Quality
from rl_code.rewards.score import Score
from rl_code.rewards.similarity import similarity
from rl_code.rewards.tested import Tested
from rl_code.rewards.tests import partial, tests
from rl_code.types import Reward

type Signal = Callable[[FinishedEpisode], float]

# One with settings is its class.
SIGNALS: dict[str, Any] = {
    "tests": tests,
    "partial": partial,
    "malformed": malformed,
    "integrity": integrity,
    "quality": Quality,
    "similarity": similarity,
    "tested": Tested,
    "score": Score,
}

# Signals that failures earn, too.
_PAY_FAILURES = ("partial", "similarity")
# Keys of an active signal's section that are not settings of the signal itself.
_OWN = ("weight", "cap", "label")


@dataclasses.dataclass(frozen=True)
class SignalConfig:
    """One active signal: ``"tests"``, or ``dict(name="partial", weight=0.2, cap=(0.0, 0.1))``.

    Keys of the section other than ``name``, ``weight``, ``cap`` and ``label`` are the signal's own
    settings.
    """

    # Which signal: a key of SIGNALS or package.module:object, with its settings.
    signal: Named
    # The signal is multiplied by it. It is at least 0: a penalty is a signal with negative values.
    weight: float = 1.0
    # The least and the greatest value of the component, after the weight; None for no bounds.
    cap: tuple[float, float] | None = None
    # The name of the component in the logs; "" for the name of the signal.
    label: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.weight < math.inf:
            raise ValueError(f"{self.signal.name}: {self.weight=} must be at least 0 and finite")
        if self.cap is not None and not self.cap[0] <= self.cap[1]:
            raise ValueError(f"{self.signal.name}: {self.cap=} must be (least, most)")

    @property
    def component(self) -> str:
        """Name of the component."""
        return self.label or self.signal.name.rpartition(":")[2]

    @classmethod
    def from_config(cls, value: Any, path: str) -> SignalConfig:
        """Reads the notation above, or what ``config.to_dict`` makes of it.

        Raises:
          ConfigError: a wrong section; names ``path``.
        """
        section = value.to_dict() if hasattr(value, "to_dict") else value
        own: dict[str, Any] = {}
        if isinstance(section, Mapping):
            own = {key: section[key] for key in _OWN if key in section}
            rest = {key: item for key, item in section.items() if key not in _OWN}
            section = rest["signal"] if set(rest) == {"signal"} else rest
        if isinstance(own.get("cap"), list):  # of JSON
            own["cap"] = tuple(own["cap"])
        signal = Named.from_config(section, path)
        try:
            return cls(signal, **own)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{path}: {error}") from error


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    """Which signals are active."""

    # The signals. Their components are logged and added up in this order.
    signals: tuple[SignalConfig, ...]

    def __post_init__(self) -> None:
        weights = {signal.component: signal.weight for signal in self.signals}
        if len(weights) < len(self.signals) or not weights:
            names = [signal.component for signal in self.signals]
            raise ValueError(f"signals {names} must have names of their own; give one a label")
        failures = {name: weights[name] for name in _PAY_FAILURES if name in weights}
        if failures and sum(failures.values()) >= weights.get("tests", math.inf):
            which = " and ".join(f"{name} ({weight})" for name, weight in failures.items())
            raise ValueError(
                f"the weights of {which} come to {sum(failures.values()):g}, which must be below "
                f"that of tests, {weights['tests']}: no failure may earn as much as a solution"
            )


@dataclasses.dataclass(frozen=True)
class ActiveSignal:
    """A signal that was found, with its part of the config."""

    signal: Signal
    config: SignalConfig

    def __call__(self, episode: FinishedEpisode) -> float:
        """The component: the weighted and capped signal. Raises ValueError unless it is finite."""
        value = self.config.weight * self.signal(episode)
        if not math.isfinite(value):
            raise ValueError(
                f"the reward signal {self.config.component!r} of task {episode.task.id} is {value}"
            )
        if self.config.cap is not None:
            low, high = self.config.cap
            value = min(max(value, low), high)
        return value


def find_signals(config: RewardConfig, path: str = "config.reward") -> tuple[ActiveSignal, ...]:
    """The active signals, made with their settings.

    Raises:
      ConfigError: a signal that does not exist, or settings that it does not take.
    """
    found = []
    for i, one in enumerate(config.signals):
        signal = named.make(SIGNALS, one.signal, f"{path}.signals[{i}]")
        if taken := [name for name in _OWN if name in getattr(signal, "__dataclass_fields__", ())]:
            raise ConfigError(
                f"{path}.signals[{i}] = {one.signal.name!r}: its settings {', '.join(taken)} would "
                "be taken for those of every signal; give them other names"
            )
        if not callable(signal):
            raise ConfigError(
                f"{path}.signals[{i}] = {one.signal.name!r}: {signal!r} cannot be called with a "
                "finished episode"
            )
        found.append(ActiveSignal(signal, one))
    return tuple(found)


def combine(episode: FinishedEpisode, signals: Sequence[ActiveSignal]) -> Reward:
    """The reward of a finished episode: its total is the sum of its components."""
    components = {one.config.component: one(episode) for one in signals}
    return Reward(float(sum(components.values())), components, episode.grade.flags)
