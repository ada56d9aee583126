"""The client says each thing until it is acknowledged, and nothing twice."""

from __future__ import annotations

import pytest

from people.feedback.records import HORIZONS_S, Event
from people.simulated.at_work import Hole, work
from people.simulated.client import Client, ServerRefused
from people.simulated.fit import embedded
from people.simulated.programmer import Habits, Programmer


def event(key: str, answer: str = "cmpl-1", kind: str = "accepted") -> Event:
    return Event(key, answer, kind, 100.0, 1.5)


def test_a_suggestion_has_its_id_text_and_confidence(server, client):
    found = client.suggest("def f(x):\n    return ", "\n", max_tokens=8)
    assert (found.id, found.text, found.finish_reason) == ("cmpl-1", "x + 1", "stop")
    assert found.confidence == pytest.approx(0.8187, abs=1e-3)
    ((path, body, headers),) = server.requests
    assert path == "/v1/completions"
    assert body["prompt"].endswith("return ") and body["suffix"] == "\n" and body["max_tokens"] == 8
    assert headers["Authorization"] == "Bearer key-1" and headers["X-Session"] == "s"


@pytest.mark.parametrize("fault", [503, 429, 500, "drop", "lose"])
def test_events_are_repeated_with_their_keys_until_acknowledged(server, client, fault):
    server.faults = [fault, fault, fault]
    assert client.report([event("a"), event("b")]) == {}
    assert len(server.requests) == 4
    assert {tuple(e["key"] for e in body["events"]) for _, body, _ in server.requests} == {
        ("a", "b")
    }
    assert sorted(server.events) == ["a", "b"]


def test_only_what_is_not_acknowledged_is_repeated(server, client, monkeypatch):
    answers = [[{"key": "a", "status": "recorded"}], [{"key": "b", "status": "waiting"}]]
    monkeypatch.setattr(server, "answer", lambda path, body: {"results": answers.pop(0)})
    client.report([event("a"), event("b")])
    assert [[e["key"] for e in body["events"]] for _, body, _ in server.requests] == [
        ["a", "b"],
        ["b"],
    ]


def test_a_refused_event_is_returned_and_not_repeated(server, client):
    server.refused = {"cmpl-9"}
    assert client.report([event("a", "cmpl-9"), event("b")]) == {"a": "of another key"}
    assert len(server.requests) == 1


def test_what_cannot_succeed_is_not_tried_again(server, client):
    server.faults = [401]
    with pytest.raises(ServerRefused, match="status 401"):
        client.report([event("a")])
    assert len(server.requests) == 1
    with pytest.raises(ValueError, match="kind='sneezed' is none of"):
        client.report([event("a", kind="sneezed")])
    with pytest.raises(ValueError, match="must be like http"):
        Client("localhost:80", "key")


def test_patience_ends():
    client = Client("http://127.0.0.1:9/v1", "key", patience_s=0.0, sleep=lambda seconds: None)
    with pytest.raises(ServerRefused, match="gave up after 0 s"):
        client.suggest("a", "b")


def test_a_programmer_at_work_reports_all_that_became_of_a_suggestion(server, client):
    server.complete = lambda prefix, suffix: "" if "skip" in prefix else "x + 1"
    holes = [Hole("def f(x):\n    return ", "\n", "x + 1"), Hole("skip", "", "y")]
    person = Programmer(embedded(), Habits(leniency=20.0), 0)
    tally = work(client, person, holes * 3, now=lambda: 1000.0)
    assert (tally.asked, tally.shown, tally.accepted) == (6, 3, 3)
    assert len(server.of_kind("shown")) == len(server.of_kind("accepted")) == 3
    alive = server.of_kind("retained")
    assert sorted({one["horizon_s"] for one in alive}) == list(HORIZONS_S)
    assert all(0 <= one["value"] <= 1 and one["at"] > 1000.0 for one in alive)
    first = server.of_kind("accepted")[0]
    assert first["at"] == 1000.0 + first["value"]
    stubborn = Programmer(embedded(), Habits(leniency=-20.0), 0)
    assert work(client, stubborn, holes, now=lambda: 1000.0).accepted == 0
    assert len(server.of_kind("rejected")) == 1


def test_who_looks_only_hours_later_tells_what_was_kept_and_nothing_earlier(server, client):
    holes = [Hole("def f(x):\n    return ", "\n", "x + 1")] * 2
    for leniency in (20.0, -20.0):
        person = Programmer(embedded(), Habits(leniency=leniency), 0)
        work(client, person, holes, now=lambda: 1000.0, seldom=True)
    assert len(server.of_kind("accepted")) == 2
    assert [one["horizon_s"] for one in server.of_kind("retained")] == [HORIZONS_S[-1]] * 2
    assert not server.of_kind("shown") and not server.of_kind("rejected")
