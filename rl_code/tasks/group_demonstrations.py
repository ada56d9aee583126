"""Demonstrations that take part in groups of training, as messages of an episode."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from rl_code.config.read_config import at_least
from rl_code.tasks.demonstrations import DemonstrationConfig, Segment


@dataclasses.dataclass(frozen=True)
class GroupDemonstrations:
    """One trajectory of each group is a demonstration, the last one (``learner.demonstrated``)."""

    # How the tasks are demonstrated; by default always rightly.
    demonstration: DemonstrationConfig = DemonstrationConfig(p_right=1.0)
    # Number of steps whose groups have one, from the first on; None for all steps.
    steps: int | None = None

    def __post_init__(self):
        at_least(self, steps=1)


def messages_of(segments: Sequence[Segment]) -> list[str]:
    """Texts of the messages that the agent writes in a demonstration, in order.

    What tools answer is left out: an episode that says these messages gets the answers for real.
    """
    runs = itertools.groupby(segments, key=lambda segment: segment.sampled)
    return ["".join(segment.text for segment in run) for sampled, run in runs if sampled]
