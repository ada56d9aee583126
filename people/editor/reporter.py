"""Reports events in the background, each until it is acknowledged."""

from __future__ import annotations

import logging
import queue
import threading
import time

from people.editor.outbox import Outbox
from people.feedback.records import Event
from people.simulated.client import Client, ServerRefused

# The most events of one request.
_MOST = 100


class Reporter:
    """Has a thread of its own, since a server that is away must not hold up the editor.

    outbox: keeps events until they are acknowledged, and those of processes that were killed before
    they were, which are sent first; None for no such place.
    """

    def __init__(self, client: Client, outbox: Outbox | None = None):
        self._client, self._outbox = client, outbox
        self._events: queue.Queue[Event | None] = queue.Queue()
        for event in outbox.left() if outbox else ():
            self._events.put(event)
        self._thread = threading.Thread(target=self._run, name="reporter", daemon=True)
        self._thread.start()

    def report(self, event: Event) -> None:
        """Returns at once."""
        if self._outbox is not None:
            self._outbox.add(event)
        self._events.put(event)

    def close(self, timeout_s: float) -> bool:
        """Waits until all events are acknowledged; whether they were, within the time."""
        self._events.put(None)
        self._thread.join(timeout_s)
        done = not self._thread.is_alive()
        if self._outbox is not None and done:
            self._outbox.close()
        return done

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
                    if self._outbox is not None:
                        self._outbox.remove([event.key for event in events])
                    break
                except ServerRefused as error:
                    # away for longer than the client's patience; the events are still wanted
                    logging.warning("%d events wait: %s", len(events), error)
                    time.sleep(1.0)
        self._client.close()
