"""The section of a config for what people did."""

from __future__ import annotations

import dataclasses

from people.feedback.checks import Claims
from people.feedback.poisoning import PoisoningConfig
from people.feedback.records import HORIZONS_S
from people.feedback.rewards.combine import FeedbackRewardConfig
from people.feedback.waiting import Wait


@dataclasses.dataclass(frozen=True)
class FeedbackConfig:
    """Storage of answers and events, the time they are kept, and the rewards made of them."""

    # URL of the database (``database.connect``); "" for people.db in the workdir.
    database: str = ""
    # Days after which answers and events are removed, by a cycle that collects.
    keep_days: float = 90.0
    # Seconds after which an answer without events has the reward of silence. Younger ones wait for
    # the next cycle. One that was accepted waits for its last look too, and at most so long beyond
    # the time from which that may be claimed.
    silence_s: float = 3_600.0
    # Rule by which the claims of clients are believed.
    claims: Claims = Claims()
    reward: FeedbackRewardConfig = FeedbackRewardConfig()
    poisoning: PoisoningConfig = PoisoningConfig()

    def __post_init__(self) -> None:
        if not self.keep_days > 0:
            raise ValueError(f"{self.keep_days=} must be above 0")
        if not self.silence_s >= 0:
            raise ValueError(f"{self.silence_s=} must be at least 0")

    @property
    def wait(self) -> Wait:
        """The wait of an answer before a cycle trains on it."""
        return Wait(self.silence_s, max(HORIZONS_S[-1] - self.claims.early_s, 0.0))

    def url(self, workdir: str) -> str:
        """The URL of the database of a run."""
        return self.database or f"sqlite:///{workdir}/people.db"
