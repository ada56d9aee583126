"""No token that is trained on is older than the bound, whatever is slow and whoever dies, and
nothing is dropped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import pytest

from configs import quickstart
from rl_code.config.read_config import build
from rl_code.recording import fork_position
from rl_code.rollout.actor import Actor
from rl_code.rollout.group_source import FromOtherProcesses, StopWaiting
from rl_code.run.config import RunConfig
from rl_code.schedule import Schedule
from rl_code.store import audit
from rl_code.store.claims import Claims, WorkConfig
from rl_code.store.errors import StoreError
from rl_code.store.group_records import GroupRecord
from rl_code.store.steps import Item
from rl_code.store.store import GroupStore
from rl_code.tasks.order import Shuffled
from rl_code.tasks.screening import ScreeningConfig, TaskPool
from rl_code.types import Group
from rl_code.weights.local import LocalWeights
from tests.rl_code.rollout.test_actor import (
    WORK,
    FakeScheduler,
    LateWeights,
    kill,
    make_asynchrony,
    make_tasks,
)
from tests.rl_code.rollout.test_actor import make_group as sampled_group
from tests.rl_code.weights.small import assert_is, mesh, model_of, wanted

TASKS, PER_STEP, GROUP_SIZE = 8, 5, 2
ALL_TASKS = 40


pytestmark = pytest.mark.usefixtures("quick_store")


def make_schedule(
    store: GroupStore, mode: str, k: int, pool: TaskPool, steps: int, next_step: int = 0, **changes
):
    config = make_asynchrony(mode, k, changes.pop("work", WORK))
    sizes = dict(tasks_per_step=PER_STEP, group_size=GROUP_SIZE, samples=3, seed=5) | changes
    return Schedule(
        config,
        store,
        pool,
        steps=steps,
        next_step=next_step,
        first_group=lambda step: step * sizes["tasks_per_step"],
        **sizes,
    )


# --- The bound ------------------------------------------------------------------------------------

LIVELY = WorkConfig(heartbeat_s=0.02, heartbeat_timeout_s=0.2, stall_s=0.15, deadline_s=30.0)
MODES = [
    ("sync", 0),
    ("one_step", 1),
    ("behind", 3),
    ("in_flight", 1),
    ("in_flight", 2),
    ("in_flight", 4),
]
FAULTS = ("none", "killed", "hung")
SEEDS = 6


class Killed(BaseException):
    """Ends an actor's thread on the spot."""


@dataclasses.dataclass
class Played:
    """What one run did. ages: of the tokens of each step when they were trained on. begun: when
    each item was, by step.

    updates: (begin, end) of each step's. mixed: whether some message has tokens of two versions.
    """

    ages: list[set[int]] = dataclasses.field(default_factory=list)
    begun: dict[int, list[float]] = dataclasses.field(default_factory=dict)
    updates: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    mixed: bool = False
    report: audit.Report | None = None

    @property
    def overlaps(self) -> bool:
        """Whether a group of some step began before the update of the step before it ended."""
        return any(
            min(self.begun[step + 1]) < end for step, (_, end) in enumerate(self.updates[:-1])
        )


class RandomScheduler(FakeScheduler):
    """Rounds and tools take random times; notes when groups begin, and checks the weights that it
    is given.

    fault: what happens to its actor in the first round with a group open.
    """

    def __init__(self, played: Played, rng: random.Random, fault: str):
        self.begun = threading.Event()
        self._played, self._rng, self._fault = played, rng, fault
        super().__init__(
            episodes=rng.choice([4, 8, 20]),
            rounds=lambda item: rng.randint(1, 6),
            before_round=self._delay,
            waits=lambda: rng.random() < 0.2,
        )

    def load(self, model, version, *, recompute=False):
        assert_is(model, version, mesh())
        super().load(model, version, recompute=recompute)

    def submit(self, *args, tag, **named):
        self._played.begun.setdefault(tag.step, []).append(time.monotonic())
        super().submit(*args, tag=tag, **named)
        self.begun.set()

    def _delay(self, scheduler: FakeScheduler) -> None:
        fault, self._fault = self._fault, "none"
        if fault == "killed":
            raise Killed
        time.sleep(0.45 if fault == "hung" else self._rng.choice([0.0, 0.001, 0.003, 0.01]))


def play(folder: Path, mode: str, k: int, seed: int) -> Played:
    """A run of a learner and two or three actors, in threads of this process, with random
    delays.
    """
    rng = random.Random(f"{mode} {k} {seed}")
    fault = FAULTS[seed % len(FAULTS)]
    steps = k + 4
    count = rng.choice([2, 3])
    played = Played()
    errors = []
    stop = threading.Event()
    store = GroupStore(folder, "learner")
    late = rng.random() < 0.5
    weights = LocalWeights(wanted(mesh()), keep=steps + 1 if late else k + 1)
    weights.publish(0, model_of(0, mesh()))

    def act(scheduler: RandomScheduler, name: str, chance: random.Random) -> None:
        subscriber = LateWeights(weights, lambda: chance.randint(0, k + 2)) if late else weights
        own = GroupStore(folder, name)
        work = Claims(own, LIVELY)
        config = make_asynchrony(mode, k, LIVELY)
        actor = Actor(scheduler, own, work, subscriber, make_tasks(TASKS), lambda *_: None, config)
        try:
            actor.run(lambda: stop.is_set() or store.is_consumed(steps - 1))
        except Killed:
            kill(work)
            return
        except BaseException as error:
            errors.append(error)
        actor.close()

    class Request:
        """Ends the learner's wait when an actor has failed."""

        requested = property(lambda self: bool(errors))

    threads = []
    with (
        FromOtherProcesses(store, LIVELY.deadline_s, Request()) as source,
        contextlib.ExitStack() as stack,
    ):
        schedule = make_schedule(store, mode, k, TaskPool(TASKS, 0, None, None), steps)
        schedule.plan(0, source.wait)
        stack.callback(stop.set)
        for i in range(count):
            scheduler = RandomScheduler(
                played, random.Random(rng.random()), fault if i == 0 else "none"
            )
            args = scheduler, f"actor-{i}", random.Random(rng.random())
            threads.append(threading.Thread(target=act, args=args, name=f"actor-{i}"))
            threads[-1].start()
            stack.callback(threads[-1].join)
            stack.callback(stop.set)
            if i == 0:
                assert scheduler.begun.wait(LIVELY.deadline_s)
        for step in range(steps):
            try:
                learn(store, schedule, source, weights, played, step, rng)
            except StopWaiting:
                raise errors[0] from None
    assert not errors, errors
    played.report = audit.check(folder, k)
    return played


def learn(store, schedule, source, weights, played, step, rng) -> None:
    """A step of the learner, as ``train`` makes it."""
    pause = lambda: time.sleep(rng.choice([0.0, 0.0, 0.005, 0.03]))  # noqa: E731
    schedule.plan(step, source.wait)
    pause()
    records = source.wait(step)
    sampled = [t.versions[t.sampled] for record in records for t in record.group.trajectories]
    played.ages.append({step - int(version) for versions in sampled for version in versions})
    played.mixed |= any(len(set(versions.tolist())) > 1 for versions in sampled)
    begin = time.monotonic()
    pause()
    made = weights.publish(step + 1, model_of(step + 1, mesh()))
    played.updates.append((begin, time.monotonic()))
    assert store.consume(step, records, version=step, weights=made.checksum)
    pause()


@pytest.mark.quick(first=2)
@pytest.mark.parametrize(("mode", "k"), MODES)
def test_staleness_is_bounded_and_every_planned_group_is_used_once(mode, k, tmp_path):
    played = []
    for seed in range(SEEDS):
        run = play(tmp_path / str(seed), mode, k, seed)
        played.append(run)
        report = run.report
        steps = k + 4
        assert report.problems == [], seed
        assert (report.steps, report.consumed, report.groups, report.waiting) == (
            steps,
            steps,
            steps * PER_STEP,
            0,
        )
        assert (
            max(map(max, run.ages)) == report.staleness_max <= k and min(map(min, run.ages)) >= 0
        ), seed
        if mode != "in_flight":
            assert run.ages == [{min(step, k)} for step in range(steps)], seed
            assert not run.mixed
        if mode == "sync":
            ends = [end for _, end in run.updates]
            assert all(min(run.begun[step + 1]) > ends[step] for step in range(steps - 1)), seed
        if FAULTS[seed % len(FAULTS)] == "killed":
            assert report.takeovers > 0, seed
    assert sum(run.overlaps for run in played) == (0 if mode == "sync" else SEEDS)
    assert any(run.mixed for run in played) == (mode == "in_flight")


# --- The plan -------------------------------------------------------------------------------------


class Learner:
    """Steps without actors or weights: what a task gives is a function of the task and of how often
    it was looked at.

    planned: the items of each step. positions: what a checkpoint before each step holds.
    """

    def __init__(
        self,
        folder: Path,
        mode: str,
        k: int,
        screening: ScreeningConfig | None,
        steps: int,
        position=None,
    ):
        position = position or {"tasks": None, "planned": 0}
        self.store = GroupStore(folder, "learner")
        self.pool = TaskPool(ALL_TASKS, 3, screening, position["tasks"])
        self.schedule = make_schedule(self.store, mode, k, self.pool, steps, position["planned"])
        self.position, self.screened = position, 0

    def wait(self, step: int, numbers: Sequence[int]) -> list[GroupRecord]:
        items = self.store.items(step)
        return [outcome(items[number]) for number in numbers]

    def step(self, step: int, items: Sequence[Item] | None = None) -> None:
        """items: of this step, where another store has them."""
        self.screened += self.schedule.plan(step, self.wait)
        items = items or self.store.items(step)
        trained = [item for item in items if item.kind == "train"]
        self.pool.record({item.task: outcome(item).group.solved for item in trained})
        self.position = json.loads(
            json.dumps({"tasks": self.pool.position(), "planned": self.schedule.next_step})
        )


def outcome(item: Item) -> GroupRecord:
    """As many solved samples as a hash of task and step says; of every third task all or none."""
    group = sampled_group(
        make_tasks(ALL_TASKS)[item.task], item.group, item.seed, [[0]] * item.group_size
    )
    good = random.Random(f"{item.task} {item.step // 2}").choice([0, 1, 1, 1, item.group_size])
    members = tuple(dataclasses.replace(t, solved=t.index < good) for t in group.trajectories)
    return GroupRecord(item.step, item.number, None, 0.0, (0,), Group(group.task, members), "")


SCREENING = ScreeningConfig(samples=3, chunk=4, least=5, retire=1)


@pytest.mark.parametrize("screening", [None, SCREENING], ids=["all", "screened"])
@pytest.mark.parametrize(
    ("mode", "k"), [("sync", 0), ("one_step", 1), ("behind", 2), ("in_flight", 3)]
)
def test_a_restart_from_any_checkpoint_plans_the_same(mode, k, screening, tmp_path):
    steps = 7
    whole = Learner(tmp_path / "whole", mode, k, screening, steps)
    positions = []
    for step in range(steps):
        positions.append(whole.position)
        whole.step(step)
    plans = [whole.store.items(step) for step in range(steps)]
    kinds = {item.kind for plan in plans for item in plan}
    assert kinds == ({"train"} if screening is None else {"train", "screen"})
    assert (
        screening is None or sum(any(item.kind == "screen" for item in plan) for plan in plans) > 1
    )
    for start, position in enumerate(positions):
        # In the store that there is, where another plan would be an error, and in one that has
        # nothing yet.
        again = Learner(tmp_path / "whole", mode, k, screening, steps, position)
        fresh = Learner(tmp_path / f"fresh-{start}", mode, k, screening, steps, position)
        for step in range(start, steps):
            again.step(step)
            fresh.step(step, plans[step])
        assert again.position == fresh.position == whole.position
        first = position["planned"]
        assert [fresh.store.items(step) for step in range(first, steps)] == plans[first:]


@pytest.mark.parametrize(("mode", "k"), [("sync", 0), ("in_flight", 2)])
def test_tasks_that_do_not_fit_give_way_to_the_next_in_every_plan(mode, k, tmp_path):
    """Also after a restart, and in a fork whose checkpoint is from before the plans."""

    def fits(task: int) -> bool:
        return task % 3 != 0

    def planned(name: str, position=None, first: int = 0, last: int = 6):
        pool = TaskPool(ALL_TASKS, 3, None, position)
        store = GroupStore(tmp_path / name, "learner")
        schedule = make_schedule(store, mode, k, pool, 6, first, fits=fits)
        schedule.plan(last, never)
        tasks = [[item.task for item in store.items(step)] for step in range(first, 6)]
        return tasks, pool.position(), schedule, store

    def never(step, numbers):
        raise AssertionError("nothing is screened")

    every, end, schedule, store = planned("whole")
    assert all(len(tasks) == PER_STEP and all(map(fits, tasks)) for tasks in every)
    order = Shuffled(ALL_TASKS, 3)
    drawn = [order[i] for i in range(end["drawn"])]
    assert [task for task in drawn if fits(task)] == [*itertools.chain(*every)]
    left_out = end["drawn"] - 6 * PER_STEP
    assert schedule.take_metrics() == {"tasks/too_long": left_out} and left_out > 0
    assert schedule.take_metrics() == {"tasks/too_long": 0}
    behind = fork_position._behind(store.items(0) + store.items(1), 0, order)
    assert planned("again", end | {"drawn": behind}, first=2)[:2] == (every[2:], end)


@pytest.mark.parametrize(
    ("mode", "k"), [("sync", 0), ("one_step", 1), ("behind", 3), ("in_flight", 1), ("in_flight", 4)]
)
def test_a_step_is_planned_as_soon_as_its_oldest_weights_are_there_and_not_before(
    mode, k, tmp_path
):
    steps = 8
    learner = Learner(tmp_path / "store", mode, k, SCREENING, steps)
    for version in range(steps):
        learner.schedule.plan(version, learner.wait)
        planned = [
            step for step in range(steps + k + 1) if (tmp_path / f"store/steps/{step:08}").exists()
        ]
        assert planned == list(range(min(version + k + 1, steps)))
        for step in planned:
            versions = {item.version for item in learner.store.items(step)}
            assert versions == ({None} if mode == "in_flight" else {max(0, step - k)})


def test_items_that_choose_the_tasks_come_before_those_that_are_trained_on(tmp_path):
    learner = Learner(tmp_path / "store", "one_step", 1, SCREENING, 6)
    screened = 0
    seeds = set()
    mixed = set()
    for step in range(6):
        learner.step(step)
        items = learner.store.items(step)
        assert [item.number for item in items] == list(range(len(items)))
        chosen = [item for item in items if item.kind == "screen"]
        trained = items[len(chosen) :]
        assert len(trained) == PER_STEP and {item.kind for item in trained} == {"train"}
        assert len({item.task for item in trained}) == PER_STEP
        mixed |= {
            item.task for item in chosen if 0 < outcome(item).group.solved[0] < SCREENING.samples
        }
        assert {item.task for item in trained} <= mixed
        assert [item.group for item in chosen] == list(range(len(chosen)))
        assert [item.group for item in trained] == [PER_STEP * step + i for i in range(PER_STEP)]
        assert {item.group_size for item in chosen} <= {SCREENING.samples}
        assert {item.group_size for item in trained} == {GROUP_SIZE}
        key = jax.random.key_data(jax.random.key(5 + 1)).tolist()
        assert {item.seed for item in trained} == {tuple(key)}
        seeds |= {item.seed for item in chosen}
        screened += len(chosen)
    assert learner.screened == screened > SCREENING.chunk
    # no two groups of a run share a random stream: each step chooses its tasks with a key of its
    # own
    assert (
        len(seeds)
        == len([1 for step in range(6) if learner.store.items(step)[0].kind == "screen"])
        > 1
    )
    assert tuple(key) not in seeds


def test_another_process_of_the_learner_plans_nothing_and_checks_what_is_planned(tmp_path):
    first = Learner(tmp_path / "store", "in_flight", 2, SCREENING, 5)
    plans = [first.step(step) or first.store.items(step) for step in range(5)]
    reading = GroupStore(tmp_path / "store")

    def follow(steps: int, **changes) -> Schedule:
        pool = TaskPool(ALL_TASKS, 3, SCREENING, None)
        schedule = make_schedule(reading, "in_flight", 2, pool, steps, **changes)
        for step in range(steps):
            schedule.plan(step, first.wait)
            trained = [item for item in plans[step] if item.kind == "train"]
            pool.record({item.task: outcome(item).group.solved for item in trained})
        return schedule

    assert follow(5).next_step == 5
    with pytest.raises(
        StoreError, match=r"another plan of step 0 stands in .* group_size = 2 there, 4 here"
    ):
        follow(5, group_size=4)
    hasty = dataclasses.replace(WORK, stall_s=0.1, heartbeat_timeout_s=0.1, deadline_s=0.3)
    with pytest.raises(StoreError, match=r"nobody planned item \(5, 0\) within 0\.3 s"):
        follow(6, work=hasty)


def test_faults_of_the_sandbox_are_no_graded_episodes():
    group = sampled_group(make_tasks(1)[0], 0, (1, 2), [[0]] * 4)
    outcomes = zip(group.trajectories, (True, False, True, False), strict=True)
    members = [dataclasses.replace(t, solved=solved) for t, solved in outcomes]
    members[2] = dataclasses.replace(members[2], status="fault")
    assert Group(group.task, tuple(members)).solved == (1, 3)


@pytest.mark.parametrize(
    ("mode", "k", "changes", "message"),
    [
        ("sync", 1, {}, r"max_staleness=1 must be 0 in mode='sync'"),
        ("one_step", 0, {}, r"max_staleness=0 must be 1 in mode='one_step'"),
        ("one_step", 2, {}, r"max_staleness=2 must be 1 in mode='one_step'"),
        ("behind", 0, {}, r"max_staleness=0 must be at least 1 in mode='behind'"),
        ("in_flight", 0, {}, r"max_staleness=0 must be at least 1 in mode='in_flight'"),
        ("one_step", 1, {"recompute": True}, r"recompute=True has no meaning in mode='one_step'"),
        ("sync", 0, {"recompute": True}, r"recompute=True has no meaning in mode='sync'"),
        ("later", 1, {}, r"mode='later' is not one of sync, one_step, behind, in_flight"),
    ],
)
def test_values_that_contradict_each_other_are_refused_by_name(mode, k, changes, message):
    with pytest.raises(ValueError, match=message):
        make_asynchrony(mode, k, **changes)


def test_weights_that_actors_need_must_be_kept():
    config = make_asynchrony("in_flight", 3)
    with pytest.raises(ValueError, match=r"weights.keep=3 must be more than max_staleness=3"):
        dataclasses.replace(config, weights=dataclasses.replace(config.weights, keep=3))


def test_the_learner_and_the_actors_have_the_same_bound():
    settings = quickstart.get_config("smoke")
    settings.train.pack.max_staleness = 1
    with pytest.raises(
        ValueError,
        match=r"train.pack.max_staleness: no such key; its value is that of "
        r"config.asynchrony.max_staleness",
    ):
        build(RunConfig, settings)
    del settings.train.pack.max_staleness
    settings.asynchrony = dict(mode="in_flight", max_staleness=3)
    assert build(RunConfig, settings).train.pack.max_staleness == 3
