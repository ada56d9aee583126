"""Tasks of another source, and their parts: sub-tasks with tests of their own.

Where a policy hardly ever does the whole, it may do a part, and be rewarded for it. What is a part
depends on the task (``WAYS``):

  steps   of a generated task, what the first steps of its program do
  places  of a task whose tests call several functions, or stand in several files of a suite: the
          same work, of which the tests of one place decide. Only places with hidden tests are
          parts: what the visible ones say alone can be written down by heart.

A part of a task of one split never is a task of another: compositions of operations that are held
out stay held out.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rl_code.config.read_config import shares
from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.tasks.generated import beginning
from rl_code.tasks.of_another import OfAnother
from rl_code.tasks.stream import Stream
from rl_code.types import Suite, Task, Tests

# The key of ``Task.meta`` that says which a task is: WHOLE or PART. A curriculum may sort by it.
KIND = "part"
WHOLE, PART = "whole", "part"


def by_steps(task: Task) -> list[Task]:
    """The beginnings of a generated task's program, the shortest first; [] for other tasks."""
    if task.meta.get("source") != "generated":
        return []
    lengths = range(1, len(task.meta["program"]))
    found = [beginning(task, length) for length in lengths]
    return [part for part in found if part is not None]


def by_places(task: Task) -> list[Task]:
    """A task for each place of the hidden tests; [] where there are fewer than two."""
    places = places_of(task.hidden_tests)
    if len(places) < 2:
        return []
    return [_at(task, place) for place in places]


WAYS: Mapping[str, Callable[[Task], list[Task]]] = {"steps": by_steps, "places": by_places}


def places_of(tests: Tests) -> list[str]:
    """The places of tests, each once: "" for the task's own function, path:function for another,
    and the file of a suite's tests that have to pass and do not yet.
    """
    own = [""] if tests.code else []
    called = [*(case.target for case in tests.cases), *own]
    files = [] if tests.suite is None else [_file(one) for one in tests.suite.fail_to_pass]
    return list(dict.fromkeys([*called, *files]))


def _file(id: str) -> str:
    return id.partition("::")[0]


def _at(task: Task, place: str) -> Task:
    """The part of a task whose tests are those of one place."""
    name = place or f"{task.path}:{task.entry_point}"
    return dataclasses.replace(
        task,
        id=f"{task.id}/{name}",
        messages=_asking(task.messages, f"Do only this part of it: {name}"),
        visible_tests=_restricted(task.visible_tests, place),
        hidden_tests=_restricted(task.hidden_tests, place),
        meta={**task.meta, "place": name},
    )


def _restricted(tests: Tests, place: str) -> Tests:
    """The tests of a place. What passes before the work still has to, wherever it stands."""
    suite = tests.suite
    if suite is not None:
        wanted = tuple(one for one in suite.fail_to_pass if _file(one) == place)
        suite = Suite(suite.files, wanted, suite.pass_to_pass, suite.command) if wanted else None
    cases = tuple(case for case in tests.cases if case.target == place)
    return Tests(cases, () if place else tests.code, suite)


def _asking(messages: Sequence[Mapping[str, Any]], request: str) -> tuple[Mapping[str, Any], ...]:
    """Messages whose last one ends with a request."""
    *before, last = messages
    content = last["content"]
    if isinstance(content, str):
        content = f"{content}\n\n{request}"
    else:
        content = (*content, {"type": "text", "text": f"\n\n{request}"})
    return (*before, {**last, "content": content})


@dataclasses.dataclass(frozen=True)
class Subtasks(OfAnother):
    """The tasks of another source with their parts. Of a list all are there: the whole tasks, then
    the parts of each. In a stream without end a part stands in the place of some whole tasks.
    """

    # How a task is split: a key of WAYS.
    by: Literal["steps", "places"]
    # In a stream, the share of the tasks in whose place one of their parts stands, if they have
    # any.
    share: float = 0.5
    # Of a list, whether the whole tasks are among them.
    whole: bool = True

    def __post_init__(self) -> None:
        if self.by not in WAYS:
            raise ValueError(f"by={self.by!r} must be one of {', '.join(map(repr, WAYS))}")
        shares(self, "share")

    @property
    def demonstrated(self) -> tuple[str, ...]:
        """Ways of the other source, if its parts are solved as its tasks are; else none."""
        return self._source.demonstrated if self.by == "steps" else ()

    def load(self, pool: SandboxPool | None, workdir: Path | None) -> Sequence[Task]:
        tasks = self._source.load(pool, workdir)
        if self._source.endless:
            return Stream(lambda i: self._drawn(tasks[i]))
        parts = [_named(part, PART) for task in tasks for part in WAYS[self.by](task)]
        return [*(_named(task, WHOLE) for task in tasks if self.whole), *parts]

    def _drawn(self, task: Task) -> Task:
        """A task of a stream, or one of its parts; the same for the same task."""
        rng = random.Random(f"subtasks/{task.id}")
        parts = WAYS[self.by](task) if rng.random() < self.share else []
        return _named(rng.choice(parts), PART) if parts else _named(task, WHOLE)


def _named(task: Task, kind: str) -> Task:
    return dataclasses.replace(task, meta={**task.meta, KIND: kind})
