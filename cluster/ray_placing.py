"""Processes of roles as actors of Ray: reserved together, and started where Ray chose."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from cluster.ray_role import End, RoleProcess, options
from rl_code.config.read_config import ConfigError
from rl_code.host.stop import StopRequest

# Seconds without an answer after which Ray's process on a node is killed; it is placed again.
_ANSWER_S = 60.0
_PLACE_S = 2.0  # between two questions where a process is
_SAY_S = 30.0
# An error of Ray's, such as a lost node, counts as an end by a signal.
_LOST = 137


class RayError(RuntimeError):
    """No Ray cluster answers."""


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A role: its command, and what each of its hosts must have."""

    name: str
    # Module and arguments.
    command: Sequence[str]
    hosts: int
    # Resource of Ray -> amount.
    needs: Mapping[str, float]
    # Folder of the run's store.
    store: str
    # Path of the log, without its suffix.
    log: str
    hang_s: float

    def commands(self, coordinator: str) -> list[list[str]]:
        """The command of each host; coordinator: host:port of the first one."""
        if self.hosts == 1:
            return [list(self.command)]
        together = [f"--coordinator={coordinator}", f"--processes={self.hosts}"]
        return [[*self.command, *together, f"--process={i}"] for i in range(self.hosts)]


def needs(flag: str, words: Sequence[str]) -> dict[str, float]:
    """Resource -> amount of words such as GPU=8. Raises ConfigError."""
    found = {}
    for word in words:
        name, _, amount = word.partition("=")
        try:
            found[name] = float(amount)
        except ValueError:
            found[name] = 0.0
        if not name or found[name] <= 0:
            raise ConfigError(f"--{flag}={word}: expected <resource>=<amount>, as in GPU=8")
    return found


@contextlib.contextmanager
def connected(address: str) -> Generator[None]:
    """This process as a driver of a Ray cluster. Raises RayError."""
    import ray

    # Ray takes 127.0.0.1 for the machine's other address, so that of the driver is the head's.
    host = address.rpartition(":")[0]
    local = {"_node_ip_address": host} if host.startswith("127.") else {}
    try:
        ray.init(address=address, log_to_driver=False, logging_level="warning", **local)
    except (ConnectionError, RuntimeError) as error:
        raise RayError(f"--address={address}: no Ray cluster answers there: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


def reserve(wanted: Sequence[Wanted], stop: StopRequest) -> list[Placed]:
    """The roles in places of their own, [] if it was stopped before all of them had one.

    All places are reserved at once, so no actor waits on a node for a learner that does not fit.
    They are free again when this process ends.
    """
    import ray
    from ray.util.placement_group import placement_group

    bundles = [dict(role.needs) for role in wanted for _ in range(role.hosts)]
    group = placement_group(bundles, strategy="SPREAD")
    said = time.monotonic()
    while not group.wait(1):
        if stop.requested:
            return []
        if time.monotonic() > said + _SAY_S:
            said = time.monotonic()
            there = {name: ray.cluster_resources().get(name, 0) for b in bundles for name in b}
            print(f"waiting for nodes: the roles need {bundles}, there is {there}", flush=True)
    roles = []
    first = 0
    for role in wanted:
        roles.append(Placed(role, group, first))
        first += role.hosts
    return roles


class Placed:
    """A role in its place. Its processes live and end together.

    first: number of its first bundle in the placement group.
    """

    def __init__(self, wanted: Wanted, group: Any, first: int):
        self.name = wanted.name
        self._wanted = wanted
        self._members = [self._member(group, first + i, i) for i in range(wanted.hosts)]
        self._runs: list[Any] = []
        self._end: End | None = None
        self._begin = 0.0
        # Whether Ray's processes answer, so that the role can be started.
        self.there = True
        self._asked: tuple[float, list[Any]] | None = None
        self._answered = 0.0
        self._place: tuple[Any, ...] = ()

    def start(self) -> None:
        """Starts the processes, on nodes that Ray may be choosing just now."""
        self._begin = time.monotonic()
        self._end = None
        coordinator = ""
        if self._wanted.hosts > 1:
            import ray

            coordinator = ray.get(self._members[0].coordinator.remote())
        commands = self._wanted.commands(coordinator)
        self._runs = [
            member.run.remote(["-m", *command])
            for member, command in zip(self._members, commands, strict=True)
        ]

    def ended(self) -> End | None:
        """End of the role, once all its processes have: that of the first with an error, which ends
        the others.
        """
        import ray

        done, self._runs = ray.wait(self._runs, num_returns=len(self._runs), timeout=0)
        for ref in done:
            end = self._read(ref)
            if self._end is None or self._end.code == 0:
                self._end = end
            if end.code and self._runs:
                self.signal(9)
        return None if self._runs else self._end

    def signal(self, number: int) -> None:
        """Sends a signal to all processes of the role."""
        for member in self._members:
            member.stop.remote(number)

    def moved(self) -> str:
        """Place of its first process, if that has changed since the last call; "" if not.

        Processes of Ray that do not answer are killed; Ray starts them again.
        """
        import ray
        from ray import exceptions

        now = time.monotonic()
        if self._asked is None:
            if now > self._answered + _PLACE_S:
                self._asked = now, [member.place.remote() for member in self._members]
            return ""
        asked, refs = self._asked
        silent = ray.wait(refs, num_returns=len(refs), timeout=0)[1]
        if silent and now < asked + _ANSWER_S:
            return ""
        self._asked, self._answered = None, now
        if silent and self.there and self._place:
            for member in self._members:
                ray.kill(member, no_restart=False)
        try:
            place = ray.get(refs, timeout=0)[0]
        except exceptions.RayError:
            return ""
        self.there = True
        if not place.pid or (place.node, place.pid) == self._place:
            return ""
        self._place = place.node, place.pid
        return f"{place.address}, node {place.node[:8]}, process {place.pid}"

    def _read(self, ref: Any) -> End:
        import ray
        from ray import exceptions

        seconds = time.monotonic() - self._begin
        try:
            return ray.get(ref)
        except exceptions.RayActorError as error:
            self.there = False  # it is being placed again
            return End(_LOST, seconds, str(error).partition("\n")[0], lost=True)
        except exceptions.RayTaskError as error:
            return End(1, seconds, str(error.cause))

    def _member(self, group: Any, bundle: int, index: int) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        wanted = self._wanted
        process = ray.remote(RoleProcess).options(
            **options(wanted.needs),
            max_restarts=-1,
            # Started again by the rules of cluster/restarts.py, never behind their back.
            max_task_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle),
        )
        suffix = f".{index}.log" if index else ".log"
        # The first process of a role is the one with a heartbeat.
        name = "" if index else wanted.name
        return process.remote(name, wanted.store, wanted.log + suffix, wanted.hang_s)
