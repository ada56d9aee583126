"""Looks for changes that solved work did not need: each hunk of its diff is reverted, and the rest
is graded again.

What solved trajectories hand in may hold changes that no test asks for: remains of attempts, files
that nobody wanted, edits made to please a reward on size or style. A hunk is a run of lines that
was replaced, added or removed, in a file of the task or of its world's layers. It is *needless* if
the work without it still solves the task. Two hunks of which either one suffices both count as
needless.

The files are made again by carrying out the calls on record in a sandbox.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from rl_code.environment.grading import grade_work
from rl_code.environment.sandbox.disposable import OutOfBounds
from rl_code.environment.sandbox.pool import File, SandboxPool, Snapshot
from rl_code.environment.sandbox.snapshot import texts
from rl_code.environment.suites.applied import texts_before
from rl_code.environment.tools.api import repeat
from rl_code.environment.tools.tool import Tool
from rl_code.environment.tools.workspace import Workspace
from rl_code.rewards.hunks import Hunk, hunks
from rl_code.text.lines import split_lines
from rl_code.types import Limits, Task, Trajectory


@dataclasses.dataclass(frozen=True)
class Review:
    """Outcome of one trajectory's changes."""

    task_id: str
    index: int
    # All hunks, and whether the work still solves the task without each of them.
    hunks: tuple[Hunk, ...]
    needless: tuple[bool, ...]
    # Why the changes could not be reviewed, in words; "" when they were.
    cause: str = ""


def without(files: Snapshot, hunk: Hunk, before: Mapping[str, str]) -> Snapshot:
    """The files with one hunk reverted. A file that was not there before goes when it is empty; one
    that is still there keeps its rights.

    files: in a world, the difference from its layers.
    """
    reverted = dict(files)
    now = reverted.get(hunk.path, "")
    lines = split_lines(texts({hunk.path: now}).get(hunk.path, ""), keepends=True)
    lines[hunk.now_at : hunk.now_at + len(hunk.now)] = hunk.before
    text = "".join(lines)
    if not lines and hunk.path not in before:
        reverted.pop(hunk.path, None)
    elif isinstance(now, File) and now.kind == "file":
        reverted[hunk.path] = dataclasses.replace(now, content=text.encode())
    else:
        reverted[hunk.path] = text
    return reverted


def review(
    task: Task,
    trajectories: Sequence[Trajectory],
    tools: Mapping[str, Tool],
    pool: SandboxPool,
    limits: Limits,
    *,
    verbose: bool,
) -> Iterator[Review]:
    """Reviews those of a task's trajectories that solved it.

    Only text files are looked at.

    tools: all of the run, by name. verbose: whether the run's protocol answers in sentences. Raises
    SandboxFault.
    """
    for trajectory in trajectories:
        if not trajectory.solved:
            continue
        if len(trajectory.contexts) > 1:
            # turns are on record context by context, not in the order of what was carried out
            yield Review(task.id, trajectory.index, (), (), "it has several contexts")
            continue
        handed_in = work_of(task, trajectory, tools, pool, limits, verbose=verbose)
        if handed_in is None:
            yield Review(task.id, trajectory.index, (), (), "its calls hand in nothing")
            continue
        if not grade_work(task, handed_in, pool, limits).solved:
            yield Review(task.id, trajectory.index, (), (), "its calls no longer solve the task")
            continue
        before = texts_before(task, pool, handed_in)
        try:
            found = hunks(before, texts(handed_in))
        except OutOfBounds as error:
            why = f"its changes cannot be compared: {error}"
            yield Review(task.id, trajectory.index, (), (), why)
            continue
        marks = [
            grade_work(task, without(handed_in, hunk, before), pool, limits).solved
            for hunk in found
        ]
        yield Review(task.id, trajectory.index, tuple(found), tuple(marks))


def work_of(
    task: Task,
    trajectory: Trajectory,
    tools: Mapping[str, Tool],
    pool: SandboxPool,
    limits: Limits,
    *,
    verbose: bool,
) -> Snapshot | None:
    """Files that a trajectory's calls hand in; None for nothing."""
    workspace = Workspace(task, pool, limits, verbose=verbose)
    with contextlib.closing(workspace):
        messages = [turn for turn in trajectory.turns if turn.role == "assistant"]
        repeat(messages, tools, workspace)
        return workspace.handed_in
