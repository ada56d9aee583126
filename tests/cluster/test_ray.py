"""What launch.on_ray decides without a cluster; tests/launch/test_faults.py runs it on one."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path

import pytest

from cluster import ray_run
from cluster.ray_placing import RayError, Wanted, needs
from cluster.ray_role import End, RoleProcess, silence
from cluster.restarts import QUICK, Restarts
from launch import on_ray
from rl_code.config.read_config import ConfigError
from rl_code.store.heartbeat import Observer
from rl_code.store.processes import StoreProcess

LONG_S = 300.0


@pytest.mark.parametrize(
    ("ends", "verdict", "count"),
    [
        ([(0, 5.0)], "done", 0),
        ([(2, 500.0)], "lasts", 0),
        ([(1, 5.0)] * (QUICK - 1), "again", QUICK - 1),
        ([(1, 5.0)] * QUICK, "gave up", QUICK - 1),
        # a kill, a long life and a request to stop from elsewhere are no signs of a lasting error
        ([(-9, 5.0)] * 100, "again", 100),
        ([(137, 5.0)] * 100, "again", 100),
        ([(130, 5.0)] * 100, "again", 100),
        ([(1, 5.0)] * (QUICK - 1) + [(1, 61.0)] + [(1, 5.0)] * (QUICK - 1), "again", 2 * QUICK - 1),
    ],
)
def test_a_role_starts_again_unless_its_error_lasts(ends, verdict, count):
    restarts = Restarts()
    assert [restarts.after(*end) for end in ends][-1] == verdict
    assert restarts.count == count


def wanted(name: str = "actor-0", hosts: int = 1, **amounts: float) -> Wanted:
    command = ["launch.train", "--role=actor"]
    return Wanted(name, command, hosts, amounts or {"CPU": 1.0}, "store", "log", 5.0)


def test_hosts_of_a_role_find_the_first_one():
    assert wanted().commands("") == [["launch.train", "--role=actor"]]
    together = ["--coordinator=10.0.0.7:99", "--processes=3"]
    assert wanted(hosts=3).commands("10.0.0.7:99") == [
        ["launch.train", "--role=actor", *together, f"--process={i}"] for i in range(3)
    ]


def test_needs_are_read_and_a_wrong_one_is_named():
    assert needs("actor_needs", ["GPU=8", "actor=0.5"]) == {"GPU": 8.0, "actor": 0.5}
    for word in ("GPU", "GPU=", "GPU=many", "=2", "CPU=0", "CPU=-1"):
        with pytest.raises(ConfigError, match=f"--actor_needs={word}: expected <resource>"):
            needs("actor_needs", [word])


@pytest.mark.parametrize("nodes", [1, 2, 3, 5])
def test_all_roles_fit_on_the_nodes_of_a_simulated_cluster_but_one(nodes):
    roles = [wanted("learner", 2, CPU=2.0, GPU=1.0), wanted(CPU=1.0), wanted(CPU=1.0)]
    node = on_ray.simulated_node(roles, nodes)
    free = [dict(node) for _ in range(max(nodes - 1, 1))]
    for role in roles:
        for _ in range(role.hosts):
            fitting = [one for one in free if all(one[x] >= n for x, n in role.needs.items())]
            assert fitting, (role, free)
            one = max(fitting, key=lambda one: one["CPU"])
            for name, amount in role.needs.items():
                one[name] -= amount


def test_silence_is_that_of_the_process_itself(tmp_path):
    (tmp_path / "processes").mkdir()
    now = [0.0]
    observer = Observer(tmp_path, clock=lambda: now[0])

    def heard(pid: int = os.getpid()) -> float | None:
        now[0] += 1.0
        return silence(observer, tmp_path, "learner", pid)

    assert heard() is None  # it has not joined the store yet
    process = StoreProcess(tmp_path, "learner")
    assert [heard(), heard(), heard()] == [0.0, 1.0, 2.0]
    assert heard(pid=1) is None  # the heartbeat of an earlier start, under another number
    process.beat(1)
    assert [heard(), heard()] == [0.0, 1.0]
    process.beat(2, left=True)
    assert heard() is None  # it is ending


class Scripted:
    """A role whose ends are given. An end is an exit code; None: it runs until a signal comes."""

    def __init__(self, name: str, *ends: int | None, there: bool = True):
        self.name, self.there = name, there
        self.signals: list[int] = []
        self.starts = 0
        self._ends = list(ends)

    def start(self) -> None:
        self.starts += 1

    def moved(self) -> str:
        return ""

    def ended(self) -> End | None:
        if self._ends[0] is not None:
            return End(self._ends.pop(0), 1.0, "its last words", lost=not self.there)
        return End(130, 1.0, "") if self.signals else None

    def signal(self, number: int) -> None:
        self.signals.append(number)


class Asked:
    """A request to stop that has come, or has not."""

    def __init__(self, requested: bool = False):
        self.requested = requested


def play(tmp_path: Path, *roles: Scripted, stop: bool = False) -> None:
    patience = ray_run.Patience(5.0, 0.0, 100.0, poll_s=0.001, all_lost_s=0.1)
    ray_run.Run(roles, Asked(stop), patience, tmp_path, steps=3).to_the_end()


def test_a_run_ends_with_its_learner_and_starts_again_what_dies(tmp_path):
    learner, actor = Scripted("learner", -9, 1, 0), Scripted("actor-0", -9, 0)
    play(tmp_path, learner, actor)
    assert (learner.starts, actor.starts) == (3, 2) and not learner.signals + actor.signals


def test_nothing_is_started_again_once_the_learner_has_ended(tmp_path):
    learner, actor = Scripted("learner", 0), Scripted("actor-0", 1, 1, 0)
    play(tmp_path, learner, actor)
    assert actor.starts == 1


def test_an_actor_that_gives_up_is_left_out_but_the_last_one_and_the_learner_end_the_run(tmp_path):
    learner, first = Scripted("learner", None), Scripted("actor-0", 2)
    with pytest.raises(ray_run.Lasting, match=r"actor-0 has given up: exit code 2.*its last words"):
        play(tmp_path, learner, first)
    assert learner.signals == [signal.SIGTERM]  # it writes a checkpoint
    learner = Scripted("learner", *[1] * QUICK)
    actors = Scripted("actor-0", None), Scripted("actor-1", 2)
    with pytest.raises(ray_run.GaveUp, match="learner has given up: exit code 1"):
        play(tmp_path, learner, *actors)
    assert actors[0].signals == [signal.SIGTERM] and actors[1].signals == []


def test_a_request_to_stop_is_passed_on_and_waited_for(tmp_path):
    roles = [Scripted("learner", None), Scripted("actor-0", None)]
    play(tmp_path, *roles, stop=True)
    assert [role.signals for role in roles] == [[signal.SIGTERM]] * 2


def test_a_run_gives_a_cluster_up_that_has_lost_all_of_its_roles(tmp_path):
    lost = [Scripted("learner", 137, None, there=False), Scripted("actor-0", 137, there=False)]
    with pytest.raises(RayError, match="all roles have been lost for"):
        play(tmp_path, *lost)
    # one that is only waiting for a node keeps the run
    learner = Scripted("learner", None)
    stopped = Scripted("actor-0", 137, there=False)
    asked = Asked()
    patience = ray_run.Patience(5.0, 0.0, 100.0, poll_s=0.1, all_lost_s=0.1)
    run = ray_run.Run([learner, stopped], asked, patience, tmp_path, steps=3)
    threading.Timer(0.5, lambda: setattr(asked, "requested", True)).start()
    run.to_the_end()
    assert stopped.starts == 1


ROLE = """
import os, signal, sys, time
from pathlib import Path
from rl_code.store.processes import StoreProcess

what = sys.argv[1]
print("said", what, sys.argv[2:], flush=True)
if what == "fails":
    os._exit(3)
signal.signal(signal.SIGTERM, lambda *_: os._exit(130))
if what == "joins":
    StoreProcess(Path("{store}"), "actor-0")
Path("{store}/pid").write_text(str(os.getpid()))
while True:
    time.sleep(0.01)
"""


@pytest.fixture
def role(tmp_path, monkeypatch):
    """A process of Ray's, without Ray: what it runs may join the store, with one heartbeat."""
    (tmp_path / "processes").mkdir()
    (tmp_path / "a_role.py").write_text(ROLE.format(store=tmp_path))
    root = Path(on_ray.__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{root}")
    return RoleProcess("actor-0", str(tmp_path), str(tmp_path / "logs" / "a.log"), 1.5)


async def started(folder: Path, run: asyncio.Task) -> int:
    """The number of the process that says it, unless it ends before."""
    while not (folder / "pid").exists() or not (folder / "pid").read_text():
        assert not run.done(), run
        await asyncio.sleep(0.01)
    return int((folder / "pid").read_text())


def test_the_end_of_a_role_has_its_code_and_its_last_lines(role):
    end = asyncio.run(role.run(["-m", "a_role", "fails"], "127.0.0.9"))
    assert end.code == 3 and end.hung_s == 0.0
    assert end.last == "said fails ['--host=127.0.0.9']"


def test_a_role_is_stopped_by_a_signal(role, tmp_path):
    async def play() -> int:
        run = asyncio.create_task(role.run(["-m", "a_role", "joins"], "127.0.0.9"))
        await started(tmp_path, run)
        await role.stop(signal.SIGTERM)
        return (await asyncio.wait_for(run, LONG_S)).code

    assert asyncio.run(play()) == 130


@pytest.mark.parametrize("what", ["starts", "joins"])
def test_a_role_that_is_stopped_is_killed_whether_it_has_a_heartbeat_yet_or_not(
    role, tmp_path, what
):
    async def play():
        run = asyncio.create_task(role.run(["-m", "a_role", what], "127.0.0.9"))
        os.kill(await started(tmp_path, run), signal.SIGSTOP)
        return await asyncio.wait_for(run, LONG_S)

    end = asyncio.run(play())
    assert end.code == -signal.SIGKILL and end.hung_s > 1.5


@pytest.mark.long
def test_a_role_that_has_no_heartbeat_but_runs_is_left_alone(role, tmp_path):
    async def play():
        run = asyncio.create_task(role.run(["-m", "a_role", "starts"], "127.0.0.9"))
        await started(tmp_path, run)
        await asyncio.sleep(4.0)  # more than twice the bound
        assert not run.done()
        await role.stop(signal.SIGTERM)
        return await asyncio.wait_for(run, LONG_S)

    assert asyncio.run(play()).code == 130
