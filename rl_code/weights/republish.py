"""A stored version that cannot be read is published once more, in full.

A checksum finds a flipped bit on storage. Then no version can be read by a route that uses the
damaged file. The process that notices it writes a request. The learner has the newest bits in
memory, and answers within seconds, even while it waits for groups:

    weights/unreadable/v_00000012.json      the request, deleted once it is answered
    weights/unreadable/v_00000012.refused   why the learner could not publish it; there only if the
                                            last answer was this one
    weights/.v_00000012.<id>                the version while its parts are written

Actors and the learner may notice the damage at the same moment. Only one request for a version
exists at a time: whoever comes second finds it and waits for the same answer. A request is never
changed, so all processes of the learner see the same one, and each answers it once. The first
process of the learner alone writes and deletes refusals, and deletes requests.

The learner makes an older version from the newest one by going back through the stored changes: a
change is an exclusive or, so it leads both ways. Each process of the learner writes its own parts
and their sums. The first process adds the sums and replaces the version only if they are the
checksum that it was published with, so a version never changes its bits.
"""

from __future__ import annotations

import os
import secrets
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import logging

from rl_code import files
from rl_code.checksums import in_hex, part_sums
from rl_code.weights import codec, version_records
from rl_code.weights.version_records import STORAGE_ERRORS, VersionRecord, read_json, write_json
from rl_code.weights.versions import Version, WeightError
from rl_code.weights.waiting import GRACE_S, Deadline

UNREADABLE = "unreadable"
_POLL_S = 0.25

# The newest version of a learner: what it is, and the bits of this process's parts.
Newest = tuple[Version, Mapping[str, codec.HostArray]]


class UnreadableError(WeightError):
    """A stored version cannot be read in any way; the message lists the ways."""


def request(folder: Path, number: int, who: str, why: str) -> None:
    """Asks the learner to publish a version once more, unless somebody already has.

    Raises OSError.
    """
    path = _request_path(folder, number)
    path.parent.mkdir(exist_ok=True)
    content = {"id": secrets.token_hex(8), "who": who, "why": why}
    data = version_records.encode(content)
    aside = path.with_name(f".{path.name}.{content['id']}{files.PARTIAL}")
    with files.explain_full_disk(path):
        if files.write_once(path, data, aside):
            return
        try:
            read_json(path)
        except WeightError as error:
            # A request that is gone was answered just now. One that is damaged is replaced: nobody
            # can answer it.
            if not isinstance(error.__cause__, FileNotFoundError):
                files.replace(path, data, aside)


def await_answer(folder: Path, number: int, deadline: Deadline) -> str:
    """Waits until a requested version was published again; returns why not, "" if it was.

    Raises OSError.
    """
    path, refusal = _request_path(folder, number), _refusal_path(folder, number)
    # By listing: a client of NFS may remember for long that a file was there, or was not.
    if not deadline.wait(lambda: path.name not in os.listdir(path.parent)):
        return f"the learner did not publish it again within {deadline.seconds:g} s"
    # A refusal is written before the request is deleted, so this second look finds it.
    refused = _read(refusal) if refusal.name in os.listdir(path.parent) else None
    return f"the learner cannot publish it again: {refused['refused']}" if refused else ""


class Republisher:
    """The learner's part: looks for requests and answers them. Every process of it has one.

    Args:
      folder: the folder of the weights.
      name: the name of the learner, in records and logs.
      newest: returns the newest version and its bits, None before the first.
      submit: runs a function in the background, after the publications that are being written and
        never at the same time as one.
      deadline_s: how long the processes of the learner wait for each other and for storage.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        newest: Callable[[], Newest | None],
        submit: Callable[..., Any],
        deadline_s: float,
    ):
        self._folder, self._name, self._newest, self._submit = folder, name, newest, submit
        self._deadline_s = deadline_s
        self._answered: set[str] = set()  # ids of requests
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="republisher", daemon=True)
        self._thread.start()

    def verify(self, number: int, host: Mapping[str, codec.HostArray], known: bool) -> None:
        """In the background: requests a version if its stored bits cannot be read.

        host: this process's parts of the version; or, if they are not ``known``, of one like it,
        and then only the checksums of the files are checked.
        """
        self._submit(self._verify, number, host, known)

    def close(self) -> None:
        """No request is answered any more."""
        self._closing.set()
        self._thread.join(self._deadline_s)

    def _verify(self, number: int, host: Mapping[str, codec.HostArray], known: bool) -> None:
        if not self._is_stored(number):
            return  # deleted because newer ones are there
        try:
            found = self._read_forward(number, host, Deadline(self._deadline_s))
            if known and not codec.same_bits(found, host):
                raise WeightError("its bits are not those of the version")
        except STORAGE_ERRORS as error:
            try:
                request(self._folder, number, self._name, str(error))
            except OSError as unwritten:
                logging.warning("cannot ask for version %d again: %s", number, unwritten)

    def _watch(self) -> None:
        folder = self._folder / UNREADABLE
        while not self._closing.wait(_POLL_S):
            try:
                names = os.listdir(folder) if folder.is_dir() else []
            except OSError as error:
                logging.log_every_n_seconds(
                    logging.WARNING, "%s cannot look for requests: %s", 60, self._name, error
                )
                continue
            newest = self._newest()
            for number in map(version_records.number_of, names):
                # A later version will be made by this learner, and verified when it is.
                if number is None or newest is None or number > newest[0].number:
                    continue
                asked = _read(_request_path(self._folder, number))
                if asked is None or asked["id"] in self._answered:
                    continue
                self._answered.add(asked["id"])
                self._submit(self._answer, number, asked, newest)

    def _answer(self, number: int, asked: Mapping[str, Any], newest: Newest) -> None:
        """In the background: writes this process's parts; in the first process also replaces the
        version.

        newest: as it was when the request was seen. All versions up to it are written by now,
        because this runs after their writes; a newer one may not be.
        """
        draft = self._folder / f".{version_records.data_folder(self._folder, number).name}"
        draft = draft.with_name(f"{draft.name}.{asked['id']}")
        deadline = Deadline(self._deadline_s)
        if not self._is_stored(number):  # deleted because newer ones are there
            if jax.process_index() == 0:
                self._close_request(number)
            return
        try:
            draft.mkdir(exist_ok=True)
            self._write_parts(draft, number, newest, deadline)
            if jax.process_index() == 0:
                self._replace(draft, number, newest[0], deadline)
                logging.warning(
                    "%s published version %d again in full, because %s could not read it: %s",
                    self._name,
                    number,
                    asked["who"],
                    asked["why"],
                )
                self._close_request(number)
        except STORAGE_ERRORS as error:
            if jax.process_index() != 0:
                logging.warning("cannot publish version %d again: %s", number, error)
                return
            shutil.rmtree(draft, ignore_errors=True)
            reason = str(error) or type(error).__name__
            logging.error("%s cannot publish version %d again: %s", self._name, number, reason)
            try:
                self._close_request(number, {**asked, "refused": reason})
            except OSError as unwritten:
                logging.warning("cannot refuse version %d: %s", number, unwritten)

    def _close_request(self, number: int, refusal: Mapping[str, Any] | None = None) -> None:
        """Deletes the request for a version; whoever waits for its answer goes on."""
        # The refusal comes first: the answer is looked up as soon as the request is gone.
        path = _refusal_path(self._folder, number)
        if refusal is None:
            path.unlink(missing_ok=True)
        else:
            write_json(path, refusal)
        _request_path(self._folder, number).unlink(missing_ok=True)

    def _write_parts(self, draft: Path, number: int, newest: Newest, deadline: Deadline) -> None:
        """The bits of this process's parts, and then a file with their sums, which says that they
        are there.
        """
        marker: dict[str, Any]
        try:
            host = self._bits(number, newest, deadline)
            codec.write(draft, "full", host, deadline)
            marker = {
                "sums": {name: _sums(x) for name, x in host.items()},
                "delta": self._delta_is_sound(number, host, deadline),
            }
        except STORAGE_ERRORS as error:
            marker = {"failed": str(error) or type(error).__name__}
        write_json(_marker(draft, jax.process_index()), marker)

    def _replace(self, draft: Path, number: int, newest: Version, deadline: Deadline) -> None:
        """Puts the draft into the version's place once all processes have written their parts and
        the parts are the version.
        """
        processes = range(jax.process_count())
        wanted = {_marker(draft, process).name for process in processes}
        if not deadline.wait(lambda: wanted <= set(os.listdir(draft))):
            raise WeightError(f"not all processes wrote their parts within {deadline.seconds:g} s")
        markers = [read_json(_marker(draft, process)) for process in processes]
        if failed := [marker["failed"] for marker in markers if "failed" in marker]:
            raise WeightError(failed[0])
        totals = {
            name: in_hex([sum(marker["sums"][name][i] for marker in markers) for i in (0, 1)])
            for name in newest.arrays
        }
        kinds = {name: kind for name, (kind, _) in newest.arrays.items()}
        made = Version(number, {name: (kinds[name], totals[name]) for name in sorted(kinds)})
        expected = self._expected_checksum(number, newest)
        if made.checksum != expected:
            raise WeightError(
                f"its bits, made again, have checksum {made.checksum} instead of {expected}"
            )
        for process in processes:
            _marker(draft, process).unlink()
        keep_delta = all(marker["delta"] for marker in markers)
        version_records.replace_with_full(self._folder, draft, made, self._name, keep_delta)

    def _is_stored(self, number: int) -> bool:
        return version_records.record_path(self._folder, number).exists()

    def _expected_checksum(self, number: int, newest: Version) -> str:
        """The checksum that a version was published with."""
        if newest.number == number:
            return newest.checksum
        record = version_records.readable_record(self._folder, number)
        if record is not None:
            return record.version.checksum
        # The record itself is damaged: a later version may name the checksum of its base.
        for later in version_records.numbers(self._folder):
            record = version_records.readable_record(self._folder, later)
            if record is not None and record.base is not None and record.base[0] == number:
                return record.base[1]
        raise WeightError("its record is damaged, and no later version names its checksum")

    def _bits(
        self, number: int, newest: Newest, deadline: Deadline
    ) -> Mapping[str, codec.HostArray]:
        """This process's parts of a version: from memory, or from memory and the changes since, or
        from what is stored in full.
        """
        version, host = newest
        failures = []
        try:
            at = version.number
            while at != number:
                # The first process of the learner may still be writing the record.
                committed = Deadline(min(GRACE_S, deadline.left()))
                committed.wait(version_records.record_path(self._folder, at).exists)
                record = version_records.read_record(self._folder, at)
                host = codec.changes(host, self._read_delta(record, host, deadline))
                at = record.base[0]
            return host
        except STORAGE_ERRORS as error:
            failures.append(f"back from version {version.number}: {error}")
        try:
            return self._read_forward(number, host, deadline)
        except STORAGE_ERRORS as error:
            failures.append(str(error))
        raise WeightError("; ".join(failures))

    def _delta_is_sound(
        self, number: int, host: Mapping[str, codec.HostArray], deadline: Deadline
    ) -> bool:
        """True if the change that leads back from a version is worth keeping: versions before it
        may have to be made from it.
        """
        try:
            record = version_records.read_record(self._folder, number)
            self._read_delta(record, host, deadline)
            return True
        except STORAGE_ERRORS:
            return False

    def _read_delta(
        self, record: VersionRecord, host: Mapping[str, codec.HostArray], deadline: Deadline
    ) -> Mapping[str, codec.HostArray]:
        number = record.version.number
        if record.base is None:
            raise WeightError(f"version {number} is stored without the change from the one before")
        folder = version_records.data_folder(self._folder, number) / "delta"
        return codec.read_like([folder], host, deadline)

    def _read_forward(
        self, number: int, host: Mapping[str, codec.HostArray], deadline: Deadline
    ) -> Mapping[str, codec.HostArray]:
        """Parts that an actor that holds nothing would read, of the parts that ``host`` has."""
        record = version_records.read_record(self._folder, number)
        failures = []
        for route in version_records.routes(self._folder, record, None):
            try:
                return codec.read_like(route.folders(self._folder), host, deadline)
            except STORAGE_ERRORS as error:
                failures.append(f"{route}: {error}")
        raise WeightError("; ".join(failures) or f"no way leads to version {number}")


def clear(folder: Path) -> None:
    """Called when a learner starts. Forgets the refusals of the one before it, which may know less,
    and requests that are damaged.
    """
    for path in (folder / UNREADABLE).glob("v_*"):  # not what actors are writing aside just now
        if version_records.number_of(path.name) is None or _read(path) is None:
            path.unlink(missing_ok=True)


def _sums(x: codec.HostArray) -> list[int]:
    """The two sums of the parts of an array that this process has."""
    pairs: Sequence[tuple[int, int]] = [
        part_sums(part, [start for start, _ in box]) for box, part in x.parts.items()
    ]
    return [sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)]


def _read(path: Path) -> dict[str, Any] | None:
    """A request or a refusal, None if there is none that can be read."""
    try:
        return read_json(path)
    except WeightError:
        return None


def _request_path(folder: Path, number: int) -> Path:
    return folder / UNREADABLE / version_records.record_path(folder, number).name


def _refusal_path(folder: Path, number: int) -> Path:
    return _request_path(folder, number).with_suffix(".refused")


def _marker(draft: Path, process: int) -> Path:
    return draft / f"process_{process}.json"
