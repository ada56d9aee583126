"""Agents of a package that is installed for another Python.

One process imports the package (seconds), and makes a child for each episode
(``forking_driver.py``). Such a package is no dependency of this project. It goes into an
environment of its own, since what it needs may contradict our pins.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from rl_code.harness.agent import Ending, EpisodeFacts, HarnessError, Host
from rl_code.harness.program import end

_DRIVER = Path(__file__).with_name("forking_driver.py")
# The most characters of what a process wrote to its standard error that are told.
LAST_WORDS = 2000
# Seconds in which the process may end by itself.
_END_S = 5.0


def find_python(python: str) -> str:
    """The Python that a config names, from whatever folder it is started; "" names this one."""
    return os.path.abspath(python) if os.sep in python else python or sys.executable


class ForkingHost(Host):
    """The process that has imported a package.

    python: the Python that has it; "" for the one that runs this. A subclass says which package,
    what its agents are told and what their endings mean.
    """

    # Its name, and what pip installs.
    package: ClassVar[str]
    requirement: ClassVar[str]
    # The file with the class ``Package``, see ``forking_driver``.
    driver: ClassVar[Path]
    # The key of the config that names the Python, for messages.
    key: ClassVar[str] = "harness.python"

    def __init__(self, python: str):
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._waiting: dict[int, Callable[[Ending], None]] = {}
        self._ended = False
        self._folder = tempfile.TemporaryDirectory(prefix="agents_")
        self._errors = Path(self._folder.name, "stderr").open("w+b")
        python = find_python(python)
        try:
            self._process = subprocess.Popen(
                # -P: modules beside the driver are none of the package's
                [python, "-P", "-u", str(_DRIVER), str(self.driver)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=self.environment(self._folder.name),
                cwd=self._folder.name,
                text=True,
                start_new_session=True,
            )
        except OSError as error:
            self._errors.close()
            self._folder.cleanup()
            raise HarnessError(f"{self.key} = {python!r} cannot be started: {error}") from error
        # It says one line when it has imported the package.
        if not self._process.stdout.readline():
            self._process.wait()
            words = self._last_words()
            self.close()
            raise HarnessError(self.missing(python, words))
        for work in (self._read, self._watch):
            threading.Thread(target=work, name=self.package, daemon=True).start()

    @classmethod
    def missing(cls, python: str, words: str) -> str:
        """Message about a Python that cannot import the package. words: its last ones."""
        return (
            f"{python} cannot import {cls.package}: {words}; install it there "
            f"(pip install {cls.requirement}), or say in {cls.key} which one has it"
        )

    @staticmethod
    def environment(folder: str) -> dict[str, str]:
        """Variables of the process. folder: an empty one of its own."""
        raise NotImplementedError

    def describe(self, job: EpisodeFacts) -> dict[str, Any]:
        """Arguments of ``Package.prepare``, beside the endpoint. Raises HarnessError."""
        raise NotImplementedError

    def ending(self, said: Mapping[str, Any]) -> Ending:
        """Reading of the outcome of ``Package.play``, or of an error (``forking_driver``)."""
        raise NotImplementedError

    def start(self, job: EpisodeFacts, on_end: Callable[[Ending], None]) -> Callable[[], None]:
        line = self.describe(job)
        line |= {"base_url": job.base_url, "key": job.api_key, "model": job.model}
        number = next(self._numbers)
        with self._lock:
            if self._ended:
                raise HarnessError(f"{self.package} has ended: {self._last_words()}")
            self._waiting[number] = on_end
        self._tell({"start": number} | line)
        return lambda: self._kill(number)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what is written to a process that is gone
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        end(self._process)
        self._process.wait()
        self._errors.close()
        self._folder.cleanup()

    def _tell(self, line: dict[str, Any]) -> None:
        try:
            with self._lock:
                self._process.stdin.write(json.dumps(line) + "\n")
                self._process.stdin.flush()
        except (OSError, ValueError) as error:
            raise HarnessError(f"{self.package} has ended: {self._last_words()}") from error

    def _kill(self, number: int) -> None:
        with self._lock:
            known = self._waiting.pop(number, None) is not None
        if known:
            with contextlib.suppress(HarnessError):  # so nothing is left to be killed
                self._tell({"kill": number})

    def _read(self) -> None:
        """Takes what the process says, until it ends."""
        for line in self._process.stdout:
            said = json.loads(line)
            with self._lock:
                on_end = self._waiting.pop(said["ended"], None)
            if on_end is not None:
                on_end(self.ending(said))

    def _watch(self) -> None:
        """Waits for the end of the process. Its children end with it, and their episodes are lost
        through no fault of the model's.
        """
        self._process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with self._lock:
            self._ended = True
            left = list(self._waiting.values())
            self._waiting.clear()
        for on_end in left:
            cause = f"{self.package} has ended: {self._last_words()}"
            on_end(Ending(False, cause, fault=True))

    def _last_words(self) -> str:
        try:
            text = Path(self._folder.name, "stderr").read_bytes().decode("utf-8", "replace")
        except OSError:
            return ""
        return text[-LAST_WORDS:].strip()
