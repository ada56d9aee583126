"""A store of feedback that tells a router what the answers of its arms have earned.

An answer counts once it is ``wait_s`` old, with what was reported of it until then: the reward of
silence where that is nothing. Younger ones do not count. At the reward of silence they would make
an arm that has just got many look worse than it is; and to count those alone of which something was
reported would judge an arm that mostly shows nothing by the rest. Answers that were cut off do not
count, as they do not in training.

Answers count in the order in which they were recorded. So after a restart the router learns from
the database what it had learned, in the same order.

Each answer is judged without the later ones of its session, so a question (the signal "asked")
earns as one that nothing follows.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from absl import logging
from sqlalchemy import Engine, Row, func, select

from people.feedback import database
from people.feedback.checks import Claims
from people.feedback.identity import AnswerIds
from people.feedback.records import AnswerRecord
from people.feedback.rewards.answered import answered
from people.feedback.rewards.combine import FeedbackReward
from people.feedback.rows import age, join
from people.feedback.store import FeedbackStore
from people.feedback.tables import ANSWERS
from people.serving.models import Models

# The most answers that are read at once.
_CHUNK = 256
# Seconds after which a database that did not answer is asked again.
_AGAIN_S = 5.0


class EarningStore(FeedbackStore):
    """``FeedbackStore``, and what its answers have earned, told to the router of an alias.

    reward: of an answer. clock: as of ``FeedbackStore``.
    """

    def __init__(
        self,
        url: str | Engine,
        *,
        ids: AnswerIds,
        reward: FeedbackReward,
        claims: Claims | None = None,
        clock: Callable[[], float] | None = None,
    ):
        super().__init__(url, ids=ids, claims=claims, clock=clock)
        self._reward = reward
        self._models: Models | None = None
        self._alias = ""
        self._wait_s = 0.0
        # The last answer that the router has heard of: when it was recorded, and its id.
        self._heard = 0.0, ""
        self._telling = threading.Lock()
        # Set where there may be an answer that is not heard of yet, and at the end.
        self._news, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="earned", daemon=True)

    def follow(self, models: Models, alias: str, wait_s: float) -> None:
        """Tells the router of an alias what its arms have earned: first that of all answers in the
        database that are old enough, so that a server that starts again has learned what it had,
        and then what comes. wait_s: age at which an answer counts, in seconds.
        """
        self._models, self._alias, self._wait_s = models, alias, wait_s
        self.tell()
        self._thread.start()

    def submit_answer(self, answer: AnswerRecord) -> Future[bool]:
        """As ``FeedbackStore``."""
        future = super().submit_answer(answer)
        if answer.arm:
            future.add_done_callback(lambda done: self._news.set())
        return future

    def close(self) -> None:
        """As ``FeedbackStore``."""
        self._together.close()
        self._ended.set()
        self._news.set()
        if self._thread.is_alive():
            self._thread.join()
        super().close()

    def tell(self) -> float | None:
        """Tells the router what answers have earned that are old enough by now. Seconds until the
        next one is; None where none waits. A thread of the store calls it at these times.
        """
        assert self._models is not None
        recorded = ANSWERS.c.recorded_at
        arms = ANSWERS.c.arm.in_(list(self._models.arms(self._alias)))
        theirs = arms & (ANSWERS.c.finish_reason != "aborted")
        with self._telling:
            at, id = self._heard
            unheard = theirs & ((recorded > at) | ((recorded == at) & (ANSWERS.c.id > id)))
            with database.reading(self.engine) as connection:
                now = self._now(connection)
                old = select(ANSWERS.c.id, recorded).where(unheard, recorded <= now - self._wait_s)
                rows = connection.execute(old.order_by(recorded, ANSWERS.c.id)).all()
                young = select(func.min(recorded)).where(theirs, recorded > now - self._wait_s)
                next_at = connection.scalar(young)
            for chunk in itertools.batched(rows, _CHUNK):
                self._tell_of(chunk)
        return None if next_at is None else next_at + self._wait_s - now

    def _tell_of(self, rows: Sequence[Row]) -> None:
        """Tells the router of some answers: rows of their ids and times, in order."""
        assert self._models is not None
        with database.reading(self.engine) as connection:
            joined = join(connection, [row.id for row in rows], age(self._wait_s))
        recorded_at = {row.id: row.recorded_at for row in rows}
        for answer, events in joined:
            # one that cannot be judged is left out, instead of being tried for ever
            self._heard = recorded_at[answer.id], answer.id
            (given,) = answered([(answer, events)])
            value = self._reward(given).total
            self._models.reward(self._alias, answer.arm, value)

    def _run(self) -> None:
        while True:
            self._news.clear()
            if self._ended.is_set():
                return
            try:
                seconds = self.tell()
            except Exception:
                # of the database, or of a signal: the next try goes on behind the last answer
                logging.exception("a router was not told what answers earned; it is tried again")
                seconds = _AGAIN_S
            if seconds is None:
                self._news.wait()
            else:
                self._ended.wait(seconds)
