"""Score that a third-party environment gives the work, as a reward signal."""

from __future__ import annotations

import dataclasses

from rl_code.config.read_config import ConfigError
from rl_code.environment.finished import FinishedEpisode


@dataclasses.dataclass(frozen=True)
class Score:
    """The environment's reward, or one of its metrics; 0 where the episode ended before either."""

    # "reward", or the name of a metric.
    of: str = "reward"

    def __call__(self, episode: FinishedEpisode) -> float:
        """Raises ConfigError where nobody says it."""
        scores = episode.trajectory.scores
        if scores is None and episode.trajectory.status != "submitted":
            return 0.0
        if scores is None or self.of not in scores:
            known = "none: the work is graded by tests" if scores is None else ", ".join(scores)
            raise ConfigError(f"score(of={self.of!r}): task {episode.task.id} has {known}")
        return scores[self.of]
