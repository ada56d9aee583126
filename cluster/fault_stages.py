"""Stages on which the roles of ``launch.faults`` run: under a supervisor each, or on a simulated
Ray cluster.

A stage starts the roles and starts them again by the means of users; it is told nothing of faults.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from cluster.ray_simulated import SimulatedCluster

ROOT = Path(__file__).resolve().parents[1]


class Stage:
    """The roles of a run in processes of their own. A context manager: leaving it kills them.

    Args:
      folder: the run's workdir, an absolute path.
      actors: how many.
      variables: the environment of what is started.
    """

    # Whether a role that hangs is found and started again.
    replaces_hung = False

    def __init__(self, folder: Path, actors: int, variables: dict[str, str]):
        self.names = ["learner", *(f"actor-{i}" for i in range(actors))]
        self.folder = folder
        self._variables = variables
        self._returns: list[tuple[str, int, float, dict]] = []
        self._started: dict[str, subprocess.Popen] = {}

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def pid(self, name: str) -> int:
        """The process of a role, 0 while there is none."""
        return next((pid for pid, found, _ in roles(self.folder) if found == name), 0)

    def running(self) -> bool:
        """True if what started the roles still runs."""
        return any(process.poll() is None for process in self._started.values())

    def gave_up(self) -> str:
        """Name of the program that has ended with an error, "" if nothing has."""
        return next((x for x, p in self._started.items() if p.poll() not in (None, 0)), "")

    def lose_node(self, rng: random.Random) -> dict | None:
        """Kills a node with all that runs there; None if nothing does just now."""
        raise NotImplementedError

    def lose_head(self) -> dict | None:
        """Kills the node that knows of all others."""
        raise NotImplementedError

    def expect_return(self, name: str, pid: int, fault: dict) -> None:
        """Once a role has another process than ``pid``, ``note_returns`` writes down in the fault
        how many seconds that took.
        """
        self._returns.append((name, pid, time.monotonic(), fault))

    def note_returns(self) -> None:
        """Called again and again; see ``expect_return``."""
        waiting = []
        now = {name: pid for pid, name, _ in roles(self.folder)} if self._returns else {}
        for name, pid, since, fault in self._returns:
            if now.get(name, pid) == pid:
                waiting.append((name, pid, since, fault))
            else:
                fault.setdefault("back_s", {})[name] = round(time.monotonic() - since, 1)
        self._returns = waiting

    def close(self) -> None:
        """Kills what is left."""
        for process in self._started.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _start(self, name: str, command: Sequence[str]) -> None:
        with open(self.folder / f"{name}.log", "ab") as log:
            self._started[name] = subprocess.Popen(
                ["bash", "launch/supervise.sh", sys.executable, "-m", *command],
                cwd=ROOT,
                env=self._variables | {"SUPERVISE_PAUSE_S": "0.2"},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


class Supervised(Stage):
    """Each role under launch/supervise.sh, on this machine."""

    def __init__(
        self, folder: Path, actors: int, variables: dict[str, str], command: Sequence[str]
    ):
        super().__init__(folder, actors, variables)
        for name in self.names:
            role = ["--role=learner"] if name == "learner" else ["--role=actor", f"--name={name}"]
            self._start(name, ["launch.train", *role, *command])


class OnRay(Stage):
    """The roles by launch.on_ray, on a Ray cluster that is simulated on this machine.

    A node that is lost is replaced by a new one before another is lost: until then the others have
    room for all roles. To start one takes seconds, in which a short run may end.
    """

    replaces_hung = True

    def __init__(
        self,
        folder: Path,
        actors: int,
        variables: dict[str, str],
        command: Sequence[str],
        nodes: int,
    ):
        super().__init__(folder, actors, variables)
        self._nodes = nodes
        self._lacks_node = False
        # Nodes have the environment of who starts them.
        os.environ.update(variables)
        # All roles fit on all nodes but one.
        each = -(-(1 + actors) // max(nodes - 1, 1))
        self._cluster = SimulatedCluster(nodes, {"CPU": each})
        address = f"--address={self._cluster.address}"
        more = [f"--actors={actors}", "--pause_s=0.2", "--status_s=10"]
        self._start("on_ray", ["launch.on_ray", address, *more, *command])

    def lose_node(self, rng: random.Random) -> dict | None:
        if self._lacks_node:
            self._cluster.add_node()
            self._lacks_node = False
        found = roles(self.folder)
        used = [
            node
            for node in self._cluster.nodes
            if any(host == node.node_ip_address for _, _, host in found)
        ]
        if not used:
            return None
        node = rng.choice(used)
        lost = [(pid, name) for pid, name, host in found if host == node.node_ip_address]
        fault: dict = {"role": ", ".join(name for _, name in lost), "what": "node lost"}
        for pid, name in lost:
            self.expect_return(name, pid, fault)
        self._cluster.lose_node(node)
        self._lacks_node = True
        return fault

    def lose_head(self) -> dict | None:
        found = roles(self.folder)
        if not found:
            return None
        fault: dict = {"role": "head", "what": "head lost"}
        for pid, name, _ in found:
            self.expect_return(name, pid, fault)
        port = int(self._cluster.address.rpartition(":")[2])
        begin = time.monotonic()
        self._cluster.lose_head()
        while roles(self.folder):  # the nodes notice it
            time.sleep(0.1)
        fault["ended_s"] = round(time.monotonic() - begin, 1)
        # A new cluster at the same address; what started the roles is started again meanwhile.
        self._cluster.close()
        self._cluster.start(self._nodes, port)
        self._lacks_node = False
        return fault

    def close(self) -> None:
        super().close()
        self._cluster.close()


def roles(folder: Path) -> list[tuple[int, str, str]]:
    """(process, name, address) of every process of launch.train that runs a role of a workdir."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []  # none of one that has just ended
        if words[1:3] != ["-m", "launch.train"] or f"--workdir={folder}" not in words:
            continue
        flags = dict(word.split("=", 1) for word in words[3:] if "=" in word)
        name = flags.get("--name", flags.get("--role", ""))
        found.append((process.pid, name, flags.get("--host", "")))
    return found


def environment(folder: Path, storage_ms: float = 0.0) -> dict[str, str]:
    """Restarts find what they compiled before.

    storage_ms: mean delay of an operation on the folders of the run that roles share.
    """
    kept = {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    if storage_ms:
        path = [str(ROOT / "cluster" / "slow_storage"), os.environ.get("PYTHONPATH", "")]
        slow = (folder / name for name in ("store", "weights", "checkpoints"))
        kept |= {
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "SLOW_STORAGE": os.pathsep.join(map(str, slow)),
            "SLOW_STORAGE_MS": str(storage_ms),
        }
    flags_kept = [
        flag
        for flag in os.environ.get("XLA_FLAGS", "").split()
        if "host_platform_device_count" not in flag
    ]
    return os.environ | kept | {"XLA_FLAGS": " ".join(flags_kept)}
