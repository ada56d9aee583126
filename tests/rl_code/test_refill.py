"""A step draws further tasks until enough of its groups teach something; a restart draws the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from rl_code.config.read_config import ConfigError, build
from rl_code.learner.advantages import ADVANTAGES, informative
from rl_code.run.sections import TrainConfig
from rl_code.store.errors import StoreError
from rl_code.store.group_records import GroupRecord
from rl_code.store.steps import Item
from rl_code.store.store import GroupStore
from rl_code.tasks.curriculum import Curriculum, CurriculumConfig
from rl_code.tasks.refill import RefillConfig
from rl_code.tasks.screening import ScreeningConfig, TaskPool
from rl_code.types import Group, Task
from tests.rl_code.learner.conftest import make_group, make_trajectory
from tests.rl_code.test_schedule import ALL_TASKS, GROUP_SIZE, PER_STEP, make_schedule, outcome

MODES = [("sync", 0), ("one_step", 1), ("in_flight", 3)]
STEPS = 6
REFILL = RefillConfig(3)
SCREENING = ScreeningConfig(samples=3, chunk=4, least=5, retire=2)


pytestmark = pytest.mark.usefixtures("quick_store")


def mixed(group: Group) -> bool:
    return 0 < sum(t.solved for t in group.trajectories) < GROUP_SIZE


class Learner:
    """Steps without actors or weights, of groups whose outcomes a hash of task and step says.

    trained: the items of each step. metrics: of each step.
    """

    def __init__(
        self,
        folder: Path,
        mode: str,
        k: int,
        *,
        kind: str = "all",
        position=None,
        refill: RefillConfig | None = REFILL,
        teaches=mixed,
    ):
        position = position or {"tasks": None, "planned": 0}
        self.store = GroupStore(folder, "learner")
        if kind == "curriculum":
            levels = [Task(f"t{n}", (), meta={"level": n % 3}) for n in range(ALL_TASKS)]
            config = CurriculumConfig()
            self.pool: TaskPool = Curriculum(levels, 3, config, GROUP_SIZE, position["tasks"])
        else:
            screening = SCREENING if kind == "screened" else None
            self.pool = TaskPool(ALL_TASKS, 3, screening, position["tasks"])
        planned = position["planned"]
        self.schedule = make_schedule(
            self.store, mode, k, self.pool, STEPS, planned, refill=refill, teaches=teaches
        )
        self.position = position
        self.trained: dict[int, list[Item]] = {}
        self.metrics: dict[int, dict[str, float]] = {}

    def wait(self, step: int, numbers: Sequence[int]) -> list[GroupRecord]:
        items = self.store.items(step)
        return [outcome(items[number]) for number in numbers]

    def step(self, step: int) -> None:
        self.schedule.plan(step, self.wait)
        items = self.trained[step] = self.schedule.fill(step, self.wait)
        self.metrics[step] = self.schedule.take_metrics()
        self.pool.record({item.task: outcome(item).group.solved for item in items})
        position = {"tasks": self.pool.position(), "planned": self.schedule.next_step}
        self.position = json.loads(json.dumps(position))


@pytest.mark.parametrize("kind", ["all", "screened", "curriculum"])
@pytest.mark.parametrize(("mode", "k"), MODES)
def test_steps_are_filled_with_groups_that_teach(mode, k, kind, tmp_path):
    learner = Learner(tmp_path / "store", mode, k, kind=kind)
    streams = []
    refills = 0
    for step in range(STEPS):
        learner.step(step)
        items = learner.store.items(step)
        assert [item.number for item in items] == list(range(len(items)))
        trained = [item for item in items if item.trained]
        assert learner.trained[step] == trained
        first, further = trained[:PER_STEP], trained[PER_STEP:]
        assert {item.kind for item in first} == {"train"}
        assert {item.kind for item in further} <= {"refill"}
        teaching = sum(mixed(outcome(item).group) for item in trained)
        # As many are drawn as are missing, so there is never one too many.
        assert teaching == PER_STEP or (teaching < PER_STEP and len(trained) == 3 * PER_STEP)
        versions = {item.version for item in further}
        assert versions <= {None if mode == "in_flight" else step}
        if kind == "all":
            assert len({item.task for item in trained}) == len(trained)
        metrics = learner.metrics[step]
        assert metrics["tasks/drawn"] == len(trained)
        assert metrics["tasks/thrown_away"] == len(trained) - teaching
        refills += metrics["tasks/refills"]
        streams += [(item.seed, item.group) for item in items]
    assert refills > 0
    assert len(set(streams)) == len(streams)  # no two groups of a run share a random stream


@pytest.mark.parametrize("kind", ["all", "screened", "curriculum"])
@pytest.mark.parametrize(("mode", "k"), MODES)
def test_a_restart_from_any_checkpoint_fills_the_same(mode, k, kind, tmp_path):
    whole = Learner(tmp_path / "whole", mode, k, kind=kind)
    positions = []
    for step in range(STEPS):
        positions.append(whole.position)
        whole.step(step)
    for start, position in enumerate(positions):
        again = Learner(tmp_path / "whole", mode, k, kind=kind, position=position)
        for step in range(start, STEPS):
            again.step(step)
        assert again.position == whole.position
        assert again.trained == {at: whole.trained[at] for at in range(start, STEPS)}


def test_a_learner_that_died_between_two_draws_goes_on_with_the_same_ones(tmp_path):
    whole, killed = (Learner(tmp_path / name, "sync", 0) for name in ("whole", "killed"))
    whole.step(0)
    assert whole.metrics[0]["tasks/refills"] > 1

    class Death(BaseException):
        pass

    waited = []

    def wait(step, numbers):
        waited.append(numbers)
        if len(waited) == 2:  # the first further tasks are planned, and not sampled
            raise Death
        return killed.wait(step, numbers)

    killed.schedule.plan(0, wait)
    with pytest.raises(Death):
        killed.schedule.fill(0, wait)
    assert PER_STEP < len(killed.store.items(0)) < len(whole.trained[0])
    again = Learner(tmp_path / "killed", "sync", 0)
    again.step(0)
    assert again.trained == whole.trained


def test_what_is_planned_anyway_does_not_depend_on_refills(tmp_path):
    filled = Learner(tmp_path / "filled", "one_step", 1)
    plain = Learner(tmp_path / "plain", "one_step", 1, refill=None)
    for step in range(STEPS):
        filled.step(step)
        plain.step(step)
        assert filled.trained[step][:PER_STEP] == plain.trained[step]
    assert filled.position == plain.position
    assert plain.metrics[0] == {"tasks/too_long": 0} and {
        item.kind for item in plain.trained[0]
    } == {"train"}


def test_a_step_that_nothing_teaches_is_bounded(tmp_path):
    learner = Learner(tmp_path / "store", "sync", 0, teaches=lambda group: False)
    learner.step(0)
    assert learner.metrics[0] == {
        "tasks/too_long": 0,
        "tasks/drawn": 3 * PER_STEP,
        "tasks/thrown_away": 3 * PER_STEP,
        "tasks/refills": 2,
    }


def test_groups_that_another_advantage_asked_for_are_refused(tmp_path):
    Learner(tmp_path / "store", "sync", 0).step(0)
    other = Learner(tmp_path / "store", "sync", 0, teaches=lambda group: True)
    with pytest.raises(StoreError, match=r"step 0 has \d+ groups on record and 5 by its plan"):
        other.step(0)


def test_a_small_pool_repeats_tasks_when_it_has_no_others():
    pool = TaskPool(3, 0, None, None)
    taken: set[int] = set()
    for place in range(3):
        taken.add(pool.another(0, place, taken))
    assert taken == {0, 1, 2}
    assert pool.another(0, 3, taken) in taken
    before = pool.position()
    assert [pool.another(1, at, set()) for at in range(9)] == [
        pool.another(1, at, set()) for at in range(9)
    ]
    assert pool.position() == before


def test_a_group_teaches_if_an_advantage_is_not_zero():
    def group(*rewards, status="submitted"):
        return make_group(
            make_trajectory([1, 2], [0, 1], prompt_length=1, reward=reward, status=status)
            for reward in rewards
        )

    grpo = ADVANTAGES["grpo"]()
    assert informative(group(1.0, 0.0), grpo)
    assert not informative(group(1.0, 1.0), grpo)
    assert not informative(group(1.0, 0.0, status="fault"), grpo)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"group_size": 1}, "group_size=1 must be at least 2"),
        ({"pack": {"drop_uninformative": False}}, "set it to True, or refill to None"),
        ({"pack": {"prompt_slots": 64}}, "prompt_slots=64 means two phases"),
        ({"refill": {"most": 1}}, "most=1 must be at least 2"),
    ],
)
def test_configs_that_cannot_be_filled_again_are_refused(changes, match):
    settings = {
        "steps": 1,
        "tasks_per_step": 2,
        "group_size": 2,
        "refill": {"most": 2},
        "optimizer": {"learning_rate": 0.1},
    }
    assert build(TrainConfig, settings, "train").refill == RefillConfig(2)
    with pytest.raises(ConfigError, match=match):
        build(TrainConfig, settings | changes, "train")
