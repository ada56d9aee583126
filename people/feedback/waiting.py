"""The wait of an answer for what people do with it, before a cycle trains on it.

An answer is trained on once, so what is reported after that is lost for its reward. An answer that
nobody accepted has waited long enough after ``silence_s``. One that was accepted also waits for the
last of the looks at how much of it is alive, or until that look should long have been reported.
"""

from __future__ import annotations

import dataclasses

from sqlalchemy import ColumnElement, and_, or_, select

from people.feedback.records import HORIZONS_S
from people.feedback.tables import ANSWERS, EVENTS


@dataclasses.dataclass(frozen=True)
class Wait:
    """Times that an answer waits, in seconds."""

    # From its recording, and beyond the last look at one that was accepted.
    silence_s: float = 0.0
    # From the receipt of an acceptance until its last look can be reported.
    look_s: float = 0.0

    def is_over(self, watermark: float) -> ColumnElement[bool]:
        """Condition on a row of ``ANSWERS``: by the events that were received up to the watermark
        (Unix seconds) it need not wait any more.
        """
        last = watermark - self.silence_s
        own = (EVENTS.c.answer == ANSWERS.c.id) & (EVENTS.c.user == ANSWERS.c.user)
        theirs = select(EVENTS.c.key).where(own, EVENTS.c.received_at <= watermark)
        taken = theirs.where(EVENTS.c.kind == "accepted")
        looked = and_(EVENTS.c.kind == "retained", EVENTS.c.horizon_s >= HORIZONS_S[-1])
        return (ANSWERS.c.recorded_at <= last) & or_(
            ~taken.exists(),
            theirs.where(looked).exists(),
            # the first report of it counts: further ones do not prolong the wait
            taken.where(EVENTS.c.received_at <= last - self.look_s).exists(),
        )


NO_WAIT = Wait()
