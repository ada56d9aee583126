"""Reward by votes with a thumb: a biased contrast, in no default reward.

Few people vote, and those who do are not those who use it; what pleases a voter is not what a user
keeps. `experiments/thumbs` shows what optimising it does.
"""

from __future__ import annotations

from people.feedback.rewards.answered import Answered


def thumbs(given: Answered) -> float:
    """1 for a thumb up, -1 for a thumb down, 0 without."""
    return given.value("thumbs")
