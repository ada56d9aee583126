"""What sandboxes may use."""

from __future__ import annotations

import dataclasses

# Least memory that a session and a Python program need.
SPARE_MB = 64


@dataclasses.dataclass(frozen=True)
class SandboxConfig:
    """The section ``sandbox`` of a config. Raises ValueError for impossible limits."""

    # Bubblewrap processes that sandboxes are spread over. A sandbox is never refused for want of
    # one.
    workers: int = 2
    # Address space of each process, and memory of a sandbox's processes together. The sum is held
    # by a cgroup; where none can be made, by the session, which looks 40 times a second and kills
    # the command.
    memory_mb: int = 512
    # Processes and threads that a sandbox may have at once.
    processes: int = 16
    # Size of the workspace, and of /tmp.
    workspace_mb: int = 8
    # CPU seconds of a command's processes together.
    cpu_s: int = 4
    # How much output of a command is kept.
    output_bytes: int = 4000
    # Processors that a sandbox may keep busy at once, where cgroups can be made. Without them only
    # ``cpu_s`` bounds what one sandbox takes from the others.
    cpus: float = 1.0
    # The largest workspace that can be handed in: size and number of its files.
    snapshot_mb: int = 16
    snapshot_files: int = 8000

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            least = 0.05 if field.name == "cpus" else 1
            if getattr(self, field.name) < least:
                raise ValueError(
                    f"sandbox.{field.name}={getattr(self, field.name)} must be at least {least}"
                )
        if self.memory_mb < SPARE_MB:
            raise ValueError(
                f"sandbox.memory_mb={self.memory_mb} must be at least {SPARE_MB}, to start Python"
            )
