"""Training of a reward model on outcomes, and its scores of many texts.

All randomness is a function of the seed, so the same outcomes give the same weights, bit for bit,
on the same device.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float64

from models.scalar_head import ScoredTransformer
from rl_code.config.read_config import at_least
from rl_code.learner.optimizer import OptimizerConfig
from rl_code.learner.scored import Kind, Text, make_scored_update, pack_scored, scores_in
from rl_code.learner.update import init_state


@dataclasses.dataclass(frozen=True)
class FitConfig:
    """Settings of the training of a reward model."""

    # Updates.
    updates: int = 20
    # By which it is trained.
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-4)
    # "outcomes": each text has a label, solved or not. "pairs": of two texts of one task one is
    # solved and the other is not.
    kind: Kind = "outcomes"
    # Rows of an update, each of as many texts as fit; and the texts of a row at most.
    rows: int = 8
    texts: int = 16
    # Pairs of one task at most, drawn at random.
    pairs: int = 16

    def __post_init__(self) -> None:
        at_least(self, updates=1, rows=1, texts=2, pairs=1)
        if self.texts % 2:
            raise ValueError(f"texts={self.texts} must be even: pairs stand in one row")
        if self.kind not in ("outcomes", "pairs"):
            raise ValueError(f"kind={self.kind!r} must be 'outcomes' or 'pairs'")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A text of which is known whether the work was good."""

    # The task, within which texts are compared.
    task: str
    # Token ids.
    tokens: tuple[int, ...]
    good: bool


def units_of(
    outcomes: Sequence[Outcome], config: FitConfig, rng: np.random.Generator
) -> list[tuple[Text, ...]]:
    """Texts to learn from in a random order, or pairs of them with the good one first."""
    if config.kind == "outcomes":
        units = [(Text.whole(one.tokens, float(one.good)),) for one in outcomes]
    else:
        by_task: dict[str, list[Outcome]] = {}
        for one in outcomes:
            by_task.setdefault(one.task, []).append(one)
        units = []
        for own in by_task.values():
            good, bad = ([x for x in own if x.good == kind] for kind in (True, False))
            pairs = list(itertools.product(good, bad))
            chosen = rng.permutation(len(pairs))[: config.pairs]
            units += [
                (Text.whole(pairs[i][0].tokens, 1.0), Text.whole(pairs[i][1].tokens))
                for i in chosen
            ]
    return [units[i] for i in rng.permutation(len(units))]


def fit(
    model: ScoredTransformer,
    outcomes: Sequence[Outcome],
    config: FitConfig,
    *,
    slots: int,
    mesh: Mesh,
    seed: Sequence[int],
    tell: Callable[[int, dict[str, float]], None] = lambda update, metrics: None,
) -> tuple[ScoredTransformer, dict[str, float]]:
    """The model after training, and metrics of the last update; the model itself where the outcomes
    say nothing, as pairs do of tasks that are all solved.

    slots: of the longest text. tell: is given the metrics of each update. ``model`` is not donated.
    """
    rng = np.random.default_rng(seed)
    if not units_of(outcomes, config, np.random.default_rng(seed)):
        return model, {}
    align = model.config.alignment
    width = 2 * slots if config.kind == "pairs" else slots
    update = _update(config.optimizer, config.kind)
    waiting: list[tuple[Text, ...]] = []
    endless = _endless(outcomes, config, rng)
    metrics: dict[str, float] = {}
    with jax.set_mesh(mesh):
        state = init_state(jax.tree.map(jnp.copy, model), config.optimizer)
        for number in range(config.updates):
            # as many as a batch can hold; those that do not fit come first in the next one
            while len(waiting) < config.rows * config.texts:
                waiting.append(next(endless))
            batch, places = pack_scored(
                waiting, rows=config.rows, slots=width, most=config.texts, align=align
            )
            waiting = waiting[len(places) :]
            state, found = update(state, jax.device_put(batch))
            metrics = {name: float(value) for name, value in jax.device_get(found).items()}
            tell(number, metrics)
    return state.model, metrics


def _endless(
    outcomes: Sequence[Outcome], config: FitConfig, rng: np.random.Generator
) -> Iterator[tuple[Text, ...]]:
    while True:
        yield from units_of(outcomes, config, rng)


@functools.cache
def _update(optimizer: OptimizerConfig, kind: Kind) -> Callable[..., tuple]:
    """One program for all versions."""
    return make_scored_update(optimizer, kind)


def scores_of(
    model: ScoredTransformer,
    texts: Sequence[Sequence[int]],
    *,
    slots: int,
    mesh: Mesh,
    rows: int = 8,
    most: int = 16,
) -> Float64[np.ndarray, " n"]:
    """The score of each text. slots: of the longest text."""
    found: list[float] = []
    align = model.config.alignment
    with jax.set_mesh(mesh):
        while len(found) < len(texts):
            left = texts[len(found) : len(found) + rows * most]
            units = [[Text.whole(tokens)] for tokens in left]
            batch, places = pack_scored(units, rows=rows, slots=slots, most=most, align=align)
            scores = np.asarray(scores_in(model, jax.device_put(batch)), np.float64)
            found += [float(scores[place]) for (place,) in places]
    return np.array(found, np.float64)
