"""Runs a learner and its actors on the nodes of a Ray cluster, to the end of training, and the role
prefill where the config has it.

    python -m launch.on_ray --config=configs/X.py --workdir=/shared/runs/x --address=auto \
        --actors=8 --learner_needs=GPU=8 --actor_needs=GPU=8

Ray places the processes of the roles, spread over the nodes, and places them again when a node is
lost. Each role is the command of launch.train and goes on from the workdir, which all nodes mount.
A process that ends with an error is started again; one whose heartbeat stops is killed first.
Output is in cluster/logs/<role>.log of the workdir. Ctrl-C and SIGTERM let the learner end its step
and write a checkpoint. The same command goes on, on this cluster or another one.

--nodes=3 makes a cluster on this machine, to try it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import ml_collections
from absl import flags as absl_flags
from ml_collections import config_flags

from launch import flags
from launch.ray_placing import Placed, RayError, Wanted, connected, needs, reserve
from launch.ray_simulated import SimulatedCluster
from launch.restarts import Restarts
from rl_code import read_config
from rl_code.run_config import RunConfig, refuse_sync
from rl_code.stop import Stopped, StopRequest
from rl_code.store import steps as steps_lib
from rl_code.store.store import GroupStore
from rl_code.workdir import LEARNER, PREFILL, STORE

FLAGS = absl_flags.FLAGS
LOGS = "cluster/logs"  # in the workdir
# Actors see for themselves that the last step is consumed.
_ACTORS_END_S = 60.0


class GaveUp(RuntimeError):
    """A role ended in a way that may be gone when the run is started again."""


class Lasting(RuntimeError):
    """A role ended and said that starting it again does not help."""


def main(config: ml_collections.ConfigDict, workdir: str | None) -> None:
    run_config = read_config.build(RunConfig, config)
    refuse_sync(run_config)
    if importlib.util.find_spec("ray") is None:
        raise read_config.ConfigError("Ray is not installed: pip install -e .[ray]")
    if bool(FLAGS.nodes) == bool(FLAGS.address):
        raise read_config.ConfigError(
            "give --address=<host>:<port> of a Ray cluster (auto: the one of this machine), or "
            "--nodes=<n> for a simulated one"
        )
    wanted = wanted_roles(run_config, arguments(str(workdir)), Path(str(workdir)).resolve())
    with contextlib.ExitStack() as stack:
        address = FLAGS.address
        if FLAGS.nodes:
            each = simulated_node(wanted, FLAGS.nodes)
            address = stack.enter_context(SimulatedCluster(FLAGS.nodes, each)).address
        stack.enter_context(connected(address))
        stop = stack.enter_context(StopRequest())
        with stop.deferred():
            roles = reserve(wanted, stop)
            if roles:
                patience = Patience(FLAGS.grace_s, FLAGS.pause_s, FLAGS.status_s)
                Run(roles, stop, patience, Path(str(workdir)), run_config.train.steps).to_the_end()
    if stop.requested:
        raise Stopped("the roles have stopped")


def arguments(workdir: str) -> list[str]:
    """Flags of the run, for the roles, whose working folder is another one."""
    file, colon, argument = config_flags.get_config_filename(FLAGS["config"]).partition(":")
    config = f"--config={Path(file).resolve()}{colon}{argument}"
    return [config, *flags.overrides(), f"--workdir={Path(workdir).resolve()}"]


def wanted_roles(config: RunConfig, given: list[str], workdir: Path) -> list[Wanted]:
    """The learner, its actors, and what prefills for them: what each runs, on how many hosts, and
    what a host must have.
    """
    hang_s = FLAGS.hang_s or 4 * config.asynchrony.work.heartbeat_timeout_s
    shared = dict(store=str(workdir / STORE), hang_s=hang_s)
    logs = workdir / LOGS
    learner = Wanted(
        LEARNER,
        ["launch.train", "--role=learner", *given],
        hosts=FLAGS.hosts,
        needs=needs("learner_needs", FLAGS.learner_needs),
        log=str(logs / LEARNER),
        **shared,
    )
    actors = [
        Wanted(
            name,
            ["launch.train", "--role=actor", f"--name={name}", *given],
            hosts=FLAGS.actor_hosts,
            needs=needs("actor_needs", FLAGS.actor_needs),
            log=str(logs / name),
            **shared,
        )
        for name in (f"actor-{i}" for i in range(FLAGS.actors))
    ]
    if config.rollout.prefill is None:
        return [learner, *actors]
    prefill = Wanted(
        PREFILL,
        ["launch.train", "--role=prefill", *given],
        hosts=1,
        needs=needs("prefill_needs", FLAGS.prefill_needs),
        log=str(logs / PREFILL),
        **shared,
    )
    return [learner, *actors, prefill]


def simulated_node(wanted: list[Wanted], nodes: int) -> dict[str, float]:
    """Resources of a node of a simulated cluster: all roles still fit when one node is lost."""
    found: dict[str, float] = {}
    for role in wanted:
        for name, amount in role.needs.items():
            found[name] = found.get(name, 0.0) + amount * role.hosts
    enough = max(nodes - 1, 1)
    return {name: float(-(-amount // enough)) for name, amount in found.items()}


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
        return self._stop.requested or self._error is not None

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


def define_flags() -> None:
    """Flags of this command alone: other modules have some of the same name."""
    absl_flags.DEFINE_string("address", None, "host:port of a Ray cluster, or auto.")
    absl_flags.DEFINE_integer("nodes", 0, "Nodes of a cluster that is simulated here.", 0)
    absl_flags.DEFINE_integer("actors", 1, "How many actors.", 1)
    absl_flags.DEFINE_integer("hosts", 1, "Hosts of the learner.", 1)
    absl_flags.DEFINE_integer("actor_hosts", 1, "Hosts of each actor.", 1)
    absl_flags.DEFINE_list(
        "learner_needs",
        ["CPU=1"],
        "What a host of the learner must have for it, as in GPU=8 or CPU=32,learner=1.",
    )
    absl_flags.DEFINE_list("actor_needs", ["CPU=1"], "The same of an actor.")
    absl_flags.DEFINE_list(
        "prefill_needs", ["CPU=1"], "The same of what prefills (config.rollout.prefill)."
    )
    absl_flags.DEFINE_float(
        "hang_s",
        0.0,
        "Seconds without a heartbeat after which a process is killed and started again; four times "
        "asynchrony.work.heartbeat_timeout_s unless given.",
        0.0,
    )
    absl_flags.DEFINE_float(
        "grace_s", 120.0, "Seconds from the request to stop to the end: a step and a checkpoint."
    )
    absl_flags.DEFINE_float("pause_s", 1.0, "Seconds before a process is started again.", 0.0)
    absl_flags.DEFINE_float("status_s", 60.0, "Seconds between two lines of progress.", 0.0)


if __name__ == "__main__":
    define_flags()
    flags.run(main, kind=RunConfig, expected=(GaveUp, RayError), lasting=(Lasting,))
