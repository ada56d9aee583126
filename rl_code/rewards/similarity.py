"""Reward for a change that resembles the reference's, solved or not.

As in SWE-RL (arXiv 2502.18449, section 2.1): the ratio of ``difflib.SequenceMatcher`` between the
change that was made and the one of the reference. There texts of patches are compared character by
character. Here it is words, so that another operator or constant counts as much as another name.

A failed attempt in the right file then earns more than one in the wrong file, so groups of a hard
task teach something before any episode solves it. It is no measure of what is right: another
solution than the reference's earns less of it. Its weight has to stay below that of the tests.
"""

from __future__ import annotations

from collections.abc import Mapping

from absl import logging

from rl_code.environment.finished import FinishedEpisode
from rl_code.environment.sandbox.disposable import OutOfBounds, bounded
from rl_code.rewards.changes import changed, reference_change
from rl_code.rewards.resemblance import resemblance

# Characters of the files that differ, and CPU seconds in which their changes are compared. No work
# that is longer, or takes longer, resembles its reference.
_LONGEST = 4 << 20
_CPU_S = 20.0


def similarity(episode: FinishedEpisode) -> float:
    """0 to 1: how much the change of submitted, honest work resembles the reference's; 0 without a
    reference. Raises SandboxFault.
    """
    grade = episode.grade
    if not grade.submitted or grade.cheated or not episode.task.reference:
        return 0.0
    made = _differing(episode.files_before, episode.files_after)
    wanted = _differing(*reference_change(episode))
    if sum(len(text) for texts in (*made, *wanted) for text in texts.values()) > _LONGEST:
        return 0.0
    try:
        return bounded(resemblance, _CPU_S, made, wanted)
    except OutOfBounds as error:
        logging.info("task %s: its work cannot be compared: %s", episode.task.id, error)
        return 0.0


def _differing(
    before: Mapping[str, str], after: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """The files that differ, of both."""
    paths = changed(before, after)
    old = {path: before[path] for path in paths if path in before}
    return old, {path: after[path] for path in paths if path in after}
