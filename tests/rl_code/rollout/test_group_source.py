"""The learner gets its groups, or learns why it does not; an actor of its own process ends with
it.
"""

from __future__ import annotations

import threading
import time

import pytest

from rl_code.host.stop import StopRequest
from rl_code.rollout import group_source
from rl_code.rollout.actor import ActorStats
from rl_code.rollout.group_source import (
    FromOtherProcesses,
    InActorThread,
    InLearnerThread,
    StopWaiting,
)
from rl_code.rollout.playing import RolloutTimeout
from rl_code.store.claims import Claims
from rl_code.store.missing import StoreTimeout
from rl_code.store.store import GroupStore
from rl_code.weights.local import LocalWeights
from rl_code.weights.versions import WeightError
from rl_code.weights.waiting import Deadline
from tests.rl_code.rollout.test_actor import WORK, FakeScheduler, Site, kill, make_group, make_tasks
from tests.rl_code.weights.small import mesh, wanted

LONG_S = 300.0


@pytest.fixture
def site(tmp_path):
    made = Site(GroupStore(tmp_path / "store", "learner"), LocalWeights(wanted(mesh()), keep=4))
    made.publish(0)
    yield made
    for work in made.works:
        work.close()


def deliver(site: Site, items) -> None:
    for item in items:
        group = make_group(
            make_tasks(20)[item.task], item.group, item.seed, [[0]] * item.group_size
        )
        site.store.deliver(item, group)


def numbers(records) -> list[tuple[int, int]]:
    return [(record.step, record.number) for record in records]


def stop_after(request: StopRequest, seconds: float) -> None:
    threading.Timer(seconds, lambda: setattr(request, "requested", True)).start()


def test_in_turn_the_learner_drives_the_actor_until_it_has_what_it_waits_for(site):
    site.plan(0, 5, version=0)
    scheduler = FakeScheduler(rounds=lambda item: 1 + 4 * item.number)
    with InLearnerThread(site.store, site.actor("sync", 0, scheduler), LONG_S) as source:
        assert scheduler.log == []  # nothing happens but in the learner's own turns
        assert numbers(source.wait(0, [1, 0])) == [(0, 1), (0, 0)]
        assert [item.number for item in site.store.missing(0)] == [2, 3, 4]
        assert numbers(source.wait(0)) == [(0, number) for number in range(5)]
        rounds = scheduler.take_stats().sampled_tokens
        assert numbers(source.wait(0)) == [(0, number) for number in range(5)]
        assert scheduler.take_stats().sampled_tokens == 0 < rounds
        assert isinstance(source.take_stats(), ActorStats)
        assert scheduler.aborted == 0
    assert scheduler.aborted == 1
    assert {thread.name for thread in threading.enumerate()} & {"actor"} == set()


def test_in_turn_what_another_process_holds_has_a_deadline(site):
    site.plan(0, 2, version=0)
    other = Claims(GroupStore(site.store.folder, "other"), WORK)
    site.works.append(other)
    other.claim(1)
    with InLearnerThread(site.store, site.actor("sync", 0, FakeScheduler()), 0.3) as source:
        with pytest.raises(StoreTimeout, match=r"step 0 lacks 1 of 2 groups .* held by other/0"):
            source.wait(0)


def test_in_turn_what_the_actor_raises_reaches_the_learner(site):
    site.plan(0, 1, version=0)

    def fail(scheduler: FakeScheduler) -> None:
        raise RolloutTimeout("no worker came back")

    scheduler = FakeScheduler(before_round=fail)
    with InLearnerThread(site.store, site.actor("sync", 0, scheduler), LONG_S) as source:
        with pytest.raises(RolloutTimeout, match="no worker came back"):
            source.wait(0)
    assert scheduler.aborted == 1


def test_a_thread_samples_while_the_learner_does_something_else(site):
    site.plan(0, 2, version=0)
    site.plan(1, 2, version=0)
    scheduler = FakeScheduler()
    with InActorThread(
        site.store, site.actor("one_step", 1, scheduler), LONG_S, StopRequest()
    ) as source:
        assert numbers(source.wait(0, [1])) == [(0, 1)]
        assert Deadline(LONG_S).wait(lambda: not site.store.missing(1))
        assert numbers(source.wait(1)) == [(1, 0), (1, 1)]
        assert source.take_stats().rollout.sampled_tokens > 0
    assert scheduler.aborted == 1


@pytest.mark.parametrize(
    "error", [RolloutTimeout("no worker came back"), WeightError("damaged"), KeyboardInterrupt()]
)
def test_what_the_thread_raises_is_raised_where_the_learner_waits(site, error):
    site.plan(0, 1, version=0)

    def fail(scheduler: FakeScheduler) -> None:
        raise error

    scheduler = FakeScheduler(before_round=fail)
    with InActorThread(
        site.store, site.actor("one_step", 1, scheduler), LONG_S, StopRequest()
    ) as source:
        with pytest.raises(type(error)) as caught:
            source.wait(0)
        assert caught.value is error
        source._thread.join(LONG_S)
        assert scheduler.aborted == 1  # others may have the item
        with pytest.raises(type(error)):  # and again: there is no actor any more
            source.wait(0)


@pytest.mark.parametrize("busy", [False, True])
def test_the_thread_ends_with_the_learner_whatever_it_was_doing(site, busy):
    if busy:
        site.plan(0, 2, version=0)
    scheduler = FakeScheduler(
        rounds=lambda item: 10**9, before_round=lambda scheduler: time.sleep(0.001)
    )
    source = InActorThread(site.store, site.actor("one_step", 1, scheduler), LONG_S, StopRequest())
    with source:
        assert not busy or Deadline(LONG_S).wait(lambda: bool(scheduler.groups))
    assert not source._thread.is_alive() and scheduler.aborted == 1
    heir = Claims(GroupStore(site.store.folder, "heir"), WORK)
    site.works.append(heir)
    assert len(heir.claim(9)) == 2 * busy


def test_a_thread_that_waits_for_weights_ends_when_they_are_closed(site):
    site.plan(0, 1, version=1)
    source = InActorThread(
        site.store, site.actor("one_step", 1, FakeScheduler()), LONG_S, StopRequest()
    )
    with source:
        assert Deadline(LONG_S).wait(lambda: bool(site.works[0].claimed))
        site.weights.close()
    assert not source._thread.is_alive()


def make(kind: str, site: Site, deadline_s: float, request: StopRequest):
    if kind == "remote":
        return FromOtherProcesses(site.store, deadline_s, request)
    scheduler = FakeScheduler(
        rounds=lambda item: 10**9, before_round=lambda scheduler: time.sleep(0.001)
    )
    return InActorThread(site.store, site.actor("one_step", 1, scheduler), deadline_s, request)


@pytest.mark.parametrize("kind", ["remote", "thread"])
def test_a_request_to_stop_ends_the_wait(site, kind):
    site.plan(0, 2, version=0)
    request = StopRequest()
    with make(kind, site, LONG_S, request) as source:
        stop_after(request, 0.2)
        with pytest.raises(StopWaiting):
            source.wait(0)
        with pytest.raises(StopWaiting):  # at once
            source.wait(0)


@pytest.mark.parametrize("kind", ["remote", "thread"])
def test_a_deadline_names_the_items_that_are_missing_and_who_holds_them(site, kind):
    items = site.plan(0, 3, version=0)
    deliver(site, items[:1])
    with make(kind, site, 0.6, StopRequest()) as source:
        with pytest.raises(
            StoreTimeout, match=r"step 0 lacks 2 of 3 groups after 0\.6 s"
        ) as caught:
            source.wait(0)
        assert [missing.item for missing in caught.value.missing] == items[1:]
        held = (
            r"\(0, 1\) held by a/0, last seen 0\.\d s ago"
            if kind == "thread"
            else r"\(0, 1\) unclaimed"
        )
        caught.match(held)
        with pytest.raises(StoreTimeout, match=r"lacks 1 of 1 groups"):
            source.wait(0, [2])
        assert numbers(source.wait(0, [0])) == [(0, 0)]


def test_a_deadline_says_for_how_long_the_holder_has_been_silent(site):
    site.plan(0, 1, version=0)
    work = Claims(GroupStore(site.store.folder, "lost"), WORK)
    work.claim(1)
    kill(work)
    with pytest.raises(StoreTimeout) as caught:
        FromOtherProcesses(site.store, 1.2, StopRequest()).wait(0)
    (missing,) = caught.value.missing
    assert missing.holder.name == "lost" and missing.silent_s > 0.8


def test_what_arrives_late_is_returned(site):
    items = site.plan(0, 2, version=0)
    threading.Timer(0.7, lambda: deliver(site, items)).start()
    source = FromOtherProcesses(site.store, LONG_S, StopRequest())
    with source:
        assert numbers(source.wait(0)) == [(0, 0), (0, 1)]
    assert source.take_stats() is None


def test_groups_that_are_there_are_returned_without_a_wait(site):
    deliver(site, site.plan(0, 2, version=0))
    assert numbers(FromOtherProcesses(site.store, 0.0, StopRequest()).wait(0)) == [(0, 0), (0, 1)]


def test_a_learner_that_waits_long_for_other_processes_says_so(site, monkeypatch, caplog):
    site.plan(0, 1, version=0)
    monkeypatch.setattr(group_source, "_SILENT_S", 0.0)
    with pytest.raises(StoreTimeout):
        FromOtherProcesses(site.store, 0.2, StopRequest()).wait(0)
    assert "waiting for the groups of step 0; is an actor running?" in caplog.text
