"""Milestones of an episode: the share of the visible tests that the work passes after each message.

The share is a potential Phi of the state: it depends on the files alone. An advantage pays its
differences to the messages that made them (``learner.milestones``). Visible tests only, since what
is paid along the way is learned whether it is right or not.

Files are kept after each message that may have changed them, and graded when the episode is over,
in sandboxes of their own, each state once. All of this may take ``limits.grade_s`` seconds; a
message whose files were not graded by then has the potential of the one before.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Literal

from absl import logging

from rl_code.environment.finished import CHEATS, Grade
from rl_code.environment.grading import PROVOKED, mark
from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.environment.sandbox.snapshot import Snapshot
from rl_code.types import Limits, Task, Tests


@dataclasses.dataclass(frozen=True)
class MilestonesConfig:
    """Measurement of milestones, which ``train.advantage`` "milestones" reads."""

    # What a milestone is. "test": each visible test. "place": all visible tests of one place, which
    # is the function that a case or a statement calls, or the file of a suite's test.
    by: Literal["test", "place"] = "test"

    def __post_init__(self) -> None:
        if self.by not in ("test", "place"):
            raise ValueError(f"by={self.by!r} must be 'test' or 'place'")


def groups_of(tests: Tests, by: Literal["test", "place"]) -> list[list[int]]:
    """Indices of the tests of each milestone, counted as in ``grading.Marks``."""
    if by == "test":
        return [[at] for at in range(len(tests))]
    ids = () if tests.suite is None else tests.suite.ids
    places = [
        *(case.target for case in tests.cases),
        *("" for _ in tests.code),
        *(f"suite {one.partition('::')[0]}" for one in ids),
    ]
    found: dict[str, list[int]] = {}
    for at, place in enumerate(places):
        found.setdefault(place, []).append(at)
    return list(found.values())


def share(groups: Sequence[Sequence[int]], passed: Sequence[bool]) -> float:
    """The share of milestones all of whose tests passed; 0 without any."""
    reached = sum(all(passed[at] for at in group) for group in groups)
    return reached / max(len(groups), 1)


class Milestones:
    """The files of one episode after each of its messages.

    start: the files that the agent starts from.
    """

    def __init__(self, task: Task, config: MilestonesConfig, start: Snapshot):
        self._task = task
        self._groups = groups_of(task.visible_tests, config.by)
        # After no message, after the first, and so on.
        self._states = [start]

    def copy(self) -> Milestones:
        """Milestones of an episode that has come the same way."""
        other = object.__new__(Milestones)
        other._task, other._groups, other._states = self._task, self._groups, [*self._states]
        return other

    def note(self, files: Snapshot | None) -> None:
        """Notes the files after a message; None where it cannot have changed any."""
        self._states.append(self._states[-1] if files is None else files)

    def potentials(
        self, final: Snapshot, verdict: Grade, pool: SandboxPool, limits: Limits
    ) -> tuple[float, ...]:
        """The potential before the first message and after each. Raises SandboxFault.

        final: the files at the end. verdict: what the tests made of them.
        """
        deadline = time.monotonic() + limits.grade_s
        known: list[tuple[Snapshot, float]] = []
        if verdict.submitted and not verdict.cause:
            passed = () if verdict.cheated else verdict.visible
            known.append((final, share(self._groups, passed) if passed else 0.0))
        out: list[float] = []
        for files in self._states:
            found = next((value for seen, value in known if seen is files or seen == files), None)
            if found is None and time.monotonic() < deadline:
                found = self._grade(files, pool, limits, deadline)
                known.append((files, found))
            out.append(found if found is not None else out[-1] if out else 0.0)
        return tuple(out)

    def _grade(self, files: Snapshot, pool: SandboxPool, limits: Limits, deadline: float) -> float:
        """The potential of files. Raises SandboxFault."""
        tests = self._task.visible_tests
        try:
            # without canaries: what a policy that cheats earns is decided by the last grade
            marks = mark(self._task, tests, files, pool, limits.command_s, deadline, canaries=0)
        except PROVOKED as error:
            logging.info("task %s: a state cannot be graded: %r", self._task.id, error)
            return 0.0
        if not CHEATS.isdisjoint(marks.flags):
            return 0.0
        return share(self._groups, [not error for error in marks.errors])
