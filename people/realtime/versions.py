"""The versions of the weights in a workdir: a checkpoint each, and what it was made of."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from models.transformer import Transformer
from rl_code import sft
from rl_code.checkpoint import checkpoint
from rl_code.checkpoint.checkpoint import Checkpoints
from rl_code.checkpoint.record import CheckpointError
from rl_code.host.stop import StopRequest
from rl_code.learner.update import TrainState, init_state
from rl_code.run.run import Run


class Versions:
    """The folder ``versions`` of a workdir. For one process at a time."""

    def __init__(self, run: Run, stop: StopRequest):
        """stop: asked between the updates of a warm start."""
        self._run, self._stop = run, stop
        self._folder = run.workdir / "versions"

    def begin(self, version: int) -> None:
        """Makes the first version: the warm start, or the model that the config names. Does nothing
        if it is there. Raises Stopped.
        """
        if self.made_of(version) is not None:
            return
        run = self._run
        with jax.set_mesh(run.mesh):
            if run.config.sft is not None:
                model = sft.warm_start(run, self._stop).model
            else:
                model = run.init_model()
            train = run.config.train
            state = init_state(model, train.optimizer, train.value)
            self.write(version, state, "the start", {})

    def made_of(self, version: int) -> str | None:
        """Source of a version (``made_of``); None for one that is not there, or not whole."""
        try:
            record = checkpoint.record_of(self._of(version), version)
        except CheckpointError:
            return None
        return record.position["made_of"]

    def updates(self, version: int) -> int:
        """Updates that made a version that is whole. Raises CheckpointError."""
        return int(checkpoint.record_of(self._of(version), version).position["updates"])

    def write(self, version: int, state: TrainState, made_of: str, told: Mapping[str, Any]) -> None:
        """Writes a version in place of what there is of it. After a kill it is there as a whole or
        ``made_of`` does not know it. told: what else is kept of its training, plain JSON values.
        """
        folder = self._of(version)
        if folder.exists():
            # the record first, so that no kill leaves one without its files
            for record in folder.glob("checkpoints/step_*"):
                checkpoint.checkpoint_record.remove(record)
            shutil.rmtree(folder)
        with Checkpoints(folder, self._run.config, keep=1) as checkpoints:
            checkpoints.save(version, state, {"made_of": made_of} | dict(told))

    def state(self, version: int) -> TrainState:
        """All that training goes on from. Raises CheckpointError."""
        return checkpoint.load(self._of(version), self._like, step=version).state

    def model(self, version: int) -> Transformer:
        """The weights alone. Raises CheckpointError."""
        return self._run.saved_model(self._of(version), version)[0]

    def _of(self, version: int) -> Path:
        return self._folder / str(version)

    @functools.cached_property
    def _like(self) -> Any:
        """Shapes, dtypes and shardings of a state."""
        run = self._run
        train = run.config.train
        state = init_state(run.init_model(), train.optimizer, train.value)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
        )
