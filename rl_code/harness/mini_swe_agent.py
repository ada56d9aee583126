"""mini_swe_agent: the package mini-swe-agent, unmodified.

It is no dependency of this project. Put it into an environment of its own:

    python -m venv mini && mini/bin/pip install mini-swe-agent==2.4.6

    harness=dict(name="mini_swe_agent", python="mini/bin/python")

One process imports the package (seconds), and makes a child for each episode
(``mini_swe_agent_driver.py``). The agent is the package's ``DefaultAgent`` with its
``LitellmModel``; its environment is the package's local one, but commands go to the episode's
sandbox. It has handed in when it says so (``Submitted``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl_code.harness.agent import Agent, Ending, HarnessError, Host, Job
from rl_code.harness.program import end

_DRIVER = Path(__file__).with_name("mini_swe_agent_driver.py")
_LAST_WORDS = 2000


@dataclasses.dataclass(frozen=True)
class MiniSweAgent(Agent):
    """The agent of the package mini-swe-agent."""

    # The Python that has the package; "" for the one that runs this.
    python: str = ""
    # How the agent calls: "tools", by the API's tool calls, or "text", by a code block in the text.
    calls: str = "tools"
    # Its templates (jinja2, with the variable ``task``); "" for those of the package.
    system: str = ""
    instance: str = ""
    observation: str = ""
    format_error: str = ""
    # Messages in a row whose action cannot be read, after which it gives up; 0 for no such limit.
    format_errors: int = 3

    def host(self) -> MiniSweAgentHost:
        if self.calls not in ("tools", "text"):
            raise HarnessError(f"harness.calls = {self.calls!r} must be 'tools' or 'text'")
        return MiniSweAgentHost(self)


class MiniSweAgentHost(Host):
    """The process that has imported the package."""

    def __init__(self, agent: MiniSweAgent):
        self._agent = agent
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._waiting: dict[int, Callable[[Ending], None]] = {}
        self._ended = False
        self._folder = tempfile.TemporaryDirectory(prefix="mini_swe_agent_")
        self._errors = Path(self._folder.name, "stderr").open("w+b")
        python = agent.python or sys.executable
        try:
            self._process = subprocess.Popen(
                [python, "-u", str(_DRIVER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=self._environment(),
                cwd=self._folder.name,
                text=True,
                start_new_session=True,
            )
        except OSError as error:
            self._folder.cleanup()
            raise HarnessError(f"harness.python = {python!r} cannot be started: {error}") from error
        # It says one line when it has imported the package.
        if not self._process.stdout.readline():
            self._process.wait()
            words = self._last_words()
            self.close()
            raise HarnessError(
                f"{python} cannot import mini-swe-agent: {words}; install it there "
                "(pip install mini-swe-agent==2.4.6), or say in harness.python which one has it"
            )
        for work in (self._read, self._watch):
            threading.Thread(target=work, name="mini-swe-agent", daemon=True).start()

    def start(self, job: Job, on_end: Callable[[Ending], None]) -> Callable[[], None]:
        number = next(self._numbers)
        with self._lock:
            if self._ended:
                raise HarnessError(f"mini-swe-agent has ended: {self._last_words()}")
            self._waiting[number] = on_end
        settings = dataclasses.asdict(self._agent)
        what = {"task": job.text, "base_url": job.base_url, "key": job.api_key, "model": job.model}
        self._tell({"start": number, "settings": settings} | what)
        return lambda: self._kill(number)

    def close(self) -> None:
        end(self._process)
        self._process.wait()
        for stream in (self._process.stdin, self._errors):
            try:
                stream.close()
            except OSError:  # what was written could not be flushed to a process that is gone
                pass
        self._folder.cleanup()

    def _environment(self) -> dict[str, str]:
        """Nothing but the loopback is asked for: no prices of models, no proxies, no keys."""
        kept = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR")
        return {name: os.environ[name] for name in kept if name in os.environ} | {
            "HOME": self._folder.name,
            "MSWEA_GLOBAL_CONFIG_DIR": self._folder.name,
            "MSWEA_SILENT_STARTUP": "1",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "2",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "NO_PROXY": "*",
        }

    def _tell(self, line: dict[str, Any]) -> None:
        try:
            with self._lock:
                self._process.stdin.write(json.dumps(line) + "\n")
                self._process.stdin.flush()
        except (OSError, ValueError) as error:
            raise HarnessError(f"mini-swe-agent has ended: {self._last_words()}") from error

    def _kill(self, number: int) -> None:
        with self._lock:
            known = self._waiting.pop(number, None) is not None
        if known:
            try:
                self._tell({"kill": number})
            except HarnessError:
                pass  # so nothing is left to be killed

    def _read(self) -> None:
        """Takes what the process says, until it ends."""
        for line in self._process.stdout:
            said = json.loads(line)
            with self._lock:
                on_end = self._waiting.pop(said["ended"], None)
            if on_end is not None:
                status = said["status"]
                done = status == "Submitted"
                cause = "" if done else f"{status}: {said['error']}"
                on_end(Ending(done, cause))

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
            cause = f"mini-swe-agent has ended: {self._last_words()}"
            on_end(Ending(False, cause, fault=True))

    def _last_words(self) -> str:
        try:
            text = Path(self._folder.name, "stderr").read_bytes().decode("utf-8", "replace")
        except OSError:
            return ""
        return text[-_LAST_WORDS:].strip()
