"""Versions of one model in the servers of this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from people.realtime.parts import Overtaken, Routing
from people.serving.models import Models
from people.serving.router import AUTO, EVERYBODY, Controlled, Router, Shares


class ServedFleet:
    """``parts.Fleet``: versions of one model in the servers of this process.

    weights: loads those of a version. drain_s: how long answers of a version that is retired may
    take.
    """

    def __init__(self, models: Models, name: str, weights: Callable[[int], Any], drain_s: float):
        self._models, self._name, self._weights, self._drain_s = models, name, weights, drain_s
        self._loaded: set[int] = set()
        self._routing: Routing | None = None

    def apply(self, routing: Routing) -> None:
        now = self._routing
        if now is not None and routing.turn < now.turn:
            raise Overtaken(f"{routing} is older than what is in force, {now}")
        if routing == now:
            return
        shares = {routing.deployed: 1.0 - routing.share}
        if routing.candidate is not None:
            shares[routing.candidate] = routing.share
        for version in routing.versions:
            if version not in self._loaded:
                self._models.load(self._name, version, self._weights(version))
                self._loaded.add(version)
        self._models.promote(self._name, routing.deployed)
        arms = {f"{self._name}@{version}": share for version, share in shares.items()}
        router: Router = Shares(routing.experiment or EVERYBODY, arms)
        if routing.control is not None:
            arm = f"{self._name}@{routing.control}"
            router = Controlled(arm, routing.control_share, router)
        self._models.route(AUTO, router)
        for version in sorted(self._loaded.difference(routing.versions)):
            self._models.retire(self._name, version, self._drain_s)
            self._loaded.remove(version)
        self._routing = routing

    def routing(self) -> Routing | None:
        return self._routing
