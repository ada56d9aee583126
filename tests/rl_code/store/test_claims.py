"""No item has two holders, and no lost holder keeps one."""

from __future__ import annotations

import dataclasses
import threading
import time

import pytest

from rl_code.store import steps
from rl_code.store.claims import Claims, WorkConfig
from rl_code.store.errors import StoreError
from rl_code.store.heartbeat import Heartbeat, Observer
from rl_code.store.missing import StoreTimeout
from rl_code.store.processes import ProcessId
from rl_code.store.sharing import share
from rl_code.store.steps import claim_path
from rl_code.store.store import GroupStore
from tests.rl_code.store.groups import make_group, make_items

FAST = WorkConfig(heartbeat_s=0.05, heartbeat_timeout_s=0.8, stall_s=30.0, deadline_s=60.0)
SLOW = WorkConfig(heartbeat_s=1.0, heartbeat_timeout_s=60.0, stall_s=300.0, deadline_s=1800.0)
HASTY = WorkConfig(heartbeat_s=0.05, heartbeat_timeout_s=0.8, stall_s=0.3, deadline_s=60.0)


@pytest.fixture
def learner(tmp_path):
    return GroupStore(tmp_path / "store", "learner")


@pytest.fixture
def actor(learner):
    """Makes an actor by name; all of them leave in the end."""
    made = []

    def make(name, config=FAST):
        made.append(Claims(GroupStore(learner.folder, name), config))
        return made[-1]

    yield make
    for work in made:
        work.close()


def claim_soon(work, max_items, seconds=120.0):
    """What an idle actor gets, asking again until there is something."""
    end = time.monotonic() + seconds
    while not (items := work.claim(max_items)) and time.monotonic() < end:
        time.sleep(0.02)
    return items


def kill(work):
    """Ends an actor's heartbeat the way SIGKILL does: it does not say that it leaves."""
    work._heartbeat._closing.set()
    work._heartbeat._thread.join()


# --- Claims ---------------------------------------------------------------------------------------


def test_racing_threads_never_share_an_item(learner, actor):
    for step in range(3):
        learner.plan(make_items(step, 60))
    got = {}

    def claim(name):
        work = actor(name)
        got[name] = []
        while items := work.claim(3):
            got[name] += items

    threads = [threading.Thread(target=claim, args=(f"actor-{i}",), daemon=True) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    everything = [(item.step, item.number) for items in got.values() for item in items]
    assert sorted(everything) == [(step, number) for step in range(3) for number in range(60)]


def test_the_oldest_step_comes_first_and_a_consumed_one_never(learner, actor):
    plans = {step: make_items(step, 2) for step in range(3)}
    learner.plan(plans[0])
    for item in plans[0]:
        learner.deliver(item, make_group(item))
    learner.consume(0, learner.read(0), version=0)
    work = actor("a")
    assert work.claim(9) == []
    learner.plan(plans[1])
    learner.plan(plans[2])
    assert [item.step for item in work.claim(1)] == [1]
    assert [{item.step for item in work.claim(9)} for _ in range(3)] == [{1}, {2}, set()]
    assert work.claimed == 4
    learner.plan(make_items(2, 1, first=2))
    assert work.claim(9) == make_items(2, 1, first=2)


def test_an_idle_actor_looks_only_at_open_steps(learner, actor, monkeypatch):
    work = actor("a")
    looked = []
    for step in range(6):
        learner.plan(make_items(step, 1))
        if step < 4:
            for item in work.claim(1):
                learner.deliver(item, make_group(item))
            learner.consume(step, learner.read(step), version=step)
    late = actor("late")
    list_step = steps.list_step
    monkeypatch.setattr(
        steps, "list_step", lambda store, step: looked.append(step) or list_step(store, step)
    )
    assert len(work.claim(1) + work.claim(1) + late.claim(1)) == 2
    looked.clear()
    assert work.claim(1) + late.claim(1) == [] and looked == [4, 5, 6] * 2


def test_what_a_failed_claim_got_is_handed_out_by_the_next(learner, actor, monkeypatch):
    learner.plan(make_items(0, 3))
    work = actor("a")
    claim = type(learner.process).claim
    made = []

    def failing(member, path, what):
        if len(made) == 2:
            raise StoreError("the disk is full")
        made.append(path)
        return claim(member, path, what)

    monkeypatch.setattr(type(learner.process), "claim", failing)
    with pytest.raises(StoreError):
        work.claim(3)
    monkeypatch.undo()
    assert work.claim(3) == make_items(0, 3)
    assert work.claim(3) == []


# --- Who is lost ----------------------------------------------------------------------------------


def test_items_of_a_killed_actor_go_to_exactly_one_other(learner, actor, caplog):
    items = make_items(0, 6)
    learner.plan(items)
    lost = actor("lost")
    assert lost.claim(6) == items
    others = [actor(f"other-{i}") for i in range(3)]
    assert [other.claim(6) for other in others] == [[], [], []]
    kill(lost)
    got = []
    end = time.monotonic() + 300
    while len(got) < 6 and time.monotonic() < end:
        got += [item for other in others for item in other.claim(1)]
        time.sleep(0.01)
    assert sorted(item.number for item in got) == [0, 1, 2, 3, 4, 5]
    assert [other.claim(6) for other in others] == [[], [], []]
    assert sum(other.takeovers for other in others) == learner.takeovers(0) == 6
    assert "takes item (0, 5) over from lost/0, which has had no heartbeat for" in caplog.text


def test_a_hung_actor_loses_its_items_and_what_it_delivers_later_counts_nothing(
    learner, actor, caplog
):
    (item,) = make_items(0, 1)
    learner.plan([item])
    hung = actor("hung", HASTY)
    other = actor("other")
    hung.claim(1)
    assert claim_soon(other, 1) == [item]
    assert "hung/0 has stopped its heartbeat: its main loop has made no progress" in caplog.text
    assert other._store.deliver(item, make_group(item, seconds=1.0))
    assert len(learner.wait(0, 1.0)) == 1
    hung._store.deliver(item, make_group(item, seconds=2.0))
    assert learner.read(0)[0].actor == ProcessId("other", 0)


def test_an_actor_that_makes_progress_keeps_its_items(learner, actor):
    # a stall that a busy machine does not cause between two calls
    config = dataclasses.replace(HASTY, stall_s=1.5)
    learner.plan(make_items(0, 1))
    busy = actor("busy", config)
    other = actor("other")
    busy.claim(1)
    end = time.monotonic() + config.stall_s + 1.5 * config.heartbeat_timeout_s
    while time.monotonic() < end:
        busy.progress()
        assert other.claim(1) == []
        time.sleep(0.02)


def test_a_restarted_actor_gets_what_its_earlier_self_held(learner, actor, caplog):
    items = make_items(0, 2)
    learner.plan(items)
    first = actor("a")
    assert first.claim(2) == items
    again = actor("a")
    other = actor("b")
    got = again.claim(1) + other.claim(2)
    assert sorted(item.number for item in got) == [0, 1] and (again.takeovers, other.takeovers) == (
        1,
        1,
    )
    assert "from a/0, which was restarted as a/1" in caplog.text
    with pytest.raises(StoreError, match="a/0 has been replaced by a/1"):
        claim_soon(first, 1)


def test_an_actor_that_leaves_gives_its_items_back_at_once(learner, actor):
    items = make_items(0, 2)
    learner.plan(items)
    work = actor("a")
    work.claim(2)
    work.close()
    assert actor("b").claim(2) == items


def test_a_claim_that_did_not_survive_holds_nothing(learner, actor):
    (item,) = make_items(0, 1)
    learner.plan([item])
    claim_path(learner.folder, 0, 0, 0).write_bytes(b"")
    assert actor("a").claim(1) == [item]


def test_a_damaged_group_is_sampled_again_once_its_claims_are_deleted(learner, actor):
    (item,) = make_items(0, 1)
    learner.plan([item])
    work = actor("a")
    assert work.claim(1) == [item] and work.claim(1) == []
    claim_path(learner.folder, 0, 0, 0).unlink()
    assert claim_soon(work, 1) == [item]


def test_a_lost_actor_loses_only_what_it_has_not_delivered(learner, actor, monkeypatch):
    monkeypatch.setattr(steps, "BLOCKS", 3)  # blocks of 4 items
    items = make_items(0, 10)
    learner.plan(items)
    lost = actor("lost")
    assert [item.number for item in lost.claim(9)] == list(range(10))
    for number in (0, 5, 8, 9):
        lost._store.deliver(items[number], make_group(items[number]))
    other = actor("other")
    assert other.claim(9) == []
    lost.close()
    assert [item.number for item in other.claim(2)] in ([1, 2, 3], [4, 6, 7])
    assert len(other.claim(9)) == 3 and other.claim(9) == []
    assert other.takeovers == 6 and sum(learner.reader.claims(0).values()) == 8  # of two blocks


@pytest.mark.parametrize("reach", ["sampled before", "everything"])
def test_an_actor_of_a_fork_samples_only_what_the_parent_did_not(learner, actor, tmp_path, reach):
    items = make_items(0, 4)
    learner.plan(items)
    for item in items[::2]:
        learner.deliver(item, make_group(item))
    held = actor("a")
    assert len(held.claim(9)) == 4  # claims of the parent's actors are not taken over
    share(learner.folder, tmp_path / "fork", 0, reach, ahead=0)
    fork = GroupStore(tmp_path / "fork", "learner")
    assert fork.missing(0) == items[1::2]
    with Claims(GroupStore(fork.folder, "a"), FAST) as work:
        assert work.claim(9) == items[1::2] and work.claim(9) == []
        for item in items[1::2]:
            work._store.deliver(item, make_group(item))
    assert [record.actor.name for record in fork.wait(0, 5.0)] == ["learner", "a"] * 2


def test_idle_actors_look_at_few_others_and_list_no_claims(learner, actor, monkeypatch):
    learner.plan(make_items(0, 40))
    fleet = [actor(f"actor-{i}", SLOW) for i in range(20)]
    for work in fleet:
        assert len(work.claim(2)) == 2
    idle = actor("idle", SLOW)
    assert idle.claim(1) == []
    counts = {"list": 0, "look": 0}
    list_claims, look = steps.list_claims, Observer.look

    def counted(name, call):
        def counting(*args):
            counts[name] += 1
            return call(*args)

        return counting

    monkeypatch.setattr(steps, "list_claims", counted("list", list_claims))
    monkeypatch.setattr(Observer, "look", counted("look", look))
    for _ in range(10):
        assert idle.claim(1) == []
    assert counts == {"list": 0, "look": 40}
    fleet[7].close()  # is found in one round over the twenty
    assert [bool(idle.claim(2)) for _ in range(5)].count(True) == 1


def test_a_timeout_names_the_holder_and_how_long_it_was_silent(learner, actor):
    learner.plan(make_items(0, 3))
    lost = actor("lost")
    left = actor("left")
    taken = lost.claim(1) + left.claim(1)
    kill(lost)
    left.close()
    with pytest.raises(StoreTimeout) as caught:
        learner.wait(0, 1.2)
    by_number = {missing.item.number: missing for missing in caught.value.missing}
    silent, gone = (by_number[item.number] for item in taken)
    assert silent.holder == ProcessId("lost", 0) and 0.9 < silent.silent_s < 10
    assert gone.gone == "has left" and f"{taken[1]} held by left/0, which has left" in str(
        caught.value
    )
    assert f"{taken[0]} held by lost/0, last seen {silent.silent_s:.1f} s ago" in str(caught.value)
    assert str(caught.value).count("unclaimed") == 1


# --- Heartbeats -----------------------------------------------------------------------------------


def test_silence_is_counted_on_the_observers_clock_alone(learner):
    now = [0.0]
    observer = Observer(learner.folder, clock=lambda: now[0])
    member = GroupStore(learner.folder, "a").process
    silences = []
    for second in range(8):
        now[0] = float(second)
        if second == 4:
            member.beat(1)
        silences.append(observer.look(member.identity).silent_s)
    assert silences == [0, 1, 2, 3, 0, 1, 2, 3]


def test_an_observer_that_was_stopped_gives_others_time_to_beat(learner):
    now = [0.0]
    observer = Observer(learner.folder, longest_gap_s=5.0, clock=lambda: now[0])
    who = GroupStore(learner.folder, "a").process.identity
    observer.look(who)
    now[0] = 1000.0
    assert observer.look(who).silent_s == 5.0


def test_a_heartbeat_that_cannot_be_written_goes_on_afterwards(learner, caplog):
    member = GroupStore(learner.folder, "a").process
    folder = learner.folder / "processes" / "a"
    away = learner.folder / "away"
    beats = Heartbeat(member, heartbeat_s=0.02, stall_s=60.0)
    folder.rename(away)
    _until(lambda: "a/0 has stopped its heartbeat: could not list" in caplog.text)
    away.rename(folder)
    _until(lambda: "a/0 has a heartbeat again" in caplog.text)
    before = (folder / "0.json").read_bytes()
    _until(lambda: (folder / "0.json").read_bytes() != before)
    beats.close()
    assert Observer(learner.folder).look(member.identity).gone == "has left"


def _until(condition):
    end = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((0.0, 1.0, 1.0, 9.0), r"self\.heartbeat_s=0\.0"),
        (
            (1.0, 2.0, 1.0, 9.0),
            r"self\.heartbeat_timeout_s=2\.0 must be more than two beats of self\.heartbeat_s=1\.0",
        ),
        ((1.0, 3.0, -1.0, 9.0), r"self\.stall_s=-1\.0"),
        ((1.0, 3.0, 6.0, 9.0), r"self\.deadline_s=9\.0 must be more than self\.stall_s=6\.0"),
    ],
)
def test_configs_that_cannot_work_are_refused(values, words):
    with pytest.raises(ValueError, match=words):
        WorkConfig(*values)
