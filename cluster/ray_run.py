"""The roles of a run on Ray's nodes, started and started again until the learner has ended."""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from cluster.ray_placing import Placed, RayError
from cluster.restarts import Restarts
from rl_code.host.stop import StopRequest
from rl_code.run.workdir import LEARNER, PREFILL, STORE
from rl_code.store import steps as steps_lib
from rl_code.store.store import GroupStore

# Actors see for themselves that the last step is consumed.
_ACTORS_END_S = 60.0


class GaveUp(RuntimeError):
    """A role ended in a way that may be gone when the run is started again."""


class Lasting(RuntimeError):
    """A role ended and said that starting it again does not help."""


@dataclasses.dataclass(frozen=True)
class Patience:
    """Seconds of what a run waits for."""

    # From the request to stop to the end.
    grace_s: float
    # Before a role is started again.
    pause_s: float
    # Between two lines of progress.
    status_s: float
    # Between two looks at the roles.
    poll_s: float = 0.5
    # With all roles lost, before the run gives the cluster up.
    all_lost_s: float = 30.0


class Run:
    """The roles of a run from their start to the end of all of them."""

    def __init__(
        self,
        roles: Sequence[Placed],
        stop: StopRequest,
        patience: Patience,
        workdir: Path,
        steps: int,
    ):
        self._roles, self._stop, self._patience = roles, stop, patience
        self._workdir, self._steps = workdir, steps
        self._restarts = {role.name: Restarts() for role in roles}
        self._running = list(roles)
        self._again: dict[str, float] = {}  # role -> when it is started again
        self._said = 0.0
        self._end_by: float | None = None  # once they are asked to end
        self._error: RuntimeError | None = None
        self._answered = time.monotonic()  # when a role was there last

    def to_the_end(self) -> None:
        """Starts the roles, and starts them again, until the learner has ended and actors too.

        Raises Lasting or GaveUp with what the role said last.
        """
        for role in self._running:
            role.start()
        while self._running:
            for role in list(self._running):
                self._look_after(role)
            if self._end_by is None and (self._stop.requested or self._error):
                self._end_by = time.monotonic() + self._patience.grace_s
                for role in self._running:
                    role.signal(signal.SIGTERM)
            elif self._end_by is None and all(role.name != LEARNER for role in self._running):
                self._end_by = time.monotonic() + _ACTORS_END_S
            if self._end_by is not None and time.monotonic() > self._end_by:
                self._kill_what_is_left()
            self._check_cluster()
            self._say_status()
            time.sleep(self._patience.poll_s)
        if self._error is not None:
            raise self._error

    def _look_after(self, role: Placed) -> None:
        if moved := role.moved():
            say(f"{role.name} runs on {moved}")
        if role.name in self._again:
            if self._stopping:
                self._running.remove(role)
            elif role.there and time.monotonic() > self._again[role.name]:
                del self._again[role.name]
                role.start()
            return
        end = role.ended()
        if end is None:
            return
        if end.code == 0 or self._stopping:
            say(f"{role.name} has ended with exit code {end.code}")
            self._running.remove(role)
            return
        verdict = self._restarts[role.name].after(end.code, end.seconds)
        why = f"exit code {end.code} after {end.seconds:.0f} s"
        if end.hung_s:
            why = f"no heartbeat for {end.hung_s:.0f} s, killed"
        elif end.lost:
            why = f"lost: {end.last}"
        if verdict == "again":
            say(f"{role.name}: {why}; it starts again")
            self._again[role.name] = time.monotonic() + self._patience.pause_s
            return
        self._running.remove(role)
        error = (Lasting if verdict == "lasts" else GaveUp)(
            f"{role.name} has given up: {why}. It said: {end.last}"
        )
        last = role.name != PREFILL and not any(map(samples, self._running))
        if role.name == LEARNER or last:
            self._error = error
        else:
            say(f"{error}; the others go on without it")

    def _check_cluster(self) -> None:
        """Raises RayError when all roles have been lost for a while. Another head may answer at the
        address of one that was lost, and it knows nothing of this run.
        """
        now = time.monotonic()
        if any(role.there for role in self._running):
            self._answered = now
        elif self._running and now > self._answered + self._patience.all_lost_s:
            raise RayError(
                f"all roles have been lost for {self._patience.all_lost_s:g} s; the same command "
                "reserves places for them anew"
            )

    @property
    def _stopping(self) -> bool:
        """True once nothing is started again: the learner has ended, or all are to end."""
        return self._end_by is not None or self._stop.requested or self._error is not None

    def _kill_what_is_left(self) -> None:
        for role in self._running:
            say(f"{role.name} did not end in time and is killed")
            role.signal(signal.SIGKILL)
        self._running.clear()

    def _say_status(self) -> None:
        now = time.monotonic()
        if now < self._said + self._patience.status_s:
            return
        self._said = now
        store = self._workdir / STORE
        done = len(GroupStore(store).consumed()) if steps_lib.exists(store) else 0
        actors = sum(samples(role) and role.name not in self._again for role in self._running)
        restarts = sum(found.count for found in self._restarts.values())
        say(f"{done}/{self._steps} steps, {actors} actors, {restarts} restarts")


def samples(role: Placed) -> bool:
    """True if a role is an actor."""
    return role.name not in (LEARNER, PREFILL)


def say(text: str) -> None:
    """One line of progress, with the time of day."""
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)
