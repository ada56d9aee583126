"""Reward for what is still there later: the share of the accepted text that is alive."""

from __future__ import annotations

from people.feedback.rewards.answered import Answered


def retention(given: Answered) -> float:
    """0 to 1: the share of the accepted tokens alive at the last horizon that was reached (30 s, 5
    min, 1 h); 0 for what was not accepted, or where no horizon was reached.

    A later horizon replaces an earlier one, so the reward of an answer may still change.
    """
    if not given.accepted:
        return 0.0
    retained = [event for event in given.events if event.kind == "retained"]
    last = max(retained, key=lambda event: event.horizon_s, default=None)
    return 0.0 if last is None else last.value
