"""Processes that share a store and are killed. Run as ``python -m tests.rl_code.store.processes
<what> <folder>``.

The parent imports once and forks its children before it has any thread; it prints what it found as
JSON.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rl_code.store.claims import Claims, WorkConfig
from rl_code.store.compaction import Compaction
from rl_code.store.errors import StoreError
from rl_code.store.reader import RecordReader
from rl_code.store.steps import step_folder
from rl_code.store.store import GroupStore
from tests.rl_code.store.groups import identical, make_group, make_items

CONFIG = WorkConfig(heartbeat_s=0.05, heartbeat_timeout_s=1.0, stall_s=20.0, deadline_s=60.0)
PER_STEP = 6
_PR_SET_PDEATHSIG = 1


def spawn(role: Callable[..., None], *args: Any) -> int:
    """Runs a role in a child process that does not outlive this one; returns its id."""
    child = os.fork()
    if child:
        return child
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        role(*args)
        code = 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)


def end(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def message(use: Callable[[], Any]) -> str:
    """What a use of the store complains of."""
    try:
        use()
    except StoreError as error:
        return str(error)
    return ""


# --- Racing ---------------------------------------------------------------------------------------


def claim_all(folder: Path, name: str) -> None:
    # nobody is lost here, however long a busy machine lets one wait
    patient = dataclasses.replace(CONFIG, heartbeat_timeout_s=60.0, deadline_s=120.0)
    with Claims(GroupStore(folder, name), patient) as work:
        got = []
        while items := work.claim(2):
            got += [(item.step, item.number) for item in items]
            # all have some before one goes on
            folder.with_name(f"{name}.begun").touch()
            while len(list(folder.parent.glob("actor-*.begun"))) < 4:
                time.sleep(0.001)
        folder.with_name(f"{name}.json").write_text(json.dumps(got))
        # an actor that leaves gives its items back
        while len(list(folder.parent.glob("actor-*.json"))) < 4:
            work.progress()
            time.sleep(0.01)


def race(folder: Path) -> list[list[tuple[int, int]]]:
    """What each of four processes claimed of 300 items."""
    learner = GroupStore(folder, "learner")
    for step in range(3):
        learner.plan(make_items(step, 100))
    children = [spawn(claim_all, folder, f"actor-{i}") for i in range(4)]
    assert [end(child) for child in children] == [0] * 4
    return [json.loads(folder.with_name(f"actor-{i}.json").read_text()) for i in range(4)]


# --- Killed before each thing that it does to the disk --------------------------------------------


def die_at_use(kill_at: int) -> None:
    """SIGKILL when the disk is used for the nth time from here."""
    uses = itertools.count(1)
    events = (
        "open", "os.link", "os.remove", "os.rename", "os.listdir", "os.scandir", "os.mkdir",
        "os.rmdir",
    )  # fmt: skip

    def count(event: str, args: tuple) -> None:
        if event in events and next(uses) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    write = os.write

    def half(descriptor: int, data: bytes) -> int:
        """A group is appended by os.write, of which no hook is told."""
        if next(uses) == kill_at:
            write(descriptor, data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return write(descriptor, data)

    sys.addaudithook(count)
    os.write = half


def play(folder: Path, step: int, kill_at: int) -> None:
    """All that happens to one step, from wherever it was left; SIGKILL when the disk is used for
    the nth time.
    """
    die_at_use(kill_at)
    store = GroupStore(folder, "all")
    with Claims(store, CONFIG) as work:
        store.plan(make_items(step, 2, version=step))
        while store.missing(step):
            for item in work.claim(1):
                assert store.deliver(item, make_group(item))
        store.consume(step, store.wait(step, 1.0), version=step)


def kill_points(folder: Path) -> dict[str, int]:
    """Plays a step of its own for each kill point, and plays it to its end after the kill; returns
    how many there are.

    begun, delivered: after how many kills the step was planned, and had all its groups.
    """
    # what reads the groups of a killed process, which each child would import
    importlib.import_module("grain")
    begun = delivered = 0
    for point in itertools.count():
        code = end(spawn(play, folder, point, point + 1))
        if code == 0:
            return {"points": point, "begun": begun, "delivered": delivered}
        assert code == -signal.SIGKILL, code
        planned = message(lambda step=point: GroupStore(folder).items(step)) == ""
        begun += planned
        delivered += planned and not GroupStore(folder).missing(point)
        assert end(spawn(play, folder, point, -1)) == 0, point


# --- Killed while it puts steps into a shard ------------------------------------------------------


def fill_steps(folder: Path, steps: Sequence[int]) -> None:
    """Steps that are planned, delivered and consumed."""
    store = GroupStore(folder, "learner")
    for step in steps:
        items = make_items(step, 2, version=step)
        store.plan(items)
        for item in items:
            store.deliver(item, make_group(item))
        store.consume(step, store.wait(step, 1.0), version=step)


def compact(folder: Path, kill_at: int) -> None:
    die_at_use(kill_at)
    Compaction(GroupStore(folder, "learner").process, folder, 2).run()


def look(folder: Path, steps: Sequence[int], moved: Path) -> None:
    """Every group is there and is what was delivered, also when the folders of steps that are in a
    shard are lost. Creates ``moved`` if the steps are in a shard.
    """
    reader = RecordReader(folder)
    for step in steps:
        if reader.moved(step):
            moved.touch()
            shutil.rmtree(step_folder(folder, step), ignore_errors=True)
        assert reader.listing(step).consumed and len(reader.consumption(step)["digests"]) == 2
        for item in reader.items(step):
            assert identical(reader.group(step, item.number).group, make_group(item))


def compaction_kill_points(folder: Path) -> dict[str, int]:
    """Puts two steps of its own into a shard for each kill point, and once more after the kill;
    returns how many there are, and after how many of them the steps were in a shard.
    """
    moved = folder.with_name("moved")
    in_shard = 0
    for point in itertools.count():
        steps = range(2 * point, 2 * point + 2)
        assert end(spawn(fill_steps, folder, steps)) == 0
        code = end(spawn(compact, folder, point + 1))
        assert code in (0, -signal.SIGKILL), code
        assert end(spawn(look, folder, steps, moved)) == 0, point
        in_shard += moved.exists()
        moved.unlink(missing_ok=True)
        if code == 0:
            return {"points": point, "in_shard": in_shard - 1, "left": len(_left(folder))}
        assert end(spawn(compact, folder, -1)) == 0, point


# --- A learner and actors, killed at random -------------------------------------------------------


def act(folder: Path, name: str, chance: random.Random) -> None:
    store = GroupStore(folder, name)
    with Claims(store, CONFIG) as work:
        while True:
            for item in work.claim(2):
                time.sleep(chance.uniform(0, 0.02))
                work.progress()
                store.deliver(item, make_group(item, length=20_000, seconds=chance.random()))
            time.sleep(0.005)


def learn(folder: Path, steps: int) -> None:
    """Plans one step ahead of the one it consumes, as one-step-off training does. A restart begins
    at the beginning.
    """
    store = GroupStore(folder, "learner")
    store.plan(make_items(0, PER_STEP, version=0))
    for step in range(steps):
        if step + 1 < steps:
            store.plan(make_items(step + 1, PER_STEP, version=step))
        store.consume(step, store.wait(step, CONFIG.deadline_s), version=step)


def hold(folder: Path) -> None:
    """Claims two items and does nothing about them."""
    work = Claims(GroupStore(folder, "doomed"), CONFIG)
    while not work.claim(2):
        time.sleep(0.01)
    folder.with_name("held").touch()
    while True:
        work.progress()
        time.sleep(0.01)


def fleet(folder: Path, seed: int, steps: int = 30, kills: int = 25) -> dict[str, Any]:
    """A learner and actors until ``steps`` are consumed, with ``kills`` at random moments.

    Who is killed is started again, but for a first actor: others must take over what it held.
    """
    chance = random.Random(seed)
    GroupStore(folder, "learner")
    roles = {"learner": (learn, folder, steps)}
    roles |= {f"actor-{i}": (act, folder, f"actor-{i}", random.Random(seed + i)) for i in range(3)}
    doomed = spawn(hold, folder)
    children = {"learner": spawn(*roles["learner"])}
    while not folder.with_name("held").exists():
        time.sleep(0.01)
    os.kill(doomed, signal.SIGKILL)
    end(doomed)
    children |= {name: spawn(*role) for name, role in roles.items() if name != "learner"}
    for _ in range(kills):
        time.sleep(chance.uniform(0, 0.2))
        name = chance.choice(list(children))
        os.kill(children[name], signal.SIGKILL)
        end(children[name])
        children[name] = spawn(*roles[name])
    code = end(children.pop("learner"))
    for child in children.values():
        os.kill(child, signal.SIGKILL)
        end(child)
    return {
        "code": code,
        "left": len(_left(folder)),
        "starts": sum(int(_newest(p)) + 1 for p in folder.glob("processes/*")),
    }


def _left(folder: Path) -> list[Path]:
    """What killed processes were writing and later starts of their names did not delete."""
    found = folder.glob("processes/*/aside.*")
    return [path for path in found if path.name.split(".")[1] != _newest(path.parent)]


def _newest(folder: Path) -> str:
    return str(max(int(path.stem) for path in folder.glob("*.json")))


# --- A disk that is full, then read-only ----------------------------------------------------------


def fill(path: Path) -> None:
    with open(path, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def full(folder: Path) -> dict[str, Any]:
    """``folder`` is on a disk of its own, a few MiB large."""
    store = GroupStore(folder, "learner")
    filler = folder.with_name("filler")
    items = make_items(0, 400)
    store.plan(items)
    work = Claims(GroupStore(folder, "actor"), CONFIG)
    messages = {}
    delivered = 0
    while not messages.get("deliver"):
        item = items[delivered]
        messages["deliver"] = message(
            lambda item=item: store.deliver(item, make_group(item, length=5000))
        )
        delivered += not messages["deliver"]
    fill(filler)
    messages["plan"] = message(lambda: store.plan(make_items(0, 100, first=400)))
    result = {
        "delivered": delivered,
        "verified": len(
            [store.record(0, n) for n in range(400) if items[n] not in store.missing(0)]
        ),
        "left": [path.name for path in (folder / "processes" / "learner").glob("aside.*")],
    }
    filler.unlink()
    (again,) = work.claim(1)
    result["again"] = store.deliver(again, make_group(again, length=500))
    work.close()  # no file may be open for writing: a heartbeat, or a log
    for log in store._logs.values():
        log.close()
    subprocess.run(["mount", "-o", "remount,ro", str(folder.parent)], check=True)
    messages["read-only"] = message(lambda: store.deliver(items[-1], make_group(items[-1])))
    result["readable"] = len(GroupStore(folder).items(0))
    return result | {"messages": messages}


if __name__ == "__main__":
    what, where, *numbers = sys.argv[1:]
    roles = {
        "race": race,
        "kill_points": kill_points,
        "compaction_kill_points": compaction_kill_points,
        "fleet": fleet,
        "full": full,
    }
    print(json.dumps(roles[what](Path(where), *map(int, numbers))))
