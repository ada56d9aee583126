"""Versions of the weights of a run, as its actors had them: read where they are kept, else made
again from the record.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from absl import logging

from models.transformer import Transformer
from rl_code import sft
from rl_code.checkpoint import checkpoint
from rl_code.metrics.progress import Progress
from rl_code.recording.replay_training import on_record, replay
from rl_code.run.run import Run
from rl_code.run.workdir import STORE
from rl_code.store.errors import StoreError
from rl_code.store.store import GroupStore
from rl_code.weights import version_records
from rl_code.weights.local import LocalWeights
from rl_code.weights.stored_subscriber import StoredSubscriber
from rl_code.weights.versions import UnreadableError, Version

_READ_S = 600.0  # in which a stored version must be read


class RecordedVersions:
    """The sampling models of some versions.

    A version is kept in storage for a while, and in a checkpoint. Any other version is made again,
    and so is one that cannot be read from storage: training is repeated from the nearest checkpoint
    on the recorded groups, bit for bit. What is got is compared with the checksum that the run
    wrote down.

    Args:
      learner: the run as its learner, on whose mesh training is repeated.
      sampler: the run as its actor, on whose devices the models go.
    """

    def __init__(self, learner: Run, sampler: Run):
        self._learner, self._sampler = learner, sampler
        self._store = GroupStore(learner.workdir / STORE)
        self.workdir = learner.workdir

    def get(self, wanted: Sequence[int]) -> dict[int, Transformer]:
        """The models of these versions.

        Raises StoreError when one of them cannot be made any more, or comes out with other bits.
        """
        models = LocalWeights(self._sampler.sampling_model(), keep=max(1, len(wanted)))
        stored = version_records.numbers(self.workdir / version_records.FOLDER)
        saved = checkpoint.steps(self.workdir)
        to_make = []
        for version in sorted(wanted):
            model = self._stored(version) if version in stored else None
            if model is not None:
                self._check(models.publish(version, model), "storage")
                continue
            if version in saved or version == 0:
                self._check(models.publish(version, self._saved(version)), "the checkpoint")
            else:
                to_make.append(version)
        self._make(to_make, models)
        return {
            version: models.wait(exactly=version, deadline_s=0.0)[1] for version in models.kept()
        }

    def _stored(self, version: int) -> Transformer | None:
        """A version that storage keeps; None if it was deleted just now or cannot be read."""
        subscriber = StoredSubscriber(self.workdir, self._sampler.sampling_model(), name="replay")
        try:
            return subscriber.read(version, _READ_S)
        except UnreadableError as error:
            logging.warning("%s; it is read from a checkpoint or made again", error)
            return None

    def _saved(self, version: int) -> Transformer:
        with jax.set_mesh(self._learner.mesh):
            model = sft.initial_model(self._learner)
            if version == 0:
                return model
            # the model alone: before a fork there may have been another state beside it
            wanted = {"model": model}
            found = checkpoint.load(self.workdir, wanted, step=version, partial=True)
            return found.state["model"]

    def _make(self, versions: Sequence[int], models: LocalWeights) -> None:
        """Repeats training from the nearest checkpoint before the first of the versions."""
        if not versions:
            return
        start = nearest(self._store, self.workdir, versions[0])
        with Progress(f"training again from step {start}", versions[-1] - start) as progress:
            for done in replay(self._learner, start, versions[-1]):
                progress.update(done.step + 1 - start)
                if done.step + 1 in versions:
                    made = models.publish(done.step + 1, done.state.model)
                    self._check(made, f"the checkpoint of step {start} and the groups since then")

    def _check(self, made: Version, source: str) -> None:
        if made.number == 0 or not self._store.is_consumed(made.number - 1):
            return
        then = self._store.consumption(made.number - 1)["weights"]
        if made.checksum != then:
            raise StoreError(
                f"version {made.number} from {source} has checksum {made.checksum}, and the run "
                f"wrote down {then}: this program does not repeat the run's updates bit for bit. "
                f"Use the code and the machine of the run; {on_record(self.workdir)}"
            )


def nearest(store: GroupStore, workdir, step: int) -> int:
    """The step of the newest checkpoint at or before ``step`` from which training can be repeated;
    0 for the beginning.

    Raises StoreError, which says what is on record, when there is none.
    """
    consumed = store.consumed()
    first = consumed[0] if consumed else 0
    found = [at for at in checkpoint.steps(workdir) if first <= at <= step]
    if not found and first > 0:
        raise StoreError(f"step {step} is no longer on record in {workdir}; {on_record(workdir)}")
    return max(found, default=0)
