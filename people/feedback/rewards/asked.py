"""Reward for a question to the person: right on an ambiguous task, a cost on a clear one.

A question earns nothing on its own. On an ambiguous task it earns what the answer after it earns,
so asking is not punished where it leads to the right edit. On a clear one it costs the person's
time.
So deferring neither avoids the risk of an edit, nor is it punished when it is right.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from people.feedback.rewards.answered import Answered
from people.feedback.rewards.retention import retention


@dataclasses.dataclass(frozen=True)
class Asked:
    """0 for an answer that is no question (``AnswerRecord.extra["question"]``)."""

    # Value of the person's time, where the task is clear: ``extra["ambiguous"]`` of the answer, or
    # of an event of the person's client, says so.
    cost: float = 0.25
    # Measure of the edit after the question: "retention", or "accepted" for +1 and 0.
    by: str = "retention"

    def __post_init__(self) -> None:
        if not self.cost >= 0:
            raise ValueError(f"{self.cost=} must be at least 0: it is taken away")
        if self.by not in _EARNS:
            raise ValueError(f"by={self.by!r}: expected one of {', '.join(_EARNS)}")

    def __call__(self, given: Answered) -> float:
        """-cost on a clear task; 0 where nobody knows whether it was clear, or where no edit came
        after the question.
        """
        if not given.is_question:
            return 0.0
        ambiguous = _ambiguous(given)
        if ambiguous is None:
            return 0.0
        if not ambiguous:
            return -self.cost
        edit = next((one for one in given.later if not one.is_question), None)
        return 0.0 if edit is None else _EARNS[self.by](edit)


def _ambiguous(given: Answered) -> Any:
    """True or False by the server's word, or else by the client's; None where nobody knows."""
    said = (one.extra.get("ambiguous") for one in (given.answer, *given.events))
    return next((one for one in said if one is not None), None)


_EARNS: dict[str, Callable[[Answered], float]] = {
    "retention": retention,
    "accepted": lambda given: float(given.accepted),
}
