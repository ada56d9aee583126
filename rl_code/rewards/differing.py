"""The change of work, and of a task's reference, as text for those who judge it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from rl_code.environment.finished import FinishedEpisode
from rl_code.environment.sandbox.disposable import OutOfBounds
from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.environment.suites.applied import texts_before
from rl_code.rewards.changes import changed
from rl_code.rewards.hunks import hunks
from rl_code.types import Task

# Characters of the files that differ; a larger change has no text.
_LONGEST = 4 << 20


def work_diff(episode: FinishedEpisode) -> str | None:
    """The change of the work; None for one that is too large. Raises SandboxFault."""
    return diff(episode.files_before, episode.files_after)


def reference_diff(task: Task, sandboxes: SandboxPool | None) -> str | None:
    """The change of the task's reference, "" where it has none; otherwise as ``work_diff``.

    sandboxes: in which the layers of a world are read.
    """
    if not task.reference:
        return ""
    before: Mapping[str, str] = task.files
    if task.world is not None and sandboxes is not None:
        before = texts_before(task, sandboxes, task.reference)
    return diff(before, {**before, **task.reference})


def diff(before: Mapping[str, str], after: Mapping[str, str]) -> str | None:
    """The runs of lines in which two sets of files differ: for each file a line with its path, for
    each run the number of its first line and its lines with - and +. None beyond the bounds.

    The texts are compared in a disposable process. Raises SandboxFault.
    """
    paths = changed(before, after)
    old = {path: before[path] for path in paths if path in before}
    new = {path: after[path] for path in paths if path in after}
    if sum(len(text) for texts in (old, new) for text in texts.values()) > _LONGEST:
        return None
    try:
        found = hunks(old, new)
    except OutOfBounds:
        return None
    lines = []
    for path, own in itertools.groupby(found, key=lambda hunk: hunk.path):
        lines.append(f"file {path}")
        for hunk in own:
            lines += [f"@ line {hunk.at + 1}", *hunk.diff]
    return "\n".join(lines)
