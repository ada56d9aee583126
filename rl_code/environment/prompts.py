"""The prompts of a run's tasks as tokens, each encoded once."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable

from rl_code.config.named import Named
from rl_code.types import Task

# Ids of a prompt, and the document number of each place (``Context.documents``).
Encoded = tuple[list[int], list[int] | None]


class Prompts:
    """The prompts that were asked for last; from any thread.

    encode: from a task and its protocol to the prompt. most: the prompts that are kept.
    """

    def __init__(self, encode: Callable[[Task, Named], Encoded], most: int = 1024):
        self._encode, self._most = encode, most
        self._lock = threading.Lock()
        self._kept: collections.OrderedDict[tuple[str, Named], tuple[Task, Encoded]]
        self._kept = collections.OrderedDict()

    def __call__(self, task: Task, protocol: Named) -> Encoded:
        """The prompt of a task. Callers share the lists, and leave them as they are."""
        key = task.id, protocol
        with self._lock:
            known, encoded = self._kept.get(key, (None, None))
        # tasks of two sources may have one id; a source without end makes a task again each time
        if encoded is None or (known is not task and known != task):
            encoded = self._encode(task, protocol)
        with self._lock:
            self._kept[key] = task, encoded
            self._kept.move_to_end(key)
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)
        return encoded
