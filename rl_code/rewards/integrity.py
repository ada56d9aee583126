"""Reward, never positive, for cheating that the grader has proven."""

from __future__ import annotations

from rl_code.environment.finished import FinishedEpisode


def integrity(episode: FinishedEpisode) -> float:
    """-1 for a proven cheat, else 0.

    A proven cheat earns nothing from its tests, so with a weight above 0 it earns less than an
    honest failure that used the same calls.
    """
    return -float(episode.grade.cheated) or 0.0
