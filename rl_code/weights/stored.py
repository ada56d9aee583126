"""Weights by way of shared storage: full versions now and then, changes in between, in
``<workdir>/weights``.

Each process of the learner writes its own parts of the arrays, in the background, into a draft; the
first one renames the draft and writes the record when all have. Each process of an actor reads the
parts that its devices hold.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
from absl import logging

from models.transformer import Transformer
from rl_code import arrays
from rl_code.weights import codec, version_records
from rl_code.weights.layout import in_dtype
from rl_code.weights.version_records import Route, VersionRecord
from rl_code.weights.versions import (
    TransferStats,
    Version,
    Wanted,
    WeightError,
    WeightsConfig,
    WeightTimeout,
    check,
    refuse_other,
)
from rl_code.weights.waiting import GRACE_S, Deadline, agree, timed_out

FOLDER = "weights"
# What TensorStore and waits raise when files cannot be written or read; WeightError is a
# RuntimeError.
_STORAGE_ERRORS = (OSError, ValueError, KeyError, RuntimeError)
# Instead of a version's number.
_NONE = -2
_GONE = -3


class StoredPublisher:
    """Writes versions to storage; one learner at a time may use a workdir.

    Each process keeps the bits of its parts of the newest version in host memory, to tell the next
    change.

    Args:
      workdir: the run's folder.
      dtype: in which the actors sample.
      name: what waiting actors call this learner in errors.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        dtype: str,
        config: WeightsConfig,
        *,
        name: str = "learner",
    ):
        self.folder = Path(workdir).absolute() / FOLDER
        self.dtype, self.config, self.name = dtype, config, name
        self._previous: tuple[Version, dict[str, codec.HostArray]] | None = None
        self._pending: tuple[int, concurrent.futures.Future[TransferStats]] | None = None
        self._writer = concurrent.futures.ThreadPoolExecutor(1, "weights")
        self.published: TransferStats | None = None
        if jax.process_index() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            version_records.delete_incomplete(self.folder)

    def publish(self, version: int, model: Transformer) -> Version:
        """As ``Publisher.publish``; the files are written in the background."""
        begin = time.perf_counter()
        named = in_dtype(model, self.dtype)
        made = Version.of(version, named)
        self.write(made, named, begin)
        return made

    def write(self, version: Version, named: Mapping[str, jax.Array], begin: float) -> None:
        """Publishes arrays that are in the sampling dtype already; begin: since when the learner is
        held up.
        """
        new = changed = False
        failure = self._finish()
        if failure is None:
            try:
                host = codec.to_host(named)
                new, changed = self._prepare(version, host)
            except _STORAGE_ERRORS as error:
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
        previous, self._previous = self._previous, (version, host)
        if facts[0][2]:  # the first process alone looks at storage, which others may see later
            base = previous if all(changed for *_, changed in facts) else None
            held_up = time.perf_counter() - begin
            self._pending = (
                version.number,
                self._writer.submit(self._write, version, host, base, held_up),
            )

    def close(self) -> None:
        """As ``Publisher.close``."""
        failure = self._finish()
        self._writer.shutdown(wait=False)
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
        except _STORAGE_ERRORS as error:
            self._previous = None
            free = shutil.disk_usage(self.folder).free
            failure = WeightError(
                f"could not write version {number} to {self.folder} ({free / 2**20:.0f} MiB free): "
                f"{str(error) or f'it took more than {self.config.deadline_s:g} s'}"
            )
            failure.__cause__ = error
            return failure

    def _prepare(self, version: Version, host: Mapping[str, codec.HostArray]) -> tuple[bool, bool]:
        """(whether storage lacks the version, whether it can be stored as a change); makes place
        for it.

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
        # a restarted learner on its way; this one was deleted before
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
        """In the background: writes this process's parts, in the first one also commits the
        version.
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
        """Until all processes of the learner have written their parts of a version."""
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


class StoredSubscriber:
    """Reads versions from storage, as changes of the version it read last where that is shorter.

    Args:
      workdir: the learner's.
      abstract: the actor's model, leaves with shape, dtype and sharding
      (``layout.sampling_model``). name: of this actor in errors.
    """

    def __init__(self, workdir: str | os.PathLike[str], abstract: Transformer, *, name: str):
        self.folder = Path(workdir).absolute() / FOLDER
        self.name = name
        self._abstract = abstract
        self.targets = arrays.targets(abstract)
        self._held: tuple[Version, dict[str, jax.Array]] | None = None
        self.fetched: TransferStats | None = None

    def newest(self) -> int | None:
        """As ``Subscriber.newest``."""
        return max(version_records.numbers(self.folder), default=None)

    def wait(
        self, *, at_least: int | None = None, exactly: int | None = None, deadline_s: float
    ) -> tuple[int, Transformer]:
        """As ``Subscriber.wait``; reading has ``deadline_s`` once more. The learner's death shows
        as WeightTimeout.
        """
        wanted = Wanted(at_least, exactly)
        deadline = Deadline(deadline_s)
        while True:
            number = self.choose(wanted, deadline, self.announced)
            model = self.read(number, deadline_s)
            if model is not None:
                return number, model

    def announced(self) -> dict[int, Path]:
        """The versions that there are, and which file says so."""
        return {
            number: version_records.record_path(self.folder, number)
            for number in version_records.numbers(self.folder)
        }

    def choose(
        self, wanted: Wanted, deadline: Deadline, announced: Callable[[], dict[int, Path]]
    ) -> int:
        """Waits for a fitting version; all processes get the one that the first process saw."""
        seen: dict[int, Path] = {}

        def decided() -> bool:
            seen.clear()
            seen.update(announced())
            return wanted.choose(seen) is not None or wanted.gone(seen)

        if jax.process_index() == 0:
            deadline.wait(decided)
        choice = wanted.choose(seen)
        if choice is None:
            choice = _GONE if wanted.gone(seen) else _NONE
        choice = agree(deadline.left() + GRACE_S, f"{self.name} waiting for {wanted}", choice)[0][0]
        if choice == _GONE:
            raise WeightError(
                f"{wanted} is not kept any more in {self.folder}; there are {sorted(announced())}"
            )
        if choice == _NONE:
            raise timed_out(
                self.name, deadline.seconds, wanted, *_last_seen(announced()), str(self.folder)
            )
        return choice

    def read(self, number: int, deadline_s: float) -> Transformer | None:
        """The model of a version that the first process has seen, checked; None if it was deleted
        in the meantime.

        Raises WeightError, which says what was tried, when it cannot be read in any way.
        """
        begin = time.perf_counter()
        deadline = Deadline(deadline_s)
        if not self._agree(
            deadline, number, version_records.record_path(self.folder, number).exists()
        )[0]:
            return None
        held = self._held
        if held is not None and any(x.is_deleted() for x in held[1].values()):
            held = None
        failures: list[str] = []
        record, routes = self._routes(number, held and held[0], deadline, failures)
        while True:
            start = self._agree(deadline, number, routes[0].start if routes else _NONE)[0]
            if start == _NONE:
                break
            route = next((route for route in routes if route.start == start), None)
            routes = [route for route in routes if route.start != start]
            named = self._follow(record, route, held and held[1], deadline, failures)
            if named is not None:
                if failures:
                    logging.warning(
                        "read version %d as %s, because: %s", number, route, "; ".join(failures)
                    )
                sizes = {"full_bytes": route.full_bytes, "delta_bytes": route.delta_bytes}
                seconds = time.perf_counter() - begin
                took = {"full_s" if route.full is not None else "delta_s": seconds}
                self.fetched = TransferStats("fetch", number, seconds, **sizes, **took)
                return self.hold(record.version, named)
        if not self._agree(
            deadline, number, version_records.record_path(self.folder, number).exists()
        )[0]:
            return None
        raise WeightError(
            f"version {number} cannot be read from {self.folder}: {'; '.join(failures)}"
        )

    def hold(self, version: Version, named: dict[str, jax.Array]) -> Transformer:
        """The model of these arrays, to which the next changes will be applied."""
        self._held = version, named
        return arrays.rebuild(self._abstract, named)

    def _agree(self, deadline: Deadline, number: int, value: int) -> list[int]:
        facts = agree(deadline.left() + GRACE_S, f"{self.name} reading version {number}", value)
        return [value for (value,) in facts]

    def _routes(
        self, number: int, held: Version | None, deadline: Deadline, failures: list[str]
    ) -> tuple[VersionRecord | None, list[Route]]:
        """The record of a version and the ways to it, none when it cannot be read or is another
        model's.
        """
        # to which shared storage may show later what the first process has seen
        if jax.process_index() != 0:
            deadline.wait(version_records.record_path(self.folder, number).exists)
        try:
            record = version_records.read_record(self.folder, number)
            record.version.check_kinds(self.targets)
        except WeightError as error:
            failures.append(str(error))
            return None, []
        return record, version_records.routes(self.folder, record, held)

    def _follow(
        self,
        record: VersionRecord | None,
        route: Route | None,
        held: dict[str, jax.Array] | None,
        deadline: Deadline,
        failures: list[str],
    ) -> dict[str, jax.Array] | None:
        """The checked arrays by one route, None (and a reason more) if it leads nowhere in any
        process.
        """
        parts = None
        try:
            if route is not None:
                parts = (
                    codec.read(route.folders(self.folder), self.targets, deadline)
                    if route.length
                    else {}
                )
        except _STORAGE_ERRORS as error:
            failures.append(f"{route}: {str(error) or 'it took too long'}")
        if not all(
            self._agree(deadline, record.version.number if record else _NONE, parts is not None)
        ):
            if parts is not None:
                failures.append(f"{route}: another process could not read it")
            return None
        held = held if route.full is None else None
        named = codec.place(self.targets, parts, held) if route.length else held
        try:
            check(record.version, named, f"{self.folder} ({route})")
        except WeightError as error:
            failures.append(str(error))
            return None
        return named


def _last_seen(announced: Mapping[int, Path]) -> tuple[str, tuple[int, float] | None]:
    """Publisher of the newest version, its number, and the seconds since it was announced."""
    newest = max(announced, default=None)
    if newest is not None:
        with contextlib.suppress(WeightError, OSError):  # it may be deleted just now
            age = time.time() - announced[newest].stat().st_mtime
            return version_records.read_json(announced[newest])["publisher"], (newest, age)
    return "the learner", None
