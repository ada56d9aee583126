"""Groups that wait, and the rows of episodes that are open, whichever engine samples them.

A group waits in the queue until its episodes are opened. An open episode is a row until it is over.
Older ones come first.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

from rl_code.environment.frames import Elsewhere
from rl_code.rollout.contexts import context_key
from rl_code.rollout.rows import OpenGroup, Row
from rl_code.rollout.spans import ContextRuns
from rl_code.rollout.stats import RolloutStats


class OpenRows:
    """Opens groups and rows, and closes them.

    episodes: the most that are open at once. prompt_length: tokens of the longest prompt.
    """

    def __init__(self, episodes: int, prompt_length: int):
        self._episodes = episodes
        self._prompt_length = prompt_length
        # of the weights that sample; None before any are loaded
        self._version: int | None = None
        self.stats = RolloutStats()
        self.clear()

    def clear(self) -> None:
        """Forgets every group and row."""
        # groups that wait to be opened
        self.queue: collections.deque[OpenGroup] = collections.deque()
        # open episodes, oldest first
        self.rows: list[Row] = []

    def add(self, group: OpenGroup, prompts: Sequence[list[int]], most: int | None = None) -> None:
        """A group whose episodes have started waits to be opened. One that continues episodes of
        another group comes first, so that its own group is finished soon.

        prompts: of each row. They differ where agents of others begin differently: the rows then
        share what all have, and go on on their own. most: the most tokens that they share, where
        that is less than the engine allows. Raises ValueError where that is next to nothing.
        """
        longest = self._prompt_length
        shared = min(_in_common(prompts), longest if most is None else min(most, longest))
        if shared < 2:
            raise ValueError(
                f"task {group.task.id}: the prompts of its {len(prompts)} episodes have only "
                f"{shared} tokens in common"
            )
        # The group's span lacks the prompt's last token: each row feeds that to the decoder itself,
        # to get the logits for its first sampled token. Rows are opened from the end of
        # ``unopened``, so in the order of their index.
        group.prompt = shared
        group.runs = self._runs()
        group.add(prompts[0][: shared - 1], group.kinds())
        for row, prompt in zip(group.rows, prompts, strict=True):
            row.episode.share(shared)
            row.prompt = shared
            row.runs = self._runs()
            row.add(prompt, row.kinds())
        if group.parent is None:
            self.queue.append(group)
        else:
            self.queue.appendleft(group)

    def loaded(self, version: int) -> None:
        """Notes the version of the weights that sample from now on."""
        self._version = version

    @property
    def room(self) -> int:
        """Episodes that could be handed in and opened at once."""
        unopened = sum(len(group.unopened) for group in self.queue)
        return self._episodes - len(self.rows) - unopened

    def close(self, row: Row) -> None:
        """Takes leave of an episode that is over."""
        self.rows.remove(row)

    def withdraw(self, group: OpenGroup) -> None:
        """Takes leave of a group that is given up, and of its open episodes."""
        if group in self.queue:
            self.queue.remove(group)
        for row in [row for row in self.rows if row.group is group]:
            self.close(row)

    def move(self, row: Row, there: Elsewhere) -> Row:
        """The row of another context of the same episode, which takes the place of ``row``; it
        lacks the tokens that ``there`` has for it.
        """
        other = self._beside(row, there) if there.in_order else self._rewritten(row, there)
        self.rows[self.rows.index(row)] = other
        return other

    def _beside(self, row: Row, there: Elsewhere) -> Row:
        """The row of a context that begins with a summary or a question to a sub-agent, or of one
        that waited for an answer. ``row`` leaves its keys meanwhile, or for good.
        """
        contexts = row.contexts or [row]
        if there.context == len(contexts):
            # behind a summary, what the cache may have is the prompt of the episode
            prompt = row.prompt if there.whole else min(len(there.tokens), self._prompt_length)
            contexts.append(self._row(row, there.context, prompt))
        for context in contexts:
            context.contexts = contexts
        if there.whole:
            self._forget(row)
            row.over = True
        else:
            self._set_aside(row)
        return contexts[there.context]

    def _rewritten(self, row: Row, there: Elsewhere) -> Row:
        """The row of a context for which that of ``row`` is given up. All its keys are computed
        anew: those that decoding wrote may differ in their last bit from what a prefill writes.
        """
        self._forget(row)
        other = self._row(row, there.context, min(row.prompt, len(there.tokens)))
        rows = row.group.rows
        rows[rows.index(row)] = other
        return other

    def _row(self, like: Row, number: int, prompt: int) -> Row:
        """A row without tokens, for a context of the episode of ``like``.

        prompt: how many tokens its prompt will have.
        """
        row = Row(episode=like.episode, group=like.group, context=number, prompt=prompt)
        row.runs = self._runs()
        row.key = context_key(like.group.key, number)
        row.adapter, row.owner = like.adapter, like.owner
        row.keys = [(0, self._version)]
        return row

    # --- For an engine that has to be told which keys it needs ------------------------------------

    def _runs(self) -> ContextRuns | None:
        """Runs of a new context; None without documents."""
        return None

    def _forget(self, row: Row) -> None:
        """Hears that the keys of a row are not needed any more."""

    def _set_aside(self, row: Row) -> None:
        """Hears that they are not needed until another context of the row's episode is done."""


def _in_common(prompts: Sequence[list[int]]) -> int:
    """Number of first tokens that all prompts have."""
    different = (at for at, each in enumerate(zip(*prompts, strict=False)) if len(set(each)) > 1)
    return next(different, min(map(len, prompts)))
