"""Every task is drawn once per epoch; a pool holds what can be learned from; the state resumes
exactly.
"""

from __future__ import annotations

import collections
import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_code.tasks.order import AsGiven, Shuffled
from rl_code.tasks.screening import ScreeningConfig, TaskPool

CONFIG = ScreeningConfig(samples=8, chunk=10, least=6, retire=2)


def outcome(task: int, visit: int = 0) -> int:
    """How many of 8 samples a made-up policy solves: tasks of each third are impossible, easy, and
    in between.
    """
    return (0, 8, 1 + (task + visit) % 7)[task % 3]


def fill(pool: TaskPool) -> list[int]:
    """Screens until the pool suffices; the tasks sampled."""
    sampled = []
    while tasks := pool.to_screen():
        pool.screened({task: (outcome(task), 8) for task in tasks})
        sampled += tasks
    return sampled


@pytest.mark.parametrize(
    ("count", "seed", "begins"),
    [
        (1, 0, [0, 0]),
        (3, 2**32 - 1, [2, 1, 0, 0, 2, 1]),
        (7, 2**40 + 5, [4, 0, 5, 3, 1, 6, 2, 2, 5, 0, 3, 1, 4, 6]),
        (10, 3, [4, 7, 0, 8, 2, 5, 3, 6, 1, 9, 6, 0, 4, 3, 2, 1, 9, 8, 7, 5]),
        (50, 12345, None),
    ],
)
def test_every_epoch_is_a_permutation_and_the_one_of_recorded_runs(count, seed, begins):
    order = Shuffled(count, seed)
    for epoch in range(3):
        assert sorted(order[epoch * count + i] for i in range(count)) == list(range(count))
    if begins is not None:
        assert [order[i] for i in range(2 * count)] == begins


def test_epochs_and_seeds_differ():
    order = Shuffled(50, 0)
    other = Shuffled(50, 1)
    assert [order[i] for i in range(50)] != [order[50 + i] for i in range(50)]
    assert [order[i] for i in range(50)] != [other[i] for i in range(50)]


def test_tasks_may_be_drawn_in_the_order_of_their_source_across_a_resume():
    pool = TaskPool(5, 3, None, None, shuffled=False)
    assert pool.draw(4) == [0, 1, 2, 3]
    pool = TaskPool(5, 3, None, json.loads(json.dumps(pool.position())), shuffled=False)
    assert pool.draw(4) == [4, 0, 1, 2]
    with pytest.raises(IndexError, match="must not be negative"):
        AsGiven(5)[-1]


# few counts, since an epoch of few tasks takes long to draw
@given(
    st.sampled_from([1, 2, 3, 8, 30]), st.lists(st.integers(1, 9), max_size=12), st.integers(0, 12)
)
@settings(max_examples=30, deadline=None)
def test_without_screening_nothing_is_skipped_or_repeated_across_a_resume(count, sizes, stop):
    pool = TaskPool(count, 3, None, None)
    assert pool.to_screen() == []
    drawn = []
    for i, size in enumerate(sizes):
        if i == stop:
            pool = TaskPool(count, 3, None, json.loads(json.dumps(pool.position())))
        drawn += pool.draw(size)
    for epoch in range(len(drawn) // count):
        assert sorted(drawn[epoch * count : (epoch + 1) * count]) == list(range(count))


def test_only_tasks_that_tell_samples_apart_enter_the_pool():
    pool = TaskPool(90, 0, CONFIG, None)
    sampled = fill(pool)
    assert len(sampled) == len(set(sampled)) < 90
    assert len(pool.active) >= CONFIG.least
    assert set(pool.active) == {task for task in sampled if 0 < outcome(task) < 8}


def test_a_draw_goes_through_the_whole_pool_before_it_repeats():
    pool = TaskPool(90, 0, CONFIG, None)
    fill(pool)
    size = len(pool.active)
    drawn = [task for _ in range(3) for task in pool.draw(size)]
    assert collections.Counter(drawn) == dict.fromkeys(pool.active, 3)
    for _ in range(20):
        assert len(set(pool.draw(size - 1))) == size - 1


def test_used_up_tasks_leave_and_fresh_ones_are_screened_before_old_ones():
    pool = TaskPool(60, 0, CONFIG, None)
    seen = fill(pool)
    used = list(pool.active)
    for _ in range(CONFIG.retire):
        assert set(used) <= set(pool.active)
        pool.record({task: (8, 8) for task in used})
    assert pool.active == ()
    fresh = fill(pool)
    assert not set(fresh) & set(seen)
    while pool.to_screen() == [] and pool.active:
        for _ in range(CONFIG.retire):
            pool.record({task: (0, 8) for task in pool.active})
    while not set(again := pool.to_screen()) & set(seen):
        pool.screened({task: (0, 8) for task in again})
    old = [task for task in again if task in seen]
    unsolved = [task for task in seen if task not in used]
    assert old == unsolved[: len(old)]


def test_an_informative_group_keeps_a_task_in_the_pool():
    pool = TaskPool(60, 0, CONFIG, None)
    fill(pool)
    task = pool.active[0]
    for _ in range(5):
        pool.record({task: (0, 8)})
        pool.record({task: (3, 8)})
    assert task in pool.active


def test_a_group_of_nothing_but_faults_is_no_evidence():
    pool = TaskPool(60, 0, CONFIG, None)
    fill(pool)
    before = pool.active
    for _ in range(5):
        pool.record({task: (0, 0) for task in before})
    assert pool.active == before


def test_a_set_that_teaches_nothing_is_an_error_and_a_small_pool_is_used():
    hopeless = TaskPool(25, 0, CONFIG, None)
    with pytest.raises(
        ValueError, match="none of 25 tasks is solved by some but not all of 8 samples"
    ):
        while tasks := hopeless.to_screen():
            hopeless.screened({task: (0, 8) for task in tasks})
    small = TaskPool(25, 0, CONFIG, None)
    sampled = []
    while tasks := small.to_screen():
        small.screened({task: (task == 7, 8) for task in tasks})
        sampled += tasks
    assert sorted(sampled) == list(range(25)) and small.active == (7,)
    assert small.draw(3) == [7, 7, 7]


@pytest.mark.long
def test_a_resumed_pool_goes_on_as_if_never_stopped():
    def run(*interrupted: int) -> list[list[int]]:
        pool = TaskPool(60, 1, CONFIG, None)
        trace = []
        for step in range(31):
            if step in interrupted:
                pool = TaskPool(60, 1, CONFIG, json.loads(json.dumps(pool.position())))
            trace.append(fill(pool))
            tasks = pool.draw(5)
            trace.append(tasks)
            pool.record({task: (outcome(task, step) if step < 9 else 8, 8) for task in tasks})
        return trace

    never = run()
    assert run(*range(31)) == never
    # once only, so that what a resumed pool does in many steps shows too
    for step in (1, 6, 10, 20):
        assert run(step) == never


def test_a_small_set_is_not_screened_at_every_step():
    pool = TaskPool(15, 0, dataclasses.replace(CONFIG, least=10), None)
    assert sorted(fill(pool)) == list(range(15)) and len(pool.active) == 5
    for left in (4, 3):
        for _ in range(CONFIG.retire):
            pool.record({pool.active[0]: (8, 8)})
        assert len(pool.active) == left and pool.to_screen() == []
    for _ in range(CONFIG.retire):
        pool.record({pool.active[0]: (8, 8)})
    kept = set(pool.active)
    assert sorted(fill(pool)) == sorted(set(range(15)) - kept)


def test_a_position_of_other_tasks_is_refused():
    position = TaskPool(10, 0, None, None).position()
    with pytest.raises(ValueError, match="10 tasks, there are 11"):
        TaskPool(11, 0, None, position)
