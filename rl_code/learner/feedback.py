"""Feedback: texts that a teacher reads beside an episode's prompt and the policy does not.

A member of FEEDBACKS makes the text for one trajectory out of its group, which is on record, so a
replay makes the same text. A trajectory for which it has no text is not taught.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from rl_code.config import named
from rl_code.config.named import Named
from rl_code.environment.tools.run_tests import call_of, failed_code
from rl_code.types import Group, Task, Tests, Trajectory


@dataclasses.dataclass(frozen=True)
class Feedback:
    """A frozen dataclass whose fields are its settings."""

    @property
    def reads_test_errors(self) -> bool:
        """True if it reads ``Trajectory.test_errors``, which are then on record."""
        return False

    def __call__(self, group: Group, trajectory: Trajectory) -> str:
        """The text for a trajectory of the group; "" for none."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class FailedTests(Feedback):
    """Tests that the work of the trajectory itself fails, each with what it said.

    They are known where work was handed in and graded (``Trajectory.test_errors``).
    """

    # Text in front of them.
    words: str = "An attempt at this failed these tests:"
    # True if hidden tests are told as well as visible ones.
    hidden: bool = False
    # The most tests that are told.
    most: int = 3

    def __post_init__(self):
        if self.most < 1:
            raise ValueError(f"most={self.most} must be at least 1")

    @property
    def reads_test_errors(self) -> bool:
        return True

    def __call__(self, group: Group, trajectory: Trajectory) -> str:
        task = group.task
        told = (task.visible_tests, task.hidden_tests)[: 1 + self.hidden]
        if not trajectory.test_errors:
            return ""
        names = [name for tests in told for name in _names(task, tests)]
        failed = [
            name(error) for name, error in zip(names, trajectory.test_errors, strict=False) if error
        ]
        return self.of(failed)

    def of(self, failed: Sequence[str]) -> str:
        """The text for the lines of the tests that failed; "" for none."""
        return "\n".join([self.words, *failed[: self.most]]) if failed else ""


@dataclasses.dataclass(frozen=True)
class LastResult(Feedback):
    """The last result of a tool in the trajectory, such as the output of its last run of tests."""

    # Name of the tool.
    tool: str = "run_tests"
    # Text in front of the result.
    words: str = "An attempt at this ended with:"

    def __call__(self, group: Group, trajectory: Trajectory) -> str:
        found = [
            result.content
            for turn in trajectory.turns
            for result in turn.results
            if result.name == self.tool
        ]
        return f"{self.words}\n{found[-1]}" if found else ""


@dataclasses.dataclass(frozen=True)
class Hint(Feedback):
    """A text that came with the task."""

    # Key of ``Task.meta`` that holds it. A task without the key has no hint.
    key: str = "hint"
    # Text in front of it.
    words: str = "Hint:"

    def __call__(self, group: Group, trajectory: Trajectory) -> str:
        hint = group.task.meta.get(self.key)
        return f"{self.words}\n{hint}" if hint else ""


@dataclasses.dataclass(frozen=True)
class Reference(Feedback):
    """The reference solution of the task."""

    # Text in front of it.
    words: str = "A solution is:"

    def __call__(self, group: Group, trajectory: Trajectory) -> str:
        files = group.task.reference
        if len(files) == 1:
            return f"{self.words}\n{next(iter(files.values()))}"
        texts = [f"{path}\n{text}" for path, text in sorted(files.items())]
        return "\n".join([self.words, *texts]) if texts else ""


@dataclasses.dataclass(frozen=True)
class SolvedSibling(Feedback):
    """Messages of the first other trajectory of the group that is solved (2601.20802: a success of
    the group is feedback for the others where there are no words).
    """

    # Text in front of them.
    words: str = "This solved it:"

    def __call__(self, group: Group, trajectory: Trajectory) -> str:
        for other in group.trajectories:
            if other.solved and other.index != trajectory.index:
                said = [turn.text for turn in other.turns if turn.role == "assistant"]
                return "\n".join([self.words, *said])
        return ""


@dataclasses.dataclass(frozen=True)
class Several(Feedback):
    """Several feedbacks, one below the other; without those that have no text."""

    # Members of FEEDBACKS, each with its settings.
    parts: tuple[Named, ...]

    def __post_init__(self):
        _ = self.members  # a wrong name is found now

    @property
    def members(self) -> list[Feedback]:
        """The feedbacks themselves. Raises ConfigError."""
        path = "config.train.teacher.feedback.parts"
        return [named.make(FEEDBACKS, part, path) for part in self.parts]

    @property
    def reads_test_errors(self) -> bool:
        return any(member.reads_test_errors for member in self.members)

    def __call__(self, group: Group, trajectory: Trajectory) -> str:
        return "\n\n".join(filter(None, (member(group, trajectory) for member in self.members)))


FEEDBACKS: dict[str, Callable[..., Feedback]] = {
    "failed_tests": FailedTests,
    "last_result": LastResult,
    "hint": Hint,
    "reference": Reference,
    "solved_sibling": SolvedSibling,
    "several": Several,
}


def with_feedback(task: Task, text: str) -> Task:
    """The task with a text behind its last message.

    Raises ValueError for a task without a message.
    """
    if not task.messages:
        raise ValueError(f"task {task.id!r} has no message that feedback could follow")
    *before, last = task.messages
    content = last["content"]
    if isinstance(content, str):
        content = f"{content}\n\n{text}"
    else:
        content = (*content, {"type": "text", "text": f"\n\n{text}"})
    return dataclasses.replace(task, messages=(*before, {**last, "content": content}))


def _names(task: Task, tests: Tests) -> Iterator[Callable[[str], str]]:
    """For each test, in the order of ``Trajectory.test_errors``, its line for an error."""
    for case in tests.cases:
        name = case.target.rpartition(":")[2] or task.entry_point
        yield lambda error, name=name, case=case: (
            # the grader begins with the call, unless it made none
            error
            if error.startswith(f"{name}(")
            else failed_code(call_of(name, case), error, verbose=True)
        )
    named = (
        *(tests.suite.ids if tests.suite else ()),
        *([tests.script.program] if tests.script else ()),
    )
    for test in (*tests.code, *named):
        yield lambda error, test=test: failed_code(test, error, verbose=True)
