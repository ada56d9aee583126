"""Builders of plans and of the groups that answer them."""

from __future__ import annotations

import shutil
import struct

import numpy as np

from rl_code.store.group_logs import Place
from rl_code.store.reader import RecordReader
from rl_code.store.steps import Item, make_folder, step_folder, taken_bytes, taken_path
from rl_code.types import (
    Case,
    Context,
    Group,
    Reward,
    Task,
    Tests,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
)


def make_items(step, count, *, first=0, version=None, kind="train", group_size=2):
    """Items ``first``, ``first + 1``, ... of a step."""
    numbers = range(first, first + count)
    return [
        Item(step, n, 7 * n, group_size, kind, version, 1000 * step + n, (3, 2**32 - 1))
        for n in numbers
    ]


def make_trajectory(task, group, index, tokens, version, seconds=0.5):
    """Half of its tokens are the prompt; one log-probability is a NaN with a payload."""
    count = len(tokens)
    sampled = np.arange(count) >= count // 2
    logprobs = np.where(sampled, -0.5, 0.0).astype(np.float32)
    logprobs[-1:] = np.frombuffer(struct.pack("<I", 0x7FC01234), np.float32)
    call = ToolCall("write_file", {"path": "a.py", "content": "é\ud800", "line": 10**40})
    return Trajectory(
        task_id=task.id,
        group=group,
        index=index,
        contexts=(
            Context(
                tokens=np.asarray(tokens, np.int32),
                sampled=sampled,
                logprobs=logprobs,
                versions=np.where(sampled, version, -1).astype(np.int32),
            ),
        ),
        prompt_length=count // 2,
        turns=(
            Turn("prompt", 0, count // 2, "fix it"),
            Turn(
                "assistant",
                count // 2,
                count,
                "→",
                (call,),
                (ToolResult("write_file", "ok", True, 0.25),),
            ),
        ),
        status="submitted",
        reward=Reward(1.0, {"tests": 1.0}, ("slow",)),
        solved=True,
        first_edit_passed=True,
        seconds={"tools": seconds},
    )


def make_group(item, *, version=0, length=64, seconds=0.5):
    """A group that answers an item; its tokens depend on the item alone."""
    rng = np.random.default_rng([item.step, item.number])
    cases = (
        Case(({1, "a", (2,)}, [1, (2, [3])]), frozenset({b"x"})),
        Case((None, True, 1.0), 2**70, 0.0),
    )
    task = Task(
        id=f"t/{item.task}",
        messages=({"role": "user", "content": "fix"},),
        files={"a.py": "def f(): ..."},
        path="a.py",
        entry_point="f",
        tools=("write_file", "submit"),
        visible_tests=Tests(cases),
        hidden_tests=Tests((), ("assert f(1) == 1",)),
        reference={"a.py": "def f(): return 1"},
        meta={
            "source": "test",
            "levels": (1, [2]),
            "raw": b"\x00\xff",
            "none": None,
            "seen": {3, 1},
        },
    )
    version = version if item.version is None else item.version
    tokens = rng.integers(0, 50_000, (item.group_size, length))
    members = [
        make_trajectory(task, item.group, i, row, version, seconds) for i, row in enumerate(tokens)
    ]
    return Group(task, tuple(members))


def group_path(folder, step, number):
    """The file of a group after ``out_of_shards`` or ``as_files``."""
    return step_folder(folder, step) / "groups" / f"apart-{number}.0.0"


def put_group(folder, step, number, data):
    """Puts other bytes into the file of a group, and takes them for the item if all are taken."""
    group_path(folder, step, number).write_bytes(data)
    _take(folder, step)


def out_of_shards(folder):
    """Puts the steps of a store back into folders, every group into a file of its own, so that each
    can be changed.
    """
    reader = RecordReader(folder)
    for step in reader.steps():
        if (found := reader._in_shard(step)) is not None:
            make_folder(folder, step)
            for name, data in found[1].files.items():
                (step_folder(folder, step) / name).write_bytes(data)
            for number in reader.groups(step):
                data = reader.group_file(step, number)[0]
                group_path(folder, step, number).write_bytes(data)
    shutil.rmtree(folder / "shards")
    for step in reader.steps():
        _take(folder, step)


def as_files(folder):
    """Puts every group of the steps in folders into a file of its own, so that each can be
    changed.
    """
    reader = RecordReader(folder)
    for path in sorted((folder / "steps").iterdir()):
        step = int(path.name)
        groups = {number: reader.group_file(step, number)[0] for number in reader.groups(step)}
        for log in path.glob("groups/*"):
            log.unlink()
        for number, data in groups.items():
            group_path(folder, step, number).write_bytes(data)
        _take(folder, step)


def _take(folder, step):
    """Writes down where the groups of a consumed step are."""
    reader = RecordReader(folder)
    listing = reader.listing(step)
    for first in listing.parts if listing.consumed else ():
        paths = [group_path(folder, step, item.number) for item in reader.part(step, first)]
        places = [Place(path, 0, path.stat().st_size) for path in paths]
        taken_path(folder, step, first).write_bytes(taken_bytes(places))


def undeliver(folder, step):
    """Deletes the groups of an open step, if there are any: as if nobody had delivered them."""
    files = [
        *step_folder(folder, step).glob("groups/*"),
        *step_folder(folder, step).glob("taken_*"),
    ]
    assert step_folder(folder, step).parent.is_dir()
    for path in files:
        path.unlink()


def identical(a, b):
    """Equality of types and of every bit, at every depth."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray | np.generic):
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, complex):
        return identical([a.real, a.imag], [b.real, b.imag])
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(identical, a, b))
    if isinstance(a, dict):
        return identical(list(a.items()), list(b.items()))
    if isinstance(a, set | frozenset):
        return identical(sorted(a, key=_order), sorted(b, key=_order))
    if hasattr(a, "__dataclass_fields__"):
        return all(identical(getattr(a, name), getattr(b, name)) for name in a.__dataclass_fields__)
    return a == b


def _order(value):
    """Text that sorts hashable values the same way however their sets are ordered."""
    if isinstance(value, tuple | frozenset):
        parts = map(_order, value)
        return f"{type(value).__name__}{list(parts) if isinstance(value, tuple) else sorted(parts)}"
    return f"{type(value).__name__} {value!r}"
