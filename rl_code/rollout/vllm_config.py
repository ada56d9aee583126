"""Settings of vLLM as the engine that samples for training (``rollout.engine.name = "vllm"``)."""

from __future__ import annotations

import dataclasses
from urllib.parse import urlsplit

from rl_code.config.read_config import at_least

# Guarantees of this project's engine that vLLM does not give, by name. They are off, and runs say
# so. What else vLLM lacks is refused with the config (``run.agreement``).
OFF = (
    "the same key gives the same token",
    "a group that is sampled again is the same group",
    "trajectories can be sampled again (launch.replay --step)",
)


@dataclasses.dataclass(frozen=True)
class VllmConfig:
    """A server of vLLM that samples for one actor."""

    # Base URL of the server. Each actor needs a server of its own.
    address: str = "http://127.0.0.1:8000"
    # Folder in which the server finds the weights that are pushed; both machines see it under this
    # path. "" for the folder "vllm" of the workdir.
    folder: str = ""
    # Seconds that the server may take to load pushed weights, or to answer at the start.
    deadline_s: float = 600.0

    def __post_init__(self):
        parts = urlsplit(self.address)
        if parts.scheme != "http" or not parts.hostname or parts.path.strip("/"):
            raise ValueError(
                f"address={self.address!r} must be like http://host:port: a server of vLLM, "
                "without a path"
            )
        at_least(self, deadline_s=1)
