"""The load finds what is lost or doubled; its clients and its database do what it takes them for."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import delete, insert, update

from experiments.load import agent_clients, postgres
from experiments.load import audit as audit_lib
from experiments.load.agent_clients import NotingClient
from experiments.load.audit import Audit, Messages, Told, check_cycles, check_record, read_journal
from experiments.load.clients import Journal
from experiments.load.program import Life
from experiments.load.report import life_of, measured
from experiments.load.strikes import Strikes
from models.tokenizer import Tokenizer
from people.feedback.store import FeedbackStore
from people.feedback.tables import ANSWERS, EVENTS
from people.realtime.ledger import Ledger
from people.simulated.client import ServerRefused
from rl_code.environment.protocols.api import PROTOCOLS
from rl_code.environment.protocols.compact import Compact
from rl_code.harness.endpoint.chat_text import ChatText
from tests.people.feedback.people import answer, event
from tests.people.simulated.fake_server import FakeServer

ROOT = Path(__file__).resolve().parents[2]


class Words:
    """Texts whose tokens are their lengths."""

    def same(self, tokens, line):
        return len(tokens) == line["tokens"]


def noted(id: str) -> dict:
    return {"what": "answer", "id": id, "tokens": 2, "text": "x", "at": 1.0}


@pytest.fixture
def recorded(tmp_path):
    """A store with three answers and an event of each, and a client who was told of all."""
    store = FeedbackStore(f"sqlite:///{tmp_path}/people.db")
    told = Told()
    for id in "abc":
        store.record_answer(answer(id, version=0))
        one = event("accepted", id)
        store.record_events([one], "ann")
        told.answers[id] = noted(id)
        told.sent[one.key] = dataclasses.asdict(one)
        told.acknowledged.add(one.key)
    with store:
        yield store, told


def problems(store, told) -> str:
    found = Audit()
    check_record(found, store.engine, told, Words())
    return "; ".join(found.problems)


def run(store, statement) -> None:
    with store.engine.begin() as connection:
        connection.execute(statement)


def test_a_whole_record_has_no_problem(recorded):
    assert problems(*recorded) == ""


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        (delete(ANSWERS).where(ANSWERS.c.id == "b"), "1 acknowledged answers lost: b"),
        (
            update(ANSWERS).where(ANSWERS.c.id == "b").values(finish_reason="aborted"),
            "1 acknowledged answers lost: b",
        ),
        (update(ANSWERS).values(tokens=(8,)), "3 acknowledged answers recorded with another text"),
        (delete(EVENTS).where(EVENTS.c.answer == "c"), "1 acknowledged events lost: accepted c"),
        (update(EVENTS).values(at=0.5), "3 events recorded otherwise than they were sent"),
    ],
)
def test_what_is_lost_or_changed_is_found(recorded, statement, words):
    store, told = recorded
    run(store, statement)
    assert words in problems(store, told)


def test_what_is_there_twice_or_was_never_sent_is_found(recorded):
    store, told = recorded
    store.record_events([event("left", "a", value=1.0)], "ann")
    # the same key of another user is another row
    again = dataclasses.asdict(event("accepted", "a")) | {"user": "bob", "received_at": 120.0}
    run(store, insert(EVENTS).values(again))
    found = problems(store, told)
    assert "events counted twice: accepted a" in found
    assert "1 events that nobody sent: left a" in found


def test_an_answer_that_nobody_was_told_of_needs_a_request_that_failed(recorded):
    store, told = recorded
    del told.answers["c"]
    assert "1 answers are recorded that no client was told of" in problems(store, told)
    told.failed.append({"what": "no answer", "why": "cut off"})
    assert problems(store, told) == ""


def cycled(store, ids=("a", "b", "c")) -> Ledger:
    """A cycle that is trained on these answers, of version 0."""
    ledger = Ledger(store.engine)
    ledger.start(0, 1.0)
    with store.engine.connect() as connection:
        now = store._now(connection)
    selection = store.select(now, [0])
    selection = dataclasses.replace(selection, ids=tuple(ids))
    store.mark_used(1, selection)
    ledger.edge(
        ledger.current(),
        "train",
        200.0,
        "",
        changes={"candidate": 1, "digest": selection.digest, "answers": len(ids)},
        new_version=1,
    )
    return ledger


def cycle_problems(store, folder, monkeypatch, made_of=None, left_out=0) -> str:
    found = Audit()
    told = made_of and {"made_of": made_of, "left_out": left_out}
    monkeypatch.setattr(audit_lib, "_told", lambda versions, version: told)
    check_cycles(found, store.engine, folder, batch=0)
    return "; ".join(found.problems)


def test_versions_are_made_of_what_is_marked(recorded, tmp_path, monkeypatch):
    store, _ = recorded
    row = cycled(store).current()
    ids = hashlib.sha256(b"a,b,c").hexdigest()
    made_of = f"0/{row.digest}/{ids}"
    assert cycle_problems(store, tmp_path, monkeypatch, made_of) == ""
    assert (
        cycle_problems(store, tmp_path, monkeypatch, made_of, left_out=2)
        == "cycle 1: 2 answers were marked and not trained on"
    )
    other = f"0/{row.digest}/{hashlib.sha256(b'a,b,b').hexdigest()}"
    assert "version 1 was made of" in cycle_problems(store, tmp_path, monkeypatch, other)


def test_an_answer_that_was_skipped_is_found(recorded, tmp_path, monkeypatch):
    store, _ = recorded
    cycled(store, ids=("a", "c"))
    assert "1 answers that cycle 1 has skipped: b" in cycle_problems(store, tmp_path, monkeypatch)


def test_an_answer_of_a_version_that_was_not_served_is_found(recorded, tmp_path, monkeypatch):
    store, _ = recorded
    ledger = cycled(store)
    assert cycle_problems(store, tmp_path, monkeypatch) == ""
    ledger.edge(ledger.current(), "gate", 300.0, "", versions=[(1, "candidate")])
    run(store, update(ANSWERS).where(ANSWERS.c.id == "c").values(version=1, asked_at=350.0))
    found = cycle_problems(store, tmp_path, monkeypatch)
    assert "1 answers of a version that was not served then: c at 350.000" in found
    ledger.edge(ledger.current(), "deploy", 340.0, "")
    found = cycle_problems(store, tmp_path, monkeypatch)
    assert "not served then" not in found


def test_an_edge_that_is_missing_is_found(recorded, tmp_path, monkeypatch):
    store, _ = recorded
    cycled(store)
    edge = {"cycle": 1, "number": 3, "before": "gate", "after": "deploy", "at": 1.0, "reason": ""}
    run(store, insert(audit_lib.EDGES).values(edge))
    assert "edge 3 of cycle 1 is out of order" in cycle_problems(store, tmp_path, monkeypatch)


def test_a_control_that_some_users_always_have_may_answer_at_any_time(recorded, tmp_path):
    store, _ = recorded
    cycled(store)
    run(store, update(ANSWERS).where(ANSWERS.c.id == "c").values(version=7))
    for control, found in ((7, False), (None, True)):
        audit = Audit()
        check_cycles(audit, store.engine, tmp_path, 0, control=control)
        assert ("not served then: c" in "; ".join(audit.problems)) == found


def test_a_person_of_an_agent_notes_each_try_answer_and_event(tmp_path, monkeypatch):
    monkeypatch.setattr(agent_clients, "WAITS_S", (0.0, 0.0))
    path = tmp_path / "clients.jsonl"
    said = [("write", {"content": "x = 1"}), ("submit", {})]
    server = FakeServer(chat=lambda body: said)
    server.faults += ["drop", 503]
    with path.open("w") as file:
        client = NotingClient(Journal(file), server.url, "key", session="s")
        id = client.chat([{"role": "user", "content": "a"}]).id
        assert client.report([event("accepted", id)]) == {}
        # what is refused for good is no try: nothing may be recorded of it
        server.chat = lambda body: 400
        with pytest.raises(ServerRefused, match="too long"):
            client.chat([{"role": "user", "content": "a"}])
        client.close()
    server.close()
    told = read_journal(path)
    assert len(told.failed) == 2 and "503" in told.failed[1]["why"]
    calls = [["write", json.dumps({"content": "x = 1"})], ["submit", "{}"]]
    assert told.answers[id]["calls"] == calls
    assert told.acknowledged == told.sent.keys() == {event("accepted", id).key}


def test_the_message_of_an_agent_is_compared_with_its_tokens():
    tokenizer = Tokenizer.train(["write x = 1"], 300, Compact.SPECIAL_TOKENS)
    schemas = [
        dict(name=name, parameters=dict(type="object", properties=given, required=list(given)))
        for name, given in (("write", dict(content=dict(type="string"))), ("submit", {}))
    ]
    messages = Messages(ChatText(PROTOCOLS["compact"], tokenizer), schemas)
    tokens = tuple(tokenizer.encode("<|call|>write\nx = 1<|end|><|eot|>"))
    line = {"content": None, "calls": [["write", '{"content": "x = 1"}']], "tokens": len(tokens)}
    assert messages.same(tokens, line)
    for other in (
        {"content": "x"},
        {"calls": []},
        {"calls": [["write", '{"content": "x = 2"}']]},
        {"tokens": 1},
    ):
        assert not messages.same(tokens, line | other)


class Struck:
    """A program that is always ready, and a ledger that is always in one state."""

    def __init__(self, state: str):
        self._state = state
        self.lives = [Life(1, 0.0)]
        self.ready, self.seconds = True, 1e9
        self.kills = 0

    def check(self) -> None:
        pass

    def deployed(self):
        return self._state, 1

    def kill(self) -> None:
        self.kills += 1

    def start(self) -> None:
        pass


@pytest.mark.parametrize(("state", "kind"), [("train", "trainer"), ("watch", "server")])
def test_kills_fall_in_their_states(state, kind):
    counts = {"trainer": 0, "server": 0, "database": 0, "anytime": 2} | {kind: 2}
    struck = Struck(state)
    strikes = Strikes(counts, 0.0, 1.0, random.Random(0), struck, struck, None, lambda text: None)
    strikes.run(lambda: not strikes.left)
    assert struck.kills == len(strikes.log) == 4
    assert {one["state"] for one in strikes.log} == {state}
    assert set(strikes.looks) == {1}


def test_the_memory_of_a_life_is_told_by_its_second_half():
    memory = [(float(at), (100 + max(0, 30 - at)) * 2**20) for at in range(60)]
    found = life_of(Life(1, 0.0, 0.0, 60.0, memory))
    assert found["mib"] == {"first": 130, "half": 100, "last": 100, "most": 130}
    assert abs(found["mib_per_minute"]) < 1e-6
    told = Told(answers={"a": {"at": 5.0, "first_s": 1.0, "whole_s": 2.0, "tokens": 8}})
    assert measured(told, [], (1.0, 9.0))["tokens_per_s"] == 1.0


@pytest.mark.skipif(bool(postgres.why_not()), reason=postgres.why_not())
def test_a_killed_database_starts_again_with_what_was_committed():
    with postgres.server() as server, FeedbackStore(server.url) as store:
        store.record_answer(answer("kept"))
        server.kill()
        server.start()
        assert [one.id for one, _ in store.joined(["kept"])] == ["kept"]


@pytest.mark.slow(reason="minutes; how much is answered depends on the machine")
def test_nothing_is_lost_under_a_small_load(tmp_path):
    """The whole command with everything real: two kills, one of them while it starts."""
    command = [
        *(sys.executable, "-m", "experiments.load", "--config=configs/realtime.py:smoke"),
        *(f"--workdir={tmp_path}", "--clients=8", "--seconds=30", "--rounds=0", "--strike_seed=1"),
        *("--database=sqlite", "--server_kills=1", "--anytime_kills=1", "--within_s=5"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every check passed" in done.stdout
    found = json.loads((tmp_path / "load.json").read_text())
    assert found["audit"]["problems"] == []
    assert len(found["strikes"]) == 2 and len(found["lives"]) == 4
    assert found["audit"]["counts"]["answers acknowledged"] > 0
