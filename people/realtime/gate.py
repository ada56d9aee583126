"""The gate: what a candidate must come to on suites before anybody is served by it.

On each suite it is compared with the deployed version and with a pinned anchor, task by task: the
lower end of the 95 % interval of the mean paired difference must be above -margin. The anchor is
there because many steps that are each within the margin may go a long way down. Rates of what it
did while playing must be within their bounds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from people.realtime.parts import Played
from rl_code.config.read_config import at_least
from rl_code.evaluation.paired import paired_difference
from rl_code.evaluation.passk import Interval


@dataclasses.dataclass(frozen=True)
class RateBound:
    """Bounds of a rate. None for no such bound."""

    # Name of the rate among those of a suite (``Played.rates``), such as "invalid_calls".
    rate: str
    # The lowest and the highest that it may be.
    least: float | None = None
    most: float | None = None
    # The most that it may be above, and below, the rate of the deployed version.
    rise: float | None = None
    fall: float | None = None

    def __post_init__(self) -> None:
        if self.least is None and self.most is None and self.rise is None and self.fall is None:
            raise ValueError(f"the bound of {self.rate} needs one of least, most, rise and fall")
        if min(self.rise or 0.0, self.fall or 0.0) < 0:
            raise ValueError(f"{self.rise=} and {self.fall=} must be at least 0")


@dataclasses.dataclass(frozen=True)
class GateConfig:
    """Conditions under which a candidate may be shown to people."""

    # The most that the lower end of an interval may lie below zero, in score.
    margin: float = 0.02
    # The same against the anchor.
    anchor_margin: float = 0.02
    # Fewer tasks than this say too little; the gate refuses.
    least_tasks: int = 20
    # Bounds of rates, on each suite.
    rates: tuple[RateBound, ...] = ()

    def __post_init__(self) -> None:
        at_least(self, margin=0, anchor_margin=0, least_tasks=2)


@dataclasses.dataclass(frozen=True)
class Check:
    """One check of the gate: a difference or a rate, and its outcome."""

    suite: str
    # "deployed" or "anchor" for a difference, else the name of a rate.
    what: str
    # The difference with its interval, or the rate.
    value: Interval
    passed: bool
    # The value found, and the value required, in words.
    text: str


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Decision about a candidate, and all checks that led to it."""

    passed: bool
    checks: tuple[Check, ...]

    @property
    def reason(self) -> str:
        """Reason in words: the checks that failed, or the number that passed."""
        failed = [f"{one.suite}: {one.text}" for one in self.checks if not one.passed]
        return "; ".join(failed) if failed else f"{len(self.checks)} checks passed"


def judge(
    config: GateConfig,
    candidate: Mapping[str, Played],
    deployed: Mapping[str, Played],
    anchor: Mapping[str, Played],
) -> Verdict:
    """Compares what three versions came to, suite by suite.

    Raises ValueError without suites, for suites or tasks that not all three have played, or a rate
    with a bound that was not measured.
    """
    if not candidate or not candidate.keys() == deployed.keys() == anchor.keys():
        raise ValueError(
            f"all three must have played the same suites, at least one: candidate "
            f"{sorted(candidate)}, deployed {sorted(deployed)}, anchor {sorted(anchor)}"
        )
    checks = []
    for suite, played in candidate.items():
        for what, other, margin in (
            ("deployed", deployed[suite], config.margin),
            ("anchor", anchor[suite], config.anchor_margin),
        ):
            checks.append(_difference(suite, what, played, other, margin, config.least_tasks))
        for bound in config.rates:
            checks.append(_rate(suite, bound, played, deployed[suite]))
    return Verdict(all(one.passed for one in checks), tuple(checks))


def _difference(
    suite: str, what: str, played: Played, other: Played, margin: float, least: int
) -> Check:
    if played.scores.keys() != other.scores.keys():
        apart = sorted(played.scores.keys() ^ other.scores.keys())
        raise ValueError(
            f"suite {suite}: candidate and {what} played other tasks: {', '.join(apart[:5])}"
        )
    tasks = sorted(played.scores)
    if len(tasks) < least:
        nothing = Interval(0.0, -1.0, 1.0)
        return Check(suite, what, nothing, False, f"{len(tasks)} tasks, at least {least} needed")
    before = [other.scores[task] for task in tasks]
    found = paired_difference(before, [played.scores[task] for task in tasks]).paired
    text = (
        f"{found.mean:+.4f} [{found.low:+.4f}, {found.high:+.4f}] against the {what} version, the "
        f"lower end must be above {-margin:+.4f}"
    )
    # an interval without width at the margin itself is no evidence for better
    return Check(suite, what, found, found.low > -margin, text)


def _rate(suite: str, bound: RateBound, played: Played, deployed: Played) -> Check:
    name = bound.rate
    for one in (played, deployed):
        if name not in one.rates:
            raise ValueError(f"suite {suite}: no rate {name!r}; there are {sorted(one.rates)}")
    value = played.rates[name]
    before = deployed.rates[name]
    lows = [bound.least, None if bound.fall is None else before - bound.fall]
    highs = [bound.most, None if bound.rise is None else before + bound.rise]
    low = max((one for one in lows if one is not None), default=float("-inf"))
    high = min((one for one in highs if one is not None), default=float("inf"))
    text = f"{name} {value:.4g} (deployed {before:.4g}), must be within [{low:.4g}, {high:.4g}]"
    return Check(suite, name, Interval(value, value, value), low <= value <= high, text)
