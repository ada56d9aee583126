"""Rewards from tests: for a solved task, and for a part of the hidden tests."""

from __future__ import annotations

from rl_code.environment.finished import FinishedEpisode


def tests(episode: FinishedEpisode) -> float:
    """1 when every required test passes (visible and hidden) on submitted work, else 0."""
    return float(episode.grade.solved)


def partial(episode: FinishedEpisode) -> float:
    """The fraction of hidden tests passed by submitted, honest work that is no solution, else 0."""
    grade = episode.grade
    if grade.solved or grade.cheated or not grade.submitted or not grade.hidden:
        return 0.0
    return sum(grade.hidden) / len(grade.hidden)
