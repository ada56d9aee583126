"""Interfaces that the cycle needs: a store of sessions, a trainer, a fleet, suites.

Each call may be made again after a kill, with the same arguments, and must then come to the same.
That is what lets every edge of the cycle be one transaction of the database alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import numpy as np
from jaxtyping import Float64, Int64
from starlette.routing import BaseRoute

from people.feedback.outcomes import Selection
from people.realtime.satisfaction import Rewards

if TYPE_CHECKING:
    from people.serving.access import KeyFile


class Overtaken(RuntimeError):
    """The cycle has gone on without this process: another one, or a person, took the edge first."""


class TrainingFailed(Exception):
    """Training came to no version, and would not the next time; the cycle refuses the candidate."""


@dataclasses.dataclass(frozen=True)
class Sessions:
    """Sessions of people, a row for each, in the order in which the sessions ended."""

    session: np.ndarray
    user: np.ndarray
    version: Int64[np.ndarray, " sessions"]
    # Unix seconds.
    at: Float64[np.ndarray, " sessions"]
    # Metric -> one number for each session, nan where it is not known: rates ("accepted", "edits",
    # "questions", "invalid_calls"), "edited" (the share of an agent's edit that the person changed,
    # so more is worse), "length", "latency", "retained", "reward" and its parts.
    values: Mapping[str, Float64[np.ndarray, " sessions"]]

    def of(self, version: int) -> Sessions:
        """The sessions that one version had."""
        kept = self.version == version
        return Sessions(
            self.session[kept],
            self.user[kept],
            self.version[kept],
            self.at[kept],
            {name: values[kept] for name, values in self.values.items()},
        )

    def metric(self, name: str) -> Float64[np.ndarray, " sessions"]:
        """Raises ValueError for a metric that nobody recorded, naming those that there are."""
        if name not in self.values:
            raise ValueError(f"no metric {name!r} of sessions; there are {sorted(self.values)}")
        return self.values[name]


@dataclasses.dataclass(frozen=True)
class Played:
    """Scores and rates of a version on one suite."""

    # Task id -> score, 0 to 1.
    scores: Mapping[str, float]
    # Rate -> its mean over episodes: "edits", "invalid_calls", "questions", "tokens", "latency".
    rates: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Routing:
    """Versions that answer users: the candidate a share of them, the deployed one the rest."""

    deployed: int
    candidate: int | None = None
    # Share of users whose answers come from the candidate, 0 without one.
    share: float = 0.0
    # Name of the experiment; the assignment of users is a keyed hash of it and the user.
    experiment: str = ""
    # Cycle, and number of its edges so far. A fleet refuses a routing that is older than its own,
    # so that a process that slept through an edge cannot undo it.
    turn: tuple[int, int] = (0, 0)
    # A version that never changes, and the share of users who always have it, the same ones in all
    # experiments; None and 0 without one.
    control: int | None = None
    control_share: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.control_share < 1 or (self.control is None) != (self.control_share == 0):
            raise ValueError(
                f"{self.control=} with {self.control_share=}: a control has a share above 0 and "
                "below 1"
            )
        if self.candidate == self.deployed or (self.candidate is None) != (self.share == 0):
            raise ValueError(
                f"{self.candidate=} with {self.share=} beside {self.deployed=}: a candidate is "
                "another version than the deployed one and has a share above 0"
            )
        if not 0 <= self.share < 1:
            raise ValueError(f"{self.share=} must be at least 0 and below 1")

    @property
    def versions(self) -> tuple[int, ...]:
        """All versions that answer users, each once."""
        every = (self.deployed, self.candidate, self.control)
        return tuple(dict.fromkeys(one for one in every if one is not None))


class Store(Protocol):
    """Store of answers, and of the reactions of people to them (``people.feedback``)."""

    def select(self, watermark: float, versions: Collection[int], most: int) -> Selection:
        """The answers of these versions that are whole, whose events are in by the watermark, and
        that no cycle has used; the newest ``most`` of them, 0 for all.
        """
        ...

    def used(self, cycle: int) -> Selection | None:
        """The selection that was marked for a cycle, less what was deleted since; None if none
        was.
        """
        ...

    def mark_used(self, cycle: int, selection: Selection) -> None:
        """Marks answers for a cycle, all or none; a second time changes nothing. Raises ValueError
        if the cycle has another selection, or another cycle one of the answers.
        """
        ...

    def sessions(self, versions: Collection[int], since: float) -> Sessions:
        """Sessions with these versions that began at or after a time: only of people whose version
        was chosen for them, also with answers that were cut off, nobody implausible.
        """
        ...

    def expire(self, cycle: int, now: float) -> None:
        """Removes what is kept no longer at a time (Unix seconds). Called at each look while a
        cycle collects. What is marked for this cycle stays.
        """
        ...


class Trainer(Protocol):
    """Trainer and suites may be at work for long. Once ``Parts.stop`` was called they raise
    ``rl_code.host.stop.Stopped`` soon, and are called again by the next process.
    """

    def train(
        self,
        cycle: int,
        base: int,
        version: int,
        selection: Selection,
        behind: Mapping[int, int],
    ) -> int:
        """Makes ``version`` of ``base`` and the selected answers, where fleet and suites find it;
        the number of updates that made it.

        behind: updates between the base and each version whose answers may be selected. After a
        kill it is called again: it goes on or starts again from ``base``. It does nothing if the
        version is whole and of the same answers. Raises TrainingFailed.
        """
        ...


class Fleet(Protocol):
    """The servers (``people.serving``)."""

    def apply(self, routing: Routing) -> None:
        """Loads what the routing names, routes users by it, then retires other versions once their
        streams have ended. Does nothing if it is so already. Raises Overtaken for a routing older
        than the one in force.
        """
        ...

    def routing(self) -> Routing | None:
        """The routing in force; None before the first."""
        ...


class Suites(Protocol):
    def play(self, version: int) -> Mapping[str, Played]:
        """Suite -> what a version came to. The same version gives the same; results may be kept."""
        ...


def never() -> bool:
    """A stop callback that never stops."""
    return False


def nothing() -> None:
    """Do nothing: the ``stop`` of parts that have nothing to stop."""


class Wait(Protocol):
    def __call__(self, seconds: float, stop: Callable[[], bool] = never) -> None:
        """Pass so many seconds in which no edge is due, or fewer once ``stop`` returns True."""
        ...


@dataclasses.dataclass(frozen=True)
class Parts:
    """The four, what happens while the cycle waits, and who serves people."""

    store: Store
    trainer: Trainer
    fleet: Fleet
    suites: Suites
    wait: Wait
    # Serves people, and further routes beside, until the context is left; yields the URL. Takes the
    # port, None for any that is free, and the keys, None where everybody may ask. None for parts
    # that serve nobody.
    serve: (
        Callable[[Sequence[BaseRoute], int | None, KeyFile | None], AbstractContextManager[str]]
        | None
    ) = None
    # Answers that the trainer takes in one update; 0 where it takes all that are selected.
    update_size: int = 0
    # Names of the metrics of the store's sessions and of the rates of suites, by which a config's
    # bounds are checked at the start; None where they are not known before.
    metrics: Collection[str] | None = None
    rates: Collection[str] | None = None
    # Rewards of recorded answers, for the page; None where no answers are recorded.
    rewards: Rewards | None = None
    # Called in a handler of signals once the process is asked to end: from now on nobody new is
    # served, and long work stops soon.
    stop: Callable[[], None] = nothing
