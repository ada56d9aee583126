"""Restarts of a role that has ended: the rules of launch/supervise.sh."""

from __future__ import annotations

from typing import Literal

# Ends in a row with an error, each within a minute of its start, after which the error lasts.
QUICK = 10
_QUICK_S = 60.0


class Restarts:
    """Counts the ends of one role. ``count``: how often it was started again."""

    def __init__(self) -> None:
        self.count = 0
        self._quick = 0

    def after(self, code: int, seconds: float) -> Literal["done", "again", "lasts", "gave up"]:
        """Consequence of an end.

        Args:
          code: exit code; negative, or 128 and more, if a signal ended it.
          seconds: how long it had run.

        Returns:
          "done"; "again"; "lasts" if the role said that starting it again does not help; "gave up"
          after ``QUICK`` quick errors in a row.
        """
        if code == 0:
            return "done"
        if code == 2:
            return "lasts"
        quick = 0 < code < 128 and seconds < _QUICK_S
        self._quick = self._quick + 1 if quick else 0
        if self._quick >= QUICK:
            return "gave up"
        self.count += 1
        return "again"
