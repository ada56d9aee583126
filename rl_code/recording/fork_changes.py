"""Changes that a fork may make, and the part of its parent's record that such a change cannot have
affected.
"""

from __future__ import annotations

from pathlib import Path

from rl_code.config import read_config
from rl_code.config.read_config import ConfigError
from rl_code.run import lineage
from rl_code.run.config import RunConfig
from rl_code.run.workdir import MAY_CHANGE
from rl_code.store.sharing import Reach

# Keys that a fork cannot change: the recorded state and the recorded tokens are of this model.
_FIXED = {
    "model": "the recorded state is of this model",
    "tokenizer": "the recorded tokens are of this tokenizer",
    "sft": "the warm start was made before the fork",
}
# Keys of those sections that it can.
_FREE = (
    "model.remat",
    "model.remat_keeps",
    "model.offload_activations",
    "model.sequence_parallel",
    "model.fold_experts",
    "model.expert_buffer",
    "model.longer_context",
)
# Keys that change nothing that is recorded.
_HARMLESS = tuple(key for key in MAY_CHANGE if not key.startswith("train."))
# Keys of what the learner does with groups: they change the weights of later versions, and neither
# plans nor groups that earlier versions sampled.
_LEARNING = (
    *_HARMLESS,
    *_FREE,
    "train.steps",
    "train.optimizer",
    "train.epochs",
    "train.advantage",
    "train.continuations",
    "train.value",
    "train.loss",
    "train.teacher",
    "train.parts",
    "train.pack",
    "train.micro_batches",
)


def check(before: RunConfig, config: RunConfig, step: int) -> None:
    """Raises ConfigError for a key that cannot change."""
    for key in read_config.diff(before, config):
        section = key.split(".")[0]
        if section in _FIXED and key not in _FREE:
            raise ConfigError(
                f"config.{key} cannot change in a fork, since {_FIXED[section]}: "
                f"{read_config.lookup(before, key)!r} there, {read_config.lookup(config, key)!r} "
                "here; begin a new run instead, which may take its weights (model.weights)"
            )
    if config.train.steps < step:
        raise ConfigError(
            f"config.train.steps = {config.train.steps}: the fork begins at step {step}; "
            "the number must not be less"
        )
    # The reference of the KL divergence is the model that training began with.
    if (
        config.seed != before.seed
        and config.train.loss.kl_coef
        and config.sft is None
        and (not config.model.weights or config.model.change_methods)
    ):
        raise ConfigError(
            f"config.seed = {config.seed}: the random parameters that training began with are the "
            f"reference of train.loss.kl_coef, and come from seed {before.seed}; keep it"
        )


def reach_of(parent: Path, there: RunConfig, here: RunConfig, step: int, other_bits: bool) -> Reach:
    """Part that a fork may take over of the steps from ``step`` on.

    there: the config of the parent's steps from ``step`` on. here: that of the fork.
    """
    # From its own fork on the parent had another config than ``there``.
    if any(entry.step > step for entry in lineage.read(parent)):
        return "nothing"
    if read_config.diff(there, here, without=_LEARNING):
        return "nothing"
    if other_bits or read_config.diff(there, here, without=_HARMLESS):
        return "sampled before"
    return "everything"
