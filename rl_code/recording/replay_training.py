"""Training once more from what a run's store holds: the same groups must give the same weights, bit
for bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from rl_code import sft
from rl_code.checkpoint import checkpoint
from rl_code.config import read_config
from rl_code.learner.teacher import first_state, with_average
from rl_code.learner.update import TrainState
from rl_code.learner.value_function import carried
from rl_code.rollout import late_credit
from rl_code.run import lineage, teaching
from rl_code.run.config import RunConfig
from rl_code.run.run import Run
from rl_code.run.workdir import MAY_CHANGE, STORE
from rl_code.store.errors import StoreError
from rl_code.store.source import read_ahead
from rl_code.store.store import GroupStore
from rl_code.weights.layout import in_dtype
from rl_code.weights.versions import Version


@dataclasses.dataclass(frozen=True)
class Replayed:
    """A step that was trained on once more."""

    step: int
    # checksum of the weights after the step, as the run wrote it down
    then: str
    # checksum of the weights that the replay made
    now: str
    # the state after the step; good until the next step
    state: TrainState

    @property
    def same(self) -> bool:
        """True if the weights are."""
        return self.then == self.now


def replay(run: Run, start: int = 0, end: int | None = None) -> Iterator[Replayed]:
    """Trains again on every consumed step from ``start`` on, up to but not including ``end``.

    Steps before a fork are trained as the run that was forked trained them. Writes nothing.

    start: 0, for which the model that training began with is read; or the step of a checkpoint that
    is kept. The next step donates the state of the step before. Raises CheckpointError when there
    is no such checkpoint, StoreError for a group that is damaged or no longer on record.
    """
    store = GroupStore(run.workdir / STORE)
    steps = [step for step in store.consumed() if step >= start and (end is None or step < end)]
    if steps and steps[0] != start:
        raise StoreError(
            f"step {start} is no longer on record in {run.workdir}; {on_record(run.workdir)}"
        )
    state = None
    for config, found in lineage.by_config(run.workdir, run.config, steps):
        with _with_config(run, config) as part:
            with jax.set_mesh(part.mesh):
                model = sft.initial_model(part)
                learn = teaching.learner(part, config.train, model)
                fresh = first_state(config.train, model)
                if state is not None:
                    state = with_average(config.train, state)
                    # onto the devices of this part, whose mesh may be another one
                    value = carried(state.value, state.model, config.train.value)
                    state = dataclasses.replace(state, value=value)
                    state = jax.device_put(state, jax.tree.map(lambda x: x.sharding, fresh))
                elif start:
                    load = functools.partial(checkpoint.load, run.workdir, step=start)
                    kept = teaching.restored(config.train, fresh, run.workdir, load, start)
                    state = kept.state
                else:
                    state = fresh
            del fresh
            read = read_ahead(store.folder, store.places(found))
            for step, records in itertools.groupby(read, key=lambda record: record.step):
                by_number = {record.number: record.group for record in records}
                items = [item.number for item in store.items(step) if item.trained]
                groups = [by_number[number] for number in items]
                credited = late_credit.late(store, groups, config.memory)
                with jax.set_mesh(part.mesh):
                    state, _ = learn(state, groups, step, late=credited)
                    rollout = config.rollout
                    weights = in_dtype(state.model, rollout.dtype, rollout.weights)
                    now = Version.of(step + 1, weights).checksum
                yield Replayed(step, store.consumption(step)["weights"], now, state)


def on_record(workdir: Path) -> str:
    """The steps of a run that are on record, in words."""
    consumed = GroupStore(workdir / STORE).consumed()
    steps = f"steps {consumed[0]} to {consumed[-1]}" if consumed else "no step"
    return f"on record are {steps}, and checkpoints of steps {checkpoint.steps(workdir)}"


@contextlib.contextmanager
def _with_config(run: Run, config: RunConfig) -> Iterator[Run]:
    """The run itself where it has this config, else the learner of the same workdir that has."""
    if not read_config.diff(config, run.config, without=MAY_CHANGE):
        yield run
        return
    with Run(config, run.workdir, "learner") as part:
        yield part


def same_bits(one: TrainState, other: TrainState) -> bool:
    """True if two states are equal, bit for bit."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)
