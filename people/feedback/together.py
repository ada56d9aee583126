"""Writes of several threads in one transaction, so that they wait for the disk together.

A commit waits until the disk has it, which takes as long for one row as for a hundred. So one
thread writes what the others hand in: all that waits, in its order, in one transaction. They wait
for the disk only where they ask for the result.

Where writes come close behind one another it waits for more of them, since a transaction of one row
costs almost as much of the processor as one of ten. It waits the longer, the more of it the last
transaction took: this thread then has about 2 % of a core while transactions take up to 2.5 ms of
it; behind longer ones the wait stays at 100 ms. A write that comes alone does not wait.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from people.feedback.database import is_away

# The most writes of one transaction.
_MOST = 256
# Where the last transaction had several writes, it waits for more, this many times as long as that
# took the processor, and at most so many seconds.
_LINGER = 40
_LONGEST_LINGER_S = 0.1


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
        goes_on, linger_s = True, 0.0
        while goes_on and (first := self._waiting.get()) is not None:
            if linger_s:
                time.sleep(linger_s)
            begin_s = time.thread_time()
            with self._turn:
                batch = [first]
                while goes_on and len(batch) < _MOST and not self._waiting.empty():
                    following = self._waiting.get()
                    goes_on = following is not None
                    batch += [following] if goes_on else []
                several = len(batch) > 1
                # one that was cancelled meanwhile is not written
                batch = [one for one in batch if one[1].set_running_or_notify_cancel()]
                found = self._carry_out([write for write, _ in batch])
            for (_, future), (result, error) in zip(batch, found, strict=True):
                if error is None:
                    future.set_result(result)
                else:
                    future.set_exception(error)
            taken_s = time.thread_time() - begin_s
            linger_s = min(_LINGER * taken_s, _LONGEST_LINGER_S) if several else 0.0

    def _carry_out(self, writes: Sequence[Any]) -> list[tuple[Any, Exception | None]]:
        """Commit writes; return for each its result, or the error that prevented the write."""
        if not writes:
            return []
        try:
            return [(result, None) for result in self._commit(writes)]
        # The thread serves all who write, so it outlives any error of one of them, which is raised
        # where that one asks for the result.
        except Exception as error:
            if len(writes) == 1 or is_away(error):
                return [(None, error)] * len(writes)
            # one of them is wrong, and must not take the others with it
            return [found for write in writes for found in self._carry_out([write])]
