"""Tools never hold up the other rows, and it may be waited for more of them."""

from __future__ import annotations

import threading

import jax
import pytest

from models.sharding import MeshConfig, make_mesh
from rl_code.rollout import playing as playing_module
from rl_code.rollout.playing import RolloutTimeout
from tests.rl_code.rollout.small import (
    Episode,
    assert_same,
    make_scheduler,
    model_on,
    play,
    task_of,
)


def test_waiting_for_tools_changes_no_token_and_no_dispatch_is_of_few_rows(monkeypatch):
    tasks = [task_of(seed) for seed in range(3)]
    alone, _ = play(tasks)
    scheduler = make_scheduler(gather_s=60.0)
    real = scheduler._prefill
    few = []

    def prefill():
        few.append(scheduler._few_go_on())
        real()

    monkeypatch.setattr(scheduler, "_prefill", prefill)

    # of each group one tool answers at once, the others when they are waited for
    asked = threading.Semaphore(0)

    def wait_for(futures, **settings):
        asked.release(len(futures))
        return real_wait(futures, **settings)

    real_wait = playing_module.wait
    monkeypatch.setattr(playing_module, "wait", wait_for)

    def make(task, group, index):
        return Episode(
            task, group, index, wait=(lambda: asked.acquire(timeout=60)) if index else None
        )

    groups, stats = play(tasks, make=make, scheduler=scheduler)
    scheduler.close()
    assert_same(groups, alone)
    assert len(few) > 3 and not any(few)
    assert stats.gather_s > 0.0


def test_no_more_programs_run_than_episodes_may_be_open():
    tasks = [task_of(seed) for seed in range(5)]
    running, most = set(), []

    class Program(Episode):
        starts_at_once = False

        def start(self):
            running.add(self)
            most.append(len(running))
            return super().start()

        def finish(self):
            running.discard(self)
            return super().finish()

    scheduler = make_scheduler()
    open_at_once = scheduler.engine.config.episodes
    groups, _ = play(tasks, make=Program, scheduler=scheduler)
    scheduler.close()
    assert len(groups) == 5 and not running
    assert 2 <= max(most) <= open_at_once < len(most)


def test_a_group_of_more_programs_than_may_be_open_is_started_alone():
    class Program(Episode):
        starts_at_once = False

    scheduler = make_scheduler()
    size = scheduler.engine.config.episodes + 1
    tasks = [task_of(0), task_of(1)]
    groups, _ = play(tasks, make=Program, scheduler=scheduler, group_size=size)
    scheduler.close()
    assert [len(group.trajectories) for group in groups] == [size, size]


@pytest.mark.parametrize("gather_s", [0.0, 0.01])
def test_decoding_goes_on_while_one_tool_is_slow(gather_s):
    release = threading.Event()
    finished = []

    def make(task, group, index):
        return Episode(
            task,
            group,
            index,
            wait=(lambda: release.wait(20)) if (group, index) == (0, 0) else None,
        )

    mesh = make_mesh(MeshConfig(data=1, tensor=1))
    scheduler = make_scheduler(gather_s=gather_s)

    def on_finished(trajectory):
        finished.append((trajectory.group, trajectory.index))
        if len(finished) == 7:  # everybody but the slow one
            release.set()

    tasks = [task_of(0), task_of(1)]
    scheduler.rollout(
        model_on(mesh),
        tasks,
        make,
        group_size=4,
        version=0,
        key=jax.random.key(0),
        on_finished=on_finished,
    )
    scheduler.close()
    assert finished[-1] == (0, 0)


def test_a_tool_that_never_answers_is_named():
    release = threading.Event()
    episodes = []

    def make(task, group, index):
        episodes.append(Episode(task, group, index, wait=lambda: release.wait(20)))
        return episodes[-1]

    mesh = make_mesh(MeshConfig(data=1, tensor=1))
    scheduler = make_scheduler(timeout_s=0.3)
    with pytest.raises(RolloutTimeout, match="task5"):
        scheduler.rollout(
            model_on(mesh), [task_of(5)], make, group_size=2, version=0, key=jax.random.key(0)
        )
    release.set()
    scheduler.close()
    assert all(episode.closed for episode in episodes)
