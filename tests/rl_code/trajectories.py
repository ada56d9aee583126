"""Changes of trajectories for tests."""

from __future__ import annotations

import dataclasses
from typing import Any

from rl_code.types import Trajectory


def with_context(trajectory: Trajectory, index: int = 0, **changes: Any) -> Trajectory:
    """The trajectory with other fields of one of its contexts."""
    contexts = list(trajectory.contexts)
    contexts[index] = dataclasses.replace(contexts[index], **changes)
    return dataclasses.replace(trajectory, contexts=tuple(contexts))
