"""Many clients of a server at once, who write down what was acknowledged to them.

A process of them is started by ``Clients``. Each client is a person with an API key, who asks for
suggestions as a stream, decides as a simulated programmer does (``simulated.programmer``) and
reports it; or who works with an agent (``agent_clients``). An answer is acknowledged when the end
of its stream has come, events when the server has said that they are recorded; until then they are
sent again with the same keys. The process is never killed, so its journal is what the database is
judged by.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import random
import subprocess
import sys
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from experiments.load.agent_clients import PATIENCE_S, TIMEOUT_S, WAITS_S, AgentLives
from people.simulated.at_work import Hole, events_of
from people.simulated.client import Client, ServerRefused, Suggestion
from people.simulated.crowd import CrowdConfig, holes_of
from people.simulated.fit import embedded
from people.simulated.programmer import NAMED, Programmer

_ROOT = Path(__file__).resolve().parents[2]
# Texts to complete, which all clients share: making them takes longer than completing them.
_SESSIONS = 64
# Answers of a session.
_HOLES = 4
# Seconds that the process has to end when it is told to.
_END_S = 60.0


@dataclasses.dataclass(frozen=True)
class Task:
    """Settings of a process of clients."""

    url: str
    journal: str
    clients: int
    seed: int
    max_tokens: int
    # An ``AgentCrowdConfig`` of people who work with an agent; None for programmers.
    agents: dict[str, Any] | None = None


class Clients:
    """The process. It rests until ``go``. A context manager, which ends it."""

    def __init__(self, task: Task):
        self._task = task
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from experiments.load import clients; clients.main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )
        # Seconds of processor time that the process had taken when it rested last.
        self.cpu_s = 0.0
        self._tell(json.dumps(dataclasses.asdict(task)))
        self._hear()  # it has made its texts

    @property
    def count(self) -> int:
        """Number of clients."""
        return self._task.clients

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def go(self) -> None:
        """All clients ask, again and again."""
        self._tell("go")

    def rest(self) -> None:
        """No client asks any more; returns when all that was asked is answered, and all events are
        acknowledged.
        """
        self._tell("rest")
        self.cpu_s = float(self._hear())

    def _tell(self, line: str) -> None:
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def _hear(self) -> str:
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the clients ended with code {self._process.wait()}")
        return line


class Journal:
    """A line of JSON for each thing that happened, with its Unix time."""

    def __init__(self, file: TextIO):
        self._file, self._lock = file, threading.Lock()

    def note(self, what: str, **fields: Any) -> None:
        line = json.dumps({"what": what, "at": time.time(), **fields})
        with self._lock:
            self._file.write(f"{line}\n")
            self._file.flush()


class Asking:
    """Asks for completions as streams, over one connection at a time."""

    def __init__(self, url: str, key: str):
        parts = urllib.parse.urlsplit(url)
        self._address = (parts.hostname, parts.port)
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        self._connection: http.client.HTTPConnection | None = None

    def ask(self, hole: Hole, session: str, max_tokens: int) -> dict[str, Any]:
        """A client's result: ``id``, ``text``, ``tokens``, ``first_s``, ``whole_s`` of an answer
        that is whole; else ``why`` there is none, the ``status`` of a refusal and in how many
        seconds to ask again (``after_s``), and the ``id`` of an answer that was cut off.
        """
        asked = {"model": "auto", "prompt": hole.prefix, "suffix": hole.suffix, "stream": True}
        asked |= {"max_tokens": max_tokens, "stream_options": {"include_usage": True}}
        found: dict[str, Any] = {}
        start = time.monotonic()
        try:
            response = self._send(json.dumps(asked).encode(), session)
            if response.status != 200:
                words = response.read()[:200].decode(errors="replace")
                after = response.getheader("Retry-After") or "0"
                return {"why": words, "status": response.status, "after_s": float(after)}
            self._read(response, found, start)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            found["why"] = f"{type(error).__name__}: {error}"
        return found

    def _send(self, body: bytes, session: str) -> http.client.HTTPResponse:
        if self._connection is None:
            self._connection = http.client.HTTPConnection(*self._address, timeout=TIMEOUT_S)
        headers = self._headers | {"X-Session": session}
        self._connection.request("POST", "/v1/completions", body, headers)
        return self._connection.getresponse()

    def _read(self, response: http.client.HTTPResponse, found: dict, start: float) -> None:
        """Server-sent events to their end. An answer counts once the last one has come."""
        text, usage = "", None
        while line := response.readline():
            if not line.startswith(b"data: "):
                continue
            seconds = time.monotonic() - start
            if line.startswith(b"data: [DONE]"):
                response.read()
                if "why" not in found and usage is not None:
                    found |= {"text": text, "tokens": usage["completion_tokens"]}
                    found["whole_s"] = seconds
                    found.setdefault("first_s", seconds)
                    return
                break
            event = json.loads(line[6:])
            if "error" in event:
                found["why"] = event["error"]["message"]
                continue
            found["id"] = event["id"]
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                found.setdefault("first_s", seconds)
                text += choice["text"]
        found.setdefault("why", "the stream ended early")
        self.close()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class Gate:
    """Lets clients work, or rest."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._going, self._busy = False, 0

    def go(self) -> None:
        with self._change:
            self._going = True
            self._change.notify_all()

    def rest(self) -> None:
        """Returns when nobody is at work."""
        with self._change:
            self._going = False
            self._change.wait_for(lambda: self._busy == 0)

    @contextlib.contextmanager
    def work(self) -> Iterator[None]:
        """Waits until it may begin, and is at work until it is left."""
        with self._change:
            self._change.wait_for(lambda: self._going)
            self._busy += 1
        try:
            yield
        finally:
            with self._change:
                self._busy -= 1
                self._change.notify_all()


class Persons:
    """Programmers of this process, each a thread."""

    def __init__(self, task: Task, journal: Journal, gate: Gate):
        self._task, self._journal = task, journal
        self._fit = embedded()
        crowd = CrowdConfig(holes=_HOLES)
        self._sessions = [
            list(holes_of(crowd, f"load/{task.seed}/{number}")) for number in range(_SESSIONS)
        ]
        self._gate = gate

    def live(self, number: int) -> None:
        """The life of one client."""
        task = self._task
        key = f"load-{task.seed}-{number}"
        rng = random.Random(f"{task.seed}/{number}")
        asking = Asking(task.url, key)
        reporting = Client(f"{task.url}/v1", key, timeout_s=TIMEOUT_S, patience_s=PATIENCE_S)
        while True:
            session = uuid.uuid4().hex
            person = Programmer(self._fit, NAMED["recorded"], f"{task.seed}/{number}", session)
            for hole in rng.choice(self._sessions):
                with self._gate.work():
                    self._one(asking, reporting, person, hole, session, rng)

    def _one(
        self,
        asking: Asking,
        reporting: Client,
        person: Programmer,
        hole: Hole,
        session: str,
        rng: random.Random,
    ) -> None:
        """One answer and what becomes of it."""
        journal = self._journal
        found = asking.ask(hole, session, self._task.max_tokens)
        if "why" in found:
            journal.note("no answer", **found)
            time.sleep(found.get("after_s", 0.0) + rng.uniform(*WAITS_S))
            return
        journal.note("answer", **found)
        if not found["text"].strip():
            return
        suggestion = Suggestion(found["id"], found["text"], "", (), found["whole_s"])
        reaction = person.react(hole.prefix, found["text"], hole.wanted)
        events = events_of(suggestion, reaction, time.time())
        journal.note("sent", events=[dataclasses.asdict(event) for event in events])
        try:
            refused = reporting.report(events)
        except ServerRefused as error:
            journal.note("refused", why=str(error))
            return
        journal.note("events", keys=[event.key for event in events], refused=refused)


def _people(
    task: Task, journal: Journal, gate: Gate
) -> tuple[Callable[[int], None], Callable[[], None]]:
    """The life of a client by its number; and what is left to do when all rest."""
    if task.agents is None:
        return Persons(task, journal, gate).live, lambda: None
    lives = AgentLives(task.url, task.agents, journal)
    threading.Thread(target=lives.post.run, daemon=True).start()

    def live(number: int) -> None:
        while True:
            with gate.work():
                lives.have()

    return live, lambda: lives.post.deliver(everything=True)


def main() -> None:
    """One process; its task is a line of JSON on the standard input, then go and rest."""
    task = Task(**json.loads(sys.stdin.readline()))
    threading.stack_size(512 * 1024)
    gate = Gate()
    with open(task.journal, "a", encoding="utf-8") as file:
        live, rest = _people(task, Journal(file), gate)
        for number in range(task.clients):
            threading.Thread(target=live, args=(number,), daemon=True).start()
        print("ready", flush=True)
        for line in sys.stdin:
            if line.strip() == "go":
                gate.go()
            else:
                gate.rest()
                rest()
                print(time.process_time(), flush=True)
    os._exit(0)  # threads that rest do not end by themselves
