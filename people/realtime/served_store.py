"""The store of feedback as the cycle of real servers reads it."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Sequence
from typing import Any

from absl import logging

from people.feedback.poisoning import PoisoningConfig, implausible
from people.feedback.rewards.answered import Answered, answered
from people.feedback.rewards.combine import FeedbackReward
from people.feedback.store import FeedbackStore
from people.feedback.waiting import Wait
from people.realtime.recorded import Joined, RecordedStore
from people.realtime.satisfaction import Rewarded

# Seconds between two removals of what is too old, while a cycle collects.
_EXPIRE_S = 3_600.0


class ServedStore(RecordedStore):
    """The store of feedback, where young answers wait for their events and old ones are removed,
    and where those who are implausible count neither in the test nor in guardrails and alarms.
    """

    def __init__(
        self,
        record: FeedbackStore,
        reward: FeedbackReward,
        wait: Wait,
        poisoning: PoisoningConfig,
        keep_days: float = math.inf,
    ):
        """The last three are those of ``FeedbackConfig``."""
        parts = [f"reward/{component}" for component in reward.components]
        super().__init__(record, functools.partial(rewarded, reward), ("reward", *parts))
        self._feedback, self._reward, self._wait = record, reward, wait
        self._poisoning = poisoning
        # (version, user) of those who were implausible at the last look
        self._left_out: set[tuple[int, str]] = set()
        self._keep_days = keep_days
        # The cycle in which old answers were last removed, and when (Unix seconds).
        self._expired = (0, -math.inf)

    def select(self, watermark: float, versions: Collection[int], most: int) -> Any:
        return self._feedback.select(watermark, versions, most, self._wait)

    def rewards(self, versions: Collection[int], since: float) -> Sequence[Rewarded]:
        """As ``satisfaction.Rewards``."""
        given = answered(self._feedback.joined(self._feedback.routed(versions, since)))
        return [
            Rewarded(
                one.answer.id, one.answer.version, one.answer.asked_at, self._reward(one).total
            )
            for one in given
        ]

    def expire(self, cycle: int, now: float) -> None:
        # Looks follow each other in seconds, and all writers wait meanwhile.
        last_cycle, last_at = self._expired
        if math.isinf(self._keep_days) or (cycle == last_cycle and now < last_at + _EXPIRE_S):
            return
        gone = self._feedback.expire(now, self._keep_days, open_cycle=cycle)
        self._expired = cycle, now
        if gone.answers or gone.events:
            words = "%d answers and %d events were older than %g days and are removed"
            logging.info(words, gone.answers, gone.events, self._keep_days)

    def _believed(self, joined: Joined) -> Joined:
        # Each version by itself. Beside the deployed one, of which there are more, everybody who
        # has a much worse candidate would look implausible, and the test would not see the harm.
        of_version: dict[int, list[Answered]] = {}
        for one in answered(joined):
            of_version.setdefault(one.answer.version, []).append(one)
        left_out = {
            (version, user)
            for version, given in of_version.items()
            for user in implausible(given, self._poisoning)
        }
        if left_out != self._left_out:
            self._left_out = left_out
            logging.info("%d users are implausible and left out of the test", len(left_out))
        return [one for one in joined if (one[0].version, one[0].user) not in left_out]


def rewarded(reward: FeedbackReward, joined: Joined) -> list[dict[str, float]]:
    """The reward of each answer, and its parts, as metrics of its session: as in training, where a
    question earns what the answer after it does.
    """
    found = [reward(given) for given in answered(joined)]
    return [
        {"reward": one.total} | {f"reward/{name}": value for name, value in one.components.items()}
        for one in found
    ]
