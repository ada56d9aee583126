"""Penalty for an edit that the person changes soon afterwards, takes back, or refuses as a whole.

An answer that the person rejected counts as one that was taken back, also where there was nothing
to take back: a call that could not be read, or a question in place of an edit. Without this both
would earn more than a wrong edit, and a policy that cannot solve a task would do best to break its
call (docs/results/broken_calls.md, questions.md).
"""

from __future__ import annotations

import dataclasses

from people.feedback.rewards.answered import Answered


@dataclasses.dataclass(frozen=True)
class ReEdited:
    """Minus the share of the edit's tokens that the person changed, or took back: the greater; -1
    for an answer that was rejected.
    """

    # Seconds after the answer; later changes are the person's own work.
    within_s: float = 600.0

    def __post_init__(self) -> None:
        if not self.within_s > 0:
            raise ValueError(f"{self.within_s=} must be above 0")

    def __call__(self, given: Answered) -> float:
        """-1 to 0."""
        if given.first("rejected") is not None and not given.accepted:
            return -1.0
        return -max(given.soon("edited", self.within_s), given.soon("reverted", self.within_s))
