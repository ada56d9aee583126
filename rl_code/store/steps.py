"""The folder of one training step: what is planned, who has claimed it, what is there, and whether
the step is consumed.

    steps/00000012/plan_000000.json     the items from number 0 on
    steps/00000012/plan_000008.json     items that were planned later, from number 8 on
    steps/00000012/claims/000003_000    who claimed the block that begins with item 3 first
    steps/00000012/claims/000003_001    who took it over
    steps/00000012/groups/actor-0.2.0   what incarnation 2 of actor-0 delivered, one after another
    steps/00000012/taken_000000.json    which delivery of each item the learner took
    steps/00000012/consumed.json        what the learner trained on, written last

Nothing but the files of ``groups`` changes once it is written, and those only grow. So the names in
a folder say almost everything, and what is asked for often costs the same however long the run is
and however many groups a step has: the folder of a step holds a handful of names, its ``claims`` at
most about a thousand for each part of the plan, its ``groups`` a name for each start of an actor.

Consumed steps move from their folders into shards (``shards``); ``reader`` reads both.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from rl_code.store.errors import StoreError, explain
from rl_code.store.group_logs import Place
from rl_code.store.group_records import versions
from rl_code.store.processes import ProcessId
from rl_code.store.sealed import seal, unseal
from rl_code.types import Group

STEPS = "steps"
CONSUMED = "consumed.json"
# Blocks into which a part of a plan is cut at most, each of which is claimed as a whole. A part of
# so many items or fewer has blocks of one item.
BLOCKS = 1000
_PLAN = re.compile(r"plan_(\d{6,})\.json")
_TAKEN = re.compile(r"taken_(\d{6,})\.json")
_CLAIM = re.compile(r"(\d{6,})_(\d{3,})")


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
    # "train": it is trained on. "refill": so is this one, which was drawn because groups before it
    # had nothing to teach. "screen": it only tells which tasks to train on.
    kind: Literal["train", "refill", "screen"]
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
        if self.kind not in ("train", "refill", "screen"):
            raise ValueError(f"{self!r}: kind must be 'train', 'refill' or 'screen'")

    @property
    def trained(self) -> bool:
        """True if its group goes to the learner."""
        return self.kind != "screen"

    def __str__(self) -> str:
        return f"({self.step}, {self.number})"

    def mismatch(self, group: Group) -> str:
        """Reason why ``group`` is no answer to this item; "" when it is one."""
        trajectories = group.trajectories
        if len(trajectories) != self.group_size:
            return f"{len(trajectories)} trajectories instead of {self.group_size}"
        for index, trajectory in enumerate(trajectories):
            found = trajectory.task_id, trajectory.group, trajectory.index
            wanted = group.task.id, self.group, index
            if found != wanted:
                return f"(task_id, group, index) = {found} instead of {wanted}"
        taken = set(range(self.group_size))
        for trajectory in group.continuations or ():
            found = trajectory.task_id, trajectory.group
            if found != (group.task.id, self.group):
                return f"(task_id, group) = {found} of a continuation, instead of the group's"
            if trajectory.index in taken or trajectory.fork is None:
                return f"continuation {trajectory.index} is there twice, or parts nowhere"
            taken.add(trajectory.index)
        if self.version is not None and not set(versions(group)) <= {self.version}:
            return f"sampled by versions {versions(group)} instead of {self.version}"
        return ""


@dataclasses.dataclass(frozen=True)
class Listing:
    """The names in a step's folder, without those of its claims and its actors."""

    # the first numbers of the parts of the plan, in order
    parts: tuple[int, ...] = ()
    # those of them of which the learner has taken the groups
    taken: frozenset[int] = frozenset()
    consumed: bool = False


def exists(store: Path) -> bool:
    """True if a learner has made the store."""
    return (store / STEPS).is_dir()


def steps(store: Path) -> list[int]:
    """The steps that have a folder, in order. Raises StoreError."""
    folder = store / STEPS
    with explain("list", folder):
        return sorted(int(name) for name in os.listdir(folder) if name.isdigit())


def step_folder(store: Path, step: int) -> Path:
    """Folder of the files of a step until they are in a shard."""
    return store / STEPS / f"{step:08}"


def make_folder(store: Path, step: int) -> Path:
    """Makes the folder of a step, with those of its claims and of its groups. Raises StoreError."""
    folder = step_folder(store, step)
    with explain("make the folder of a step", folder):
        for made in (folder, folder / "claims", folder / "groups"):
            made.mkdir(exist_ok=True)
    return folder


def groups_folder(store: Path, step: int) -> Path:
    """Folder into which actors put their groups, each into files of its own."""
    return step_folder(store, step) / "groups"


def claim_path(store: Path, step: int, first: int, turn: int) -> Path:
    """The file of a claim on the block that begins with item ``first``. turn: how many claims on it
    there were before.
    """
    return step_folder(store, step) / "claims" / f"{first:06}_{turn:03}"


def taken_path(store: Path, step: int, first: int) -> Path:
    """The file that says which groups were taken for the part of a plan from ``first`` on."""
    return step_folder(store, step) / f"taken_{first:06}.json"


def list_step(store: Path, step: int) -> Listing | None:
    """Content of the folder of a step; None when it has none. Raises StoreError."""
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
    return list_names(names)


def list_names(names: Iterable[str]) -> Listing:
    """The listing of a step in whose folder there are these names."""
    names = set(names)
    return Listing(
        parts=tuple(sorted(_numbers(_PLAN, names))),
        taken=frozenset(_numbers(_TAKEN, names)),
        consumed=CONSUMED in names,
    )


def list_claims(store: Path, step: int) -> dict[int, tuple[int, int]]:
    """First item of every block that is claimed -> (turn, inode) of its latest claim. The claims of
    one process have one inode. Raises StoreError.
    """
    folder = step_folder(store, step) / "claims"
    found: dict[int, tuple[int, int]] = {}
    with explain("list", folder):
        try:
            with os.scandir(folder) as entries:
                names = [(entry.name, entry.inode()) for entry in entries]
        except FileNotFoundError:  # a step that has moved
            return {}
    for name, inode in names:
        if match := _CLAIM.fullmatch(name):
            first = int(match[1])
            found[first] = max((int(match[2]), inode), found.get(first, (-1, 0)))
    return found


def claim_bytes(who: ProcessId) -> bytes:
    """The content of a claim."""
    return seal({"actor": who.name, "incarnation": who.incarnation})


def read_claim(path: Path) -> ProcessId | None:
    """Maker of a claim; None when the claim did not survive a crash of its writer's host. Raises
    StoreError.
    """
    with explain("read the claim", path):
        data = path.read_bytes()
    try:
        content = unseal(data, path)
    except StoreError:
        return None
    return ProcessId(content["actor"], content["incarnation"])


def _numbers(pattern: re.Pattern[str], names: Iterable[str]) -> list[int]:
    return [int(match[1]) for match in map(pattern.fullmatch, names) if match]


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


def blocks(items: Sequence[Item]) -> list[Sequence[Item]]:
    """The blocks of one part of a plan, each of which is claimed as a whole."""
    size = max(1, math.ceil(len(items) / BLOCKS))
    return [items[begin : begin + size] for begin in range(0, len(items), size)]


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
    """Difference of two plans of the same numbers, in words."""
    if len(there) != len(here):
        return [f"{len(there)} items there, {len(here)} here"]
    return [
        f"item {a}: {field.name} = {getattr(a, field.name)} there, {getattr(b, field.name)} here"
        for a, b in zip(there, here, strict=True)
        for field in dataclasses.fields(Item)
        if getattr(a, field.name) != getattr(b, field.name)
    ]


# --- What was taken -------------------------------------------------------------------------------


def taken_bytes(places: Sequence[Place]) -> bytes:
    """The content of the file that says where the groups of a part of a plan are. places: of its
    items, in order.
    """
    names = sorted({place.path.name for place in places})
    index = {name: number for number, name in enumerate(names)}
    groups = [[index[place.path.name], place.offset, place.size] for place in places]
    return seal({"files": names, "groups": groups})


def parse_taken(data: bytes, path: Path, store: Path, step: int, first: int) -> dict[int, Place]:
    """Item -> where its group is, of such a file. path: where it was read, for the StoreError of
    damage.
    """
    content = unseal(data, path)
    paths = [groups_folder(store, step) / name for name in content["files"]]
    return {
        number: Place(paths[file], offset, size)
        for number, (file, offset, size) in enumerate(content["groups"], first)
    }
