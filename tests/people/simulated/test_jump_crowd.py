"""Simulated programmers who edit several files, on a server that only looks like one."""

from __future__ import annotations

import dataclasses
import io
import json

import pytest

from people.realtime.held_out import NOTHING, JudgeConfig
from people.simulated import jump_crowd
from people.simulated.client import Client
from people.simulated.fit import embedded
from people.simulated.jump_crowd import JumpCrowdConfig, JumpPersons, carry_on
from people.simulated.jumper import JUMP_HABITS, Jumper, JumpHabits
from rl_code.tasks import jumps
from tests.people.simulated.fake_server import FakeServer

# Whose every jump to a place that is left is taken, and no other.
SURE = JumpHabits(next=1.0, later=1.0, wrong=0.0)
MOMENTS = [jumps.moment("train", 3, i) for i in range(60)]
MANY = next(one for one in MOMENTS if len(one.remaining) >= 2)
DONE = next(one for one in MOMENTS if not one.remaining)


def carried(client: Client, moment: jumps.Moment, habits: JumpHabits = SURE, asks: int = 9):
    """What a session came to, with its events reported at once."""
    person = Jumper(embedded(), habits, 0, "h")
    return carry_on(
        client, person, moment, client.report, asks=asks, max_tokens=10, now=lambda: 1000.0
    )


def pages(server: FakeServer) -> list[str]:
    asked = [body for path, body, _ in server.requests if path == "/v1/completions"]
    assert all(body["suffix"] == "" and body["max_tokens"] == 10 for body in asked)
    return [body["prompt"] for body in asked]


def test_a_change_is_carried_on_by_jumps_until_nothing_is_left(server, client):
    """The server knows the places. Where nothing is left it says nothing, and nothing is shown."""
    answers = iter([*MANY.left, ""])
    server.complete = lambda prefix, suffix: next(answers)
    found = carried(client, MANY)
    count = len(MANY.remaining)
    assert (found.asked, found.shown, found.taken, found.done) == (count + 1, count, count, True)
    assert len(server.of_kind("accepted")) == len(server.of_kind("shown")) == count
    assert not server.of_kind("rejected") and not server.of_kind("retained")
    # each page has the edit before it, and no place that is done
    first, second = pages(server)[:2]
    edit = MANY.edited(MANY.remaining[0][0]).edits[-1]
    assert first == MANY.page()
    assert f"edit {edit.path}:{edit.line}\n-{edit.removed[0]}" in second
    assert f"\n{MANY.left[0]} " in first and f"\n{MANY.left[0]} " not in second
    times = {event["answer"]: event["value"] for event in server.of_kind("accepted")}
    assert len(set(times.values())) == count and min(times.values()) > 0


def test_who_is_sent_to_a_wrong_place_goes_on_at_their_own(server, client):
    outline = jumps.generate("train", 3, MOMENTS.index(MANY)).meta["outline"]
    wrong = next(place for place in outline if place not in MANY.left)
    server.complete = lambda prefix, suffix: wrong
    found = carried(client, MANY, asks=2)
    assert (found.asked, found.taken, found.done) == (2, 0, False)
    assert [one["extra"] for one in server.of_kind("rejected")] == [{"why": "edited_elsewhere"}] * 2
    assert pages(server)[1] == MANY.edited(MANY.remaining[0][0]).page()
    # somebody hasty goes there first, finds nothing to do, and goes on at the same place
    hasty = dataclasses.replace(SURE, wrong=1.0)
    assert carried(client, MANY, hasty, asks=2).taken == 2
    assert pages(server)[3] == pages(server)[1]


@pytest.mark.parametrize("text", ["", "views.py", "nowhere.py:1"])
def test_nothing_is_reported_of_an_answer_that_names_no_place(server, client, text):
    server.complete = lambda prefix, suffix: text
    assert carried(client, MANY).shown == 0
    assert carried(client, DONE).done and not server.events


def test_events_come_with_their_keys_late_lost_or_twice(server):
    """Everybody has a key of their own, and each session is one."""
    server.complete = lambda prefix, suffix: prefix.rpartition("\nopen\n")[2].partition(" ")[0]
    config = JumpCrowdConfig(people=2, late_s=60.0)
    habits = dataclasses.replace(SURE, late=0.5, lost=0.2, twice=0.3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(JUMP_HABITS, "usual", habits)
        persons = JumpPersons(config, server.url, 0)
        shown = sum(persons.have(number % 2, f"s{number}").shown for number in range(60))
    at_once = len(server.events)
    assert 0.2 * 2 * shown < at_once < 0.6 * 2 * shown
    persons.post.deliver(everything=True)
    assert at_once < len(server.events) < 2 * shown
    reports = [body["events"] for path, body, _ in server.requests if path == "/v1/feedback"]
    sent = [event["key"] for events in reports for event in events]
    assert len(sent) > len(set(sent)) == len(server.events)
    keys = {headers["Authorization"] for _, _, headers in server.requests}
    assert keys == {"Bearer person-0-0", "Bearer person-0-1"}
    assert len({headers["X-Session"] for _, _, headers in server.requests}) == 60


@pytest.mark.parametrize(
    "wrong", [{"habits": "bored"}, {"asks": 0}, {"late_s": -1.0}, {"split": "all"}]
)
def test_people_that_cannot_be_are_named(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=rf"{name}={value!r}"):
        JumpCrowdConfig(**wrong)
    with pytest.raises(ValueError, match="processes"):
        JumpCrowdConfig(people=1, processes=2)


def test_a_judge_of_places_pays_for_silence_where_nothing_is_left():
    judge = JudgeConfig(suggests="place", habits="careful")
    task = jumps.generate("train", 3, MOMENTS.index(MANY))
    done = jumps.generate("train", 3, MOMENTS.index(DONE))
    place = task.meta["remaining"][0]
    assert judge.shown(task, f" {place}\n") == place and judge.shown(task, "x") == ""
    assert judge.chance(task, place) > 0.5 > NOTHING > judge.chance(done, done.meta["outline"][0])
    assert JudgeConfig().shown(task, "x") == "x"
    with pytest.raises(ValueError, match="suggests='tune'"):
        JudgeConfig(suggests="tune")
    with pytest.raises(ValueError, match="'exacting' must be one of usual"):
        JudgeConfig(suggests="place")


def test_the_program_has_sessions_until_it_is_left(monkeypatch, server):
    """As a process of a crowd runs it, but for its threads."""
    had = []
    task = {"url": server.url, "number": 0, "config": {"people": 1, "at_once": 3}, "truth": "t"}
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(task)))
    monkeypatch.setattr(jump_crowd, "run_until_left", lambda *given: had.append(given))
    jump_crowd.main()
    ((session, at_once),) = had
    session()
    assert at_once == 3 and pages(server)
