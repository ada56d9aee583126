"""Reporting events over HTTP."""

from __future__ import annotations

import json
import queue
import threading
from concurrent.futures import Future

import pytest
import sqlalchemy
from starlette.applications import Starlette
from starlette.testclient import TestClient

from people.feedback import http
from people.feedback.http import MOST_BYTES, routes
from people.feedback.store import FeedbackStore
from tests.people.feedback.people import answer

USERS = {"key of ann": "ann", "key of eve": "eve"}
SHOWN = {"key": "1", "answer": "a", "kind": "shown", "at": 5}


@pytest.fixture
def store(url):
    with FeedbackStore(url) as store:
        yield store


@pytest.fixture
def client(store):
    app = Starlette(routes=routes(store, USERS.get))
    with TestClient(app, headers={"Authorization": "Bearer key of ann"}) as client:
        yield client


def test_events_are_recorded_and_a_person_is_forgotten(store, client):
    store.record_answer(answer())
    events = [SHOWN, SHOWN, {**SHOWN, "key": "2", "answer": "b", "value": None, "extra": {}}]
    reply = client.post("/v1/feedback", json={"events": events})
    assert reply.status_code == 200
    assert [one["status"] for one in reply.json()["results"]] == ["recorded", "repeated", "waiting"]
    as_eve = {"Authorization": "Bearer key of eve"}
    reply = client.post("/v1/feedback", json={"events": [SHOWN]}, headers=as_eve)
    (refused,) = reply.json()["results"]
    assert refused["status"] == "refused" and "not given to this key" in refused["why"]
    ((_, events),) = store.joined(["a"])
    assert [(event.kind, event.at) for event in events] == [("shown", 5.0)]
    assert client.delete("/v1/users/me").json() == {
        "deleted": {"answers": 1, "events": 2, "cycles": []}
    }
    assert store.counts()["events"] == 0


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("{", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("[]", "nothing else"),
        ('{"events": [], "more": 1}', "nothing else"),
        ('{"events": []}', "1 to 1000"),
        ('{"events": {}}', "1 to 1000"),
        ('{"events": [3]}', "events[0]: expected an object"),
        (json.dumps({"events": [{**SHOWN, "users": "x"}]}), "no such key: 'users'"),
        (json.dumps({"events": [SHOWN, {"key": "1"}]}), "events[1]: 'answer' is missing"),
        (json.dumps({"events": [{**SHOWN, "at": "now"}]}), "at='now': expected a finite number"),
        (json.dumps({"events": [{**SHOWN, "at": True}]}), "at=True"),
        (json.dumps({"events": [{**SHOWN, "value": float("nan")}]}), "value=nan"),
        (json.dumps({"events": [{**SHOWN, "kind": ["shown"]}]}), "kind=['shown']"),
        (json.dumps({"events": [{**SHOWN, "key": "\ud800"}]}), "cannot be printed"),
        (json.dumps({"events": [{**SHOWN, "key": 7}]}), "key is 7"),
        (json.dumps({"events": [{**SHOWN, "extra": []}]}), "expected an object"),
        (json.dumps({"events": [{**SHOWN, "extra": {"a": "\ud800"}}]}), "not valid Unicode"),
    ],
)
def test_a_malformed_request_is_answered_with_what_is_wrong(tmp_path, body, says):
    with FeedbackStore(f"sqlite:///{tmp_path}/people.db") as store:
        client = TestClient(Starlette(routes=routes(store, USERS.get)))
        known = {"Authorization": "Bearer key of ann"}
        reply = client.post("/v1/feedback", content=body, headers=known)
        assert reply.status_code == 400 and says in reply.json()["error"]["message"]
        assert store.counts()["events"] == 0
        assert client.post("/v1/feedback", json={"events": [SHOWN]}, headers=known).is_success


def test_requests_without_a_known_key_or_too_long_are_refused(tmp_path):
    with FeedbackStore(f"sqlite:///{tmp_path}/people.db") as store:
        client = TestClient(Starlette(routes=routes(store, USERS.get)))
        for header in ({}, {"Authorization": "Bearer x"}, {"Authorization": "Basic key of ann"}):
            assert client.post("/v1/feedback", json={}, headers=header).status_code == 401
            assert client.delete("/v1/users/me", headers=header).status_code == 401
        known = {"Authorization": "Bearer key of ann"}
        long = client.post("/v1/feedback", content=b" " * (MOST_BYTES + 1), headers=known)
        assert long.status_code == 413


def test_nobody_deletes_what_belongs_to_others_but_an_admin(store):
    users = {"": "all without a key", "key of ann": "ann", "key of root": "root"}
    forgotten: list[str] = []
    ways = dict(is_admin=lambda key: key == "key of root", forget=forgotten.append)
    client = TestClient(Starlette(routes=routes(store, users.get, **ways)))

    def delete(whom: str, key: str):
        return client.delete(f"/v1/users/{whom}", headers={"Authorization": f"Bearer {key}"})

    for user in ("ann", "bob", "all without a key"):
        store.record_answer(answer(user, user))
    refused = delete("me", "")
    assert refused.status_code == 403 and refused.json()["error"]["code"] == "no_api_key"
    assert delete("bob", "key of ann").status_code == 403
    assert delete("ann", "key of ann").status_code == 403
    assert delete("bob", "unknown").status_code == 401
    assert store.counts()["answers"] == 3 and not forgotten
    # bob's key is withdrawn; the admin may
    assert delete("bob", "key of root").json()["deleted"]["answers"] == 1
    assert delete("me", "key of ann").json()["deleted"]["answers"] == 1
    assert forgotten == ["bob", "ann"] and store.counts()["answers"] == 1


def test_a_key_over_its_limit_of_events_is_told_when_to_come_again(store):
    taken: list[tuple[str, int]] = []

    def take_events(api_key: str, count: int) -> float:
        taken.append((api_key, count))
        return 6.5 if len(taken) == 2 else 0.0

    client = TestClient(Starlette(routes=routes(store, USERS.get, take_events=take_events)))
    known = {"Authorization": "Bearer key of ann"}
    two = {"events": [SHOWN, {**SHOWN, "key": "2"}]}
    assert client.post("/v1/feedback", json=two, headers=known).is_success
    again = {"events": [{**SHOWN, "key": "3"}]}
    reply = client.post("/v1/feedback", json=again, headers=known)
    assert (reply.status_code, reply.headers["Retry-After"]) == (429, "7")
    assert reply.json()["error"]["code"] == "rate_limit_exceeded"
    assert store.counts()["events"] == 2
    assert client.post("/v1/feedback", json=again, headers=known).is_success
    assert taken == [("key of ann", 2), ("key of ann", 1), ("key of ann", 1)]


def test_requests_that_wait_for_the_database_have_a_bound(store, monkeypatch):
    body = json.dumps({"events": [SHOWN]})
    monkeypatch.setattr(http, "MOST_WAITING", 2 * len(body))
    waits: Future = Future()
    monkeypatch.setattr(store, "submit_events", lambda events, user: waits)
    statuses: queue.Queue[int] = queue.Queue()
    known = {"Authorization": "Bearer key of ann"}
    with TestClient(Starlette(routes=routes(store, USERS.get)), headers=known) as client:

        def post() -> None:
            statuses.put(client.post("/v1/feedback", content=body).status_code)

        threads = [threading.Thread(target=post) for _ in range(5)]
        for thread in threads:
            thread.start()
        try:
            # two wait, and there is no room for a third
            assert [statuses.get(timeout=400) for _ in range(3)] == [503] * 3
        finally:
            waits.set_result([])
            for thread in threads:
                thread.join()
        assert [statuses.get() for _ in range(2)] == [200] * 2
        # those that ended have left their room
        assert client.post("/v1/feedback", content=body).is_success


def test_what_could_not_be_recorded_is_not_acknowledged(tmp_path, monkeypatch):
    with FeedbackStore(f"sqlite:///{tmp_path}/people.db") as store:
        client = TestClient(Starlette(routes=routes(store, USERS.get)))
        known = {"Authorization": "Bearer key of ann"}

        def fails(*_):
            raise sqlalchemy.exc.OperationalError("INSERT", {}, OSError("disk full"))

        with monkeypatch.context() as patch:
            patch.setattr(store, "submit_events", fails)
            reply = client.post("/v1/feedback", json={"events": [SHOWN]}, headers=known)
        assert (reply.status_code, reply.headers["Retry-After"]) == (503, "2")
        reply = client.post("/v1/feedback", json={"events": [SHOWN]}, headers=known)
        assert reply.json()["results"][0]["status"] == "waiting"
