"""Reporting events over HTTP."""

from __future__ import annotations

import json

import pytest
import sqlalchemy
from starlette.applications import Starlette
from starlette.testclient import TestClient

from rl_code.feedback.http import MOST_BYTES, routes
from rl_code.feedback.store import FeedbackStore
from tests.rl_code.feedback.people import answer

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
