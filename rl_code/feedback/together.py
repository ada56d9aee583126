"""Writes of several threads in one transaction, so that they wait for the disk together.

A commit waits until the disk has it, which takes as long for one row as for a hundred. So one
thread writes what the others hand in: all that waits, in its order, in one transaction. They wait
for the disk only where they ask for the result.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from rl_code.feedback.database import is_away

# The most writes of one transaction.
_MOST = 256


class Together:
    """The writes that wait, and the thread that carries them out.

    turn: held meanwhile; others may take it too. commit: carries out writes that were handed in, in
    one transaction, and returns what each of them comes to. It may be called again with the same
    ones after one that was undone.
    """

    def __init__(self, turn: threading.Lock, commit: Callable[[Sequence[Any]], Sequence[Any]]):
        self._turn, self._commit = turn, commit
        # (write, its future); None ends the thread.
        self._waiting: queue.SimpleQueue[tuple[Any, Future] | None] = queue.SimpleQueue()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def submit(self, write: Any) -> Future:
        """Hands in a write. The result is there once it is committed, or raises what kept it from
        being so. Callbacks of the future are called in the thread that writes, and should be short.
        """
        future: Future = Future()
        self._waiting.put((write, future))
        if self._thread is None or not self._thread.is_alive():
            self._start()
        return future

    def close(self) -> None:
        """Returns when all that was handed in is written. What comes later is written too."""
        with self._starting:
            thread, self._thread = self._thread, None
            if thread is not None and thread.is_alive():
                self._waiting.put(None)
                thread.join()

    def _start(self) -> None:
        with self._starting:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        goes_on = True
        while goes_on and (first := self._waiting.get()) is not None:
            with self._turn:
                batch = [first]
                while goes_on and len(batch) < _MOST and not self._waiting.empty():
                    following = self._waiting.get()
                    goes_on = following is not None
                    batch += [following] if goes_on else []
                # one that was cancelled meanwhile is not written
                batch = [one for one in batch if one[1].set_running_or_notify_cancel()]
                found = self._carry_out([write for write, _ in batch])
            for (_, future), (result, error) in zip(batch, found, strict=True):
                if error is None:
                    future.set_result(result)
                else:
                    future.set_exception(error)

    def _carry_out(self, writes: Sequence[Any]) -> list[tuple[Any, Exception | None]]:
        """What each comes to, or what kept it from being written."""
        if not writes:
            return []
        try:
            return [(result, None) for result in self._commit(writes)]
        except Exception as error:  # whatever it is, whoever wrote it is told
            if len(writes) == 1 or is_away(error):
                return [(None, error)] * len(writes)
            # one of them is wrong, and must not take the others with it
            return [found for write in writes for found in self._carry_out([write])]
