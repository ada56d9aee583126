"""Tasks whose prompt an engine takes: one check for training and suites, for sources with an end
and without.

Of a source with an end all tasks are looked at when it is loaded. One without an end cannot be gone
through. Its tasks are looked at when a step is planned (``schedule``) or a suite is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from absl import logging

from rl_code.config.read_config import ConfigError
from rl_code.types import Task

# After so many tasks in a row that do not fit, a source without an end counts as one without any.
_PATIENCE = 1000


class Fitting:
    """True for a task whose prompt fits.

    Args:
      what: whose tasks they are, for messages.
      most: the tokens that a prompt may have.
      length: the tokens of a task's prompt; None where agents of others write the prompts, so that
        every task fits.
      endless: whether the source has no end.
    """

    def __init__(
        self, what: str, most: int, length: Callable[[Task], int] | None, *, endless: bool
    ):
        self.most = most
        self._what, self._length, self._endless = what, length, endless
        # Tokens of the shortest prompt that did not fit.
        self._shortest: int | None = None
        self._in_a_row = 0

    def __call__(self, task: Task) -> bool:
        """True if the task fits. Raises ConfigError if no task of an endless source fits."""
        if self._length is None:
            return True
        tokens = self._length(task)
        if tokens <= self.most:
            self._in_a_row = 0
            return True
        self._shortest = min(tokens, self._shortest or tokens)
        self._in_a_row += 1
        if self._endless and self._in_a_row >= _PATIENCE:
            raise self.none()
        return False

    def of(self, tasks: Iterable[Task]) -> Iterator[Task]:
        """Yield the tasks that fit, one by one, so that no more are made than are asked for."""
        kept = 0
        seen = 0
        for task in tasks:
            seen += 1
            if self(task):
                kept += 1
                yield task
        if kept < seen:
            message = "%d of %d tasks have prompts of at most %d tokens"
            logging.info(message, kept, seen, self.most)

    def none(self) -> ConfigError:
        """The error for a source or a suite without a task to play."""
        if self._shortest is None:
            return ConfigError(
                f"{self._what}: no task; look at the file, the split and what its settings leave "
                "out"
            )
        return ConfigError(
            f"{self._what}: no task has a prompt of at most {self.most} tokens, the shortest has "
            f"{self._shortest}; raise limits.tokens (or lower limits.turns or limits.turn_tokens, "
            "which leave room for answers)"
        )
