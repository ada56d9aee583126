"""A Ray cluster of several nodes on this machine, whose nodes and head can be lost.

Every node has an address of its own on the loopback network (127.0.0.2 and on), its own processes
and its own workers. They share the machine's processors, memory and file system.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.ray_role import options

# Unless the environment sets them. A lost node is seen sooner than after the 14 s of Ray's
# defaults, a lost head after 10 s instead of 60.
SETTINGS = {
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
    "RAY_USAGE_STATS_ENABLED": "0",
    # As without Ray, which would let all else go first (15).
    "RAY_worker_niceness": "0",
}


class SimulatedCluster:
    """A head, which runs no roles, and ``nodes`` nodes. A context manager: leaving it ends them.

    Args:
      nodes: how many nodes beside the head.
      resources: what each of them has.

    Must be made before anything else imports ray, which reads its settings when it is imported.
    """

    def __init__(self, nodes: int, resources: Mapping[str, float]):
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        self._resources = dict(resources)
        self._made = 0
        self._folder = ""
        self._cluster: Any = None
        self.start(nodes)

    def __enter__(self) -> SimulatedCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def address(self) -> str:
        """host:port of the head."""
        return self._cluster.address

    @property
    def nodes(self) -> list[Any]:
        """The nodes that are there, oldest first."""
        return sorted(self._cluster.worker_nodes, key=lambda node: node.node_ip_address)

    def start(self, nodes: int, port: int = 0) -> None:
        """Starts a head and its nodes; again after ``close``. port: of the head, 0 for any."""
        # Not the default, which all users of a machine share; and short, since sockets are in it.
        self._folder = tempfile.mkdtemp(prefix="ray-")
        os.environ["RAY_TMPDIR"] = self._folder
        inside = Path(self._folder) / "ray"
        inside.mkdir()
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "include_dashboard": False, "temp_dir": str(inside)}
        if port:
            head["gcs_server_port"] = port
        self._made = 0
        self._cluster = Cluster(
            initialize_head=True, head_node_args={**head, "node_ip_address": self._next_address()}
        )
        for _ in range(nodes):
            self.add_node()

    def add_node(self) -> Any:
        """A further node."""
        where = self._next_address()
        return self._cluster.add_node(**options(self._resources), node_ip_address=where)

    def lose_node(self, node: Any) -> None:
        """Kills a node: Ray's processes at once, and with them those that they have started."""
        self._cluster.remove_node(node, allow_graceful=False)

    def lose_head(self) -> None:
        """Kills the head. The nodes end when they have not reached it for a while."""
        self._cluster.remove_node(self._cluster.head_node, allow_graceful=False)

    def close(self) -> None:
        """Kills everything, nodes and head."""
        for node in self._cluster.list_all_nodes():
            with contextlib.suppress(AssertionError):  # of a process that the kernel has not reaped
                self._cluster.remove_node(node, allow_graceful=False)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _next_address(self) -> str:
        self._made += 1
        return f"127.0.0.{1 + self._made}"
