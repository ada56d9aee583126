"""Runs a trainer to its end, strikes it as planned, and writes down its lives and its memory."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from cluster.kills import kill_all
from experiments.endurance import small_disk
from experiments.endurance.plan import KILL, Fault, Plan
from rl_code.metrics.values import METRICS_FILE

ROOT = Path(__file__).resolve().parents[2]
LIVES_FILE = "lives.jsonl"
MEMORY_FILE = "memory.jsonl"
LOG_FILE = "trainer.log"
# Seconds between two looks at the trainer, and between two measurements of its memory.
_LOOK_S = 0.1
_MEMORY_S = 2.0
# Lives in a row that may end with an error by themselves and without a new step.
_ERRORS = 5
# Exit code of a trainer that would fail again.
_LASTING = 2
# Bytes at the end of a file of metrics in which the last whole row is.
_TAIL = 1 << 16
# A trainer without a new step for so many seconds, of which a warm start takes most, is killed.
_HUNG_S = 3600.0
# End of a life of such a trainer, as lives.jsonl has it.
HUNG = "hung"
# Seconds that a trainer on a small disk may take until that is full.
_PATIENCE_S = 900.0
# Seconds that a trainer that was asked to stop may take.
_STOP_S = 120.0


class EnduranceError(RuntimeError):
    """The trainer gave up, or a check failed."""


class Player:
    """Runs one trainer after another on one workdir.

    Args:
      folder: of the plan and of what is written down; the workdir is its folder ``run``.
      command: words that start the trainer.
      variables: its environment.
      room_kib: room that the full disk has left, before it is full.
      say: shows a line.
    """

    def __init__(
        self,
        folder: Path,
        plan: Plan,
        command: Sequence[str],
        variables: dict[str, str],
        room_kib: int,
        say: Callable[[str], None],
    ):
        self.folder, self.plan = folder, plan
        self.run = folder / "run"
        # A killed player leaves no trainer behind, which the next one would meet in the workdir.
        self._command = [*small_disk.WITH_PARENT, *command]
        self._variables = variables
        self._room_kib, self._say = room_kib, say
        self._began = 0.0
        self._first = 0

    def play(self) -> None:
        """Runs to the end of training. Raises EnduranceError, and KeyboardInterrupt after having
        stopped the trainer, which then goes on by the same command.
        """
        errors = 0
        while True:
            with self._started() as process:
                how = self._watch(process)
            done = self._note_life(how)
            if how == "ended with code 0":
                return
            if how == f"ended with code {_LASTING}":
                raise EnduranceError(f"the trainer gave up: {self._last_words()}")
            failed = how.startswith("ended") and not done
            errors = errors + 1 if failed else 0
            if errors == _ERRORS:
                raise EnduranceError(f"{errors} starts in a row failed: {self._last_words()}")

    @contextlib.contextmanager
    def _started(self):
        self.plan.lives += 1
        self._began, self._first = time.time(), steps_done(self.run)
        with open(self.folder / LOG_FILE, "ab") as log:
            process = subprocess.Popen(
                self._command,
                cwd=ROOT,
                env=self._variables,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield process
        except KeyboardInterrupt:
            self._stop(process)
            self._note_life("stopped with this command")
            raise
        finally:
            kill_all(process.pid)
            process.wait()

    def _watch(self, process: subprocess.Popen[bytes]) -> str:
        """Strikes a trainer when the next fault is due; returns how it ended."""
        due: float | None = None
        measured = 0.0
        moved, known = time.monotonic(), -1
        while (code := process.poll()) is None:
            now = time.monotonic()
            step = steps_done(self.run)
            if step != known:
                moved, known = now, step
            if now >= moved + _HUNG_S:
                kill_all(process.pid)
                return HUNG
            if now >= measured + _MEMORY_S:
                measured = now
                self._note_memory(process.pid, step)
            fault = self.plan.next
            if fault is not None and step >= fault.step:
                due = now + fault.delay_s if due is None else due
                if now >= due:
                    return self._strike(fault, process, step)
            time.sleep(_LOOK_S)
        return f"ended with code {code}"

    def _strike(self, fault: Fault, process: subprocess.Popen[bytes], step: int) -> str:
        age_s = round(time.time() - self._began, 1)
        if fault.what == KILL:
            kill_all(process.pid)
            self._done(fault, {"step": step, "age_s": age_s})
            return "killed"
        self._stop(process)
        try:
            self._done(fault, {"step": step} | self._fill_disk())
        except small_disk.SmallDiskError as error:
            raise EnduranceError(str(error)) from error
        return "stopped for a full disk"

    def _fill_disk(self) -> dict:
        """Runs a trainer on a disk that fills up, to its end; the facts of it."""
        before = steps_done(self.run)
        log_path = self.folder / "full_disk.log"
        with open(log_path, "wb") as log:
            disk = small_disk.start(
                self.run, self._command, self._room_kib, log, self._variables, ROOT
            )
            try:
                code = disk.process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                kill_all(disk.process.pid)
                disk.process.wait()
        if code is None:
            small_disk.mend(self.run)
            return {"code": None, "told": f"the disk was not full after {_PATIENCE_S:.0f} s"}
        disk.take_back()
        told = of_full_disk(log_path.read_text(errors="replace"))
        return {"code": code, "told": told, "steps": steps_done(self.run) - before}

    def _stop(self, process: subprocess.Popen[bytes]) -> None:
        """Lets a trainer end its step and save."""
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            process.terminate()
            process.wait(_STOP_S)
        kill_all(process.pid)

    def _done(self, fault: Fault, facts: dict) -> None:
        fault.done = facts
        self.plan.save(self.folder)
        left = sum(one.done is None for one in self.plan.faults)
        self._say(f"{fault.what} at update {facts['step']} of {self.plan.steps}, {left} to come")

    def _note_life(self, how: str) -> int:
        """Writes down a life that has ended; returns how many steps it brought."""
        last = steps_done(self.run)
        seconds = time.time() - self._began
        self.plan.seconds += seconds
        self.plan.save(self.folder)
        times = {"life": self.plan.lives, "began": self._began, "seconds": round(seconds, 2)}
        steps = {"first": self._first, "last": last}
        _append(self.folder / LIVES_FILE, {**times, **steps, "how": how})
        return last - self._first

    def _note_memory(self, pid: int, step: int) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            size = psutil.Process(pid).memory_info().rss
            row = {"life": self.plan.lives, "step": step, "mb": round(size / 1e6, 3)}
            _append(self.folder / MEMORY_FILE, row)

    def _last_words(self) -> str:
        lines = (self.folder / LOG_FILE).read_text(errors="replace").splitlines()
        return " | ".join(lines[-3:])


def steps_done(run: Path) -> int:
    """Steps whose metrics are written, read from the end of the file."""
    try:
        with open(run / METRICS_FILE, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - _TAIL))
            lines = file.read().split(b"\n")[:-1]  # what follows the last newline is torn
    except OSError:
        return 0
    for line in reversed(lines):
        with contextlib.suppress(ValueError):
            return json.loads(line)["step"] + 1
    return 0


def of_full_disk(text: str) -> str:
    """The last words of a log that tell of a full disk, wherever its lines break; "" for none."""
    text = " ".join(text.split())
    at = max(text.rfind(words) for words in ("the disk is full", "No space left"))
    return "" if at < 0 else text[max(0, at - 120) : at + 60]


def _append(path: Path, row: dict) -> None:
    with open(path, "a") as file:
        file.write(json.dumps(row) + "\n")
