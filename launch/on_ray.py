"""Runs a learner and its actors on the nodes of a Ray cluster, to the end of training, and the role
prefill where the config has it.

    python -m launch.on_ray --config=configs/X.py --workdir=/shared/runs/x --address=auto \\
        --actors=8 --learner_needs=GPU=8 --actor_needs=GPU=8

Ray places the processes of the roles, spread over the nodes, and places them again when a node is
lost. Each role is the command of launch.train and goes on from the workdir, which all nodes mount.
A process that ends with an error is started again, until the learner has ended; one whose heartbeat
stops is killed first.
Output is in cluster/logs/<role>.log of the workdir. Ctrl-C and SIGTERM let the learner end its step
and write a checkpoint. The same command goes on, on this cluster or another one.

--nodes=3 makes a cluster on this machine, to try it.
"""

from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path

import ml_collections
from absl import flags as absl_flags
from ml_collections import config_flags

from cluster.ray_placing import RayError, Wanted, connected, needs, reserve
from cluster.ray_run import GaveUp, Lasting, Patience, Run
from cluster.ray_simulated import SimulatedCluster
from launch import flags
from rl_code.config import read_config
from rl_code.host.stop import Stopped, StopRequest
from rl_code.run.config import RunConfig, refuse_sync
from rl_code.run.workdir import LEARNER, PREFILL, STORE

FLAGS = absl_flags.FLAGS
LOGS = "cluster/logs"  # in the workdir


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
