"""Models that ``launch.serve`` serves beside its first, and the one that ``auto`` asks.

    --also=policy@120:runs/a --also=other:runs/b      checkpoints, of models of the same shape
    --adapter=tuned@20:runs/lora                      adapters of the first model
    --auto=shares:policy@80=0.9,policy@120=0.1        fixed shares of the users
    --auto=thompson:policy@80,tuned                   what earns most (Thompson sampling, by
                                                      serving.auto of the config)

A name without a step means the newest checkpoint of its workdir, and in --auto the one that is
served by that name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from models import json_files
from models.adapted import without_adapters
from models.lora import trained
from models.transformer import Transformer
from people.serving.models import Models
from people.serving.router import AUTO, Router, Shares, Thompson
from rl_code.config.read_config import ConfigError
from rl_code.run import origin
from rl_code.run.config import refuse_other_documents
from rl_code.run.run import Run
from rl_code.run.serving import AutoConfig
from rl_code.run.workdir import CONFIG_FILE


@dataclasses.dataclass(frozen=True)
class ServedCheckpoint:
    """A checkpoint of a run, and the name that it is served by."""

    name: str
    # None for the newest.
    step: int | None
    workdir: Path

    @classmethod
    def read(cls, text: str, flag: str) -> ServedCheckpoint:
        """Reads ``name@step:workdir`` or ``name:workdir``. Raises ConfigError."""
        served_as, colon, workdir = text.partition(":")
        name, at, step = served_as.partition("@")
        if not (name and colon and workdir) or (at and not step.isdecimal()):
            raise ConfigError(f"--{flag}={text}: write name@step:workdir or name:workdir")
        return cls(name, int(step) if at else None, Path(workdir))


def load_also(run: Run, folder: Path, models: Models, texts: Sequence[str]) -> None:
    """Serves further checkpoints. Raises ConfigError and CheckpointError.

    folder: the workdir of the run, whose tokenizer all of them must have.
    """
    for text in texts:
        source = ServedCheckpoint.read(text, "also")
        try:
            _check_kept(source.workdir, folder, run)
            found = origin.load_checkpoint(source.workdir, run.model_config, run.mesh, source.step)
            weights, step = found
            models.load(source.name, step, weights)
        except ValueError as error:
            raise ConfigError(f"--also={text}: {error}") from error


def load_adapters(
    run: Run, folder: Path, models: Models, base: str, weights: Transformer, texts: Sequence[str]
) -> None:
    """Serves adapters that runs with ``model.lora`` have trained. Raises ConfigError and
    CheckpointError.

    base: the model that they adapt, as ``name@version``, and weights: its weights. folder: as of
    ``load_also``.
    """
    for text in texts:
        source = ServedCheckpoint.read(text, "adapter")
        try:
            _check_kept(source.workdir, folder, run)
            lora = origin.kept_adapters(origin.kept_by(source.workdir))
            if lora is None:
                raise ValueError(
                    f"{source.workdir} trained no adapters (config.model.lora); serve its "
                    "checkpoint by --also"
                )
            config = dataclasses.replace(run.model_config, lora=lora)
            model, step = origin.load_checkpoint(source.workdir, config, run.mesh, source.step)
            if not _same(without_adapters(model), weights):
                raise ValueError(
                    f"it adapts other weights than those of {base}; serve the checkpoint that "
                    "config.model.weights of its run names"
                )
            models.load_adapter(source.name, step, trained(model), base)
        except ValueError as error:
            raise ConfigError(f"--adapter={text}: {error}") from error


def make_router(text: str | None, models: Models, first: str, config: AutoConfig) -> Router:
    """Source of answers for ``auto``. text: the flag; None for the first model alone, which is
    given as ``name@version``. config: of Thompson sampling. Raises ConfigError.
    """
    if text is None:
        return Shares(AUTO, {first: 1.0})
    kind, _, listed = text.partition(":")
    arms = [arm for arm in listed.split(",") if arm]
    try:
        if kind == "thompson":
            named = [_served(arm, models) for arm in arms] or models.versions()
            return Thompson(named, config)
        if kind == "shares":
            return Shares(AUTO, _shares(arms, models))
    except ValueError as error:
        raise ConfigError(f"--auto={text}: {error}") from error
    raise ConfigError(f"--auto={text}: write shares:a@1=0.9,b@2=0.1 or thompson:a@1,b@2")


def _shares(arms: Sequence[str], models: Models) -> Mapping[str, float]:
    """Shares by what is served. Raises ValueError."""
    found: dict[str, float] = {}
    for arm in arms:
        name, is_there, share = arm.partition("=")
        key = _served(name, models)
        if not is_there or key in found:
            raise ValueError(f"{arm!r} must be like {key}=0.5, and each arm stand there once")
        found[key] = float(share)
    return found


def _served(name: str, models: Models) -> str:
    """Model that is served by a name, as ``name@version``. Raises ValueError."""
    there = models.versions()
    found = [key for key in there if name in (key, key.partition("@")[0])]
    if len(found) != 1:
        raise ValueError(f"{name!r} must be one of {', '.join(there)}")
    return found[0]


def check_trained(workdir: Path, run: Run) -> None:
    """Raises ConfigError for the workdir of a run that trained with other documents than ``run``
    has, which serves its weights.
    """
    for folder in (workdir, workdir.parent):  # a warm start's checkpoints are in one of the run's
        if (file := folder / CONFIG_FILE).is_file():
            refuse_other_documents(run.config.documents, json_files.read_json(file), str(file))
            return


def _check_kept(workdir: Path, folder: Path, run: Run) -> None:
    """Raises ValueError where a run has another tokenizer than the one that is served, or was
    trained with other documents. folder, run: of what serves.
    """
    check_trained(workdir, run)
    files = [origin.kept_by(each) / "tokenizer.json" for each in (workdir, folder)]
    if files[0].read_bytes() != files[1].read_bytes():
        raise ValueError(f"{files[0]} is another tokenizer than that of the first model")


def _same(one: Transformer, other: Transformer) -> bool:
    """True if two models have the same parameters."""
    pairs = [jax.tree.leaves_with_path(model) for model in (one, other)]
    names = [[path for path, _ in pair] for pair in pairs]
    if names[0] != names[1]:
        return False
    return all(bool(jnp.array_equal(a, b)) for (_, a), (_, b) in zip(*pairs, strict=True))
