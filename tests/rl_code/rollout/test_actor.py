"""An actor samples every item with the weights that it is planned for, and delivers each group for
its own item.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from rl_code.environment.sandbox.pool import SandboxUnavailable
from rl_code.rollout import actor as actor_lib
from rl_code.rollout.actor import Actor
from rl_code.rollout.asynchrony import AsynchronyConfig
from rl_code.rollout.forks_config import ForksConfig
from rl_code.rollout.playing import RolloutTimeout
from rl_code.rollout.scheduler import Scheduler
from rl_code.rollout.stats import RolloutStats
from rl_code.store.claims import Claims, WorkConfig
from rl_code.store.steps import Item
from rl_code.store.store import GroupStore
from rl_code.types import Context, Group, Reward, Task, Tests, Trajectory, Turn
from rl_code.weights.local import LocalWeights
from rl_code.weights.versions import Wanted, WeightsConfig
from tests.rl_code.weights.small import assert_is, mesh, model_of, wanted

WORK = WorkConfig(heartbeat_s=0.02, heartbeat_timeout_s=0.25, stall_s=20.0, deadline_s=60.0)
PROMPT = 3


def make_tasks(count: int) -> list[Task]:
    return [Task(f"t/{i}", (), {}, "a.py", "f", Tests(), Tests(), {}) for i in range(count)]


def make_asynchrony(
    mode: str, max_staleness: int, work: WorkConfig = WORK, recompute: bool = False
) -> AsynchronyConfig:
    weights = WeightsConfig(full_every=2, keep=max_staleness + 1, deadline_s=20.0)
    return AsynchronyConfig(mode, max_staleness, recompute, work, weights)


def prompt_of(task: Task, vocab: int = 32) -> np.ndarray:
    """Ids of its prompt."""
    return np.random.default_rng(list(task.id.encode())).integers(0, vocab, PROMPT)


def make_group(
    task: Task, group: int, key: Sequence[int], versions: Sequence[Sequence[int]], vocab: int = 32
) -> Group:
    """What a scheduler returns; tokens and rewards depend on (key, group, index) alone, as the real
    one's do.
    """
    prompt = prompt_of(task, vocab)
    members = []
    for index, sampled in enumerate(versions):
        rng = np.random.default_rng([*key, group, index])
        end = PROMPT + len(sampled)
        solved = float(rng.integers(0, 2))
        members.append(
            Trajectory(
                task_id=task.id,
                group=group,
                index=index,
                contexts=(
                    Context(
                        tokens=np.concatenate(
                            [prompt, rng.integers(0, vocab, len(sampled))]
                        ).astype(np.int32),
                        sampled=np.arange(end) >= PROMPT,
                        logprobs=np.where(np.arange(end) >= PROMPT, -3.0, 0.0).astype(np.float32),
                        versions=np.concatenate([np.full(PROMPT, -1), sampled]).astype(np.int32),
                    ),
                ),
                prompt_length=PROMPT,
                turns=(Turn("prompt", 0, PROMPT, ""), Turn("assistant", PROMPT, end, "")),
                status="submitted",
                reward=Reward(solved, {"tests": solved}),
                solved=solved > 0,
            )
        )
    return Group(task, tuple(members))


@dataclasses.dataclass
class Open:
    """A group in the hands of the scheduler below. left: rounds until it is finished. versions: of
    every row.
    """

    item: Item
    task: Task
    key: Sequence[int]
    left: int
    versions: list[list[int]]


class FakeScheduler:
    """The real one's interface. A round 'samples' one token for every row of a group, by the
    version that is loaded.

    rounds(item): how many a group takes. before_round(scheduler): what happens first in each; it
    may sleep or raise. waits(): whether a tool keeps a group from taking part in a round. log:
    ("load", version), ("begin", item) and ("end", item), in order.
    """

    def __init__(
        self,
        *,
        episodes: int = 8,
        vocab: int = 32,
        rounds: Callable[[Item], int] = lambda item: 2,
        before_round: Callable[[FakeScheduler], None] = lambda scheduler: None,
        waits: Callable[[], bool] = lambda: False,
    ):
        self.version: int | None = None
        self.model: Any = None
        self.log: list[tuple[str, Any]] = []
        self.open: list[Open] = []
        self.aborted = 0
        self._episodes, self._vocab = episodes, vocab
        self._rounds, self._before_round, self._waits = rounds, before_round, waits
        self._stats = RolloutStats()

    def size_of(self, item: Item) -> int:
        """How many episodes of an item's group are sampled."""
        return item.group_size

    def load(self, model: Any, version: int, *, recompute: bool = False) -> None:
        self.model, self.version = model, version
        self.log.append(("load", version))

    def submit(
        self,
        task: Task,
        make_episode: Callable,
        *,
        group: int,
        group_size: int,
        key: Sequence[int],
        tag: Any = None,
        adapter: int = -1,
        owner: str = "",
        ways: Sequence | None = None,
        forks: Any = None,
        on_finished: Callable = lambda trajectory: None,
    ) -> None:
        assert self.version is not None
        assert (group, group_size, tuple(key)) == (tag.group, self.size_of(tag), tag.seed)
        self.open.append(Open(tag, task, key, self._rounds(tag), [[] for _ in range(group_size)]))
        self.log.append(("begin", tag))

    @property
    def groups(self) -> int:
        return len(self.open)

    @property
    def room(self) -> int:
        return self._episodes - sum(len(group.versions) for group in self.open)

    def step(self) -> list[tuple[Any, Group]]:
        self._before_round(self)
        finished = []
        for group in [group for group in self.open if not self._waits()]:
            for row in group.versions:
                row.append(self.version)
            self._stats.sampled_tokens += len(group.versions)
            group.left -= 1
            if group.left <= 0:
                self.open.remove(group)
                self.log.append(("end", group.item))
                made = make_group(
                    group.task, group.item.group, group.key, group.versions, self._vocab
                )
                finished.append((group.item, made))
        return finished

    def take_stats(self) -> RolloutStats:
        stats, self._stats = self._stats, RolloutStats()
        return stats

    def abort(self) -> None:
        self.aborted += 1
        self.open.clear()


class LateWeights:
    """A subscriber to whom versions show late by up to ``lag``, and which may see less than it saw
    before.
    """

    def __init__(self, local: LocalWeights, lag: Callable[[], int]):
        self._local, self._lag, self.fetched = local, lag, None

    def newest(self) -> int | None:
        newest = self._local.newest()
        return None if newest is None or newest < (lag := self._lag()) else newest - lag

    def wait(self, *, at_least: int | None = None, exactly: int | None = None, deadline_s: float):
        Wanted(at_least, exactly)
        exactly = max(at_least, self.newest() or 0) if exactly is None else exactly
        return self._local.wait(exactly=exactly, deadline_s=deadline_s)


def kill(work: Claims) -> None:
    """Ends an actor's heartbeat the way SIGKILL does: it does not say that it leaves."""
    work._heartbeat._closing.set()
    work._heartbeat._thread.join()


@dataclasses.dataclass
class Site:
    """A store with its learner's side, its weights, and actors by name."""

    store: GroupStore
    weights: LocalWeights
    works: list[Claims] = dataclasses.field(default_factory=list)

    def publish(self, *versions: int) -> None:
        for version in versions:
            self.weights.publish(version, model_of(version, mesh()))

    def plan(self, step: int, count: int, version: int | None, group_size: int = 2) -> list[Item]:
        items = [
            Item(step, n, n, group_size, "train", version, 10 * step + n, (7, 2**31))
            for n in range(count)
        ]
        self.store.plan(items)
        return items

    def actor(
        self,
        mode: str,
        max_staleness: int,
        scheduler: FakeScheduler,
        name: str = "a",
        weights: Any = None,
        prepare: Callable[[Task, int], Task] = lambda task, step: task,
        forks: Any = None,
        demonstrator: Any = None,
        **changes: Any,
    ) -> Actor:
        store = GroupStore(self.store.folder, name)
        self.works.append(Claims(store, WORK))
        config = make_asynchrony(mode, max_staleness, **changes)
        tasks = make_tasks(20)
        return Actor(
            scheduler,
            store,
            self.works[-1],
            weights or self.weights,
            tasks,
            lambda *_: None,
            config,
            prepare=prepare,
            forks=forks,
            demonstrator=demonstrator,
        )


@pytest.fixture
def site(tmp_path):
    made = Site(GroupStore(tmp_path / "store", "learner"), LocalWeights(wanted(mesh()), keep=8))
    yield made
    for work in made.works:
        work.close()


def play(actor: Actor, store: GroupStore, *steps: int) -> None:
    """Takes turns until the steps have all their groups."""
    for _ in range(1000):
        if not any(store.missing(step) for step in steps):
            return
        actor.turn()
    raise AssertionError(f"steps {steps} lack {[store.missing(step) for step in steps]}")


def test_the_fake_has_the_interface_of_the_scheduler():
    for name in ("load", "submit", "step", "abort", "take_stats"):
        real, fake = (inspect.signature(getattr(cls, name)) for cls in (Scheduler, FakeScheduler))
        assert [(p.name, p.kind) for p in real.parameters.values()] == [
            (p.name, p.kind) for p in fake.parameters.values()
        ], name
    for name in ("groups", "room"):
        assert isinstance(getattr(Scheduler, name), property) and isinstance(
            getattr(FakeScheduler, name), property
        )


def test_items_of_another_version_wait_until_the_open_groups_are_done(site):
    site.publish(0, 1)
    first = site.plan(0, 3, version=0)
    second = site.plan(1, 2, version=1)
    scheduler = FakeScheduler(episodes=20, rounds=lambda item: 2 + 3 * item.number)
    actor = site.actor("one_step", 1, scheduler)
    play(actor, site.store, 0, 1)
    events = scheduler.log
    assert [item for what, item in events if what == "begin"] == [*first, *second]
    assert [version for what, version in events if what == "load"] == [0, 1]
    swap = events.index(("load", 1))
    assert all(events.index(("end", item)) < swap for item in first)
    assert all(events.index(("begin", item)) > swap for item in second)
    assert_is(scheduler.model, 1, mesh())


def test_what_is_prepared_for_a_step_is_played_and_delivered(site):
    def prepare(task: Task, step: int) -> Task:
        return dataclasses.replace(task, meta={"notes": (("of", f"{task.id} in {step}"),)})

    site.publish(0, 1)
    actor = site.actor("one_step", 1, FakeScheduler(), prepare=prepare)
    for step in (0, 1):
        site.plan(step, 2, version=step)
        play(actor, site.store, step)
        for number in (0, 1):
            task = site.store.record(step, number).group.task
            assert task.meta == {"notes": (("of", f"t/{number} in {step}"),)}


@pytest.mark.parametrize(("kind", "forked"), [("train", True), ("refill", True), ("screen", False)])
def test_what_is_trained_on_is_forked(site, kind, forked):
    forks = ForksConfig()
    site.publish(0)
    site.store.plan([Item(0, 0, 0, 2, kind, 0, 0, (7, 2**31))])
    scheduler = FakeScheduler()
    asked = []
    submit = scheduler.submit
    scheduler.submit = lambda *of, **way: (asked.append(way["forks"]), submit(*of, **way))
    play(site.actor("one_step", 1, scheduler, forks=forks), site.store, 0)
    assert asked == [forks if forked else None]


def test_older_weights_come_back_when_an_item_wants_them(site):
    site.publish(0, 1, 2)
    site.plan(0, 1, version=2)
    site.plan(1, 1, version=1)
    scheduler = FakeScheduler()
    play(site.actor("one_step", 1, scheduler), site.store, 0, 1)
    assert [version for what, version in scheduler.log if what == "load"] == [2, 1]
    assert_is(scheduler.model, 1, mesh())


def test_in_flight_the_newest_weights_are_loaded_in_the_middle_of_groups(site):
    site.publish(0)
    (item,) = site.plan(0, 1, version=None)
    scheduler = FakeScheduler(rounds=lambda item: 4)
    actor = site.actor("in_flight", 2, scheduler)
    actor.turn()
    actor.turn()
    site.publish(1, 2)
    play(actor, site.store, 0)
    for trajectory in site.store.record(0, item.number).group.trajectories:
        assert trajectory.versions.tolist() == [-1] * PROMPT + [0, 0, 2, 2]
    assert [version for what, version in scheduler.log if what == "load"] == [0, 2]


def test_in_flight_begins_with_weights_within_the_bound_however_late_they_show(site):
    site.publish(0, 1, 2, 3, 4)
    late = LateWeights(site.weights, lambda: 9)
    assert late.newest() is None
    scheduler = FakeScheduler()
    actor = site.actor("in_flight", 2, scheduler, weights=late)
    for step in range(6):
        site.plan(step, 1, version=None)
        play(actor, site.store, step)
        assert scheduler.version == max(0, step - 2)


def test_in_flight_never_goes_back_to_older_weights(site):
    site.publish(0, 1, 2, 3)
    lags = iter([0, 0, 3, 3, 2, 2, 1, 1, 0, 0] + [3] * 100)
    scheduler = FakeScheduler(rounds=lambda item: 4)
    actor = site.actor(
        "in_flight", 1, scheduler, weights=LateWeights(site.weights, lambda: next(lags))
    )
    site.plan(4, 1, version=None)
    play(actor, site.store, 4)
    assert [version for what, version in scheduler.log if what == "load"] == [3]
    assert set(site.store.record(4, 0).versions) == {3}


def test_recompute_is_passed_on(site):
    asked = []
    scheduler = FakeScheduler()
    scheduler.load = lambda model, version, recompute=False: (
        asked.append(recompute) or FakeScheduler.load(scheduler, model, version)
    )
    site.publish(0)
    site.plan(0, 1, version=None)
    play(site.actor("in_flight", 1, scheduler, recompute=True), site.store, 0)
    assert asked == [True]


@pytest.mark.parametrize(("mode", "version"), [("one_step", 0), ("in_flight", None)])
def test_each_group_is_delivered_for_its_own_item(site, mode, version):
    site.publish(0)
    items = site.plan(0, 11, version=version, group_size=3)
    rng = np.random.default_rng(0)
    scheduler = FakeScheduler(
        episodes=9,
        rounds=lambda item: int(rng.integers(1, 6)),
        waits=lambda: bool(rng.random() < 0.4),
    )
    play(site.actor(mode, 1, scheduler), site.store, 0)
    ended = [item.number for what, item in scheduler.log if what == "end"]
    assert sorted(ended) == list(range(11)) and ended != sorted(ended)
    for item in items:
        record = site.store.record(0, item.number)
        assert item.mismatch(record.group) == "" and record.actor.name == "a"
        lengths = [[0] * (len(t.tokens) - PROMPT) for t in record.group.trajectories]
        expected = make_group(make_tasks(20)[item.task], item.group, item.seed, lengths)
        for found, wanted_one in zip(record.group.trajectories, expected.trajectories, strict=True):
            np.testing.assert_array_equal(found.tokens, wanted_one.tokens)
    assert site.works[0].claimed == 11


def test_nothing_is_claimed_without_room(site):
    site.publish(0)
    site.plan(0, 12, version=0)
    scheduler = FakeScheduler(episodes=6, rounds=lambda item: 2 + item.number % 4)
    actor = site.actor("one_step", 1, scheduler)
    while site.store.missing(0):
        room = scheduler.room
        claimed = site.works[0].claimed
        actor.turn()
        assert room > 0 or site.works[0].claimed == claimed


def test_what_a_turn_returns_tells_an_idle_actor(site):
    site.publish(0)
    actor = site.actor("one_step", 1, FakeScheduler(rounds=lambda item: 1))
    assert not actor.turn()
    site.plan(0, 1, version=0)
    assert actor.turn() and not site.store.missing(0)
    assert not actor.turn()


def test_the_idle_share_is_the_time_without_an_open_group(site, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(actor_lib, "time", types.SimpleNamespace(perf_counter=lambda: clock[0]))
    site.publish(0)

    def pass_time(seconds: float) -> None:
        clock[0] += seconds

    scheduler = FakeScheduler(rounds=lambda item: 2, before_round=lambda scheduler: pass_time(3.0))
    actor = site.actor("one_step", 1, scheduler)
    actor.turn()
    pass_time(4.0)  # nothing is planned
    site.plan(0, 2, version=0)
    play(actor, site.store, 0)  # two rounds of 3 s
    stats = actor.take_stats()
    assert (stats.idle_s, stats.total_s, stats.idle_share) == (4.0, 10.0, 0.4)
    assert stats.rollout.sampled_tokens == 8
    pass_time(5.0)
    assert actor.take_stats().idle_share == 1.0  # from the moment that the last group was finished
    assert actor.take_stats().idle_share == 0.0  # no time has passed

    site.plan(1, 1, version=1)  # sampled by weights that come late
    waited = site.weights.wait

    def wait(**wanted_version: Any):
        pass_time(2.0)
        site.publish(1)
        return waited(**wanted_version)

    monkeypatch.setattr(site.weights, "wait", wait)
    play(actor, site.store, 1)
    stats = actor.take_stats()
    assert (stats.idle_s, stats.total_s) == (2.0, 8.0) and stats.rollout.sampled_tokens == 4


def test_an_actor_that_closes_gives_up_its_items_to_others(site):
    site.publish(0)
    items = site.plan(0, 4, version=0)
    scheduler = FakeScheduler(rounds=lambda item: 3 + 10 * (item.number > 0))
    actor = site.actor("one_step", 1, scheduler)
    for _ in range(5):
        actor.turn()
    assert site.store.missing(0) == items[1:] and scheduler.groups == 3
    heir = Claims(GroupStore(site.store.folder, "b"), WORK)
    site.works.append(heir)
    assert heir.claim(9) == []
    actor.close()
    assert scheduler.aborted == 1 and scheduler.groups == 0
    assert heir.claim(9) == items[1:] and heir.takeovers == 3


def test_an_actor_that_dies_gives_up_its_items_to_others(site):
    site.publish(0)
    site.plan(0, 4, version=0)
    lost = site.actor("one_step", 1, FakeScheduler(rounds=lambda item: 100), "lost")
    lost.turn()
    heir = site.actor("one_step", 1, FakeScheduler(), "heir")
    kill(site.works[0])
    while site.store.missing(0):
        heir.turn()
    assert site.store.takeovers(0) == 4
    assert {record.actor.name for record in site.store.read(0)} == {"heir"}


def test_a_group_of_faults_is_played_again_and_never_delivered(site):
    site.publish(0)
    site.plan(0, 1, version=0)
    broken = [True, False]

    class Faulty(FakeScheduler):
        def step(self):
            return [
                (item, faulted(group) if broken.pop(0) else group) for item, group in super().step()
            ]

    def faulted(group: Group) -> Group:
        return Group(
            group.task, tuple(dataclasses.replace(t, status="fault") for t in group.trajectories)
        )

    play(site.actor("one_step", 1, Faulty()), site.store, 0)
    assert not broken and {t.status for t in site.store.record(0, 0).group.trajectories} == {
        "submitted"
    }

    site.plan(1, 1, version=0)
    broken[:] = [True, True]
    with pytest.raises(
        SandboxUnavailable, match=r"all 2 episodes of task 't/0' ended in a fault .*, twice"
    ):
        play(site.actor("one_step", 1, Faulty(), "b"), site.store, 1)
    assert site.store.missing(1)


def test_in_flight_a_version_that_is_announced_but_never_comes_is_not_waited_for(site, monkeypatch):
    site.publish(0)
    # by a learner that died before it stored it
    monkeypatch.setattr(site.weights, "newest", lambda: 1)
    site.plan(0, 1, version=None)
    scheduler = FakeScheduler()
    play(site.actor("in_flight", 2, scheduler), site.store, 0)
    assert [version for what, version in scheduler.log if what == "load"] == [0]


def test_items_that_others_finished_are_dropped_without_asking_for_their_weights(site):
    site.publish(0, 1)
    site.plan(0, 1, version=0)
    actor = site.actor("one_step", 1, FakeScheduler())
    actor._claim()  # and is stopped
    kill(site.works[0])
    heir = site.actor("one_step", 1, FakeScheduler(), "heir")
    while site.store.missing(0):
        heir.turn()
    site.store.consume(0, site.store.read(0), version=0)
    site.plan(1, 1, version=1)
    actor._weights = types.SimpleNamespace(
        wait=lambda **wanted: site.weights.wait(exactly=1, deadline_s=1.0)
    )
    actor._begin()
    assert not actor._claimed and actor._loaded is None


def test_loading_weights_is_reported(site):
    site.publish(0, 1)
    site.plan(0, 1, version=0)
    site.plan(1, 1, version=1)
    actor = site.actor("one_step", 1, FakeScheduler())
    loaded = []
    actor._on_loaded = loaded.append
    play(actor, site.store, 0, 1)
    assert loaded == [0, 1]


def test_what_the_scheduler_raises_reaches_the_caller(site):
    site.publish(0)
    site.plan(0, 1, version=0)

    def fail(scheduler: FakeScheduler) -> None:
        raise RolloutTimeout(
            "no worker came back within worker_deadline_s=1; waiting for tasks ['t/0']"
        )

    actor = site.actor("one_step", 1, FakeScheduler(before_round=fail))
    with pytest.raises(RolloutTimeout, match="no worker came back"):
        actor.run(lambda: False)
