"""program: any command, started once for each episode.

It finds the task on its standard input, and in its environment

    OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL    where to ask for messages, and for which model

It runs a command in the episode's workspace with a POST of ``{"command": ...}`` to
``$OPENAI_BASE_URL/execute``, which answers ``{"output", "returncode", "timed_out"}``. It hands its
work in by ending with exit code 0. One that the machine kills is a fault, and no failure.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable

from rl_code.harness.agent import Agent, Ending, EpisodeFacts, HarnessError, Host

# The most of a program's last words that an error shows, in characters.
_LAST_WORDS = 2000
# Signals that the machine sends, when it is short of memory or shut down. A program that one of
# them ended did not fail, and neither did the policy.
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM)


@dataclasses.dataclass(frozen=True)
class Program(Agent):
    """Any command that speaks the OpenAI chat API."""

    # The command and its arguments.
    command: tuple[str, ...] = ()

    def host(self) -> ProgramHost:
        if not self.command:
            raise HarnessError("harness.command = (): say which command is the agent")
        return ProgramHost(self.command)


class ProgramHost(Host):
    """A process for each episode."""

    def __init__(self, command: tuple[str, ...]):
        self._command = command
        self._running: set[subprocess.Popen] = set()
        self._lock = threading.Lock()

    def start(self, job: EpisodeFacts, on_end: Callable[[Ending], None]) -> Callable[[], None]:
        output = tempfile.TemporaryFile()
        try:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment(job),
                start_new_session=True,
            )
        except OSError as error:
            output.close()
            raise HarnessError(
                f"harness.command = {self._command!r} cannot be started: {error}"
            ) from error
        with self._lock:
            self._running.add(process)

        def wait() -> None:
            with contextlib.suppress(OSError):
                process.communicate(job.text.encode("utf-8", "replace"))
            code = process.wait()
            with self._lock:
                self._running.discard(process)
            with output:
                output.seek(0, os.SEEK_END)
                output.seek(max(0, output.tell() - _LAST_WORDS))
                words = output.read().decode("utf-8", "replace").strip()
            killed = -code in _FROM_OUTSIDE
            cause = f"exit code {code}: {words}"
            on_end(Ending(True) if code == 0 else Ending(False, cause, fault=killed))

        threading.Thread(target=wait, name="agent program", daemon=True).start()
        return lambda: end(process)

    def close(self) -> None:
        with self._lock:
            running = list(self._running)
        for process in running:
            end(process)


def end(process: subprocess.Popen) -> None:
    """Kills a process that leads a group of its own, and the group."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def environment(job: EpisodeFacts) -> dict[str, str]:
    """The environment of an agent's program: this process's own without proxies, which would stand
    between it and the endpoint, and without any other key of the same kind.
    """
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.lower().endswith("_proxy") and not name.startswith("OPENAI_")
    }
    return own | {
        "OPENAI_BASE_URL": job.base_url,
        "OPENAI_API_KEY": job.api_key,
        "OPENAI_MODEL": job.model,
    }
