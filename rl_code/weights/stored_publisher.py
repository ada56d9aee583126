"""The learner's side of weights on shared storage, in ``<workdir>/weights``.

Some versions are stored in full (``WeightsConfig.full_every``), the others as changes.

Each process of the learner writes its own parts of the arrays, in the background, into a draft
folder. When all have, the first process renames the draft and writes the record.

A version that cannot be read is written again in full: when an actor asks for it (``republish``),
and when a learner that started again makes it once more.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import jax
from absl import logging

from models.quantised import Kind
from models.transformer import Transformer
from rl_code.weights import codec, republish, version_records
from rl_code.weights.layout import in_dtype
from rl_code.weights.versions import (
    TransferStats,
    Version,
    WeightError,
    WeightsConfig,
    WeightTimeout,
    refuse_other,
)
from rl_code.weights.waiting import GRACE_S, Deadline, agree

_POLL_S = 0.25  # between two looks for requests
# The file in a draft which says that a process cannot write its parts.
_FAILED = "failed"


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
        self._closing = threading.Event()
        self._watching = threading.Thread(target=self._watch, name="republisher", daemon=True)
        self._watching.start()

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
        new = changed = sound = False
        # One write at a time: what the version before stored is the base of this one's change.
        failure = self._finish()
        if failure is None:
            try:
                host = codec.to_host(named)
                new, changed = self._prepare(version, host)
                sound = self._reads_back(version.number, host)
            except version_records.STORAGE_ERRORS as error:
                failure = error
        facts = agree(
            # the first process may be waiting for storage before it comes here
            2 * self.config.deadline_s,
            f"which publishes version {version.number}",
            *(version.number, failure is None, new, changed, sound),
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
        # The first process alone looks for other versions in storage, which others may see later.
        new = facts[0][2]
        whole = all(sound for *_, sound in facts)
        if not whole:
            logging.warning("version %d cannot be read; it is stored again", version.number)
        if new or not whole:
            base = self._previous if new and all(fact[3] for fact in facts) else None
            held_up = time.perf_counter() - begin
            draft = version_records.draft_folder(self.folder, version.number)
            self._pending = (
                version.number,
                self._writer.submit(self._write, draft, version, host, base, held_up),
            )
        # This is set only after the write was handed over. The thread that looks for requests
        # relies on that: whatever it hands over afterwards runs when this version is written.
        self._previous = version, host

    def close(self) -> None:
        """As ``Publisher.close``."""
        self._closing.set()
        self._watching.join(GRACE_S)
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
        """Clears the place of a version's draft. Returns whether storage lacks the version, and
        whether it can be stored as a change.

        Raises WeightError if storage has the version with other bits.
        """
        base = self._previous
        changed = base is not None and codec.same_layout(base[1], host)
        if jax.process_index() != 0:
            return False, changed
        draft = version_records.draft_folder(self.folder, version.number)
        shutil.rmtree(draft, ignore_errors=True)
        known = version_records.numbers(self.folder)
        there = version_records.readable_record(self.folder, version.number)
        if there is not None:
            refuse_other(there.version, version, str(self.folder))
        # A restarted learner repeats its steps: this version was stored once, and may have been
        # deleted since.
        if known and version.number <= known[-1]:
            return False, changed
        if base is not None:
            there = version_records.readable_record(self.folder, base[0].number)
            changed = changed and there is not None and there.version.checksum == base[0].checksum
        return True, changed

    def _reads_back(self, number: int, host: Mapping[str, codec.HostArray]) -> bool:
        """True unless this process's parts of a stored version are damaged. host: their bits."""
        if not version_records.record_path(self.folder, number).exists():
            return True
        deadline = Deadline(self.config.deadline_s)
        record = version_records.readable_record(self.folder, number)
        for route in version_records.routes(self.folder, record, None) if record else []:
            with contextlib.suppress(*version_records.STORAGE_ERRORS):
                found = codec.read_like(route.folders(self.folder), host, deadline)
                if codec.same_bits(found, host):
                    return True
        return False

    def _write(
        self,
        draft: Path,
        version: Version,
        host: Mapping[str, codec.HostArray],
        base: tuple[Version, Mapping[str, codec.HostArray]] | None,
        held_up: float,
    ) -> TransferStats:
        """Runs in the background: writes this process's parts of a version, in full if ``base`` is
        None. The first process then waits for the others and commits the version.
        """
        deadline = Deadline(self.config.deadline_s)
        begin = time.perf_counter()
        draft.mkdir(exist_ok=True)
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
        self._await_others(draft, version.number, deadline)
        record = version_records.commit(
            self.folder, draft, version, self.name, base and base[0], self.config.keep
        )
        sizes = {"full_bytes": record.full_bytes, "delta_bytes": record.delta_bytes}
        return TransferStats("publish", version.number, held_up, **seconds, **sizes)

    def _await_others(self, draft: Path, number: int, deadline: Deadline) -> None:
        """Waits until all processes of the learner have written their parts of a version."""

        def missing() -> list[int]:
            # a client of NFS may remember for long that a file was not there
            there = os.listdir(draft)
            if _FAILED in there:
                raise WeightError(
                    "another process of the learner cannot make its parts; see its log"
                )
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

    def _watch(self) -> None:
        """Runs in a thread until closed: answers requests for versions that cannot be read."""
        answered: set[str] = set()
        while not self._closing.wait(_POLL_S):
            newest = self._previous
            if newest is None:
                continue
            try:
                for number, (path, asked) in republish.pending(self.folder).items():
                    # A later version will be made by this learner, which reads it back then.
                    if number > newest[0].number:
                        continue
                    if asked is None:
                        path.unlink(missing_ok=True)
                    elif asked["id"] not in answered:
                        answered.add(asked["id"])
                        self._writer.submit(self._answer, number, path, asked, newest)
            except OSError as error:
                logging.log_every_n_seconds(
                    logging.WARNING, "%s cannot look for requests: %s", 60, self.name, error
                )

    def _answer(
        self,
        number: int,
        path: Path,
        asked: Mapping[str, str],
        newest: tuple[Version, Mapping[str, codec.HostArray]],
    ) -> None:
        """Runs in the background: stores a version once more, in full, under the checksums that it
        was published with. The first process deletes the request.

        newest: as it was when the request was seen. It is written by now.
        """
        draft = version_records.data_folder(self.folder, number)
        draft = draft.with_name(f".{draft.name}.{asked['id']}")
        first = jax.process_index() == 0
        try:
            version, host = newest
            if number != version.number:
                version = version_records.read_record(self.folder, number).version
                host = self._back(number, newest)
            self._write(draft, version, host, base=None, held_up=0.0)
            if first:
                logging.warning(
                    "%s published version %d again in full, because %s could not read it: %s",
                    *(self.name, number, asked["who"], asked["why"]),
                )
        except version_records.STORAGE_ERRORS as error:
            logging.error("%s cannot publish version %d again: %s", self.name, number, error)
            if not first:
                draft.mkdir(exist_ok=True)
                (draft / _FAILED).touch()
        finally:
            if first:
                shutil.rmtree(draft, ignore_errors=True)
                path.unlink(missing_ok=True)

    def _back(
        self, number: int, newest: tuple[Version, Mapping[str, codec.HostArray]]
    ) -> Mapping[str, codec.HostArray]:
        """This process's parts of an older version, by the changes from there to the newest: a
        change is an exclusive or, so it leads both ways.
        """
        deadline = Deadline(self.config.deadline_s)
        at, host = newest[0].number, newest[1]
        while at != number:
            record = version_records.read_record(self.folder, at)
            if record.base is None:
                raise WeightError(f"version {at} is stored without the change from the one before")
            change = version_records.data_folder(self.folder, at) / "delta"
            host = codec.changes(host, codec.read_like([change], host, deadline))
            at = record.base[0]
        return host


def _marker(draft: Path, process: int) -> Path:
    """The file which says that a process has written its parts."""
    return draft / f"process_{process}"
