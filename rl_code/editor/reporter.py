"""Reports events in the background, each until it is acknowledged."""

from __future__ import annotations

import logging
import queue
import threading
import time

from rl_code.feedback.records import Event
from rl_code.people.client import Client, ServerRefused

# The most events of one request.
_MOST = 100


class Reporter:
    """Has a thread of its own, since a server that is away must not hold up the editor."""

    def __init__(self, client: Client):
        self._client = client
        self._events: queue.Queue[Event | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="reporter", daemon=True)
        self._thread.start()

    def report(self, event: Event) -> None:
        """Returns at once."""
        self._events.put(event)

    def close(self, timeout_s: float) -> bool:
        """Waits until all events are acknowledged; whether they were, within the time."""
        self._events.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        ended = False
        while not ended:
            batch = [self._events.get()]
            while len(batch) < _MOST and not self._events.empty():
                batch.append(self._events.get())
            ended = None in batch
            events = [event for event in batch if event is not None]
            while events:
                try:
                    for key, why in self._client.report(events).items():
                        logging.warning("event %s was refused: %s", key, why)
                    break
                except ServerRefused as error:
                    # away for longer than the client's patience; the events are still wanted
                    logging.warning("%d events wait: %s", len(events), error)
                    time.sleep(1.0)
        self._client.close()
