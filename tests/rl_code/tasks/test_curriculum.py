"""Kinds that are solved sometimes are drawn more often; nothing is lost or repeated; the state
resumes exactly.
"""

from __future__ import annotations

import collections
import json
import random

import pytest

from rl_code.tasks.curriculum import Curriculum, CurriculumConfig
from rl_code.types import Task, Tests

GROUP = 8
# Chances of a made-up policy, by level.
CHANCES = {0: 0.995, 1: 0.5, 2: 0.002}


def make_tasks(levels=(0, 1, 2), count=300) -> list[Task]:
    tests = Tests()
    return [
        Task(
            f"t{i}", (), {}, "a.py", "f", tests, tests, {}, meta={"level": levels[i % len(levels)]}
        )
        for i in range(count)
    ]


def play(pool: Curriculum, tasks: list[Task], steps: int, count: int = 16, seed: int = 0):
    """Steps of training with the made-up policy. Returns (tasks drawn, share of mixed groups)."""
    rng = random.Random(seed)
    drawn, mixed = [], 0
    for _ in range(steps):
        chosen = pool.draw(count)
        outcomes = {}
        for task in chosen:
            chance = CHANCES[tasks[task].meta["level"]]
            outcomes[task] = (sum(rng.random() < chance for _ in range(GROUP)), GROUP)
        mixed += sum(0 < solved < graded for solved, graded in outcomes.values())
        pool.record(outcomes)
        drawn.append(chosen)
    return drawn, mixed / (steps * count)


def test_kinds_that_are_solved_sometimes_are_drawn_more_often():
    tasks = make_tasks()
    pool = Curriculum(tasks, 0, CurriculumConfig(evenly=0.1), GROUP, None)
    assert pool.shares() == pytest.approx(dict.fromkeys("012", 1 / 3))
    drawn, _ = play(pool, tasks, 20)
    levels = collections.Counter(tasks[task].meta["level"] for step in drawn[10:] for task in step)
    assert levels[1] > levels[0] + levels[2] and min(levels.values()) > 0
    _, with_curriculum = play(pool, tasks, 10, seed=1)
    alike = Curriculum(tasks, 0, CurriculumConfig(evenly=1.0), GROUP, None)
    _, without = play(alike, tasks, 30, seed=1)
    assert with_curriculum > 1.5 * without
    rates = pool.rates()
    assert rates["0"] > 0.9 and 0.4 < rates["1"] < 0.6 and rates["2"] < 0.1


def test_estimates_follow_a_policy_that_gets_better():
    tasks = make_tasks((0, 1))
    pool = Curriculum(tasks, 0, CurriculumConfig(memory=0.5), GROUP, None)
    for solved in (0, 0, 0, GROUP, GROUP, GROUP, GROUP):
        pool.record(dict.fromkeys(pool.draw(8), (solved, GROUP)))
    assert all(rate > 0.9 for rate in pool.rates().values())


def test_a_draw_has_each_kind_as_often_as_its_share_says():
    tasks = make_tasks((0, 0, 0, 1))  # a list of unequal parts does not matter
    pool = Curriculum(tasks, 5, CurriculumConfig(), GROUP, None)
    pool.record({0: (GROUP, GROUP), 3: (3, GROUP)})
    for _ in range(20):
        shares = pool.shares()
        levels = collections.Counter(str(tasks[task].meta["level"]) for task in pool.draw(7))
        assert all(abs(levels[kind] - 7 * share) < 1 for kind, share in shares.items())


def test_every_task_of_a_kind_is_drawn_once_per_epoch():
    tasks = make_tasks((0, 1), count=40)
    pool = Curriculum(tasks, 1, CurriculumConfig(evenly=1.0), GROUP, None)
    drawn = [task for _ in range(20) for task in pool.draw(4)]
    assert sorted(drawn) == sorted([*range(40)] * 2)


def test_a_resumed_pool_goes_on_as_one_that_was_not_stopped():
    tasks = make_tasks()
    whole, _ = play(Curriculum(tasks, 2, CurriculumConfig(), GROUP, None), tasks, 6)
    pool = Curriculum(tasks, 2, CurriculumConfig(), GROUP, None)
    rng = random.Random(0)
    for step in range(6):
        position = json.loads(json.dumps(pool.position()))
        pool = Curriculum(tasks, 2, CurriculumConfig(), GROUP, position)
        chosen = pool.draw(16)
        assert chosen == whole[step]
        outcomes = {}
        for task in chosen:
            chance = CHANCES[tasks[task].meta["level"]]
            outcomes[task] = (sum(rng.random() < chance for _ in range(GROUP)), GROUP)
        pool.record(outcomes)


def test_a_pool_behind_another_one_repeats_none_of_its_tasks():
    tasks = make_tasks(count=90)
    first = Curriculum(tasks, 3, CurriculumConfig(), GROUP, None)
    before = [task for _ in range(3) for task in first.draw(10)]
    fresh = Curriculum(tasks, 3, CurriculumConfig(), GROUP, None)
    second = Curriculum(tasks, 3, CurriculumConfig(), GROUP, fresh.position_after(45))
    after = [task for _ in range(2) for task in second.draw(10)]
    order = [second._order[i] for i in range(45)]
    assert not set(order) & set(after) and len({*before, *after}) > len(before)


def test_metrics_name_every_kind():
    pool = Curriculum(make_tasks(), 0, CurriculumConfig(), GROUP, None)
    assert sorted(pool.metrics()) == [
        *(f"tasks/pass_rate_{level}" for level in range(3)),
        *(f"tasks/share_{level}" for level in range(3)),
    ]


def test_groups_of_one_are_drawn_evenly():
    pool = Curriculum(make_tasks(), 0, CurriculumConfig(), 1, None)
    assert pool.shares() == pytest.approx(dict.fromkeys("012", 1 / 3))


def test_what_cannot_be_a_curriculum_is_refused_by_name():
    tasks = make_tasks()
    with pytest.raises(
        ValueError, match=r"curriculum.by='depth': task 't.*' has no such key .*level"
    ):
        Curriculum(tasks, 0, CurriculumConfig(by="depth"), GROUP, None)
    with pytest.raises(ValueError, match="are of one kind, 4"):
        Curriculum(make_tasks((4,)), 0, CurriculumConfig(), GROUP, None)
    with pytest.raises(ValueError, match=r"memory=1.0 must be at least 0 and below 1"):
        CurriculumConfig(memory=1.0)
    with pytest.raises(ValueError, match=r"evenly=0.0 must be above 0"):
        CurriculumConfig(evenly=0.0)
    position = Curriculum(tasks, 0, CurriculumConfig(), GROUP, None).position()
    with pytest.raises(ValueError, match="the position is of 300 tasks, there are 299"):
        Curriculum(tasks[:-1], 0, CurriculumConfig(), GROUP, position)
