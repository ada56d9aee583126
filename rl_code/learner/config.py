"""Settings of the learner in a config: a part of the section ``train``."""

from __future__ import annotations

import dataclasses

from rl_code.config.named import Named, make
from rl_code.config.read_config import at_least, follows
from rl_code.learner.advantages import ADVANTAGES
from rl_code.learner.batching import PackConfig
from rl_code.learner.objective import LossConfig
from rl_code.learner.optimizer import OptimizerConfig
from rl_code.learner.parts import PartsConfig


@dataclasses.dataclass(frozen=True)
class LearnerConfig:
    """Settings for turning a step's groups into the next weights."""

    optimizer: OptimizerConfig
    # Updates made on each batch. With 1 the ratio of every token is 1 in the only update, so that
    # the clip of ``loss.policy`` does nothing.
    epochs: int = 1
    # Method that computes advantages from rewards: a member of learner.advantages.ADVANTAGES, with
    # its settings.
    advantage: Named = Named("grpo")
    # The credit of summaries and sub-agents, and whether they are trained.
    parts: PartsConfig = PartsConfig()
    loss: LossConfig = LossConfig()
    pack: PackConfig = PackConfig()
    # Parts of a batch whose gradients are computed one after another, to save memory. None for
    # parts that have one row for each device.
    micro_batches: int | None = None
    # Use of the sampler's picks.
    picks: str | None = follows("rollout.picks", None)

    def __post_init__(self):
        at_least(self, epochs=1, micro_batches=1)
        make(ADVANTAGES, self.advantage, "config.train.advantage")
