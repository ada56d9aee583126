"""Generalised advantage estimation (1506.02438), on the host in numpy.

With V_t the value before sampled token t, r_t its reward, gamma the discount and lambda the trace

  delta_t = r_t + gamma V_{t+1} - V_t                     (equation 9)
  A_t = sum over k of (gamma lambda)^k delta_{t+k}        (equation 16)

Departures:
- Steps are sampled tokens. Tokens that were given, such as results of tools, are skipped.
- Each context of a trajectory is a sequence of its own, and the episode's reward comes at the last
  sampled token of each. Contexts need not follow each other in time: while a sub-agent is at work,
  the context that asked it waits. Of an episode with one context this is the usual definition.
- After the last token the value is 0. It is the value of the last place if the way in which the
  episode ended counts as a cut by the system (``ValueConfig.cut``).

Everything is computed in float64; what leaves the host is rounded to float32 once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from jaxtyping import Float

from rl_code.config.read_config import shares
from rl_code.types import Group, Trajectory

if TYPE_CHECKING:
    from rl_code.learner.value_config import ValueConfig


@dataclasses.dataclass(frozen=True)
class GAE:
    """Advantages from values. Needs the section ``train.value``, which has the discount."""

    # Lambda: 1 for the return minus the value, 0 for one step. Long outputs need 1 or nearly 1: the
    # reward reaches a token that lies n before it with the weight lambda^n.
    lam: float = 1.0
    # With a number alpha, lambda is 1 - 1 / (alpha l) in a context of l sampled tokens, at least 0
    # (2504.05118, section 4.2, where alpha is 0.05). None for ``lam``.
    length_alpha: float | None = None

    # Of members that are called with the values of the group's trajectories, too.
    reads_values: ClassVar[bool] = True

    def __post_init__(self):
        shares(self, "lam")
        alpha = self.length_alpha
        if alpha is not None and not 0.0 < alpha < math.inf:
            raise ValueError(f"length_alpha={alpha} must be positive and finite, or None")
        if alpha is not None and self.lam != 1.0:
            raise ValueError(
                f"lam={self.lam} and length_alpha={alpha} both say what lambda is: leave lam out"
            )

    def __call__(
        self, group: Group, values: Sequence[Float[np.ndarray, " n"]], value: ValueConfig
    ) -> list[Float[np.ndarray, " n"]]:
        """The advantages of each trajectory, float32, one for each sampled token.

        values: of each trajectory, in the order of its sampled tokens; empty for one that is not
        trained on.
        """
        return [
            of_trajectory(trajectory, own, value, self.lam_of).astype(np.float32)
            for trajectory, own in zip(group.trajectories, values, strict=True)
        ]

    def lam_of(self, length: int) -> float:
        """Lambda in a context of so many sampled tokens."""
        if self.length_alpha is None:
            return self.lam
        return max(0.0, 1.0 - 1.0 / (self.length_alpha * length))


def of_trajectory(
    trajectory: Trajectory,
    values: Float[np.ndarray, " n"],
    value: ValueConfig,
    lam_of: Callable[[int], float],
) -> Float[np.ndarray, " n"]:
    """The advantages of a trajectory's sampled tokens, float64; empty where ``values`` is empty.

    lam_of: lambda by the number of sampled tokens of a context.

    Raises:
      ValueError: another number of values than of sampled tokens; names task and index.
    """
    if not len(values):
        return np.zeros(0)
    counts = [int(context.sampled.sum()) for context in trajectory.contexts]
    if len(values) != sum(counts):
        raise ValueError(
            f"task {trajectory.task_id!r} trajectory {trajectory.index}: {len(values)} values for "
            f"{sum(counts)} sampled tokens"
        )
    cut = trajectory.status in value.cut
    parts = []
    start = 0
    for count in filter(None, counts):
        own = np.asarray(values[start : start + count], np.float64)
        rewards = np.zeros(count)
        rewards[-1] = trajectory.reward.total
        after = own[-1] if cut else 0.0
        parts.append(gae(rewards, own, after, value.gamma, lam_of(count)))
        start += count
    return np.concatenate(parts)


def gae(
    rewards: Float[np.ndarray, " n"],
    values: Float[np.ndarray, " n"],
    after: float,
    gamma: float,
    lam: float,
) -> Float[np.ndarray, " n"]:
    """A_t of each step of a sequence, float64. after: the value behind the last step."""
    deltas = rewards + gamma * np.append(values[1:], after) - values
    found = deltas.tolist()
    for at in reversed(range(len(found) - 1)):
        found[at] += gamma * lam * found[at + 1]
    return np.array(found)
