"""The actor's side of weights on shared storage.

Each process of an actor reads the parts that its devices hold, and all of them use a version or
none does. A version that cannot be read is asked for again (``republish``).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
from absl import logging

from models.transformer import Transformer
from rl_code.checkpoint import arrays
from rl_code.weights import codec, republish, version_records
from rl_code.weights.version_records import Route, VersionRecord
from rl_code.weights.versions import (
    TransferStats,
    UnreadableError,
    Version,
    Wanted,
    WeightError,
    check,
)
from rl_code.weights.waiting import GRACE_S, Deadline, agree, timed_out

# Instead of a version's number, in what the processes of an actor agree on.
_NONE = -2
_GONE = -3


class StoredSubscriber:
    """Reads versions from storage: as changes of the version it read last if that is shorter, or in
    full.

    Args:
      workdir: the workdir of the learner.
      abstract: the actor's model, whose leaves have shape, dtype and sharding
        (``layout.sampling_model``).
      name: the name of this actor in errors.
    """

    def __init__(self, workdir: str | os.PathLike[str], abstract: Transformer, *, name: str):
        self.folder = Path(workdir).absolute() / version_records.FOLDER
        self.name = name
        self._abstract = abstract
        self.targets = arrays.targets(abstract)
        self._held: tuple[Version, dict[str, jax.Array]] | None = None
        self._asked: int | None = None  # the version that the learner was asked for, until one came
        self.fetched: TransferStats | None = None

    def newest(self) -> int | None:
        """As ``Subscriber.newest``."""
        return max(version_records.numbers(self.folder), default=None)

    def wait(
        self, *, at_least: int | None = None, exactly: int | None = None, deadline_s: float
    ) -> tuple[int, Transformer]:
        """As ``Subscriber.wait``. Reading may take another ``deadline_s``. If the learner has died,
        WeightTimeout is raised.
        """
        wanted = Wanted(at_least, exactly)
        deadline = Deadline(deadline_s)
        while True:
            number = self.choose(wanted, deadline, self.announced)
            model = self.read_or_ask(number, deadline_s)
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

        # Only the first process looks at storage, since others may see a new file later. The
        # values of the others are not used.
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

    def read_or_ask(self, number: int, deadline_s: float) -> Transformer | None:
        """As ``read``. A version that cannot be read is asked for once; None when the learner has
        answered.

        Raises UnreadableError, which says what was tried, if that did not help.
        """
        try:
            return self.read(number, deadline_s)
        except UnreadableError as error:
            if self._asked == number:
                raise UnreadableError(
                    f"{error}; the learner was asked for it and could not publish it again, as its "
                    "log says"
                ) from error
            unreadable = error
        self._asked = number
        deadline = Deadline(deadline_s)
        trouble = ""
        if jax.process_index() == 0:
            logging.warning("%s; %s asks the learner for it", unreadable, self.name)
            try:
                if not republish.ask(self.folder, number, self.name, str(unreadable), deadline):
                    trouble = f"the learner did not publish it again within {deadline_s:g} s"
            except OSError as error:
                trouble = f"the learner could not be asked for it: {error}"
        if not self._agree(deadline, number, not trouble)[0]:
            raise UnreadableError(f"{unreadable}; {trouble or 'process 0 says more'}")
        return None

    def read(self, number: int, deadline_s: float) -> Transformer | None:
        """The model of a version that the first process has seen, checked; None if it was deleted
        in the meantime.

        Raises UnreadableError, which says what was tried, when it cannot be read in any way, and
        WeightError when it is of another model.
        """
        begin = time.perf_counter()
        deadline = Deadline(deadline_s)
        if not self._agree(
            deadline, number, version_records.record_path(self.folder, number).exists()
        )[0]:
            return None
        # Changes cannot be applied to arrays whose memory was given away.
        held = self.held
        failures: list[str] = []
        record, routes = self._routes(number, held and held[0], deadline, failures)
        # The first process chooses the next route, and all try it together. A process that lacks
        # the route takes part as well: no process may be alone in what they agree on.
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
        raise UnreadableError(
            f"version {number} cannot be read from {self.folder}: {'; '.join(failures)}"
        )

    @property
    def held(self) -> tuple[Version, dict[str, jax.Array]] | None:
        """The version that was read last, and its arrays, while they are there."""
        if self._held is not None and any(x.is_deleted() for x in self._held[1].values()):
            return None
        return self._held

    def hold(self, version: Version, named: dict[str, jax.Array]) -> Transformer:
        """The model of these arrays, to which the next changes will be applied."""
        self._held = version, named
        self._asked = None
        return arrays.rebuild(self._abstract, named)

    def _agree(self, deadline: Deadline, number: int, value: int) -> list[int]:
        facts = agree(deadline.left() + GRACE_S, f"{self.name} reading version {number}", value)
        return [value for (value,) in facts]

    def _routes(
        self, number: int, held: Version | None, deadline: Deadline, failures: list[str]
    ) -> tuple[VersionRecord | None, list[Route]]:
        """The record of a version, and the routes to it; none if the record cannot be read."""
        # Shared storage may show the other processes a file later than the first process.
        if jax.process_index() != 0:
            deadline.wait(version_records.record_path(self.folder, number).exists)
        try:
            record = version_records.read_record(self.folder, number)
        except WeightError as error:
            failures.append(str(error))
            return None, []
        record.version.check_kinds(self.targets)
        return record, version_records.routes(self.folder, record, held)

    def _follow(
        self,
        record: VersionRecord | None,
        route: Route | None,
        held: dict[str, jax.Array] | None,
        deadline: Deadline,
        failures: list[str],
    ) -> dict[str, jax.Array] | None:
        """Reads a version by one route, and checks it. None if that failed in any process; the
        reason is added to ``failures``.
        """
        parts = None
        try:
            if route is not None:
                parts = (
                    codec.read(route.folders(self.folder), self.targets, deadline)
                    if route.length
                    else {}
                )
        except version_records.STORAGE_ERRORS as error:
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
