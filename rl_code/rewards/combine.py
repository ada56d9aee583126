"""All reward signals by name, which of them a config makes active, and their sum.

A signal is a function of one finished episode. One with settings is a frozen dataclass whose fields
are its settings and which is called in the same way. It returns a number, or ``noted.Noted``, a
number with notes for the record. Whatever it raises on an episode is an
outcome: the episode earns no more than an honest failure, has the flag SIGNAL_ERROR, and is
counted. With ``reward.on_error="stop"`` the run ends instead, to find bugs of a signal of one's
own. A ConfigError of a signal always ends it, and a SandboxFault masks the episode.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import logging

from models.tokenizer import Tokenizer
from rl_code.config import named
from rl_code.config.named import Named
from rl_code.config.read_config import ConfigError
from rl_code.environment.finished import FinishedEpisode, Rewarder
from rl_code.environment.sandbox.errors import SandboxFault
from rl_code.environment.tools.text import cut_middle
from rl_code.rewards.integrity import integrity
from rl_code.rewards.malformed import malformed
from rl_code.rewards.noted import Noted
from rl_code.rewards.overlong import Overlong
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
    "overlong": Overlong,
    "rubric": "rl_code.rewards.rubric:Rubric",
    "process": "rl_code.rewards.process:ProcessReward",
    "reward_model": "rl_code.rewards.reward_model:RewardModel",
}

# The flag of an episode of which a signal raised an exception.
SIGNAL_ERROR = "signal_error"
# Signals that failures earn, too.
_PAY_FAILURES = ("partial", "similarity", "rubric", "process", "reward_model")
# Characters of an exception in the log.
_DESCRIBED = 8000
# Keys of an active signal's section that are not settings of the signal itself.
_OWN = ("weight", "cap", "label")


@dataclasses.dataclass(frozen=True)
class SignalConfig:
    """One active signal: ``"tests"``, or ``dict(name="partial", weight=0.2, cap=(0.0, 0.1))``.

    Keys of the section other than ``name``, ``weight``, ``cap`` and ``label`` are the signal's own
    settings.
    """

    # The signal: a key of SIGNALS or package.module:object, with its settings.
    signal: Named
    # The signal is multiplied by it. It is at least 0: a penalty is a signal with negative values.
    weight: float = 1.0
    # The least and the greatest value of the component, after the weight. None bounds penalties
    # alone: no episode loses more by one signal than the greater of 1 and its weight.
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

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the greatest value of the component."""
        return (-max(1.0, self.weight), math.inf) if self.cap is None else self.cap

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
    """Active reward signals, and the treatment of their exceptions."""

    # The signals. Their components are logged and added up in this order.
    signals: tuple[SignalConfig, ...]
    # An exception of a signal: "count" it as an outcome of the episode, or "stop" the run.
    on_error: str = "count"

    def __post_init__(self) -> None:
        check_on_error(self.on_error)
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


def check_on_error(value: str) -> None:
    """Raises ValueError for what is no value of ``on_error``."""
    if value not in ("count", "stop"):
        raise ValueError(f"on_error={value!r} must be 'count' or 'stop'")


@dataclasses.dataclass(frozen=True)
class ActiveSignal[T]:
    """A signal that was found, with its part of the config."""

    signal: Callable[[T], float]
    config: SignalConfig
    # True if an exception of the signal ends the run.
    stops: bool = False

    def __call__(self, given: T) -> float:
        """The component: the weighted and capped signal. Raises ValueError unless it is finite, and
        what the signal raises.
        """
        return self.noted(given)[0]

    def noted(self, given: T) -> tuple[float, Mapping[str, Any] | None]:
        """The component and the signal's notes, None for none; raises as a call."""
        found = self.signal(given)
        # a plain number, which records can hold, of one of numpy's or jax's
        value = self.config.weight * float(found)
        if not math.isfinite(value):
            raise ValueError(f"the reward signal {self.config.component!r} is {value}")
        low, high = self.config.bounds
        notes = found.notes if isinstance(found, Noted) else None
        return min(max(value, low), high), notes


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
        found.append(ActiveSignal(signal, one, config.on_error == "stop"))
    return tuple(found)


def check_models(config: RewardConfig, tokenizer: Tokenizer) -> None:
    """Checks before a run begins that models which pay it are there: the first episode with work to
    score may be hours away. A signal with a model has the method ``check_model``.

    tokenizer: the policy's. Raises ConfigError.
    """
    for one in find_signals(config):
        check_model = getattr(one.signal, "check_model", None)
        if check_model is not None:
            check_model(tokenizer)


def find_reward(config: RewardConfig) -> Rewarder:
    """Function that pays an episode: ``combine`` of the active signals. Raises ConfigError as
    ``find_signals``.
    """
    return functools.partial(combine, signals=find_signals(config))


def combine(episode: FinishedEpisode, signals: Sequence[ActiveSignal]) -> Reward:
    """The reward of a finished episode: its total is the sum of its components. Raises
    SandboxFault, ConfigError, and what a signal raises that stops the run.
    """
    notes: dict[str, Mapping[str, Any]] = {}
    components, error = components_of(episode, signals, f"task {episode.task.id}", notes)
    flags = (*episode.grade.flags, *([SIGNAL_ERROR] if error else []))
    return Reward(float(sum(components.values())), components, flags, notes or None)


def components_of[T](
    given: T,
    signals: Sequence[ActiveSignal[T]],
    name: str,
    notes: dict[str, Mapping[str, Any]] | None = None,
) -> tuple[dict[str, float], bool]:
    """The components of what is rewarded, and whether a signal raised: then only penalties are
    left, so that nothing is gained by work on which a signal fails.

    name: of what is rewarded, for messages. notes: takes those of the signals, by component. Raises
    as ``combine``.
    """
    components = {}
    error = False
    for one in signals:
        try:
            components[one.config.component], written = one.noted(given)
            if notes is not None and written is not None:
                notes[one.config.component] = written
        except (SandboxFault, ConfigError):
            raise
        # a signal's library may leave by sys.exit, too
        except (Exception, SystemExit) as raised:
            if one.stops:
                raise
            logging.warning(
                "the reward signal %r of %s failed: %s",
                one.config.component,
                name,
                described(raised),
            )
            components[one.config.component] = 0.0
            error = True
    if error:
        components = {one: min(value, 0.0) for one, value in components.items()}
    return components, error


def described(raised: BaseException) -> str:
    """An exception with its traceback, of which the middle is left out where it is long: its
    message may hold all that the agent wrote.
    """
    return cut_middle("".join(traceback.format_exception(raised)), _DESCRIBED)
