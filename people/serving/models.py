"""Served models and adapters by name and version, loaded and retired while others answer.

A model is asked for as ``name@version``, as ``name`` (the version that was promoted last), or by an
alias whose router chooses. Each set of weights has an engine of its own, with pages of its own;
adapters share the engine of the model that they adapt. Nothing is swapped below an answer: it ends
with the weights that began it, and only then are they let go.
"""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from models.adapter_rows import with_several
from models.lora import Adapters
from models.transformer import Transformer
from people.serving.router import Router
from people.serving.service import Service
from rl_code.harness.endpoint.fields import unknown_model

# The most adapters beside one model.
_MOST_ADAPTERS = 64
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)


@dataclasses.dataclass(eq=False)
class Host:
    """An engine and what it computes with."""

    service: Service
    weights: Transformer
    # The adapters by their numbers; None where there is room for one.
    adapters: list[Mapping[str, Adapters] | None] = dataclasses.field(default_factory=list)
    # Models that it answers for.
    models: int = 0


@dataclasses.dataclass(eq=False)
class Loaded:
    """A version of a model, or of an adapter, that can be asked."""

    name: str
    version: int
    host: Host
    # For an adapter: its number in the engine, and the model that it adapts; else -1 and None.
    adapter: int = -1
    base: Loaded | None = None
    # Requests that wait or are answered.
    running: int = 0

    @property
    def key(self) -> str:
        """Name by which requests ask for it: ``name@version``."""
        return f"{self.name}@{self.version}"


class Models:
    """The table of what is served. Safe to use from several threads.

    make_service: starts an engine with weights of a version.
    """

    def __init__(self, make_service: Callable[[Transformer, int], Service]):
        self._make_service = make_service
        self._loaded: dict[str, Loaded] = {}
        self._promoted: dict[str, Loaded] = {}
        self._routers: dict[str, Router] = {}
        # Requests that wait or are answered, of retired versions too.
        self.running = 0
        # Guards the three tables and ``running``; ``retire`` waits for it.
        self._changed = threading.Condition()  # of a lock that a thread may take twice
        # Held while something is loaded or retired.
        self._changing = threading.Lock()

    def load(self, name: str, version: int, weights: Transformer) -> None:
        """Serves a version of a model; the first of a name is promoted.

        Raises ValueError for a name that cannot be one, and for what is served already.
        """
        with self._changing:
            self._check_new(name, version)
            host = Host(self._make_service(weights, version), weights)
            self._add(Loaded(name, version, host))

    def load_adapter(
        self, name: str, version: int, adapters: Mapping[str, Adapters], base: str
    ) -> None:
        """Serves an adapter of a model that is served.

        adapters: as ``lora.trained`` gives them. base: the model, as ``name@version``. Raises
        ValueError as ``load``, for a base that is not served, and where there is no room.
        """
        with self._changing:
            self._check_new(name, version)
            model = self._loaded.get(base)
            if model is None or model.base is not None:
                raise ValueError(f"{base=} is no model that is served; there are {self.names()}")
            host = model.host
            number = self._room(host)
            host.adapters[number] = adapters
            self._put_adapters(host)
            self._add(Loaded(name, version, host, number, model))

    def promote(self, name: str, version: int) -> None:
        """Let a name alone mean this version from now on. Raises ValueError if it is not served."""
        with self._changed:
            self._promoted[name] = self._found(f"{name}@{version}")

    def retire(self, name: str, version: int, timeout_s: float | None = None) -> None:
        """Takes no more requests for a version, waits until its answers have ended, and lets its
        weights go. timeout_s: after which what is left is cut off; None for no end.

        Raises ValueError for what is not served, what its name alone or a router still means, and a
        model that adapters are loaded for.
        """
        with self._changing:
            with self._changed:
                loaded = self._found(f"{name}@{version}")
                self._check_free(loaded)
                del self._loaded[loaded.key]
                if self._promoted.get(name) is loaded:
                    del self._promoted[name]
                self._changed.wait_for(lambda: loaded.running == 0, timeout_s)
            host = loaded.host
            host.models -= 1
            if host.models == 0:
                host.service.close()
            elif loaded.running == 0:
                host.adapters[loaded.adapter] = None
            else:
                # Its number stays taken, since requests that wait for others may still come.
                host.service.cut_off(loaded.adapter).result()

    def route(self, alias: str, router: Router) -> None:
        """Has a router answer for an alias, which may be the name of a model too. A router that was
        there before is replaced at once, for requests from now on.

        Raises ValueError for an arm that is not served.
        """
        self._check_name(alias)
        with self._changed:
            for arm in router.arms:
                self._found(arm)
            self._routers[alias] = router

    def arms(self, alias: str) -> Sequence[str]:
        """Names among which the router of an alias chooses; empty if it has no router."""
        with self._changed:
            router = self._routers.get(alias)
        return router.arms if router else ()

    def reward(self, alias: str, arm: str, value: float) -> None:
        """Tells the router of an alias what an answer of an arm has earned (``Router.reward``).
        Raises ValueError.
        """
        with self._changed:
            router = self._routers.get(alias)
        if router is None:
            raise ValueError(f"{alias!r} has no router")
        router.reward(arm, value)

    def forget(self, user: str) -> None:
        """Has all routers forget what they keep of a user."""
        with self._changed:
            routers = list(self._routers.values())
        for router in routers:
            router.forget(user)

    def versions(self) -> list[str]:
        """All models and adapters, each by name and version, in the order in which they came."""
        with self._changed:
            return list(self._loaded)

    def names(self) -> list[str]:
        """All that can be asked for."""
        with self._changed:
            return sorted({*self._routers, *self._promoted, *self._loaded})

    def take(self, asked: str, user: str, session: str) -> tuple[Loaded, str]:
        """Take the model that answers a request, and its arm ("" where no router chose). The model
        is not let go before ``give_back``. asked: "" for the only router, or the only model where
        there is no router. Raises ApiError.
        """
        with self._changed:
            choices = self._routers or self._promoted
            if not asked and len(choices) == 1:
                (asked,) = choices
            router = self._routers.get(asked)
            arm = router.choose(user, session) if router else ""
            loaded = self._loaded.get(arm or asked) or self._promoted.get(arm or asked)
            if loaded is None:
                raise unknown_model(asked, self.names())
            loaded.running += 1
            self.running += 1
            return loaded, arm

    def give_back(self, loaded: Loaded) -> None:
        """A request has ended."""
        with self._changed:
            loaded.running -= 1
            self.running -= 1
            self._changed.notify_all()

    def wait_idle(self, timeout_s: float) -> bool:
        """Waits until no request is left; whether there is none."""
        with self._changed:
            return self._changed.wait_for(lambda: self.running == 0, timeout_s)

    @property
    def services(self) -> Sequence[Service]:
        """All engines."""
        with self._changed:
            return list(
                {id(each.host): each.host.service for each in self._loaded.values()}.values()
            )

    def close(self) -> None:
        """Ends all engines; what they answer is cut off."""
        for service in self.services:
            service.close()
        with self._changed:
            self._routers.clear()
            self._promoted.clear()
            self._loaded.clear()

    # --- Tables -----------------------------------------------------------------------------------

    def _add(self, loaded: Loaded) -> None:
        loaded.host.models += 1
        with self._changed:
            self._loaded[loaded.key] = loaded
            self._promoted.setdefault(loaded.name, loaded)

    def _found(self, key: str) -> Loaded:
        if key not in self._loaded:
            there = ", ".join(sorted(self._loaded)) or "nothing"
            raise ValueError(f"{key!r} is not served; there is {there}")
        return self._loaded[key]

    def _check_name(self, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"{name=} must be up to 64 letters, digits, '.', '_' and '-', the first one a "
                "letter or a digit"
            )

    def _check_new(self, name: str, version: int) -> None:
        self._check_name(name)
        if version < 0:
            raise ValueError(f"{version=} must be at least 0")
        if f"{name}@{version}" in self._loaded:
            raise ValueError(f"{name}@{version} is served already")

    def _check_free(self, loaded: Loaded) -> None:
        """Raises ValueError where something else still needs it."""
        for alias, router in self._routers.items():
            if loaded.key in router.arms:
                raise ValueError(f"{loaded.key} is an arm of {alias!r}: route that otherwise first")
        others = [each for each in self._loaded.values() if each is not loaded]
        if any(each.base is loaded for each in others):
            raise ValueError(f"{loaded.key} has adapters: retire them first")
        same = any(each.name == loaded.name for each in others)
        if same and self._promoted.get(loaded.name) is loaded:
            raise ValueError(f"{loaded.name!r} means {loaded.key}: promote another version first")

    # --- Adapters ---------------------------------------------------------------------------------

    def _room(self, host: Host) -> int:
        """The number of a new adapter. The room doubles, since each other count of adapters is
        another program for the engine to compile.
        """
        if None not in host.adapters:
            count = len(host.adapters)
            if count == _MOST_ADAPTERS:
                raise ValueError(f"there are {_MOST_ADAPTERS} adapters already: retire one first")
            host.adapters += [None] * max(1, count)
        return host.adapters.index(None)

    def _put_adapters(self, host: Host) -> None:
        """Has the engine compute with the adapters that there are; zeros where there is room."""
        like = next(each for each in host.adapters if each is not None)
        nothing = jax.tree.map(jnp.zeros_like, like)
        several = [nothing if each is None else each for each in host.adapters]
        host.service.load(with_several(host.weights, several)).result()
