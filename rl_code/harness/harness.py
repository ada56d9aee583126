"""Shared parts of a run's episodes that agents of others play: the endpoint, and what runs them."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping
from typing import Any

from rl_code.harness.agent import Agent, Host
from rl_code.harness.endpoint.endpoint import Client, Endpoint

# The name under which agents ask for the policy.
MODEL = "policy"


class Harness:
    """The endpoint of a process and the host of its agents, both started when first used."""

    model = MODEL

    def __init__(self, agent: Agent):
        self._agent = agent
        self._clients: dict[str, Client] = {}
        self._host: Host | None = None
        self._endpoint: Endpoint | None = None
        # Episodes start in several threads; the endpoint and the host are made once.
        self._lock = threading.Lock()

    @property
    def scores(self) -> bool:
        """As ``Agent.scores``."""
        return self._agent.scores

    @property
    def sandbox(self) -> Mapping[str, Any] | None:
        """As ``Agent.sandbox``."""
        return self._agent.sandbox

    @property
    def host(self) -> Host:
        """Runs the agent's programs. Raises HarnessError where that cannot be."""
        with self._lock:
            if self._host is None:
                self._host = self._agent.host()
            return self._host

    @property
    def endpoint(self) -> Endpoint:
        """The server, on the loopback."""
        with self._lock:
            if self._endpoint is None:
                self._endpoint = Endpoint(self._clients.get)
            return self._endpoint

    def enter(self, client: Client) -> str:
        """Lets an episode's agent in; its key."""
        key = secrets.token_hex(16)
        self._clients[key] = client
        return key

    def leave(self, key: str) -> None:
        """The key is not known from now on. May be called twice."""
        self._clients.pop(key, None)

    def url_of(self, key: str) -> str:
        """The base URL of an episode's agent."""
        return self.endpoint.url_of(key)

    def close(self) -> None:
        """Ends all programs, and the server."""
        with self._lock:
            if self._host is not None:
                self._host.close()
            if self._endpoint is not None:
                self._endpoint.close()
            self._host = self._endpoint = None
