"""Writers for the numbers of each step: files, TensorBoard, a service, or one's own.

A folder of metrics holds

    metrics.jsonl                         one JSON object per step (``metrics``)
    tensorboard/events.out.tfevents.*     the same numbers for TensorBoard

Numbers are on the disk when the call that writes them returns, so a killed process loses at most
the step it was in. A run that resumes at step s repeats step s: the writers of files drop whatever
was written for steps >= s, and so do TensorBoard and the services when they show it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, ClassVar, Protocol

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

from rl_code.host.files import explain_full_disk, write_atomically
from rl_code.metrics.values import METRICS_FILE, as_number, json_line, read_metrics

Numbers = Mapping[str, int | float]


class MetricWriter(Protocol):
    """Takes the numbers of one step after another."""

    def write(self, step: int, values: Numbers) -> None:
        """The numbers of one step, ``group/name`` -> number; steps grow. May raise OSError."""

    def close(self) -> None:
        """No more steps come."""


class WriterSettings(Protocol):
    """A kind of writer as a config names it: a frozen dataclass whose fields are its settings."""

    def open(self, folder: Path, resume_step: int, config: Mapping[str, Any]) -> MetricWriter:
        """A writer for a run.

        Args:
          folder: for files; also tells runs apart.
          resume_step: the first step that will be written; what is there of it and later steps is
            from before a restart and no longer counts.
          config: the run's config, a nested dict of plain values.
        """


@dataclasses.dataclass(frozen=True)
class JsonLines:
    """One JSON object per step in ``metrics.jsonl``; the report reads it."""

    def open(self, folder: Path, resume_step: int, config: Mapping[str, Any]) -> MetricWriter:
        """As ``WriterSettings.open``; ValueError for a damaged line before the last."""
        return _JsonLinesWriter(folder, resume_step)


@dataclasses.dataclass(frozen=True)
class TensorBoard:
    """Scalars for TensorBoard."""

    def open(self, folder: Path, resume_step: int, config: Mapping[str, Any]) -> MetricWriter:
        """As ``WriterSettings.open``."""
        return _TensorBoardWriter(folder / "tensorboard", resume_step)


@dataclasses.dataclass(frozen=True)
class WeightsAndBiases:
    """A run of Weights & Biases; needs the package ``wandb``."""

    # The project that the run belongs to.
    project: str = "rl-code"
    package: ClassVar[str] = "wandb"

    def __post_init__(self):
        _require(self.package)

    def open(self, folder: Path, resume_step: int, config: Mapping[str, Any]) -> MetricWriter:
        """As ``WriterSettings.open``; a resumed run goes on where it was."""
        folder.mkdir(parents=True, exist_ok=True)
        run = importlib.import_module(self.package).init(
            project=self.project,
            name=folder.name,
            # The same workdir is the same run, so that a restart does not begin another one.
            id=hashlib.sha256(str(folder).encode()).hexdigest()[:16],
            resume="allow",
            dir=str(folder),
            config=dict(config),
        )
        return _ServiceWriter(run)


@dataclasses.dataclass(frozen=True)
class Trackio:
    """A run of trackio; needs the package ``trackio``."""

    # The project that the run belongs to.
    project: str = "rl-code"
    package: ClassVar[str] = "trackio"

    def __post_init__(self):
        _require(self.package)

    def open(self, folder: Path, resume_step: int, config: Mapping[str, Any]) -> MetricWriter:
        """As ``WriterSettings.open``; a resumed run goes on where it was."""
        run = importlib.import_module(self.package).init(
            project=self.project, name=folder.name, resume="allow", config=dict(config)
        )
        return _ServiceWriter(run)


WRITERS: dict[str, type[WriterSettings]] = {
    "jsonl": JsonLines,
    "tensorboard": TensorBoard,
    "trackio": Trackio,
    "wandb": WeightsAndBiases,
}


class MetricLog:
    """Writes each step's numbers with several writers. A context manager.

    Args:
      folder: of the files.
      resume_step: the first step that will be written.
      writers: kinds of writers; one of them is ``JsonLines``.
      config: as in ``WriterSettings.open``.

    Raises ValueError for a damaged ``metrics.jsonl``, OSError when the disk is full.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        resume_step: int = 0,
        writers: Sequence[WriterSettings] = (JsonLines(), TensorBoard()),
        config: Mapping[str, Any] | None = None,
    ):
        folder = Path(folder).absolute()
        self._writers = [writer.open(folder, resume_step, config or {}) for writer in writers]
        rows = read_metrics(folder)
        # of the last row, -1 before the first
        self.last_step: int = rows[-1]["step"] if rows else -1

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
        numbers = {name: as_number(name, value) for name, value in values.items()}
        for writer in self._writers:
            writer.write(step, numbers)
        self.last_step = step

    def close(self) -> None:
        """Closes all writers."""
        for writer in self._writers:
            writer.close()

    def __enter__(self) -> MetricLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _JsonLinesWriter:
    def __init__(self, folder: Path, resume_step: int):
        self._path = folder / METRICS_FILE
        folder.mkdir(parents=True, exist_ok=True)
        kept = [row for row in read_metrics(folder) if row["step"] < resume_step]
        write_atomically(self._path, "".join(map(json_line, kept)).encode())
        self._file = open(self._path, "ab", buffering=0)

    def write(self, step: int, values: Numbers) -> None:
        _append(self._file, self._path, json_line({"step": step, **values}).encode())

    def close(self) -> None:
        self._file.close()


class _TensorBoardWriter:
    def __init__(self, folder: Path, resume_step: int):
        self._folder = folder
        with explain_full_disk(folder):
            folder.mkdir(parents=True, exist_ok=True)
            # The library names files by the second; the suffix keeps a quick restart from
            # overwriting one.
            self._events = EventsWriter(str(folder / "events"), f".{time.time_ns()}")
            # TensorBoard hides older events of steps >= this step.
            start = SessionLog(status=SessionLog.START)
            self._events.write_event(
                Event(wall_time=time.time(), step=resume_step, session_log=start)
            )
            self._events.flush()

    def write(self, step: int, values: Numbers) -> None:
        scalars = [
            Summary.Value(tag=name, simple_value=float(number)) for name, number in values.items()
        ]
        with explain_full_disk(self._folder):
            self._events.write_event(
                Event(wall_time=time.time(), step=step, summary=Summary(value=scalars))
            )
            self._events.flush()

    def close(self) -> None:
        self._events.close()


class _ServiceWriter:
    """A run of a service: wandb and trackio have the same methods."""

    def __init__(self, run: Any):
        self._run = run

    def write(self, step: int, values: Numbers) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def _require(package: str) -> None:
    """Raises ValueError, which says what to install, when a package is missing."""
    if importlib.util.find_spec(package) is None:
        raise ValueError(
            f"the package {package} is not installed; run pip install -e '.[{package}]'"
        )


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
