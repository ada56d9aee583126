"""Writes to a store until it is killed: ``python writer.py URL PREFIX``.

Each line on the standard output is something that was acknowledged before it was printed.
"""

from __future__ import annotations

import itertools
import sys

from people.feedback.store import FeedbackStore
from tests.people.feedback.people import answer, event


def main(url: str, prefix: str) -> None:
    store = FeedbackStore(url)
    cycle = max((one.cycle for one in store.training_sets()), default=0)
    for number in itertools.count():
        id = f"{prefix}-{number}"
        user = f"user of {id}"
        store.record_answer(answer(id, user))
        print(f"answer {id}", flush=True)
        store.record_events([event("shown", id), event("accepted", id, at=111.0)], user)
        print(f"events {id}", flush=True)
        if number % 3 == 2:
            # the clock of the selection is that of what was just recorded
            selection = store.select(store_time(store), [1], 2)
            cycle += 1
            store.mark_used(cycle, selection)
            print(f"cycle {cycle}", flush=True)
        if number % 5 == 4:
            store.delete_user(user)
            print(f"deleted {id}", flush=True)


def store_time(store: FeedbackStore) -> float:
    """A time that is not after the database's."""
    with store.engine.connect() as connection:
        return store._now(connection)


if __name__ == "__main__":
    main(*sys.argv[1:])
