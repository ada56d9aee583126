"""What the store of answers and events holds to, on SQLite and on PostgreSQL."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import random
import sqlite3
import threading

import pytest
import sqlalchemy
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from people.feedback import database, writes
from people.feedback.checks import Claims
from people.feedback.identity import AnswerIds
from people.feedback.outcomes import Selection, SelectionChanged
from people.feedback.poisoning import Suspect
from people.feedback.store import FeedbackStore
from people.feedback.tables import METADATA
from people.feedback.waiting import Wait
from people.realtime import tables as realtime_tables
from tests.people.feedback.people import answer, event

DAY = 86_400.0


class Clock:
    """A clock that stands until it is set."""

    def __init__(self, now: float = 1_000.0):
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def store(url, clock):
    with FeedbackStore(url, clock=clock) as store:
        yield store


def statuses(results) -> list[str]:
    return [result.status for result in results]


def test_migrations_come_to_the_tables(url):
    engine = database.connect(url)
    database.migrate(engine)  # again: nothing to do
    with engine.connect() as connection:
        both = [METADATA, realtime_tables.METADATA]
        assert compare_metadata(MigrationContext.configure(connection), both) == []
    engine.dispose()


def test_a_workdir_from_before_cycles_were_migrated_goes_on(url):
    engine = database.make_engine(url)
    realtime_tables.METADATA.create_all(engine)
    first = sqlalchemy.insert(realtime_tables.VERSIONS).values(version=0, state="deployed")
    with engine.begin() as connection:
        connection.execute(first)
    database.migrate(engine)
    with engine.connect() as connection:
        assert (
            connection.execute(sqlalchemy.select(realtime_tables.VERSIONS)).one().state
            == "deployed"
        )
        both = [METADATA, realtime_tables.METADATA]
        assert compare_metadata(MigrationContext.configure(connection), both) == []
    engine.dispose()


def test_what_is_committed_in_sqlite_is_synced(tmp_path):
    engine = database.connect(f"sqlite:///{tmp_path}/new/people.db")
    with engine.connect() as connection:
        found = [
            connection.exec_driver_sql(f"PRAGMA {pragma}").scalar()
            for pragma in ("journal_mode", "synchronous", "foreign_keys", "secure_delete")
        ]
    assert found == ["wal", 2, 1, 1]  # 2 is FULL
    engine.dispose()


@pytest.mark.parametrize("bad", ["mysql://host/db", "people.db", "sqlite://", ""])
def test_a_url_of_no_such_database_is_refused(bad):
    with pytest.raises(ValueError, match="database"):
        database.connect(bad)


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"", "no tables of this project"), ("table", "no tables of this project"), (b"x" * 9000, "")],
)
def test_a_file_that_is_only_read_is_not_made_a_database(tmp_path, content, says):
    path = tmp_path / "a b.db"
    if content == "table":
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute("CREATE TABLE others (x)")
    else:
        path.write_bytes(content)
    before = path.read_bytes()
    with pytest.raises((FileNotFoundError, ValueError), match=f"b.db.*{says}"):
        database.make_engine(f"sqlite:///{path}", new=False)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_an_answer_comes_back_as_it_was(store):
    logprobs = (-1e-300, -math.pi)
    one = answer(logprobs=logprobs, given=(), extra={"seed": 3, "text": "déjà \x00"})
    assert store.record_answer(one)
    assert not store.record_answer(dataclasses.replace(one, tokens=(1, 2)))
    assert store.joined(["a", "none"]) == [(one, [])]


def test_an_event_counts_once(store):
    store.record_answer(answer())
    first = event("accepted", value=1.5)
    assert statuses(store.record_events([first, first], "ann")) == ["recorded", "repeated"]
    other = dataclasses.replace(first, value=9.0)
    again, changed = store.record_events([first, other], "ann")
    assert (again.status, again.why) == ("repeated", "")
    assert changed.status == "repeated" and "another event" in changed.why
    assert store.joined(["a"])[0][1] == [first]


def test_events_join_their_answer_in_any_order(store):
    """Also those that come before it, twice or late."""
    events = [
        event("shown", at=101.0, value=0.1),
        event("accepted", at=102.0, value=1.0),
        event("retained", at=132.0, value=1.0, horizon_s=30.0, key="r1"),
        event("retained", at=402.0, value=0.5, horizon_s=300.0, key="r2"),
    ]
    orders = list(itertools.permutations(range(5)))
    for number, order in enumerate(random.Random(0).sample(orders, 8)):
        id = f"a{number}"
        for step in order:
            if step == 4:
                store.record_answer(answer(id))
                continue
            one = dataclasses.replace(events[step], answer=id, key=f"{id} {step}")
            expected = "recorded" if order.index(4) < order.index(step) else "waiting"
            assert statuses(store.record_events([one], "ann")) == [expected]
            assert statuses(store.record_events([one], "ann")) == ["repeated"]
        ((_, joined),) = store.joined([id])
        assert [(one.kind, one.at) for one in joined] == [(one.kind, one.at) for one in events]
    assert store.counts()["waiting"] == 0


def test_what_is_written_in_one_transaction_comes_to_what_it_does_one_by_one(store):
    first, shown = event("accepted", value=1.5), event("shown")
    other = dataclasses.replace(first, value=9.0)
    store.record_events([shown], "ann")
    with store._turn:  # so that all of these wait
        handed_in = [
            store.submit_events([first, first], "ann"),
            store.submit_answer(answer()),
            store.submit_events([first, shown], "ann"),
            store.submit_answer(dataclasses.replace(answer(), tokens=(1, 2))),
            store.submit_events([other], "ann"),
            store.submit_events([first, event("left")], "eve"),
            store.submit_events([event("accepted", "b")], "eve"),
            store.submit_events([], "ann"),
        ]
        assert not any(future.done() for future in handed_in)
    found = [future.result() for future in handed_in]
    assert statuses(found[0]) == ["recorded", "repeated"]
    assert (found[1], found[3]) == (True, False)
    assert statuses(found[2]) == ["repeated", "repeated"] and found[2][0].why == ""
    assert "another event" in found[4][0].why
    assert statuses(found[5]) == ["refused", "refused"]
    assert statuses(found[6]) == ["waiting"]
    assert found[7] == []
    assert store.joined(["a"]) == [(answer(), [first, shown])]
    assert store.refusals() == {"eve": 2}


def test_events_for_the_answers_of_others_are_refused(store):
    store.record_answer(answer())
    assert statuses(store.record_events([event("accepted")], "eve")) == ["refused"]
    # before the answer is there nobody can tell; it is not joined all the same
    assert statuses(store.record_events([event("accepted", "b")], "eve")) == ["waiting"]
    store.record_answer(answer("b"))
    assert store.joined(["a", "b"]) == [(answer(), []), (answer("b"), [])]
    assert store.refusals() == {"eve": 1}
    # eve's keys are not ann's
    assert statuses(store.record_events([event("accepted", "b")], "ann")) == ["recorded"]


def test_an_id_that_was_made_up_is_refused_before_its_answer_is_recorded(url):
    ids = AnswerIds(b"0123456789abcdef")
    real = ids.make("ann", 1, 1)
    with FeedbackStore(url, ids=ids) as store:
        sent = [event("accepted", real), event("accepted", real[:-1] + "x", key="2")]
        assert statuses(store.record_events(sent, "ann")) == ["waiting", "refused"]
        assert statuses(store.record_events(sent, "eve")) == ["refused", "refused"]


def test_retention_is_believed_at_known_horizons_once_they_can_be_over(url, clock):
    def claim(key, horizon_s, answer="a"):
        return event("retained", answer, key, value=1.0, horizon_s=horizon_s)

    sent = [claim("1", 30.0), claim("2", 300.0), claim("3", 1e12), event("accepted", value=1.0)]
    with FeedbackStore(url, claims=Claims(early_s=5.0), clock=clock) as store:
        store.record_answer(answer(answered_at=1_000.0))
        clock.now = 1_026.0
        results = store.record_events(sent, "ann")
        assert statuses(results) == ["recorded", "refused", "refused", "recorded"]
        assert results[1].why == "26 s after its answer nothing is known of 300 s"
        assert results[2].why == "horizon_s=1e+12 is none of 30, 300, 3600"
        # an answer that is not recorded has not reached anybody
        early = store.record_events([claim("4", 30.0, "b"), event("shown", "b")], "ann")
        assert statuses(early) == ["refused", "waiting"]
        clock.now = 1_300.0
        assert statuses(store.record_events(sent, "ann"))[1:3] == ["recorded", "refused"]
        # a second event does not redeem the first one of its key
        both = [claim("5", 7.0), claim("5", 30.0)]
        assert statuses(store.record_events(both, "ann")) == ["refused"] * 2
        kept = [one.horizon_s for one in store.joined(["a"])[0][1]]
    assert sorted(kept, key=str) == [30.0, 300.0, None]


def test_claims_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="must be at least 0"):
        Claims(early_s=-1.0)


@pytest.mark.parametrize(
    "bad",
    [
        event("kissed"),
        event("accepted", key=" " * 201),
        event("accepted", key="\x00"),
        event("accepted", at=math.nan),
        event("accepted", value=-1.0),
        event("edited"),
        event("edited", value=1.5),
        event("retained", value=0.5),
        event("retained", value=0.5, horizon_s=0.0),
        event("accepted", horizon_s=30.0),
        event("follow_up", extra={"text": math.inf}),
        event("follow_up", extra={"text": "x" * 20_000}),
        event("follow_up", extra=["text"]),
    ],
)
def test_a_malformed_event_is_refused_with_all_that_came_with_it(tmp_path, bad):
    with FeedbackStore(f"sqlite:///{tmp_path}/people.db") as store:
        with pytest.raises(ValueError):
            store.record_events([event("shown"), bad], "ann")
        assert store.counts()["events"] == 0


def test_a_malformed_answer_is_refused(tmp_path):
    with FeedbackStore(f"sqlite:///{tmp_path}/people.db") as store:
        with pytest.raises(ValueError, match="lengths"):
            store.record_answer(answer(tokens=(1,)))
        with pytest.raises(ValueError, match="finite"):
            store.record_answer(answer(logprobs=(0.0, -math.inf)))
        with pytest.raises(ValueError, match="1 to 64"):
            store.record_answer(answer(user="u" * 65))
        with pytest.raises(ValueError, match="cannot be printed"):
            store.record_answer(answer(session="\x00"))
        assert store.counts()["answers"] == 0


def test_a_selection_can_be_made_again(store, clock):
    for number in range(6):
        clock.now = 1_000.0 + number
        store.record_answer(answer(f"a{number}", version=number // 2, user=f"u{number % 2}"))
        store.record_events([event("shown", f"a{number}")], f"u{number % 2}")
    store.record_answer(answer("cut off", finish_reason="aborted", version=2))
    clock.now = 2_000.0
    selection = store.select(1_500.0, [1, 2])
    assert selection.ids == ("a2", "a3", "a4", "a5")
    assert (selection.sessions, selection.outside, selection.aborted) == (2, 2, 1)
    # what comes later changes nothing for this watermark
    store.record_answer(answer("late", version=2))
    store.record_events([event("accepted", "a3")], "u1")
    assert store.select(1_500.0, [1, 2]) == selection
    assert store.digest(selection.ids, 1_500.0) == selection.digest
    assert store.digest(selection.ids, 2_000.0) != selection.digest
    assert [len(events) for _, events in store.joined(["a3"], 1_500.0)] == [1]
    assert store.select(1_500.0, [1, 2], 2).ids == ("a4", "a5")
    assert store.select(1_005.0, [1, 2], wait=Wait(2.0)).ids == ("a2", "a3")
    with pytest.raises(ValueError, match="after the database's time"):
        store.select(2_001.0, [1])


def test_what_was_accepted_waits_for_its_last_look(store, clock):
    """And no longer than it could be reported in, however often the acceptance is said again."""
    wait = Wait(silence_s=60.0, look_s=3_590.0)
    for id in ("a", "b", "c"):
        store.record_answer(answer(id))
    clock.now = 1_050.0
    store.record_events([event("accepted", "a"), event("accepted", "b")], "ann")
    store.record_events([event("accepted", "c", key="not c's")], "eve")
    early = event("retained", "a", key="5 minutes", value=1.0, horizon_s=300.0)
    clock.now = 1_400.0
    store.record_events([early, event("accepted", "b", key="again")], "ann")
    selection = store.select(1_400.0, [1], wait=wait)
    assert selection.ids == ("c",) and selection.waiting == 2
    clock.now = 4_650.0
    late = event("retained", "a", key="1 hour", value=0.5, horizon_s=3_600.0)
    store.record_events([late], "ann")
    assert store.select(4_649.0, [1], wait=wait).ids == ("c",)  # as it was then
    selection = store.select(4_650.0, [1], wait=wait)
    assert selection.ids == ("a", "c") and selection.waiting == 1
    clock.now = 4_700.0  # 1,050 + 3,590 + 60: the editor of b was closed
    assert store.select(4_699.0, [1], wait=wait).waiting == 1
    assert store.select(4_700.0, [1], wait=wait).ids == ("a", "b", "c")


def test_an_answer_is_in_one_cycle_at_most(store):
    for number in range(4):
        store.record_answer(answer(f"a{number}"))
    whole = store.select(1_000.0, [1])
    newest = store.select(1_000.0, [1], 2)
    store.mark_used(1, newest)
    store.mark_used(1, newest)
    assert store.used(1) == newest and store.used(2) is None
    with pytest.raises(SelectionChanged, match="2 selected answers are used"):
        store.mark_used(2, whole)
    with pytest.raises(ValueError, match="another training set"):
        store.mark_used(1, whole)
    assert store.used(2) is None
    assert store.select(1_000.0, [1]).ids == ("a0", "a1")


def test_of_many_cycles_that_want_the_same_answers_one_gets_them(store):
    for number in range(20):
        store.record_answer(answer(f"a{number}"))
    selection = store.select(1_000.0, [1])
    won = []

    def take(cycle):
        try:
            store.mark_used(cycle, selection)
            won.append(cycle)
        except SelectionChanged:
            pass

    threads = [threading.Thread(target=take, args=[cycle]) for cycle in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1 and store.used(won[0]).ids == selection.ids


def test_many_writers_lose_and_double_nothing(url):
    """Two stores on one database, threads that repeat each other's events in other orders."""
    stores = [FeedbackStore(url), FeedbackStore(url)]
    stores[0].record_answer(answer())
    events = [event("thumbs", key=str(number), value=1.0) for number in range(30)]
    counted = []

    def write(seed):
        order = random.Random(seed).sample(events, len(events))
        for start in range(0, len(order), 10):
            results = stores[seed % 2].record_events(order[start : start + 10], "ann")
            counted.extend(result.key for result in results if result.status == "recorded")

    threads = [threading.Thread(target=write, args=[seed]) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(counted) == sorted(one.key for one in events)
    assert len(stores[1].joined(["a"])[0][1]) == 30
    for store in stores:
        store.close()


def test_an_answer_has_so_many_events_and_no_more(store, monkeypatch):
    monkeypatch.setattr(writes, "MOST_OF_ANSWER", 5)
    for id in ("a", "b"):
        store.record_answer(answer(id))
    store.record_events([event("shown", key=f"k{i}") for i in range(3)], "ann")
    sent = [event("shown", key=f"k{i}") for i in range(2, 8)] + [event("shown", "b", "kb")]
    said = store.record_events(sent, "ann")
    assert [one.status for one in said] == [
        "repeated",
        *["recorded"] * 2,
        *["refused"] * 3,
        "recorded",
    ]
    assert "as many events as are kept" in said[3].why
    # those who repeat what was recorded are told so, also where there is no room
    assert [one.status for one in store.record_events(sent[:3], "ann")] == ["repeated"] * 3
    assert len(store.joined(["a"])[0][1]) == 5
    # it was their own answer, so this is no sign of an attack on others
    assert store.refusals() == {}
    # another user's events for it, which came before it, take none of its room
    store.record_events([event("shown", "later", f"e{i}") for i in range(5)], "eve")
    assert store.record_events([event("shown", "later")], "ann")[0].status == "waiting"


def test_a_deleted_user_is_gone_and_marks_cycles(store):
    for user, number in itertools.product(("ann", "bob"), range(3)):
        store.record_answer(answer(f"{user}{number}", user))
        store.record_events([event("accepted", f"{user}{number}")], user)
    store.record_events([event("accepted", "not there yet")], "ann")
    store.record_events([event("accepted", "bob0", key="not mine")], "ann")
    selection = store.select(1_000.0, [1], 4)
    store.mark_used(7, selection)
    unused = store.select(1_000.0, [1])
    deleted = store.delete_user("ann")
    assert (deleted.answers, deleted.events, deleted.cycles) == (3, 4, (7,))
    assert store.joined([f"ann{number}" for number in range(3)]) == []
    assert store.used(7).ids == tuple(id for id in selection.ids if id.startswith("bob"))
    assert store.refusals() == {}
    (marked,) = store.training_sets()
    assert (
        marked.deleted == sum(id.startswith("ann") for id in selection.ids) and not marked.expired
    )
    with pytest.raises(SelectionChanged, match="deleted"):
        store.mark_used(8, unused)
    assert store.delete_user("ann").answers == 0
    with store.engine.connect() as connection:
        for table in METADATA.sorted_tables:
            for row in connection.execute(sqlalchemy.select(table)):
                assert "ann" not in str(row)


def test_what_is_deleted_is_not_in_the_file_any_more(tmp_path):
    with FeedbackStore(f"sqlite:///{tmp_path}/people.db") as store:
        store.record_answer(answer(extra={"text": "a secret of ann"}))
        before = b"".join(path.read_bytes() for path in tmp_path.iterdir())
        store.delete_user("ann")
        after = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"a secret of ann" in before and b"a secret of ann" not in after


def test_what_is_too_old_goes(store, clock):
    clock.now = 10 * DAY
    store.record_answer(answer("old"))
    store.record_events([event("shown", "old"), event("shown", "never there")], "ann")
    store.mark_used(1, store.select(clock.now, [1]))
    clock.now = 20 * DAY
    store.record_answer(answer("new"))
    store.record_events([event("shown", "new"), event("accepted", "old")], "ann")
    gone = store.expire(20 * DAY, keep_days=5)
    assert (gone.answers, gone.events, gone.cycles) == (1, 3, (1,))
    assert [one.id for one, _ in store.joined(["old", "new"])] == ["new"]
    assert store.training_sets()[0].expired == 1
    assert store.counts() == {"answers": 1, "aborted": 0, "silent": 0, "events": 1, "waiting": 0}


def test_the_training_set_of_the_open_cycle_is_never_too_old(store, clock):
    clock.now = 10 * DAY
    for id in ("marked", "free"):
        store.record_answer(answer(id))
        store.record_events([event("shown", id)], "ann")
    selection = store.select(clock.now, [1])
    store.mark_used(2, Selection(("marked",), "digest", selection.watermark, 1))
    store.list_suspects(2, [Suspect("ann", "steady", 0.1, "")])
    gone = store.expire(20 * DAY, keep_days=5, open_cycle=2)
    assert (gone.answers, gone.events, gone.cycles) == (1, 1, ())
    ((_, events),) = store.joined(["marked", "free"])
    assert [one.kind for one in events] == ["shown"] and store.used(2).ids == ("marked",)
    # the next cycle does not need it any more
    gone = store.expire(20 * DAY, keep_days=5, open_cycle=3)
    assert (gone.answers, gone.events, gone.cycles) == (1, 1, (2,))
    assert store.suspects(2) == []


def test_a_file_that_is_no_database_is_refused_and_kept(tmp_path):
    (tmp_path / "people.db").write_text("not a database, but somebody's notes " * 40)
    with pytest.raises(sqlalchemy.exc.DatabaseError, match="not a database"):
        FeedbackStore(f"sqlite:///{tmp_path}/people.db")
    with pytest.raises(sqlite3.DatabaseError):
        sqlite3.connect(tmp_path / "people.db").execute("SELECT * FROM answers")
    assert (tmp_path / "people.db").read_text().startswith("not a database")


def test_earlier_answers_are_those_that_the_policy_has_read(store):
    chat = dict(kind="chat", session="s")
    turns = [
        answer("a", **chat, asked_at=1.0),
        answer("b", **chat, asked_at=2.0, kept=5, version=7, finish_reason="aborted"),
        answer("c", **chat, asked_at=3.0, kept=8),
        answer("d", **chat, asked_at=4.0, kept=11),
    ]
    others = [
        answer("bob", user="bob", session="s", asked_at=1.0),
        answer("t", session="t", asked_at=1.0),
        answer("alone", session="u", asked_at=5.0),
    ]
    for one in [*turns, *others]:
        store.record_answer(one)
    assert {one.id for one in store.earlier(turns[2:3])} == {"a", "b"}
    assert {one.id for one in store.earlier([turns[0], turns[3]])} == {"b", "c"}
    # what stands alone needs nothing
    assert store.earlier([turns[0], others[2]]) == []
