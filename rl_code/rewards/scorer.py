"""A reward model in memory: texts go in, probabilities come out.

It runs on one device, in whichever thread asks, one text at a time in a program of one shape. So
the number of a text does not depend on what stands beside it, and a text that is scored again by
the same version has the same bits.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from models.sharding import MeshConfig, make_mesh
from models.tokenizer import Tokenizer
from rl_code.checkpoint import checkpoint
from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.learner.scored import Text, pack_scored, scores_in
from rl_code.rewards import reward_model_folder
from rl_code.rewards.calibration import sigmoid
from rl_code.rewards.reward_model_folder import Weights
from rl_code.types import Task
from rl_code.weights.waiting import Deadline

# Versions that are kept in memory beside the first: those that open episodes may still need.
_KEPT = 4
# Seconds in which shared storage shows what another host has written.
_LATE_S = 30.0


class Scorer:
    """The reward model of a folder, and its versions in another one.

    folder: as ``reward_model_folder`` describes it, with version 0. versions: the folder whose
    ``checkpoints`` hold later versions; None for none.
    """

    def __init__(self, folder: Path, versions: Path | None = None):
        self.folder, self.versions = folder, versions
        self.description = reward_model_folder.read(folder)
        self.tokenizer: Tokenizer = reward_model_folder.tokenizer_of(folder)
        self.shape = reward_model_folder.shape_of(folder, self.description.attention)
        self.mesh = make_mesh(MeshConfig(), jax.local_devices()[:1])
        self._weights: dict[int, Weights] = {}
        # loading twice would cost memory, and programs of several threads the same device
        self._lock = threading.Lock()

    @property
    def slots(self) -> int:
        """Slots of the row in which a text is scored."""
        align = self.shape.alignment
        return -(-self.description.reading.tokens // align) * align

    def weights(self, version: int) -> Weights:
        """A version. Raises ConfigError where it is not there."""
        with self._lock:
            return self._load(version)

    def _load(self, version: int) -> Weights:
        if version not in self._weights:
            where = self.folder
            if version and self.versions is not None:
                where = self.versions
                # written before the weights that need it, and on shared storage perhaps seen after
                Deadline(_LATE_S).wait(lambda: version in checkpoint.steps(where), poll_s=0.2)
            found = reward_model_folder.load(where, version, self.shape, self.mesh)
            self._weights[version] = found
            # the first one stays: it is what later ones are compared with
            for old in sorted(self._weights)[1:-_KEPT]:
                del self._weights[old]
            return found
        return self._weights[version]

    def ids(self, task: Task, work: str, sandboxes: SandboxPool | None) -> list[int]:
        """Token ids of a task and the kept change of its work (``Reading``)."""
        return self.description.reading.ids(self.tokenizer, task, work, sandboxes)

    def score(self, tokens: Sequence[int], version: int = 0) -> tuple[float, float]:
        """(The score of one text, the probability that it stands for). Raises ConfigError."""
        batch, _ = pack_scored(
            [[Text.whole(tokens)]], rows=1, slots=self.slots, most=1, align=self.shape.alignment
        )
        with self._lock, jax.set_mesh(self.mesh):
            weights = self._load(version)
            found = scores_in(weights.model, jax.device_put(batch))
        score = float(np.asarray(found)[0, 0])
        return score, probability(score, weights.scale)


def probability(score: float, scale: tuple[float, float]) -> float:
    """The probability that a score stands for."""
    return float(sigmoid(np.array([scale[0] * score + scale[1]]))[0])


@functools.lru_cache(maxsize=8)
def scorer(folder: Path, versions: Path | None) -> Scorer:
    """The one Scorer of these folders in this process. Raises ConfigError."""
    return Scorer(folder, versions)
