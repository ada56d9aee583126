"""Rows, which are episodes that the scheduler plays, and the groups that they belong to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from rl_code.environment.documents import OUTSIDE
from rl_code.environment.episode import Episode
from rl_code.rollout.forks_config import ForksConfig
from rl_code.rollout.own_way import OwnWay
from rl_code.rollout.spans import Span
from rl_code.types import Task, Trajectory


@dataclasses.dataclass(eq=False)
class Row(Span):
    """An open episode; ``tokens`` are all its tokens so far."""

    episode: Episode | None = None
    # The group this episode belongs to.
    group: OpenGroup | None = None
    # The words of the random key.
    key: tuple[int, ...] = (0, 0)
    # How its tokens are drawn; None for as the config says.
    own: OwnWay | None = None
    # Whether a worker thread is carrying out the episode's message.
    waiting: bool = False
    # The tokens of the current message that were sampled so far.
    message: list[int] = dataclasses.field(default_factory=list)
    # For each of these tokens its log-probability, and the version of the weights that sampled it.
    logprobs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    # ``Context.keys`` so far.
    keys: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    # The most tokens that its next dispatch may sample; None for as many as the engine can.
    most: int | None = None
    # Whether it repeated itself when that was last looked at (``DraftTexts.repeats``).
    repeats: bool = False
    # The parts of ``Context.choices`` so far, in the order in which tokens were sampled.
    choices: dict[str, list[np.ndarray]] = dataclasses.field(default_factory=dict)
    # Which context of the episode it is, and the rows of all contexts so far, in order; empty while
    # the episode has one.
    context: int = 0
    contexts: list[Row] = dataclasses.field(default_factory=list)
    # True if its context was given up for one that begins with a summary of it.
    over: bool = False

    def back_to(self, place: int) -> None:
        """Forgets the keys from a place on, behind which its pages hold a state. They are computed
        again by the weights of then.
        """
        self.cached = place
        self.keys = [(min(at, place), version) for at, version in self.keys]

    def kinds(self) -> list[int] | None:
        """Kinds of the places that the episode has behind ``tokens``; None without documents.

        Raises ValueError where nothing outside of documents follows the last one.
        """
        if self.runs is None:
            return None
        kinds = self.episode.documents
        if kinds[-1] != OUTSIDE:
            raise ValueError(
                f"task {self.episode.task.id}: its context ends in a document or padding; the last "
                "token must stand outside, since the next one is sampled from it"
            )
        return kinds[len(self.tokens) :]

    @property
    def ready(self) -> bool:
        """True if the row can decode: only its last token is not in the cache, and the decoder
        computes that one itself.
        """
        return not self.waiting and self.held and self.missing == 1

    @property
    def to_prefill(self) -> bool:
        """True if the row holds pages, and more tokens than its last are not in the cache."""
        return self.held and not self.waiting and self.missing > 1


@dataclasses.dataclass(eq=False)
class OpenGroup(Span):
    """A group that is not finished, and the span of its prompt.

    ``tokens`` are the prompt without its last token, which each row feeds to the decoder itself.
    """

    # What the caller gets back with the finished group.
    tag: Any = None
    # The words of the random key of its episodes.
    key: tuple[int, ...] = (0, 0)
    task: Task | None = None
    # The rows of all its episodes.
    rows: list[Row] = dataclasses.field(default_factory=list)
    # The rows that are not open yet. The prompt keeps its pages until none is left.
    unopened: list[Row] = dataclasses.field(default_factory=list)
    # Whether the prompt's pages are in the cache of the devices that decode.
    decodable: bool = False
    # Whether another process was asked for the prompt's pages in vain: it is prefilled here.
    by_itself: bool = False
    # How many prompt tokens were in the cache already when the prompt first got pages; None before
    # that.
    found: int | None = None
    # The finished trajectories, by their index in the group.
    trajectories: dict[int, Trajectory] = dataclasses.field(default_factory=dict)
    # The group whose episodes its own continue, from a turn border on (``forks``); None for a group
    # that begins at a task's prompt.
    parent: OpenGroup | None = None
    # The groups that continue its episodes.
    parts: list[OpenGroup] = dataclasses.field(default_factory=list)
    # Which of its episodes are forked, and where; None for none.
    forks: ForksConfig | None = None
    # The finished trajectories of ``parts``, by their index.
    continuations: dict[int, Trajectory] = dataclasses.field(default_factory=dict)
    # The version of the weights that prefilled the prompt; None before it got pages.
    version: int | None = None
    # Called with each finished trajectory.
    on_finished: Callable[[Trajectory], None] = lambda trajectory: None

    @property
    def whole(self) -> list[OpenGroup]:
        """The group and those that continue its episodes."""
        return [self, *self.parts]

    @property
    def finished(self) -> bool:
        """True if all its episodes are, and all that continue them."""
        due = sum(len(part.rows) for part in self.parts)
        return len(self.trajectories) == len(self.rows) and len(self.continuations) == due

    def let_go(self) -> None:
        """Forgets its rows, which know it in turn. So what they hold is freed at once: in a process
        of many objects garbage is collected seldom, and all that was answered since would stay.
        """
        for part in self.parts:
            part.let_go()
        self.rows, self.unopened, self.parts, self.parent = [], [], [], None

    def kinds(self) -> list[int] | None:
        """Kinds of the places of ``tokens``: those of the prompt, less its last."""
        return None if self.runs is None else self.rows[0].episode.documents[: self.prompt - 1]
