"""Limits of sandboxes."""

from __future__ import annotations

import dataclasses
import math
import os

# Least memory that a session and a Python program need.
SPARE_MB = 64


@dataclasses.dataclass(frozen=True)
class SandboxConfig:
    """The section ``sandbox`` of a config. Raises ValueError for impossible limits."""

    # Bubblewrap processes that sandboxes are spread over. It does not limit the number of
    # sandboxes.
    workers: int = 2
    # MiB of address space of each process in a sandbox, and of memory of all its processes
    # together. A cgroup enforces the sum. Where no cgroup can be made, the session in the sandbox
    # measures the sum 40 times a second and kills a command that exceeds it.
    memory_mb: int = 512
    # MiB of address space of each process, where they differ from ``memory_mb``; 0 where not.
    # Programs with a just-in-time compiler reserve far more than they use.
    address_mb: int = 0
    # Processes and threads that a sandbox may have at once.
    processes: int = 16
    # MiB that the workspace may hold, and as many again for /tmp.
    workspace_mb: int = 8
    # CPU seconds that all processes of a command may use together.
    cpu_s: int = 4
    # Bytes of a command's output that are kept.
    output_bytes: int = 4000
    # Processors that a sandbox may keep busy at once. It needs cgroups. Where none can be made,
    # only ``cpu_s`` bounds what one sandbox takes from the others.
    cpus: float = 1.0
    # MiB of the largest workspace that can be handed in.
    snapshot_mb: int = 16
    # Files of the largest workspace that can be handed in.
    snapshot_files: int = 8000
    # The folder of the layer store (``environment.layers.store``), for tasks with a world; "" for
    # none. Sandboxes of one pool share it.
    layers: str = ""
    # Programs and folders of this machine that sandboxes show, read-only, under /opt/programs, each
    # by the last part of its path. Tools that need some have sandboxes of their own
    # (``environment.servers``), so the agent's need none.
    programs: tuple[str, ...] = ()
    # True if commands may use sockets: each sandbox then has a network of its own, with nothing but
    # a loopback. For agents whose programs run inside (``harness.inside``).
    loopback: bool = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.name in ("layers", "programs", "loopback"):
                continue
            least = {"cpus": 0.05, "address_mb": 0}.get(field.name, 1)
            if not least <= getattr(self, field.name) < math.inf:
                raise ValueError(
                    f"sandbox.{field.name}={getattr(self, field.name)} must be at least {least}"
                )
        names = [os.path.basename(path) for path in self.programs]
        if len(set(names)) < len(names) or not all(names):
            raise ValueError(
                f"sandbox.programs={self.programs} must be paths whose last parts differ"
            )
        for path in self.programs:
            if not (os.path.isabs(path) and os.path.exists(path)):
                raise ValueError(f"sandbox.programs: {path!r} is no absolute path that exists")
        if self.memory_mb < SPARE_MB:
            raise ValueError(
                f"sandbox.memory_mb={self.memory_mb} must be at least {SPARE_MB}, to start Python"
            )
