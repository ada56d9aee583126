"""Tinker's API for the model that a run serves."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from models.transformer import Transformer
from people.serving.access import Access
from people.serving.fleet import Fleet
from people.serving.tinker.adapters import Programs
from people.serving.tinker.checkpoints import Checkpoints
from people.serving.tinker.history import History
from people.serving.tinker.routes import Served, Tinker
from people.serving.tinker.sampler import Sampler
from people.serving.tinker.trainer import Trainer
from rl_code.config.read_config import ConfigError
from rl_code.host import files
from rl_code.rollout.sampling import SamplingConfig
from rl_code.run import origin
from rl_code.run.run import Run


def check(run: Run) -> None:
    """Raises ConfigError for a config whose model Tinker's API cannot train and sample."""
    config = run.config
    if config.rollout.sampling != SamplingConfig():
        raise ConfigError(
            f"config.rollout.sampling = {config.rollout.sampling}: Tinker's API samples at "
            "temperature 1 unless a request says otherwise; leave it out"
        )
    if run.model_config.lora is not None:
        raise ConfigError("config.model.lora: Tinker's API trains adapters of its own; set None")
    if config.documents is not None:
        raise ConfigError("config.documents: Tinker's API has no documents; set None")


def make_trainer(run: Run, model: Transformer, history: History, **named) -> Trainer:
    """The trainer of a served model. Raises ConfigError where the record is of other weights."""
    _check_base(history.folder / "base.json", model)
    config = run.config.serving.tinker
    longest = run.config.rollout.engine.length
    assert longest is not None  # it was derived of the limits
    return Trainer(
        Programs(model, config.max_rank),
        history,
        Checkpoints(history),
        config,
        mesh=run.mesh,
        vocab=run.tokenizer.vocab_size,
        longest=longest,
        **named,
    )


def open_history(folder: Path) -> History:
    """The record in a folder. Raises ConfigError."""
    try:
        return History(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--tinker={folder}: {error}") from error


@contextlib.contextmanager
def open_api(
    run: Run, fleet: Fleet, access: Access, folder: Path, *, base: str, model: Transformer
) -> Iterator[Tinker]:
    """Tinker's API for the model ``base`` (``name@version``) of a fleet.

    folder: its record. Raises ConfigError.
    """
    history = open_history(folder)
    api: Tinker | None = None

    def finished(id: str) -> None:
        if api is not None:
            api.finished(id)

    trainer = make_trainer(run, model, history, on_finish=finished)
    name = base.partition("@")[0]
    tokenizer = origin.kept_by(run.workdir).resolve()
    served = Served((name, str(tokenizer)), str(tokenizer), "transformer", trainer.longest)

    def make_sampler(on_end) -> Sampler:
        parts = trainer, trainer.checkpoints, fleet.text, run.tokenizer
        return Sampler(fleet.models, base, *parts, on_end)

    api = Tinker(served, history, trainer.checkpoints, trainer, make_sampler, access)
    with trainer:
        yield api


def _check_base(path: Path, model: Transformer) -> None:
    """Notes which weights a record is of, or checks it. Raises ConfigError."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(model):
        found.update(np.ascontiguousarray(leaf).tobytes())
    if not path.exists():
        files.write_atomically(path, json.dumps({"sha256": found.hexdigest()}).encode())
    elif json.loads(path.read_bytes())["sha256"] != found.hexdigest():
        raise ConfigError(
            f"{path}: the adapters in this folder are of other weights than those served now; "
            "serve those, or name another folder"
        )
