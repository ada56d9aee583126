"""What a run writes down for people: numbers per step, the episodes themselves, and a progress
line.

A working directory holds

  metrics.jsonl                       one JSON object per step: {"step": 12, "train/loss": 0.31,
  ...} tensorboard/events.out.tfevents.*   the same numbers for TensorBoard
  trajectories/step_000012.jsonl.gz   the episodes of one step, one group per line (fields:
  ``TrajectoryLog``)

Everything is on disk when the call that writes it returns, so a killed process loses at most the
step it was in. A run that resumes at step s repeats step s: the writers drop whatever was written
for steps >= s.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import jax
import rich.console
import rich.progress
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

from rl_code.files import explain_full_disk, write_atomically

METRICS_FILE = "metrics.jsonl"

# Time left is told from the updates of the last minute, at least the last few: steps can come in
# bursts.
_PACE_UPDATES, _PACE_SECONDS = 5, 60.0


class MetricWriter:
    """Appends one row of numbers per step to metrics.jsonl and to TensorBoard.

    Rows of steps >= ``resume_step`` and a torn last line are removed when the writer opens.
    last_step: of the last row, -1 before the first.
    """

    def __init__(self, workdir: str | os.PathLike[str], resume_step: int = 0):
        """Raises ValueError for a damaged line before the last, OSError when the disk is full."""
        self._path = Path(workdir) / METRICS_FILE
        self._path.parent.mkdir(parents=True, exist_ok=True)
        kept = [row for row in read_metrics(workdir) if row["step"] < resume_step]
        write_atomically(self._path, "".join(json_line(row) for row in kept).encode())
        self.last_step = kept[-1]["step"] if kept else -1
        self._file = open(self._path, "ab", buffering=0)
        folder = self._path.parent / "tensorboard"
        with explain_full_disk(folder):
            folder.mkdir(exist_ok=True)
            # The library names files by the second; the suffix keeps a quick restart from
            # overwriting one.
            self._events = EventsWriter(str(folder / "events"), f".{time.time_ns()}")
            # TensorBoard hides older events of steps >= this step
            start = SessionLog(status=SessionLog.START)
            self._events.write_event(
                Event(wall_time=time.time(), step=resume_step, session_log=start)
            )
            self._events.flush()

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes one step's numbers.

        Args:
          step: greater than every step written before.
          values: ``group/name`` -> number, bool or array of one element. NaN and infinities are
          kept.

        Raises:
          ValueError: the step does not grow, or a value is not one number.
          OSError: the disk is full; no partial row is left behind.
        """
        if step <= self.last_step:
            raise ValueError(f"{step=} must be greater than the last written step {self.last_step}")
        numbers = {name: _number(name, value) for name, value in values.items()}
        _append(self._file, self._path, json_line({"step": step, **numbers}).encode())
        scalars = [
            Summary.Value(tag=name, simple_value=float(number)) for name, number in numbers.items()
        ]
        with explain_full_disk(self._path.parent / "tensorboard"):
            self._events.write_event(
                Event(wall_time=time.time(), step=step, summary=Summary(value=scalars))
            )
            self._events.flush()
        self.last_step = step

    def close(self) -> None:
        self._file.close()
        self._events.close()

    def __enter__(self) -> MetricWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(workdir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl in order, a torn last line left out; [] where there is no file.

    Raises ValueError naming file and line for any other damaged line.
    """
    path = Path(workdir) / METRICS_FILE
    if not path.exists():
        return []
    # what follows the last newline is torn
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            rows.append({name: _NON_FINITE.get(value, value) for name, value in row.items()})
        except (ValueError, AttributeError) as error:
            raise ValueError(
                f"{path}, line {number}: not a row of metrics: {line[:80]!r}"
            ) from error
    return rows


class Progress:
    """Shows where a run is: step, what matters now, time left.

    On a terminal one line that redraws itself; elsewhere a plain line for about every hundredth of
    the run.
    """

    def __init__(self, title: str, total: int, start: int = 0, file: IO[str] | None = None) -> None:
        """``total``: steps of the whole run. ``start``: steps already done.

        ``file``: unless given standard error, and nothing in all but the first of several
        processes.
        """
        if file is None:
            file = open(os.devnull, "w") if jax.process_index() else sys.stderr
        self._title, self._total, self._done = title, total, start
        self._console = rich.console.Console(file=file, highlight=False)
        self._plain_every = max(1, total // 100)
        self._recent = [(start, time.monotonic())]  # (steps done, when), of about the last minute
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}", markup=False),
            rich.progress.BarColumn(bar_width=24),
            rich.progress.TextColumn(
                "{task.completed}/{task.total}  {task.fields[values]}", markup=False
            ),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task(title, total=total, completed=start, values="")

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
        elif done % self._plain_every == 0 or done >= self._total:
            self._console.print(
                "  ".join([self._title, f"{done}/{self._total}", *shown]),
                markup=False,
                soft_wrap=True,
            )

    def note(self, text: str) -> None:
        """Prints a line above the bar."""
        self._console.print(text, markup=False, soft_wrap=True)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


class CompilationCounter:
    """Counts XLA compilations while it is open: after warm-up there must be none. A context
    manager.
    """

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> CompilationCounter:
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration: float, **_: Any) -> None:
        self.count += event == "/jax/core/compile/backend_compile_duration"


_FORMATS = {
    "reward": "reward {:.2f}",
    "pass_rate": "pass {:.0%}",
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


_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def json_line(value: Any) -> str:
    """Strict JSON: what a model wrote may hold NaN or infinities, which become words."""
    try:
        return (
            json.dumps(
                value, ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=repr
            )
            + "\n"
        )
    except ValueError:
        return json_line(json.loads(json.dumps(value, default=repr), parse_constant=str))


def _number(name: str, value: Any) -> int | float | str:
    """A JSON number, or for what JSON lacks the word that JavaScript's Number() and Python's
    float() read.
    """
    try:
        number = value.item() if hasattr(value, "item") else value
        number = int(number) if isinstance(number, bool | int) else float(number)
    except (TypeError, ValueError) as error:
        raise ValueError(f"metric {name} = {value!r}: expected one number") from error
    if isinstance(number, float) and not math.isfinite(number):
        return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"
    return number


def _append(file: IO[bytes], path: Path, data: bytes) -> None:
    """Appends all of ``data`` to an unbuffered file or, when the disk is full, none of it."""
    size = os.fstat(file.fileno()).st_size
    with explain_full_disk(path):
        try:
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
        except OSError:
            file.truncate(size)
            raise
