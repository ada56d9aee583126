"""Reward, never positive, for calls that could not be understood."""

from __future__ import annotations

from rl_code.environment.finished import FinishedEpisode


def malformed(episode: FinishedEpisode) -> float:
    """Minus the number of malformed calls."""
    return float(-episode.usage.malformed_calls)
