"""A process reward model: on disk, and in memory to score the turns of episodes.

    process_model.json  its methods of attention, and measures on labels that it was not trained on
    model/              the shape of its backbone and its tokenizer, as a run keeps them
    checkpoints/        its weights; the number of a checkpoint is the updates made

It reads the tokens of a trajectory as the policy wrote them, so its tokenizer is the policy's.
``launch.process_model`` makes one.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from models.model_config import ModelConfig
from models.scalar_head import abstract_scored
from models.sharding import MeshConfig, make_mesh
from models.tokenizer import Tokenizer
from rl_code.checkpoint import checkpoint
from rl_code.checkpoint.record import CheckpointError
from rl_code.config import read_config
from rl_code.config.named import Named
from rl_code.config.read_config import ConfigError
from rl_code.host.files import write_atomically
from rl_code.learner.scored import Text, pack_scored, scores_in
from rl_code.rewards import reward_model_folder
from rl_code.rewards.calibration import sigmoid

FILE = "process_model.json"
# The shortest row, and the fewest borders, of a program that scores; longer ones are twice as long.
_LEAST_SLOTS, _LEAST_BORDERS = 128, 8


@dataclasses.dataclass(frozen=True)
class Description:
    """Content of ``process_model.json``."""

    # Methods of attention of the backbone.
    attention: tuple[Named, ...]
    # Runs and settings that it was made of.
    made_of: Any = None
    # Measures on borders of tasks that it was not trained on, by the updates made.
    judged: Any = None


def write(folder: Path, description: Description) -> None:
    """Writes ``process_model.json``, which makes a folder with weights a process reward model."""
    write_atomically(folder / FILE, read_config.to_json(description).encode())


def read(folder: Path) -> Description:
    """Raises ConfigError for a folder that holds no process reward model."""
    try:
        content = json.loads((folder / FILE).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{folder} holds no process reward model: {FILE} cannot be read ({error}); python -m "
            "launch.process_model makes one"
        ) from error
    return read_config.build(Description, content, str(folder / FILE))


def shape_of(folder: Path) -> ModelConfig:
    """Shape of the backbone, in float32. Raises ConfigError."""
    return reward_model_folder.shape_of(folder, read(folder).attention, FILE)


def check(folder: Path, step: int | None, tokenizer: Tokenizer) -> None:
    """Raises ConfigError where a folder holds no such checkpoint of a process reward model, or one
    that reads other tokens than a policy with this tokenizer writes.
    """
    read(folder)
    known = checkpoint.steps(folder)
    if not known or step not in (None, *known):
        which = f" of {step} updates; there are {known}" if known else ""
        raise ConfigError(f"{folder} has no checkpoint of a process reward model{which}")
    if reward_model_folder.tokenizer_of(folder).vocabulary != tokenizer.vocabulary:
        raise ConfigError(
            f"{folder}: the process reward model has another tokenizer than the policy, whose "
            "tokens mean something else to it"
        )


class Scorer:
    """The process reward model of a folder. It runs on one device, in whichever thread asks, one
    trajectory at a time in a program whose shape depends on that trajectory alone: what is scored
    again has the same bits.

    step: the checkpoint; None for the newest. Raises ConfigError.
    """

    def __init__(self, folder: Path, step: int | None = None):
        self._shape = shape_of(folder)
        self._mesh = make_mesh(MeshConfig(), jax.local_devices()[:1])
        self._lock = threading.Lock()
        with jax.set_mesh(self._mesh):
            abstract = {"model": abstract_scored(self._shape, self._mesh)}
            try:
                restored = checkpoint.load(folder, abstract, step=step, partial=True)
            except CheckpointError as error:
                raise ConfigError(f"{folder}: {error}") from error
        if restored is None:
            raise ConfigError(f"{folder} has no checkpoint of a process reward model")
        self._model = restored.state["model"]
        # Updates that its weights have had.
        self.step = restored.step

    def scores(self, tokens: np.ndarray, places: Sequence[int]) -> list[float]:
        """Estimates of the labels of borders, each of which is read at its last token's place."""
        if not len(places):
            return []
        zeros = (0.0,) * len(places)
        batch, _ = pack_scored(
            [[Text(tokens.tolist(), places, zeros, zeros)]],
            rows=1,
            slots=_doubled(_LEAST_SLOTS * self._shape.alignment, len(tokens)),
            most=_doubled(_LEAST_BORDERS, len(places)),
            align=self._shape.alignment,
        )
        with self._lock, jax.set_mesh(self._mesh):
            found = np.asarray(scores_in(self._model, jax.device_put(batch)), np.float64)
        return sigmoid(found[0, : len(places)]).tolist()


@functools.lru_cache(maxsize=4)
def scorer(folder: Path, step: int | None) -> Scorer:
    """The one Scorer of a checkpoint in this process. Raises ConfigError."""
    return Scorer(folder, step)


def _doubled(least: int, needed: int) -> int:
    """The smallest number that is ``least`` times a power of two and at least ``needed``."""
    while least < needed:
        least *= 2
    return least
