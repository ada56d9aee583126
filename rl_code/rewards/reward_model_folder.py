"""A reward model on disk: its weights by version, its tokenizer, and how it reads.

    reward_model.json   how it reads, what it was trained with, and what it was judged by
    model/              the shape of its backbone and its tokenizer, as a run keeps them
    checkpoints/        its weights; the number of a checkpoint is its version

Version 0 is made by ``launch.reward_model``. A run that retrains it writes further versions into
its own workdir, ``reward_model/checkpoints``, which need the first folder for the rest.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from attention.methods.api import METHODS
from attention.methods.method import Method
from models import pretrained
from models.model_config import ModelConfig
from models.scalar_head import ScoredTransformer, abstract_scored
from models.tokenizer import Tokenizer
from rl_code.checkpoint import arrays, checkpoint
from rl_code.checkpoint.checkpoint import Checkpoints
from rl_code.checkpoint.record import CheckpointError
from rl_code.config import named, read_config
from rl_code.config.named import Named
from rl_code.config.read_config import ConfigError
from rl_code.host.files import write_atomically
from rl_code.rewards.reading import Reading

FILE = "reward_model.json"
# The folder of a reward model that holds its tokenizer and the shape of its backbone.
MODEL = "model"


@dataclasses.dataclass(frozen=True)
class Description:
    """Content of ``reward_model.json``."""

    reading: Reading
    # Methods of attention of the backbone, by name.
    attention: tuple[Named, ...]
    # Loss that it was trained with.
    kind: str
    # Runs and checkpoints that it was made of, and measures on outcomes that it was not trained on.
    made_of: Any = None
    judged: Any = None


def write(folder: Path, description: Description) -> None:
    """Writes ``reward_model.json``, which makes a folder with weights a reward model."""
    write_atomically(folder / FILE, read_config.to_json(description).encode())


def read(folder: Path) -> Description:
    """Raises ConfigError for a folder that holds no reward model."""
    try:
        content = json.loads((folder / FILE).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{folder} holds no reward model: {FILE} cannot be read ({error}); python -m "
            "launch.reward_model makes one"
        ) from error
    return read_config.build(Description, content, str(folder / FILE))


def check(folder: Path) -> None:
    """Raises ConfigError for a folder without a reward model or its weights."""
    read(folder)
    if 0 not in checkpoint.steps(folder):
        raise ConfigError(f"{folder} has no checkpoint of a reward model")


def names_of(methods: tuple[Method, ...], key: str) -> tuple[Named, ...]:
    """Methods of attention as names with settings. Raises ConfigError for one of other packages,
    which whoever reads the folder may not have.
    """
    names = {kind: name for name, kind in METHODS.items()}
    for method in methods:
        if type(method) not in names:
            raise ConfigError(
                f"{key}: {type(method).__name__} is no method of attention of this tree; the "
                f"backbone of a reward model may have {', '.join(METHODS)}"
            )
    return tuple(Named(names[type(one)], read_config.to_dict(one)) for one in methods)


def shape_of(folder: Path, attention: tuple[Named, ...], file: str = FILE) -> ModelConfig:
    """Shape of the backbone, in float32, whose methods of attention stand in a file of the folder.
    Raises ConfigError.
    """
    path = f"{folder / file}: attention"
    for one in attention:
        if one.name not in METHODS:  # a file must not have code of its own run
            raise ConfigError(f"{path}: no method of attention is called {one.name!r}")
    try:
        shape = pretrained.read_config(folder / MODEL)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{folder}: {error}") from error
    methods = tuple(named.make(METHODS, one, path) for one in attention)
    return dataclasses.replace(shape, attention=methods)


def tokenizer_of(folder: Path) -> Tokenizer:
    """Raises ConfigError."""
    try:
        return pretrained.read_tokenizer(folder / MODEL)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{folder}: {error}") from error


@dataclasses.dataclass(frozen=True)
class Weights:
    """A version of a reward model."""

    model: ScoredTransformer
    # Slope and offset by which a score becomes a probability, sigmoid(slope * score + offset).
    scale: tuple[float, float]
    # Digest of the outcomes that it was trained on.
    made_of: str
    # Metrics of the last update of its training.
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)


def load(versions: Path, version: int, shape: ModelConfig, mesh: Mesh) -> Weights:
    """A version. versions: the folder with ``checkpoints``. Raises ConfigError."""
    try:
        with arrays.any_mesh():
            like = {"model": abstract_scored(shape, mesh)}
            found = checkpoint.load(versions, like, step=version)
    except CheckpointError as error:
        raise ConfigError(f"version {version} of the reward model: {error}") from error
    if found is None:
        raise ConfigError(f"{versions} holds no version of a reward model")
    slope, offset = found.position["scale"]
    made_of, metrics = (found.position[name] for name in ("made_of", "metrics"))
    return Weights(found.state["model"], (slope, offset), made_of, metrics)


def save(checkpoints: Checkpoints, version: int, weights: Weights) -> None:
    """Writes a version, and returns when it is on the disk. Raises CheckpointError."""
    position = {
        "scale": list(weights.scale),
        "made_of": weights.made_of,
        "metrics": dict(weights.metrics),
    }
    with arrays.any_mesh():  # the learner's may be another one
        checkpoints.save(version, {"model": weights.model}, position)
        checkpoints.wait()
