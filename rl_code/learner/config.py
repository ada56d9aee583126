"""Settings of the learner in a config: a part of the section ``train``."""

from __future__ import annotations

import dataclasses

from rl_code.config.named import Named, make
from rl_code.config.read_config import ConfigError, at_least, follows
from rl_code.learner.advantages import ADVANTAGES, reads_values
from rl_code.learner.batching import PackConfig
from rl_code.learner.distillation import TeacherConfig
from rl_code.learner.losses import Clip
from rl_code.learner.objective import LossConfig
from rl_code.learner.optimizer import OptimizerConfig
from rl_code.learner.parts import PartsConfig
from rl_code.learner.value_config import ValueConfig


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
    # True if continuations of forks are trained on as well, each against the others that part at
    # the same place. False: they only tell values.
    continuations: bool = False
    # The credit of summaries and sub-agents, and whether they are trained.
    parts: PartsConfig = PartsConfig()
    loss: LossConfig = LossConfig()
    pack: PackConfig = PackConfig()
    # With this section a teacher's log-probabilities are a part of the loss; None for no teacher.
    teacher: TeacherConfig | None = None
    # Parts of a batch whose gradients are computed one after another, to save memory. None for
    # parts that have one row for each device.
    micro_batches: int | None = None
    # Use of the sampler's picks.
    picks: str | None = follows("rollout.picks", None)
    # The value function, which ``advantage="gae"`` needs; None for none.
    value: ValueConfig | None = None

    def __post_init__(self):
        at_least(self, epochs=1, micro_batches=1)
        advantage = make(ADVANTAGES, self.advantage, "config.train.advantage")
        if self.value is None and reads_values(advantage):
            raise ConfigError(
                f"config.train.advantage = {self.advantage.name!r} makes advantages of values, and "
                "config.train.value = None: set it to a section, such as "
                "dict(optimizer=dict(learning_rate=1e-3))"
            )
        if self.continuations and reads_values(advantage):
            raise ConfigError(
                f"config.train.advantage = {self.advantage.name!r} credits tokens by values, "
                "and compares no continuations: set config.train.continuations to False"
            )
        if (own := self.parts.paid("own")) and (reads_values(advantage) or self.continuations):
            key = "continuations" if self.continuations else "advantage"
            value = self.continuations or self.advantage.name
            raise ConfigError(
                f"config.train.parts.{own[0]} = 'own': train.{key} = {value!r} credits tokens "
                "otherwise; set it to 'episode' or 'none'"
            )
        if self.value is not None:
            self._check_value(self.pack)

    def without_effect(self) -> tuple[str, ...]:
        """Keys of the config that are set and do nothing: bounds of the ratio of an update, where
        every batch has one update, whose ratio is 1.
        """
        bounds = {field.name for field in dataclasses.fields(Clip)} if self.epochs == 1 else set()
        return tuple(
            f"train.loss.policy.{key}" for key in self.loss.policy.settings if key in bounds
        )

    def _check_value(self, pack: PackConfig) -> None:
        """Raises ConfigError for what does not go with a value function."""
        if pack.drop_uninformative:
            raise ConfigError(
                "config.train.pack.drop_uninformative = True drops groups of equal rewards, from "
                "which config.train.value learns: set it to False"
            )
        if pack.prompt_slots:
            raise ConfigError(
                f"config.train.pack.prompt_slots = {pack.prompt_slots} means an update in two "
                "phases, which has no values: set it to 0, or leave config.train.value out"
            )
