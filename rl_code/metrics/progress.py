"""The line that shows where a run is."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from typing import IO

import rich.console
import rich.progress

from rl_code.metrics.values import CompilationCounter

# Time left is told from the updates of the last minute, at least the last few: steps can come in
# bursts.
_PACE_UPDATES, _PACE_SECONDS = 5, 60.0
# Off a terminal: seconds between two lines, so that a log stays readable.
_PLAIN_S = 15.0
# Off a terminal: seconds without a line after which one says that the work goes on; then twice as
# many, and so on up to the second number.
_ALIVE_S, _ALIVE_MOST_S = 30.0, 600.0
# Shown before the first update, and behind it where programs may have to be compiled for that.
_BEGINS = "begins"
_COMPILES = "; the first result waits for programs to be compiled"


class Progress:
    """Shows where a run is: step, what matters now, time left.

    On a terminal one line that is overwritten. Elsewhere plain lines: one at the beginning, the
    first update, the last, and between them about a hundred, but never two within ``_PLAIN_S``
    seconds. While no update comes, as during compilation, further lines say that the work goes on
    and how many programs were compiled.
    """

    def __init__(
        self,
        title: str,
        total: int,
        start: int = 0,
        file: IO[str] | None = None,
        *,
        compiles: bool = True,
    ) -> None:
        """``total``: steps of the whole run. ``start``: steps already done. ``compiles``: False for
        work that compiles no programs.

        ``file``: unless given standard error, and nothing in all but the first of several
        processes.
        """
        if file is None:
            jax = sys.modules.get("jax")  # which each of several processes has loaded
            file = open(os.devnull, "w") if jax and jax.process_index() else sys.stderr
        self._title, self._total, self._done = title, total, start
        self._compiles = compiles
        self._console = rich.console.Console(file=file, highlight=False)
        self._plain_every = max(1, total // 100)
        self._printed_at = -math.inf  # of time.monotonic
        self._recent = [(start, time.monotonic())]  # (steps done, when), of about the last minute
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}", markup=False),
            rich.progress.BarColumn(bar_width=24),
            rich.progress.TextColumn(
                "{task.completed}/{task.total}  {task.fields[values]}", markup=False
            ),
            rich.progress.TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task(title, total=total, completed=start, values=self._begins())
        self._compilations = CompilationCounter()
        self._ended = threading.Event()

    def update(self, done: int, **values: float | str) -> None:
        """Reports that ``done`` steps are finished, with numbers to show (known ones are formatted
        by name).
        """
        now = time.monotonic()
        if done > self._done:
            self._recent.append((done, now))
            while len(self._recent) > _PACE_UPDATES and now - self._recent[0][1] > _PACE_SECONDS:
                self._recent.pop(0)
        self._done = done
        shown = [_shown(name, value) for name, value in values.items()]
        (first, begin) = self._recent[0]
        (last, end) = self._recent[-1]
        if last > first and done < self._total:
            shown.append(f"{_duration((self._total - done) * (end - begin) / (last - first))} left")
        if self._console.is_terminal:
            self._bar.update(self._task, completed=done, values="  ".join(shown))
        elif self._is_due(done, now):
            self._printed_at = now
            self._console.print(
                "  ".join([self._title, f"{done}/{self._total}", *shown]),
                markup=False,
                soft_wrap=True,
            )

    def _begins(self) -> str:
        """Text before the first update."""
        return _BEGINS + (_COMPILES if self._compiles else "")

    def _is_due(self, done: int, now: float) -> bool:
        """True if a plain line is to be printed."""
        if done >= self._total:
            return True
        return done % self._plain_every == 0 and now - self._printed_at >= _PLAIN_S

    def note(self, text: str) -> None:
        """Prints a line above the bar."""
        self._console.print(text, markup=False, soft_wrap=True)

    def _stay_alive(self) -> None:
        """Prints lines while no update comes, until the end."""
        pause = _ALIVE_S
        printed_at = self._printed_at
        since = time.monotonic()
        while not self._ended.wait(pause):
            if self._printed_at != printed_at:
                printed_at, pause, since = self._printed_at, _ALIVE_S, self._printed_at
                continue
            pause = min(2 * pause, _ALIVE_MOST_S)
            told = f"goes on, {_duration(time.monotonic() - since)} since the last line"
            if self._compiles:
                told += f", {self._compilations.count} programs compiled so far"
            self.note(f"{self._title}  {self._done}/{self._total}  {told}")

    def __enter__(self) -> Progress:
        self._bar.start()
        self._compilations.__enter__()
        if not self._console.is_terminal and self._done < self._total:
            self.note(f"{self._title}  {self._done}/{self._total}  {self._begins()}")
            threading.Thread(target=self._stay_alive, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._compilations.__exit__()
        self._bar.stop()


_FORMATS = {
    "reward": "reward {:.2f}",
    "pass_rate": "pass {:.0%}",
    "signal": "groups with a signal {:.0%}",
    "malformed": "{:.1f} malformed calls",
    "tokens_per_s": "{:,.0f} tok/s",
    "loss": "loss {:.3f}",
}


def _shown(name: str, value: float | str) -> str:
    return (
        f"{name} {value}"
        if isinstance(value, str)
        else _FORMATS.get(name, name + " {:.4g}").format(value)
    )


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{seconds:02}s"
