"""Clients of an agent under load: people with wants, who write down what was acknowledged to them.

They are those of ``people.simulated.agent_crowd``, with tools that they carry out themselves. Each
request for a message is noted: an answer when it is whole, and every try that came to none.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from people.feedback.records import Event
from people.simulated.agent_crowd import AgentCrowdConfig, AgentPersons
from people.simulated.client import Client, NoAnswer, Said, ServerRefused
from rl_code.config import read_config

# Seconds of one try, and the shortest and longest wait after one that failed.
TIMEOUT_S = 120.0
WAITS_S = (0.1, 2.0)
# Seconds for which a request, and events, are sent again before a client gives up.
PATIENCE_S = 3_600.0


class Notes(Protocol):
    """The journal of ``experiments.load.clients``."""

    def note(self, what: str, **fields: Any) -> None: ...


class NotingClient(Client):
    """A client that notes each answer, each try without one, and what became of events."""

    def __init__(self, journal: Notes, url: str, key: str, *, session: str):
        super().__init__(url, key, session=session, timeout_s=TIMEOUT_S, patience_s=PATIENCE_S)
        # one try, so that each is noted
        self._tries = Client(url, key, session=session, timeout_s=TIMEOUT_S, patience_s=0.0)
        self._journal = journal

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        model: str = "auto",
        **fields: Any,
    ) -> Said:
        """As ``Client``."""
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                said = self._tries.chat(messages, tools, model, **fields)
            except NoAnswer as error:
                why = str(error).split(": ", 2)[-1]  # without how long it has tried, and the path
                self._journal.note("no answer", why=why)
                if time.monotonic() > end:
                    raise
                time.sleep(random.uniform(*WAITS_S))
                continue
            calls = [one["function"] for one in said.message.get("tool_calls") or ()]
            self._journal.note(
                "answer",
                id=said.id,
                content=said.message.get("content"),
                calls=[[one["name"], one["arguments"]] for one in calls],
                tokens=said.tokens,
                first_s=said.seconds,
                whole_s=said.seconds,
            )
            return said

    def report(self, events: Sequence[Event]) -> dict[str, str]:
        """As ``Client``."""
        self._journal.note("sent", events=[dataclasses.asdict(event) for event in events])
        try:
            refused = super().report(events)
        except ServerRefused as error:
            self._journal.note("refused", why=str(error))
            raise
        self._journal.note("events", keys=[event.key for event in events], refused=refused)
        return refused

    def close(self) -> None:
        """As ``Client``."""
        super().close()
        self._tries.close()


class AgentLives:
    """People of an agent in this process. agents: an ``AgentCrowdConfig`` as JSON values."""

    def __init__(self, url: str, agents: Mapping[str, Any], journal: Notes):
        config = read_config.build(AgentCrowdConfig, agents)

        def client(url: str, key: str, *, session: str) -> Client:
            return NotingClient(journal, url, key, session=session)

        self._persons = AgentPersons(config, f"{url}/v1", 0, client=client)
        self.post = self._persons.post

    def have(self) -> None:
        """One session of whoever is free."""
        try:
            self._persons.session()
        except ServerRefused as error:
            print(error, flush=True)
            time.sleep(random.uniform(*WAITS_S))
