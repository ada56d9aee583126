"""Files changed by the work or by its task's reference, for several reward signals."""

from __future__ import annotations

from collections.abc import Mapping

from rl_code.environment.finished import FinishedEpisode
from rl_code.environment.suites.applied import texts_before


def changed(before: Mapping[str, str], after: Mapping[str, str], ending: str = "") -> list[str]:
    """Paths of the files that differ, of those with an ending."""
    paths = sorted({*before, *after})
    return [p for p in paths if p.endswith(ending) and before.get(p) != after.get(p)]


def reference_change(episode: FinishedEpisode) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Path -> text of the files before and after the reference, those of the work's change among
    them: equal where a task has no reference. Raises SandboxFault.
    """
    task, before = episode.task, episode.files_before
    if task.world is not None and episode.sandboxes is not None:
        before = texts_before(task, episode.sandboxes, task.reference)
    return before, {**before, **task.reference}
