"""Training once more from what a run's store holds: the same groups must give the same weights, bit
for bit.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import jax
import numpy as np

from rl_code import checkpoint, sft
from rl_code.learner.learner import Learner
from rl_code.learner.update import TrainState, init_state
from rl_code.run import Run
from rl_code.stop import StopRequest
from rl_code.store.source import read_ahead
from rl_code.store.store import GroupStore
from rl_code.weights.layout import in_dtype
from rl_code.weights.versions import Version
from rl_code.workdir import STORE


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
        """Whether the weights are."""
        return self.then == self.now


def replay(
    run: Run, stop: StopRequest, start: int = 0, end: int | None = None
) -> Iterator[Replayed]:
    """Trains again on every consumed step from ``start`` on, up to but not including ``end``.

    start: 0, for which the model that training began with is made again; or the step of a
    checkpoint that is kept. The next step donates the state of the step before. Raises
    CheckpointError when there is no such checkpoint, StoreError for a group that is damaged.
    """
    model = sft.warm_start(run, stop).model if run.config.sft else run.init_model()
    learn = Learner(run.config.train, run.rows_sharding, model)
    state = init_state(model, run.config.train.optimizer)
    if start:
        state = checkpoint.load(run.workdir, state, step=start).state
    store = GroupStore(run.workdir / STORE)
    steps = [step for step in store.consumed() if step >= start and (end is None or step < end)]
    read = read_ahead(store.folder, store.places(steps))
    for step, found in itertools.groupby(read, key=lambda record: record.step):
        records = list(found)
        items = [item.number for item in store.items(step) if item.kind == "train"]
        state, _ = learn(state, [records[number].group for number in items], step)
        now = Version.of(step + 1, in_dtype(state.model, run.config.rollout.dtype)).checksum
        yield Replayed(step, store.consumption(step)["weights"], now, state)


def same_bits(one: TrainState, other: TrainState) -> bool:
    """Whether two states are equal, bit for bit."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)
