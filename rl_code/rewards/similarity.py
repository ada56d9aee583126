"""Reward for a change that resembles the reference's, solved or not.

As in SWE-RL (arXiv 2502.18449, section 2.1): the ratio of ``difflib.SequenceMatcher`` between the
change that was made and the one of the reference. There texts of patches are compared character by
character. Here it is words, so that another operator or constant counts as much as another name.

A failed attempt in the right file then earns more than one in the wrong file, so groups of a hard
task teach something before any episode solves it. It is no measure of what is right: another
solution than the reference's earns less of it. Its weight has to stay below that of the tests.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping

from rl_code.rewards.changes import changed, reference_change
from rl_code.rewards.finished import FinishedEpisode

_WORDS = re.compile(r"\w+|[^\w\s]")
# Work whose change has more than this times the words of the reference's earns nothing, so that
# aligning the two takes a bounded time; its ratio would be below 0.2.
_LONGER = 9
# And none is computed against a reference of more words.
_MOST = 5_000


def similarity(episode: FinishedEpisode) -> float:
    """0 to 1: how much the change of submitted, honest work resembles the reference's; 0 without a
    reference. Raises SandboxFault.
    """
    grade = episode.grade
    if not grade.submitted or grade.cheated or not episode.task.reference:
        return 0.0
    wanted = list(_words(*reference_change(episode)))
    found = list(_words(episode.files_before, episode.files_after))
    if not found or len(wanted) > _MOST or len(found) > _LONGER * len(wanted):
        return 0.0
    return difflib.SequenceMatcher(None, found, wanted, autojunk=False).ratio()


def _words(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[str]:
    """The words of a change: of each file its path, and then the lines that went and that came."""
    for path in changed(before, after):
        yield path
        lines = before.get(path, "").splitlines(), after.get(path, "").splitlines()
        for line in difflib.unified_diff(*lines, n=0, lineterm=""):
            if not line.startswith(("---", "+++", "@@")):
                yield line[0]
                yield from _WORDS.findall(line[1:])
