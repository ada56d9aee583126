"""Versions of the weights: a number, and a checksum of the bits of all parameters.

Version v is the model after v updates, in the dtype it samples in.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Protocol, Self

import jax

from rl_code.checkpoint.checksums import checksums


class WeightError(RuntimeError):
    """Weights could not be published or read; the message says which version, from where, and
    why.
    """


class OtherBits(WeightError):
    """A version that was published before came out with other bits."""


class UnreadableError(WeightError):
    """A stored version cannot be read in any way; the message lists the ways."""


class WeightTimeout(WeightError):
    """A wait for weights reached its deadline; the message says who waited for whom."""


@dataclasses.dataclass(frozen=True)
class WeightsConfig:
    """Storage of versions of the weights, and for how long."""

    # Versions whose number is a multiple of it are stored in full, the others as changes.
    full_every: int = 16
    # How many of the newest versions stay available. In a run None keeps every version that may
    # still sample, and one more.
    keep: int | None = None
    # Seconds that processes of the learner wait for each other and for storage. A version that an
    # actor asked for stays ready to be pulled for as long.
    deadline_s: float = 300.0

    def __post_init__(self):
        if self.full_every < 1:
            raise ValueError(f"full_every={self.full_every} must be at least 1")
        if self.keep is not None and self.keep < 1:
            raise ValueError(f"keep={self.keep} must be at least 1")
        if not self.deadline_s > 0:
            raise ValueError(f"deadline_s={self.deadline_s} must be positive")


@dataclasses.dataclass(frozen=True)
class Version:
    """One version of the weights, without the weights."""

    # how many updates were made before it
    number: int
    # by name: dtype and shape in words, and the checksum, 16 hex digits
    arrays: Mapping[str, tuple[str, str]]

    @classmethod
    def of(cls, number: int, named: Mapping[str, jax.Array]) -> Self:
        """The version that these arrays are; every process that holds a part of them has to
        call.
        """
        sums = checksums(named)
        return cls(number, {name: (in_words(x), sums[name]) for name, x in sorted(named.items())})

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Version of the result of ``to_json``."""
        return cls(data["number"], {name: tuple(pair) for name, pair in data["arrays"].items()})

    def to_json(self) -> dict[str, Any]:
        """For records."""
        return {"number": self.number, "checksum": self.checksum, "arrays": dict(self.arrays)}

    @functools.cached_property
    def checksum(self) -> str:
        """One checksum of names, dtypes, shapes and bits, 16 hex digits."""
        lines = (f"{name} {kind} {sums}\n" for name, (kind, sums) in sorted(self.arrays.items()))
        return hashlib.blake2b("".join(lines).encode(), digest_size=8).hexdigest()

    def check_kinds(self, targets: Mapping[str, jax.ShapeDtypeStruct]) -> None:
        """Raises WeightError, which names them, if the arrays have other names, dtypes or shapes
        than the targets.
        """
        here = {name: in_words(target) for name, target in targets.items()}
        there = {name: kind for name, (kind, _) in self.arrays.items()}
        if names := sorted(
            name for name in here.keys() | there.keys() if here.get(name) != there.get(name)
        ):
            name = names[0]
            raise WeightError(
                f"version {self.number} is not of this model: {name} is "
                f"{there.get(name, 'missing')} there and "
                f"{here.get(name, 'missing')} here"
            )

    def differing(self, other: Version) -> list[str]:
        """Names of the arrays that are not the same in both."""
        names = self.arrays.keys() | other.arrays.keys()
        return sorted(name for name in names if self.arrays.get(name) != other.arrays.get(name))


def check(expected: Version, named: Mapping[str, jax.Array], source: str) -> None:
    """Raises WeightError if the arrays are not the version that they should be; source: where they
    came from.
    """
    found = Version.of(expected.number, named)
    if expected.differing(found):
        raise WeightError(
            f"version {expected.number} from {source} has checksum {found.checksum} instead of "
            f"{expected.checksum}; "
            f"different: {_some(expected, found)}"
        )


def refuse_other(known: Version, made: Version, where: str) -> None:
    """Raises OtherBits if a number that was published before is published with other bits."""
    if known.differing(made):
        raise OtherBits(
            f"version {made.number} was published to {where} with checksum {known.checksum}, and "
            "now again with "
            f"{made.checksum}: the learner did not repeat its updates exactly, as after a change "
            "of code, or "
            "on a GPU without XLA_FLAGS=--xla_gpu_deterministic_ops=true. Undo that, or go on in "
            "another --workdir. "
            f"Different: {_some(known, made)}"
        )


def _some(one: Version, other: Version) -> str:
    names = one.differing(other)
    return ", ".join(names[:5]) + (" ..." if len(names) > 5 else "")


def in_words(x: Any) -> str:
    """dtype and shape, as in ``bfloat16[2, 3]``."""
    return f"{x.dtype}{list(x.shape)}"


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Version that a subscriber asks for: the newest from ``at_least`` on, or ``exactly`` one."""

    at_least: int | None = None
    exactly: int | None = None

    def __post_init__(self):
        if (self.at_least is None) == (self.exactly is None):
            raise ValueError(f"give one of at_least={self.at_least} and exactly={self.exactly}")

    def choose(self, available: Iterable[int]) -> int | None:
        """The version to take of those that there are."""
        fitting = (
            v
            for v in available
            if (v >= self.at_least if self.exactly is None else v == self.exactly)
        )
        return max(fitting, default=None)

    def gone(self, available: Iterable[int]) -> bool:
        """True if later versions are there, so that the one asked for will not come any more."""
        return self.exactly is not None and max(available, default=-1) > self.exactly

    def __str__(self) -> str:
        return f"version {self.at_least if self.exactly is None else self.exactly}"


@dataclasses.dataclass(frozen=True)
class TransferStats:
    """Cost of publishing or fetching one version in one process; 0 where nothing moved."""

    action: Literal["publish", "fetch"]
    version: int
    # Of a publication: how long the learner was held up. Of a fetch: from the choice of the version
    # until its weights were checked.
    seconds: float = 0.0
    # files of full versions, compressed
    full_bytes: int = 0
    full_s: float = 0.0
    # files of changes, compressed
    delta_bytes: int = 0
    delta_s: float = 0.0
    # from device to device
    live_bytes: int = 0
    live_s: float = 0.0

    def metrics(self) -> dict[str, float]:
        """``weights/publish_s``, ``weights/publish_full_bytes`` and so on, for the metric
        writer.
        """
        values = dataclasses.asdict(self)
        moved = {
            name: float(values[name])
            for name in values
            if name.startswith(("full", "delta", "live"))
        }
        named = {f"weights/{self.action}_{name}": value for name, value in moved.items()}
        return {
            f"weights/{self.action}_s": self.seconds,
            f"weights/{self.action}_version": float(self.version),
            **named,
        }


class Publisher(Protocol):
    """The learner's side; all processes of the learner call alike."""

    @property
    def published(self) -> TransferStats | None:
        """Statistics of the newest publication that is complete."""

    def publish(self, version: int, model: Any) -> Version:
        """Makes the model version ``version``, and returns it once its arrays may be donated.

        A number that was published before, as after a restart from a checkpoint, is accepted if the
        bits are the same.

        Raises:
          WeightError: this number was published with other bits, or the publication before this one
          failed.
        """

    def close(self) -> None:
        """Waits until what was published is there. Raises WeightError if it failed."""


class Subscriber(Protocol):
    """The actor's side; all processes of the actor call alike. The arrays it returns must not be
    donated.
    """

    @property
    def fetched(self) -> TransferStats | None:
        """Statistics of the last version that ``wait`` returned."""

    def newest(self) -> int | None:
        """Number of the newest version that can be seen, None before the first."""

    def wait(
        self, *, at_least: int | None = None, exactly: int | None = None, deadline_s: float
    ) -> tuple[int, Any]:
        """(number, model) of the newest version from ``at_least`` on, or of ``exactly`` one; its
        checksum is checked.

        Raises:
          WeightTimeout: it did not come within ``deadline_s``.
          WeightError: the version is damaged, or no longer kept.
        """
