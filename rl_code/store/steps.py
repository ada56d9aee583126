"""The folder of one training step: what is planned, who has claimed it, what is there, and whether
the step is consumed.

    steps/00000012/plan_000000.json         the items from number 0 on
    steps/00000012/plan_000008.json         items that were planned later, from number 8 on
    steps/00000012/claim_000003_000.json    who claimed item 3 first
    steps/00000012/claim_000003_001.json    who took it over
    steps/00000012/group_000003.record      what was delivered for it
    steps/00000012/consumed.json            what the learner took, written last

Every file is written once and never changed, so the names in a folder say almost everything.
Polling costs one listing for each open step, however long the run is. Consumed steps move from
their folders into shards (``shards``); ``reader`` reads both.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rl_code.store.errors import StoreError, explain
from rl_code.store.group_records import versions
from rl_code.store.processes import ProcessId
from rl_code.store.sealed import seal, unseal
from rl_code.types import Group

STEPS = "steps"
CONSUMED = "consumed.json"
_NAME = re.compile(
    r"(?:(plan)_(\d{6,})\.json|(claim)_(\d{6,})_(\d{3,})\.json|(group)_(\d{6,})\.record)"
)


@dataclasses.dataclass(frozen=True)
class Item:
    """One group that a training step needs."""

    # the training step
    step: int
    # index among the items of the step, from 0
    number: int
    # index of the task
    task: int
    # how many episodes the group has
    group_size: int
    # "train": it is trained on. "screen": it only tells which tasks to train on.
    kind: Literal["train", "screen"]
    # Version of the weights that must sample the group. None if any version may, and even several
    # one after another. A version is published before items are planned for it. So no actor claims
    # an item whose weights it has to wait for, while an older item could be sampled at once.
    version: int | None
    # number of the group, which its trajectories carry
    group: int
    # Words of the random key. Together with ``group`` they fix all random streams, so that another
    # actor samples the same tokens.
    seed: tuple[int, ...]

    def __post_init__(self):
        numbers = (
            self.step,
            self.number,
            self.task,
            self.group,
            self.group_size - 1,
            self.version or 0,
            *self.seed,
        )
        if any(type(number) is not int or number < 0 for number in numbers):
            raise ValueError(
                f"{self!r}: numbers must be ints, none negative, and group_size positive"
            )
        if self.kind not in ("train", "screen"):
            raise ValueError(f"{self!r}: kind must be 'train' or 'screen'")

    def __str__(self) -> str:
        return f"({self.step}, {self.number})"

    def mismatch(self, group: Group) -> str:
        """What makes ``group`` no answer to this item; "" when it is one."""
        trajectories = group.trajectories
        if len(trajectories) != self.group_size:
            return f"{len(trajectories)} trajectories instead of {self.group_size}"
        for index, trajectory in enumerate(trajectories):
            found = trajectory.task_id, trajectory.group, trajectory.index
            wanted = group.task.id, self.group, index
            if found != wanted:
                return f"(task_id, group, index) = {found} instead of {wanted}"
        if self.version is not None and not set(versions(group)) <= {self.version}:
            return f"sampled by versions {versions(group)} instead of {self.version}"
        return ""


@dataclasses.dataclass(frozen=True)
class Listing:
    """The names in a step's folder."""

    # the first numbers of the parts of the plan, in order
    parts: tuple[int, ...] = ()
    # item -> its latest claim
    claims: Mapping[int, int] = dataclasses.field(default_factory=dict)
    # the items that were delivered
    groups: frozenset[int] = frozenset()
    consumed: bool = False

    @property
    def takeovers(self) -> int:
        return sum(self.claims.values())


def exists(store: Path) -> bool:
    """Whether a learner has made the store."""
    return (store / STEPS).is_dir()


def steps(store: Path) -> list[int]:
    """The steps that have a folder, in order. Raises StoreError."""
    folder = store / STEPS
    with explain("list", folder):
        return sorted(int(name) for name in os.listdir(folder) if name.isdigit())


def step_folder(store: Path, step: int) -> Path:
    """Where the files of a step lie until they are in a shard."""
    return store / STEPS / f"{step:08}"


def group_path(store: Path, step: int, number: int) -> Path:
    """The file of the group that was delivered for an item."""
    return step_folder(store, step) / f"group_{number:06}.record"


def claim_path(store: Path, item: Item, turn: int) -> Path:
    """The file of a claim on an item. turn: how many claims on it there were before."""
    return step_folder(store, item.step) / f"claim_{item.number:06}_{turn:03}.json"


def list_step(store: Path, step: int) -> Listing | None:
    """What is in the folder of a step; None when it has none. Raises StoreError."""
    folder = step_folder(store, step)
    with explain("list", folder):
        try:
            names = os.listdir(folder)
        except FileNotFoundError:
            # There is no such step, or there is no store. Opening also makes a client of NFS look
            # again next time.
            os.close(os.open(folder.parent, os.O_RDONLY | os.O_DIRECTORY))
            return None
    # A folder is moved away before its files are deleted. One that is still there was whole.
    if not folder.is_dir():
        return None
    claims: dict[int, int] = {}
    groups = []
    for match in filter(None, map(_NAME.fullmatch, names)):
        if match[3]:
            number = int(match[4])
            claims[number] = max(int(match[5]), claims.get(number, 0))
        elif match[6]:
            groups.append(int(match[7]))
    return list_names(names, claims, groups)


def list_names(names: Iterable[str], claims: Mapping[int, int], groups: Iterable[int]) -> Listing:
    """The listing of a step.

    names: of the parts of the plan and of the consumption, whatever else is among them. claims:
    item -> its latest claim. groups: the items that were delivered.
    """
    names = set(names)
    plans = [match for match in map(_NAME.fullmatch, names) if match and match[1]]
    parts = tuple(sorted(int(match[2]) for match in plans))
    return Listing(parts, claims, frozenset(groups), CONSUMED in names)


def read_claim(path: Path) -> ProcessId | None:
    """Who made a claim; None when the claim did not survive a crash of its writer's host. Raises
    StoreError.
    """
    with explain("read the claim", path):
        data = path.read_bytes()
    try:
        content = unseal(data, path)
    except StoreError:
        return None
    return ProcessId(content["actor"], content["incarnation"])


# --- The plan -------------------------------------------------------------------------------------


def part_path(store: Path, step: int, first: int) -> Path:
    """The file of the part of a step's plan whose items are numbered from ``first`` on."""
    return step_folder(store, step) / f"plan_{first:06}.json"


def part_bytes(items: Sequence[Item]) -> bytes:
    """The content of such a file."""
    return seal([dataclasses.asdict(item) for item in items])


def parse_part(data: bytes, path: Path) -> tuple[Item, ...]:
    """The items of one part of a plan. path: where it was read, for the StoreError of damage."""
    content: list[dict[str, Any]] = unseal(data, path)
    return tuple(Item(**(item | {"seed": tuple(item["seed"])})) for item in content)


def check_plan(items: Sequence[Item]) -> None:
    """Raises ValueError unless these are items of one step with consecutive numbers."""
    if not items:
        raise ValueError("a plan needs items")
    first = items[0]
    for offset, item in enumerate(items):
        if (item.step, item.number) != (first.step, first.number + offset):
            raise ValueError(
                f"item {item} follows {items[offset - 1]}: a plan has one step and consecutive "
                "numbers"
            )


def differences(there: Sequence[Item], here: Sequence[Item]) -> list[str]:
    """Where two plans of the same numbers differ, in words."""
    if len(there) != len(here):
        return [f"{len(there)} items there, {len(here)} here"]
    return [
        f"item {a}: {field.name} = {getattr(a, field.name)} there, {getattr(b, field.name)} here"
        for a, b in zip(there, here, strict=True)
        for field in dataclasses.fields(Item)
        if getattr(a, field.name) != getattr(b, field.name)
    ]
