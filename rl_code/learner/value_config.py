"""Settings of the value function in a config: the section ``train.value``."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from rl_code.config.read_config import at_least, shares
from rl_code.learner.optimizer import OptimizerConfig

# Ways for an episode to end that somebody may count as cut (``Trajectory.status``).
LIMITS = ("turn_limit", "token_limit", "time_limit")


@dataclasses.dataclass(frozen=True)
class ValueConfig:
    """A value function: an estimate of the reward that is still to come, before each sampled token.

    It is trained beside the policy. ``train.advantage="gae"`` makes advantages of it; with another
    member it is only fitted and measured.
    """

    # The optimizer of the head, and of a copy of the policy. A shared backbone is updated by
    # ``train.optimizer``.
    optimizer: OptimizerConfig
    # "shared": one linear map from the policy's own hidden states. "separate": one from those of a
    # copy of the policy, which is trained as a value function alone. Of a policy with adapters the
    # copy has adapters of its own, and the frozen parameters are not copied.
    backbone: Literal["shared", "separate"] = "shared"
    # Discount of the reward for each sampled token that it lies ahead.
    gamma: float = 1.0
    # Lambda of the targets G = A + V. With 1 these are the returns, whatever lambda the advantages
    # have (2503.01491, section 4.2).
    lam: float = 1.0
    # How far a value may go from its old one before the loss is clipped (as in PPO's published
    # code); None for no clip.
    clip: float | None = None
    # Weight of the value loss in the gradient of the policy's parameters, with a shared backbone.
    # 0 leaves them to the policy: the head then reads features that it does not shape. The head's
    # own gradient has the weight 1 in any case.
    coef: float = 0.1
    # Steps at the beginning in which the value function is trained on the returns of the policy,
    # and the policy keeps every bit (2503.01491, section 4.1). They are part of ``train.steps``. A
    # shared backbone rests too, and the head alone is trained.
    pretrain_steps: int = 0
    # Updates of the value function in each of these steps.
    pretrain_epochs: int = 1
    # Ways to end that count as cuts by the system: some of "turn_limit", "token_limit" and
    # "time_limit". After the last token of such an episode comes the value of its last place and
    # not 0. () where reaching a limit is an outcome, as the reward takes it.
    cut: tuple[str, ...] = ()

    def __post_init__(self):
        if self.backbone not in ("shared", "separate"):
            raise ValueError(f"backbone={self.backbone!r} is not one of shared, separate")
        shares(self, "gamma", "lam")
        if self.clip is not None and not 0.0 < self.clip < math.inf:
            raise ValueError(f"clip={self.clip} must be positive and finite, or None for no clip")
        if not 0.0 <= self.coef < math.inf:
            raise ValueError(f"coef={self.coef} must be at least 0 and finite")
        at_least(self, pretrain_steps=0, pretrain_epochs=1)
        unknown = [name for name in self.cut if name not in LIMITS]
        if unknown:
            raise ValueError(f"cut has {', '.join(map(repr, unknown))}; it may have {LIMITS}")

    @property
    def pretrain_updates(self) -> int:
        """Updates of the value function before the policy's first."""
        return self.pretrain_steps * self.pretrain_epochs
