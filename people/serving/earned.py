"""A store of feedback that tells a router what the answers of its arms have earned.

An answer counts as soon as it is recorded, with the reward of silence: otherwise an arm that mostly
shows nothing would be judged by the rest of its answers alone. What is reported of it later changes
what it has earned, and the router takes the new reward in place of the one before. Answers that
were cut off do not count, as they do not in training.

Each answer is judged without the later ones of its session, so a question (the signal "asked")
earns as one that nothing follows.
"""

from __future__ import annotations

import collections
import itertools
import queue
import threading
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future

from absl import logging
from sqlalchemy import Engine, select

from people.feedback import database
from people.feedback.checks import Claims
from people.feedback.identity import AnswerIds
from people.feedback.outcomes import Result
from people.feedback.records import AnswerRecord, Event
from people.feedback.rewards.answered import answered
from people.feedback.rewards.combine import FeedbackReward
from people.feedback.store import FeedbackStore
from people.feedback.tables import ANSWERS
from people.serving.models import Models

# Answers whose reward may still change: about 20 MB. What is reported of older ones changes nothing
# before the next start.
_ANSWERS = 100_000
# The most answers that are read at once.
_CHUNK = 256


class EarningStore(FeedbackStore):
    """``FeedbackStore``, and what its answers have earned, told to the router of an alias.

    reward: of an answer.
    """

    def __init__(
        self,
        url: str | Engine,
        *,
        ids: AnswerIds,
        reward: FeedbackReward,
        claims: Claims | None = None,
    ):
        super().__init__(url, ids=ids, claims=claims)
        self._reward = reward
        self._models: Models | None = None
        self._alias = ""
        # What the router was told of each answer.
        self._told: collections.OrderedDict[str, float] = collections.OrderedDict()
        # (answer, whether it was recorded just now); None ends the thread.
        self._news: queue.SimpleQueue[tuple[str, bool] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="earned", daemon=True)

    def follow(self, models: Models, alias: str) -> None:
        """Tells the router of an alias what its arms have earned: first that of all answers in the
        database, so that a server that starts again has learned what it had, and then what comes.
        """
        self._models, self._alias = models, alias
        arms = ANSWERS.c.arm.in_(list(models.arms(alias)))
        query = select(ANSWERS.c.id).where(arms).order_by(ANSWERS.c.recorded_at, ANSWERS.c.id)
        with database.reading(self.engine) as connection:
            ids = list(connection.scalars(query))
        for chunk in itertools.batched(ids, _CHUNK):
            self._tell(chunk, chunk)
        self._thread.start()

    def submit_answer(self, answer: AnswerRecord) -> Future[bool]:
        """As ``FeedbackStore``."""
        future = super().submit_answer(answer)
        if answer.arm:
            ids = [answer.id]
            future.add_done_callback(lambda done: self._note(done, ids, True))
        return future

    def submit_events(self, events: Sequence[Event], user: str) -> Future[list[Result]]:
        """As ``FeedbackStore``."""
        future = super().submit_events(events, user)
        ids = dict.fromkeys(event.answer for event in events)
        future.add_done_callback(lambda done: self._note(done, ids, False))
        return future

    def close(self) -> None:
        """As ``FeedbackStore``; the router has heard of all that was written."""
        self._together.close()
        if self._thread.is_alive():
            self._news.put(None)
            self._thread.join()
        super().close()

    def _note(self, done: Future, ids: Iterable[str], new: bool) -> None:
        """Called in the thread that writes, which must not wait for what is read."""
        if self._models is not None and not done.cancelled() and done.exception() is None:
            for id in ids:
                self._news.put((id, new))

    def _run(self) -> None:
        goes_on = True
        while goes_on:
            news = [self._news.get()]
            while len(news) < _CHUNK and not self._news.empty():
                news.append(self._news.get())
            goes_on = None not in news
            found = [one for one in news if one is not None]
            try:
                self._tell(dict.fromkeys(id for id, _ in found), {id for id, new in found if new})
            except Exception:
                # of the database, or of a signal: the router lacks this until the next start, and
                # learns from what comes
                logging.exception("a router was not told what %d answers earned", len(found))

    def _tell(self, ids: Collection[str], new: Collection[str]) -> None:
        """Tells the router what answers earn now. new: those that it has not heard of."""
        assert self._models is not None
        arms = self._models.arms(self._alias)
        # of the others, the reward that is to be replaced is not known any more
        known = [id for id in ids if id in new or id in self._told]
        for answer, events in self.joined(known):
            if answer.arm not in arms or answer.finish_reason == "aborted":
                continue
            (given,) = answered([(answer, events)])
            value = self._reward(given).total
            before = self._told.pop(answer.id, None)
            self._told[answer.id] = value
            if len(self._told) > _ANSWERS:
                self._told.popitem(last=False)
            if value != before:
                self._models.reward(self._alias, answer.arm, value, before)
