"""The interface by which a scheduler plays an episode."""

from __future__ import annotations

from collections.abc import Sequence

from rl_code.types import Task


class SampledEpisode:
    """An episode whose messages a scheduler samples.

    It also has ``start``, ``step`` and ``finish`` as ``environment.episode.Episode`` has them,
    ``protocol``, which says where messages end, and ``budget``, the most tokens of the next
    message. Most episodes have no use for what the methods here tell.
    """

    # True if ``start`` waits for nothing. Otherwise the episodes of a group start in worker
    # threads.
    starts_at_once = True

    def __init__(self, task: Task, group: int, index: int):
        self.task = task
        self.group = group
        self.index = index

    @property
    def forkable(self) -> bool:
        """True where the episode can be forked as it stands (``Episode.fork``)."""
        return False

    def share(self, length: int) -> None:
        """Told after the start: how many first tokens of the prompt the whole group has."""

    def sampling(self, tokens: Sequence[int]) -> None:
        """Told while a message is sampled: its tokens so far."""

    def close(self) -> None:
        """Told when the episode is given up, to let go of what it holds."""
