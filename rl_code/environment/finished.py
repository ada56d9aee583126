"""Input of a reward signal: one finished episode, with all that is known about it."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.types import Limits, Reward, Task, Trajectory

# Flags of the grader that prove cheating, since no honest code earns them: a frame that the harness
# did not write, a value whose ``__eq__`` says that it equals anything, a test that passed beside a
# copy of it that expects another value, and one that passed although what it calls returned another
# value to the split grader. A timeout, a killed process and a swallowed exception are no proof.
CHEATS = frozenset({"forged_result", "lying_value", "canary_passed", "suite_disagrees"})


@dataclasses.dataclass(frozen=True)
class Grade:
    """Verdict of the grader on the work that was handed in, test by test."""

    # True if the agent handed its work in; only then was it graded.
    submitted: bool
    # Passed or not, test by test, in the order of the task; empty when not graded.
    visible: tuple[bool, ...] = ()
    hidden: tuple[bool, ...] = ()
    # Observations of the grader, such as "timeout" and "killed", or a proof of cheating (CHEATS).
    flags: tuple[str, ...] = ()
    # Reason why the work could not be graded; "" if it was graded or was not handed in.
    cause: str = ""
    # Rewards of a test that is a program, by name, "reward" among them; None without one.
    scores: Mapping[str, float] | None = None
    # True if the grader has proven that the work cheats.
    cheated: bool = dataclasses.field(init=False)
    # True if the work was handed in, does not cheat, and every required test ran and passed.
    solved: bool = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        required = self.visible + self.hidden
        cheated = not CHEATS.isdisjoint(self.flags)
        solved = self.submitted and bool(required) and all(required) and not cheated
        object.__setattr__(self, "cheated", cheated)  # the class is frozen
        object.__setattr__(self, "solved", solved)

    @property
    def passed(self) -> tuple[float, float] | None:
        """The shares of visible and of hidden tests that passed; None without tests of both."""
        if not (self.visible and self.hidden):
            return None
        return sum(self.visible) / len(self.visible), sum(self.hidden) / len(self.hidden)


@dataclasses.dataclass(frozen=True)
class Usage:
    """Resources that an episode used."""

    # Messages of the assistant.
    turns: int
    tokens_sampled: int
    # Tokens of the whole trajectory: prompt, messages and observations.
    tokens_total: int
    # Well-formed calls by name of the tool; those after a submit, which do nothing, are counted.
    calls: Mapping[str, int]
    malformed_calls: int
    # Wall-clock time by activity ("tools", "grade").
    seconds: Mapping[str, float]

    @classmethod
    def of(cls, trajectory: Trajectory) -> Usage:
        """Counts what a trajectory used."""
        messages = [turn for turn in trajectory.turns if turn.role == "assistant"]
        named = (call.name for turn in messages for call in turn.calls if not call.error)
        return cls(
            turns=len(messages),
            tokens_sampled=int(trajectory.sampled.sum()),
            tokens_total=trajectory.num_tokens,
            calls=dict(collections.Counter(named)),
            malformed_calls=trajectory.malformed_calls,
            seconds=trajectory.seconds,
        )


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that happened after the episode, such as what a person did with its work."""

    name: str
    # Seconds since the epoch.
    time_s: float
    payload: Mapping[str, Any] = dataclasses.field(default_factory=dict)


# The most likely next token after each of several texts, as text, by the policy that sampled an
# episode; None for a text of more tokens than the second argument says.
type AskPolicy = Callable[[Sequence[str], int], list[str | None]]


@dataclasses.dataclass(frozen=True)
class FinishedEpisode:
    """All that a reward signal may look at."""

    task: Task
    # The whole record; its ``reward`` is not known yet and is empty.
    trajectory: Trajectory
    # Path -> text of the workspace as the agent found it, and as it left it; binary files and
    # links are left out. In a world of layers both hold the files that the task brings or the work
    # changes, and leave out the others.
    files_before: Mapping[str, str]
    files_after: Mapping[str, str]
    grade: Grade
    usage: Usage
    # In order of time; empty when the episode has just ended.
    events: tuple[Event, ...] = ()
    # Sandboxes in which a signal may run code of the work; None where there are none.
    sandboxes: SandboxPool | None = dataclasses.field(default=None, repr=False, compare=False)
    # Folder of the run, where reward models that it trains are; None outside of a run.
    workdir: Path | None = None
    # The policy that sampled the episode, for a signal that asks it; None outside of a run.
    policy: AskPolicy | None = dataclasses.field(default=None, repr=False, compare=False)
    # Notes on record (``Reward.notes``) of an episode that is played again; empty for a new one. A
    # signal that asks somebody else, who may answer otherwise today, pays by them.
    recorded: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    # Limits that it was played with; None where they are not known.
    limits: Limits | None = None


# What pays a finished episode. Raises SandboxFault where the sandbox is at fault.
type Rewarder = Callable[[FinishedEpisode], Reward]
