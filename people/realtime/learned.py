"""A reward model in the cycle: every cycle trains it on what people did with answers, and the next
cycle pays by it.

It reads what was new in the request and the answer, in the tokens that the server recorded. With
sight of the ground truth it also reads what the person said next. An answer is good whose reward by
what people did is above a bound. A cycle's answers are first judged by the model of the cycle
before, which has not seen them, and only then does the model learn from them; so its measures are
those of a model on new people.

The prediction is on the scale of rewards: between the mean reward of bad answers and that of good
ones, by the probability. It takes the place of the reward where nothing is known of an answer, or
is mixed with all rewards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float64

from models.model_config import ModelConfig
from models.scalar_head import ScoredTransformer, abstract_scored, with_head
from models.transformer import Transformer, cast
from people.feedback.rewards.answered import Answered
from rl_code.checkpoint import checkpoint
from rl_code.checkpoint.checkpoint import Checkpoints
from rl_code.checkpoint.record import CheckpointError
from rl_code.config.read_config import at_least
from rl_code.rewards.calibration import auc, ece, platt, reliability, sigmoid
from rl_code.rewards.reading import fitted
from rl_code.rewards.reward_model_fit import FitConfig, Outcome, fit, scores_of

# The folder of a cycle's workdir with a folder for each cycle's model.
FOLDER = "reward_model"


@dataclasses.dataclass(frozen=True)
class LearnedReward:
    """Settings of a reward model that the cycle trains."""

    # Answers whose reward it changes: "silent" ones, of which no event says anything, or "all".
    pays: Literal["silent", "all"] = "silent"
    # Share of the prediction in the reward of an answer that it pays; 0 to judge it alone.
    weight: float = 1.0
    # An answer is good whose reward, by what people did, is above this number.
    good: float = 0.0
    # Whether it also reads what the person said next in the session.
    sees_next: bool = False
    # Tokens that it reads of an answer at most: the end of the request, and the answer, which gets
    # at least half of them.
    tokens: int = 256
    # Training in a cycle. On pairs it would need several answers to one request.
    fit: FitConfig = FitConfig(updates=50)

    def __post_init__(self) -> None:
        at_least(self, tokens=8)
        if not 0.0 <= self.weight <= 1.0:
            raise ValueError(f"{self.weight=} must be in [0, 1]")
        if self.fit.kind != "outcomes":
            raise ValueError(
                f"fit.kind={self.fit.kind!r} must be 'outcomes': a request has one answer"
            )


@dataclasses.dataclass(frozen=True)
class Learned:
    """The model of a cycle."""

    model: ScoredTransformer
    # Slope and offset by which a score becomes a probability.
    scale: tuple[float, float]
    # Mean reward of bad and of good answers in its training.
    levels: tuple[float, float]


class RewardModels:
    """The models of all cycles so far, in a workdir.

    first: the weights that the first of them begins with. eos: the token that ends what is read.
    """

    def __init__(
        self,
        config: LearnedReward,
        folder: Path,
        first: Callable[[], Transformer],
        mesh: Mesh,
        eos: int,
        seed: int,
    ):
        self._config, self._folder = config, folder / FOLDER
        self._first, self._mesh, self._eos, self._seed = first, mesh, eos, seed

    def pay(
        self, cycle: int, given: Sequence[Answered], totals: Float64[np.ndarray, " n"]
    ) -> tuple[Float64[np.ndarray, " n"], dict[str, float]]:
        """Rewards of answers with the predictions of the model of an earlier cycle, and measures of
        it on them; the rewards as they are in the first cycle.

        totals: by what people did.
        """
        before = self._before(cycle)
        if before is None:
            return totals, {}
        learned = self._load(before)
        texts = [self._ids(one) for one in given]
        scores = self._scores(learned.model, texts)
        p = sigmoid(learned.scale[0] * scores + learned.scale[1])
        silent = np.array([not one.events for one in given], bool)
        told = {"reward_model/of_cycle": float(before), "reward_model/silent": float(silent.mean())}
        heard = np.flatnonzero(~silent)
        if len(heard):
            probabilities, good = p[heard].tolist(), (totals[heard] > self._config.good).tolist()
            told["reward_model/ece"] = ece(reliability(probabilities, good))
            if (area := auc(probabilities, good)) is not None:
                told["reward_model/auc"] = area
        low, high = learned.levels
        share = self._config.weight * (silent if self._config.pays == "silent" else 1.0)
        return (1.0 - share) * totals + share * (low + p * (high - low)), told

    def train(
        self,
        cycle: int,
        given: Sequence[Answered],
        totals: Float64[np.ndarray, " n"],
        made_of: str,
    ) -> dict[str, float]:
        """Makes the model of a cycle of those answers of which something is known; does nothing
        where it is there already, of the same data. Returns metrics of its training.

        totals: by what people did. made_of: digest of the data. Raises CheckpointError.
        """
        if (there := self._record(cycle)) is not None and there["made_of"] == made_of:
            return there["metrics"]
        pairs = [(one, total) for one, total in zip(given, totals, strict=True) if one.events]
        outcomes = [
            Outcome(one.answer.session, tuple(self._ids(one)), bool(total > self._config.good))
            for one, total in pairs
        ]
        good = np.array([one.good for one in outcomes], bool)
        if not 0 < good.sum() < len(good):
            return {}  # answers of one kind alone teach nothing
        before = self._before(cycle)
        if before is None:
            model = with_head(cast(self._first(), "float32"))
            model = jax.device_put(model, jax.tree.map(lambda x: x.sharding, self._like(model)))
        else:
            model = self._load(before).model
        align = model.config.alignment
        slots = -(-self._config.tokens // align) * align
        seed = [self._seed, cycle]
        made, found = fit(
            model, outcomes, self._config.fit, slots=slots, mesh=self._mesh, seed=seed
        )
        scores = self._scores(made, [one.tokens for one in outcomes])
        rewards = np.array([total for _, total in pairs], np.float64)
        metrics = {f"reward_model/{name.partition('/')[2]}": value for name, value in found.items()}
        position = {
            "made_of": made_of,
            "scale": platt(scores.tolist(), good.tolist()),
            "levels": [float(rewards[~good].mean()), float(rewards[good].mean())],
            "metrics": metrics | {"reward_model/good": float(good.mean())},
        }
        self._write(cycle, made, position)
        return position["metrics"]

    def _ids(self, one: Answered) -> list[int]:
        """Tokens that are read of an answer; the newest of what stands before it."""
        after = one.following.answer.given if self._config.sees_next and one.following else ()
        before, answer = one.answer.given, one.answer.tokens
        room = self._config.tokens - 1
        lengths = fitted([len(before), len(after), len(answer)], room)
        kept = before[len(before) - lengths[0] :], answer[: lengths[2]], after[: lengths[1]]
        return [*kept[0], *kept[1], *kept[2], self._eos]

    def _scores(
        self, model: ScoredTransformer, texts: Sequence[Sequence[int]]
    ) -> Float64[np.ndarray, " n"]:
        align = model.config.alignment
        slots = -(-self._config.tokens // align) * align
        return scores_of(model, texts, slots=slots, mesh=self._mesh)

    def _before(self, cycle: int) -> int | None:
        """The newest cycle before this one that made a model."""
        numbers = [int(path.name) for path in self._folder.glob("*") if path.name.isdecimal()]
        found = [number for number in numbers if number < cycle and self._record(number)]
        return max(found, default=None)

    def _record(self, cycle: int) -> dict[str, Any] | None:
        """Facts of a cycle's model; None for one that is not there, or not whole."""
        try:
            return checkpoint.record_of(self._folder / str(cycle), cycle).position
        except CheckpointError:
            return None

    def _like(self, model: ScoredTransformer) -> ScoredTransformer:
        return abstract_scored(model.config, self._mesh)

    def _load(self, cycle: int) -> Learned:
        record = self._record(cycle)
        assert record is not None
        like = {"model": abstract_scored(self._shape, self._mesh)}
        found = checkpoint.load(self._folder / str(cycle), like, step=cycle)
        assert found is not None
        (slope, offset), (low, high) = record["scale"], record["levels"]
        return Learned(found.state["model"], (slope, offset), (low, high))

    @functools.cached_property
    def _shape(self) -> ModelConfig:
        """The shape of the backbone, the same in all cycles."""
        return cast(self._first(), "float32").config

    def _write(self, cycle: int, model: ScoredTransformer, position: dict[str, Any]) -> None:
        """Writes a cycle's model in place of what there is of it. After a kill it is there as a
        whole, or has no record.
        """
        folder = self._folder / str(cycle)
        with contextlib.suppress(FileNotFoundError):
            for record in folder.glob("checkpoints/step_*"):
                checkpoint.checkpoint_record.remove(record)
            shutil.rmtree(folder)
        with Checkpoints(folder, self._config, keep=1) as checkpoints:
            checkpoints.save(cycle, {"model": model}, position)
