"""The runs of a sweep on the nodes of a Ray cluster.

Ray chooses a node with room for each run, and keeps the others waiting until there is some. A run
whose node is lost is started again on another one, and goes on from its last checkpoint: all nodes
mount the folder of the sweep.
"""

from __future__ import annotations

import contextlib
import importlib.util
import signal
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.ray_placing import connected
from cluster.ray_role import RoleProcess, options
from cluster.ray_simulated import SimulatedCluster
from rl_code.config.read_config import ConfigError
from rl_code.host.stop import INTERRUPTED
from sweeps.runs import SweepRun
from sweeps.start import LOG, Begin, prepared

# How often Ray starts a run again whose node or whose process of Ray was lost.
RESTARTS = 10
# Seconds without any computation after which a run is killed.
HANG_S = 1800.0
# The exit code of a run that was lost too often.
_LOST = 137


class RayRun:
    """A run of a sweep on a cluster, with those methods of ``subprocess.Popen`` that a sweep uses.

    Args:
      arguments: of Python.
      log: file to which the run's output is appended.
      needs: resource of Ray -> amount.
    """

    def __init__(self, arguments: Sequence[str], log: Path, needs: Mapping[str, float]):
        import ray

        process: Any = ray.remote(RoleProcess).options(
            **options(needs), max_restarts=RESTARTS, max_task_retries=RESTARTS
        )
        self._process: Any = process.remote("", "", str(log), HANG_S)
        self._place = self._process.place.remote()
        self._end = self._process.run.remote(list(arguments), None)
        # Seconds that the run took, once it has ended. It may have waited for a node before.
        self.seconds = 0.0
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code of the run, None before its end."""
        import ray
        from ray import exceptions

        if self.returncode is None and ray.wait([self._end], timeout=0)[0]:
            try:
                end = ray.get(self._end)
                self.returncode, self.seconds = end.code, end.seconds
            except exceptions.RayActorError:
                self.returncode = _LOST
            ray.kill(self._process)  # which frees its place
        return self.returncode

    def terminate(self) -> None:
        """Lets the run end its step and write a checkpoint; one that waits for a node never
        begins.
        """
        import ray

        if self.poll() is not None:
            return
        if ray.wait([self._place], timeout=0)[0]:
            self._process.stop.remote(signal.SIGTERM)
        else:
            self.returncode = INTERRUPTED
            ray.kill(self._process)

    def wait(self) -> int:
        """The exit code of the run, when it has ended."""
        while (code := self.poll()) is None:
            time.sleep(0.2)
        return code


@contextlib.contextmanager
def cluster(address: str, needs: Mapping[str, float]) -> Generator[Begin]:
    """A function that begins a run on the cluster, as ``start.start`` does here.

    address: host:port of a cluster, "auto" for that of this machine, or the number of nodes of one
      that is simulated here, each with room for one run. needs: of each run.

    Raises ConfigError if Ray is not installed, and RayError if no cluster answers.
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("Ray is not installed: pip install -e .[ray]")
    with contextlib.ExitStack() as stack:
        if address.isdecimal():
            nodes = int(address)
            if nodes < 1:
                raise ConfigError(f"--ray={address}: a simulated cluster has at least 1 node")
            address = stack.enter_context(SimulatedCluster(nodes, needs)).address
        stack.enter_context(connected(address))

        def begin(run: SweepRun, command: Sequence[str], to_log: bool) -> RayRun:
            # a node has a Python of its own
            _, *arguments = prepared(run, command)
            return RayRun(arguments, (run.workdir / LOG).resolve(), needs)

        yield begin
