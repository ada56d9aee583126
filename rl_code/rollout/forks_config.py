"""Settings of forks: the episodes that part, where, and into how many continuations."""

from __future__ import annotations

import dataclasses

from rl_code.config.read_config import at_least


@dataclasses.dataclass(frozen=True)
class ForksConfig:
    """Forks of the episodes that are trained on."""

    # Episodes that go on from each border that is chosen.
    continuations: int = 4
    # A border is chosen after each so many messages of the assistant.
    every: int = 1
    # The most borders of an episode; the first ones are chosen. None for all.
    borders: int | None = None
    # Episodes of each group that are forked, the first ones. None for all.
    episodes: int | None = None

    def __post_init__(self):
        at_least(self, continuations=1, every=1, borders=1, episodes=1)

    def chooses(self, index: int, turn: int) -> bool:
        """True if the episode of this index is forked after ``turn`` messages."""
        if turn < 1 or turn % self.every or (self.episodes is not None and index >= self.episodes):
            return False
        return self.borders is None or turn // self.every <= self.borders

    def most(self, turns: int, group_size: int) -> int:
        """The most continuations of a group whose episodes have at most ``turns`` messages."""
        borders = (turns - 1) // self.every  # behind the last message nothing goes on
        if self.borders is not None:
            borders = min(borders, self.borders)
        forked = group_size if self.episodes is None else min(self.episodes, group_size)
        return forked * borders * self.continuations

    def indices(self, index: int, turn: int, group_size: int) -> range:
        """Indices of the continuations of a border. They follow from its place alone, and not from
        what was forked before: the index fixes the random stream.
        """
        first = group_size + ((turn - 1) * group_size + index) * self.continuations
        return range(first, first + self.continuations)
