"""Reward by a process reward model: its score of each turn border, paid per turn in one of four
forms.

    dict(name="process", weights="runs/prm@300", form="minimum")

A score estimates the share of continuations from there that solve the task (``step_labels``). The
forms say what is paid at each turn; the signal is their sum:

    sum         the score behind the turn
    mean        the same, divided by the number of turns
    minimum     the least score of the episode, at the turn behind which it stands, and 0 elsewhere
                (Math-Shepherd, 2312.08935, section 3.4, takes it for a whole solution)
    difference  the score behind the turn less the one before it, that of the prompt before the
                first. It is potential-based (Ng and others, 1999): the sum is that of the last
                border less that of the prompt, whatever stands between

The amounts go on record as notes: "turns" (paid, before the weight), "scores" (with that of the
prompt in front), "updates" (of the model). ``train.advantage="process"`` credits each turn with
what is paid from it on; any other advantage sees their sum.

A score can be raised without solving anything, so nobody should be surprised by a policy that does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from models.tokenizer import Tokenizer
from rl_code.environment.finished import FinishedEpisode
from rl_code.rewards.noted import MEASURES, Noted
from rl_code.rewards.step_labels import borders_in
from rl_code.types import Trajectory

Form = Literal["sum", "mean", "minimum", "difference"]
FORMS: tuple[str, ...] = get_args(Form)


@dataclasses.dataclass(frozen=True)
class ProcessReward:
    """Scores of a process reward model for the turns of an episode."""

    # The folder of the model, perhaps with @ and the number of a checkpoint. Without it the newest
    # one is taken, and an episode that is played again after the model was trained further is paid
    # otherwise.
    weights: str
    # How scores are paid.
    form: Form = "mean"

    def __post_init__(self):
        if not self.weights:
            raise ValueError("weights='' must name the folder of a process reward model")

    def check_model(self, tokenizer: Tokenizer) -> None:
        """Raises ConfigError where there is no such model, or one that reads other tokens."""
        # with it jax, which commands that only read a config do without
        from rl_code.rewards.process_model import check

        check(*folder_of(self.weights), tokenizer)

    def __call__(self, episode: FinishedEpisode) -> Noted:
        """The signal of a finished episode. Raises ConfigError where there is no such model."""
        from rl_code.rewards.process_model import scorer

        model = scorer(*folder_of(self.weights))
        trajectory = episode.trajectory
        scores = model.scores(trajectory.contexts[0].tokens, places_of(trajectory))
        paid = pay(scores, self.form)
        mean = float(np.mean(scores[1:])) if paid else 0.0
        notes = {"turns": paid, "scores": scores, "updates": model.step}
        return Noted(float(sum(paid)), {**notes, MEASURES: {"score": mean}})


def folder_of(weights: str) -> tuple[Path, int | None]:
    """The folder and the checkpoint that a config's text names."""
    before, at, step = weights.rpartition("@")
    if at and step.isdecimal() and not Path(weights).exists():
        return Path(before), int(step)
    return Path(weights), None


def places_of(trajectory: Trajectory) -> list[int]:
    """Places that are scored: the prompt's last token, and that of each border."""
    return [trajectory.prompt_length - 1, *borders_in(trajectory)]


def pay(scores: Sequence[float], form: str) -> list[float]:
    """The amount that is paid at each turn. scores: of the prompt and behind each turn."""
    behind = list(scores[1:])
    if not behind:
        return []
    if form == "sum":
        return behind
    if form == "mean":
        return [score / len(behind) for score in behind]
    if form == "minimum":
        least = int(np.argmin(behind))
        return [score if at == least else 0.0 for at, score in enumerate(behind)]
    return np.diff(scores).tolist()
