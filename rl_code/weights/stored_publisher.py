"""The learner's side of weights on shared storage, in ``<workdir>/weights``.

Some versions are stored in full (``WeightsConfig.full_every``), the others as changes.

Each process of the learner writes its own parts of the arrays, in the background, into a draft
folder. When all have, the first process renames the draft and writes the record.
"""

from __future__ import annotations

import concurrent.futures
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

import jax

from models.quantised import Kind
from models.transformer import Transformer
from rl_code.weights import codec, republish, version_records
from rl_code.weights.layout import in_dtype
from rl_code.weights.republish import Republisher
from rl_code.weights.versions import (
    TransferStats,
    Version,
    WeightError,
    WeightsConfig,
    WeightTimeout,
    refuse_other,
)
from rl_code.weights.waiting import Deadline, agree


class StoredPublisher:
    """Writes versions to storage. One learner at a time may use a workdir.

    Each process keeps the bits of its parts of the newest version in host memory, to compute the
    next change from them.

    Args:
      workdir: the run's folder.
      dtype, quantised: how the actors have the weights, as for ``models.transformer.cast``.
      name: the name of this learner in the errors of waiting actors.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        dtype: str,
        config: WeightsConfig,
        *,
        quantised: Kind | None = None,
        name: str = "learner",
    ):
        self.folder = Path(workdir).absolute() / version_records.FOLDER
        self.dtype, self.quantised, self.config, self.name = dtype, quantised, config, name
        self._previous: tuple[Version, dict[str, codec.HostArray]] | None = None
        self._pending: tuple[int, concurrent.futures.Future[TransferStats]] | None = None
        self._writer = concurrent.futures.ThreadPoolExecutor(1, "weights")
        self.published: TransferStats | None = None
        if jax.process_index() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            version_records.delete_incomplete(self.folder)
            republish.clear(self.folder)
        self._republisher = Republisher(
            self.folder, name, lambda: self._previous, self._writer.submit, config.deadline_s
        )

    def publish(self, version: int, model: Transformer) -> Version:
        """As ``Publisher.publish``; the files are written in the background."""
        begin = time.perf_counter()
        named = in_dtype(model, self.dtype, self.quantised)
        made = Version.of(version, named)
        self.write(made, named, begin)
        return made

    def write(self, version: Version, named: Mapping[str, jax.Array], begin: float) -> None:
        """Publishes arrays that are in the sampling dtype already.

        begin: the time since which the learner has been held up. The learner goes on when the bits
        are in host memory and the version before is written; the files are written in the
        background.
        """
        new = changed = False
        # One write at a time: what the version before stored is the base of this one's change.
        failure = self._finish()
        if failure is None:
            try:
                host = codec.to_host(named)
                new, changed = self._prepare(version, host)
            except version_records.STORAGE_ERRORS as error:
                failure = error
        facts = agree(
            # the first process may be waiting for storage before it comes here
            2 * self.config.deadline_s,
            f"which publishes version {version.number}",
            *(version.number, failure is None, new, changed),
        )
        if failure is not None:
            raise failure
        if len({number for number, *_ in facts}) > 1:
            raise WeightError(
                "the learner's processes publish different versions: "
                f"{[number for number, *_ in facts]}"
            )
        if failed := [process for process, (_, fine, *_) in enumerate(facts) if not fine]:
            raise WeightError(
                f"process {failed[0]} could not publish version {version.number}; its error says "
                "why"
            )
        previous = self._previous
        # The first process alone looks at storage, which others may see later.
        new = facts[0][2]
        if new:
            base = previous if all(changed for *_, changed in facts) else None
            held_up = time.perf_counter() - begin
            self._pending = (
                version.number,
                self._writer.submit(self._write, version, host, base, held_up),
            )
        # This is set only after the write was handed over. The republisher's thread relies on that:
        # whatever it hands over afterwards runs when this version is written.
        self._previous = version, host
        self._verify_stored(version, host, first=previous is None, known=not new)

    def _verify_stored(
        self, version: Version, host: Mapping[str, codec.HostArray], first: bool, known: bool
    ) -> None:
        """Has stored versions read once in the background, and published again if they are damaged.

        These are the versions that an earlier start of the learner stored: actors may need those
        from before the checkpoint. first: whether this start has published nothing yet. known:
        whether storage has this version already.
        """
        if first:
            for number in version_records.numbers(self.folder)[-self.config.keep :]:
                if number < version.number:
                    self._republisher.verify(number, host, known=False)
        if known:
            self._republisher.verify(version.number, host, known=True)

    def close(self) -> None:
        """As ``Publisher.close``."""
        self._republisher.close()
        failure = self._finish()
        self._writer.shutdown(wait=False, cancel_futures=True)
        if failure is not None:
            raise failure

    def _finish(self) -> WeightError | None:
        """Waits until the version in flight is there; returns why it is not."""
        if self._pending is None:
            return None
        (number, job), self._pending = self._pending, None
        try:
            self.published = job.result(self.config.deadline_s)
            return None
        except version_records.STORAGE_ERRORS as error:
            self._previous = None
            free = shutil.disk_usage(self.folder).free
            failure = WeightError(
                f"could not write version {number} to {self.folder} ({free / 2**20:.0f} MiB free): "
                f"{str(error) or f'it took more than {self.config.deadline_s:g} s'}"
            )
            failure.__cause__ = error
            return failure

    def _prepare(self, version: Version, host: Mapping[str, codec.HostArray]) -> tuple[bool, bool]:
        """Makes an empty draft for a version that storage lacks. Returns whether storage lacks it,
        and whether it can be stored as a change.

        Raises WeightError if storage has the version with other bits.
        """
        base = self._previous
        changed = base is not None and codec.same_layout(base[1], host)
        if jax.process_index() != 0:
            return False, changed
        known = version_records.numbers(self.folder)
        if version.number in known:
            there = version_records.readable_record(self.folder, version.number)
            if there is not None:
                refuse_other(there.version, version, str(self.folder))
                return False, changed
        # A restarted learner repeats its steps: this version was stored once, and deleted since.
        if known and version.number < known[-1]:
            return False, changed
        if base is not None:
            there = version_records.readable_record(self.folder, base[0].number)
            changed = changed and there is not None and there.version.checksum == base[0].checksum
        draft = version_records.draft_folder(self.folder, version.number)
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        return True, changed

    def _write(
        self,
        version: Version,
        host: Mapping[str, codec.HostArray],
        base: tuple[Version, Mapping[str, codec.HostArray]] | None,
        held_up: float,
    ) -> TransferStats:
        """Runs in the background: writes this process's parts of a version. The first process then
        waits for the others and commits the version.
        """
        draft = version_records.draft_folder(self.folder, version.number)
        deadline = Deadline(self.config.deadline_s)
        begin = time.perf_counter()
        if base is None or version.number % self.config.full_every == 0:
            codec.write(draft, "full", host, deadline)
        between = time.perf_counter()
        if base is not None:
            codec.write(draft, "delta", codec.changes(host, base[1]), deadline)
        end = time.perf_counter()
        seconds = {"full_s": between - begin, "delta_s": end - between}
        # The marker comes after the parts: it tells the first process that they are all there.
        _marker(draft, jax.process_index()).touch()
        if jax.process_index() != 0:
            return TransferStats("publish", version.number, held_up, **seconds)
        self._await_others(version.number, deadline)
        record = version_records.commit(
            self.folder, version, self.name, base and base[0], self.config.keep
        )
        sizes = {"full_bytes": record.full_bytes, "delta_bytes": record.delta_bytes}
        return TransferStats("publish", version.number, held_up, **seconds, **sizes)

    def _await_others(self, number: int, deadline: Deadline) -> None:
        """Waits until all processes of the learner have written their parts of a version."""
        draft = version_records.draft_folder(self.folder, number)

        def missing() -> list[int]:
            # a client of NFS may remember for long that a file was not there
            there = os.listdir(draft)
            return [
                process
                for process in range(jax.process_count())
                if _marker(draft, process).name not in there
            ]

        if not deadline.wait(lambda: not missing()):
            raise WeightTimeout(
                f"process 0 of {self.name} waited {deadline.seconds:g} s for processes {missing()} "
                "to write their "
                f"parts of version {number}"
            )
        for process in range(jax.process_count()):
            _marker(draft, process).unlink()


def _marker(draft: Path, process: int) -> Path:
    """The file which says that a process has written its parts."""
    return draft / f"process_{process}"
