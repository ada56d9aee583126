"""Writes of several threads in one transaction, so that they wait for the disk together.

A commit waits until the disk has it, which takes as long for one row as for a hundred. So a thread
that finds another one at work leaves its write there; who comes next takes all that were left, in
their order, in one transaction. A write returns when that is committed, and raises what kept it
from being so.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from sqlalchemy import Connection

from rl_code.feedback.database import is_away

# The most writes of one transaction.
_MOST = 256
Write = Callable[[Connection], Any]


class _Waiting:
    """A write, and what came of it."""

    def __init__(self, write: Write):
        self.write = write
        self.done = False
        self.result: Any = None
        self.error: BaseException | None = None

    def end(self, result: Any = None, error: BaseException | None = None) -> None:
        self.result, self.error, self.done = result, error, True


class Together:
    """The writes that wait, and the turn to write.

    begin: a transaction that writes. turn: held by whoever writes; others may take it too.
    """

    def __init__(self, begin: Callable[[], AbstractContextManager[Connection]], turn: Any):
        self._begin, self._turn = begin, turn
        self._waiting: collections.deque[_Waiting] = collections.deque()

    def write(self, write: Write) -> Any:
        """What a write returns, once it is committed.

        write: may be called twice, the first time in a transaction that is undone.
        """
        own = _Waiting(write)
        self._waiting.append(own)
        with self._turn:
            while not own.done:
                count = min(len(self._waiting), _MOST)
                self._write_all([self._waiting.popleft() for _ in range(count)])
        if own.error is not None:
            raise own.error
        return own.result

    def _write_all(self, writes: list[_Waiting]) -> None:
        try:
            with self._begin() as connection:
                results = [one.write(connection) for one in writes]
        except Exception as error:  # whatever it is, whoever wrote it is told
            if len(writes) == 1 or is_away(error):
                for one in writes:
                    one.end(error=error)
            else:  # one of them is wrong, and must not take the others with it
                for one in writes:
                    self._write_all([one])
        except BaseException as error:  # Ctrl-C: who waits would wait for ever
            for one in writes:
                one.end(error=error)
            raise
        else:
            for one, result in zip(writes, results, strict=True):
                one.end(result)
