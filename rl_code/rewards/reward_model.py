"""Reward by a model that was trained on outcomes: the probability that the work is good.

The folder is made by ``launch.reward_model``. Work is scored by its change alone (``reading``); a
model with sight of the ground truth also reads the reference's.

With ``retrain`` a run trains the model again every n steps, on the outcomes of the newest steps
(``run.retraining``), and writes each version into its workdir. An episode is paid by the version
that was there when the weights were published that sampled its first token: version w of the
weights has version w // every of the reward model. So the record of an episode says by which
version it was paid, in every mode, and a run that was killed or an episode that is played again
comes to the same number.

The tests decide what an outcome is, and a policy that is paid by the model alone can do without
them. ``reward/solved`` in the metrics is then the true reward, by which one sees the two part.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from models.tokenizer import Tokenizer
from rl_code.config.read_config import ConfigError, at_least
from rl_code.environment.finished import FinishedEpisode
from rl_code.rewards import reward_model_folder
from rl_code.rewards.differing import work_diff
from rl_code.rewards.noted import MEASURES, Noted
from rl_code.rewards.reward_model_fit import FitConfig
from rl_code.rewards.scorer import scorer
from rl_code.types import Trajectory

# The folder of a workdir that holds the versions which a run trains.
FOLDER = "reward_model"
# The key of notes for the change that was read, by which later versions are trained.
WORK = "work"


@dataclasses.dataclass(frozen=True)
class Retrain:
    """Schedule by which a run trains its reward model again."""

    # Steps from one version to the next.
    every: int
    # Steps whose outcomes a version is trained on, the newest ones; None for ``every``.
    window: int | None = None
    # Weights that a version begins with: those of the version before, or of the first one.
    begins: Literal["previous", "first"] = "previous"
    # Loss, length and optimizer of the training.
    fit: FitConfig = FitConfig()

    def __post_init__(self) -> None:
        at_least(self, every=1, window=1)


@dataclasses.dataclass(frozen=True)
class RewardModel:
    """The probability that honest work which was handed in is good, by a model; 0 for other
    work.
    """

    # A folder of ``launch.reward_model``.
    folder: str
    # "probability", 0 to 1; or "score", the logarithm of its odds.
    form: Literal["probability", "score"] = "probability"
    # Retraining within the run; None for a model that stays.
    retrain: Retrain | None = None

    def check_model(self, tokenizer: Tokenizer) -> None:
        """Raises ConfigError where the folder holds no reward model. It reads text, so the
        policy's tokenizer does not matter.
        """
        reward_model_folder.check(Path(self.folder))

    def version(self, trajectory: Trajectory) -> int:
        """The version that pays an episode. Raises ConfigError for one whose weights have no
        version.
        """
        if self.retrain is None:
            return 0
        versions = trajectory.versions[trajectory.sampled]
        if not versions.size or versions.min() < 0:
            raise ConfigError(
                "reward_model(retrain=...): the versions of the weights that sampled this episode "
                "are not known, so neither is that of the reward model"
            )
        return int(versions.min()) // self.retrain.every

    def __call__(self, episode: FinishedEpisode) -> Noted | float:
        """The signal of a finished episode. Raises SandboxFault, and ConfigError where the model is
        not there.
        """
        grade = episode.grade
        if not grade.submitted or grade.cheated:
            return 0.0
        if self.retrain is not None and episode.workdir is None:
            raise ConfigError("reward_model(retrain=...): only a run has versions of its own")
        versions = episode.workdir / FOLDER if self.retrain and episode.workdir else None
        one = scorer(Path(self.folder).absolute(), versions and versions.absolute())
        change = work_diff(episode)
        if change is None:
            return Noted(0.0, {"failure": "too_large"})
        work = one.description.reading.kept(change)
        version = self.version(episode.trajectory)
        score, probability = one.score(one.ids(episode.task, work, episode.sandboxes), version)
        notes = {
            "version": version,
            "score": score,
            MEASURES: {"probability": probability, "version": float(version)},
        }
        if self.retrain is not None:
            notes[WORK] = work
        return Noted(probability if self.form == "probability" else score, notes)
