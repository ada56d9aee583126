"""A simulated person works with a scripted agent over HTTP, with its tools in a real sandbox."""

from __future__ import annotations

import dataclasses
import json
import time

import pytest

from people.feedback.records import EVENTS, Event
from people.simulated import agent_crowd
from people.simulated.agent_crowd import AgentCrowdConfig, AgentPersons
from people.simulated.agent_habits import KINDS, AgentHabits
from people.simulated.crowd import Crowd
from rl_code.config.named import Named
from rl_code.config.read_config import ConfigError
from tests.people.simulated.fake_server import FakeServer
from tests.people.simulated.test_agent_person import EXACT

SOURCE = Named(
    "experiments.incidents.tasks:FromWords",
    dict(split="train", levels=(1,), unclear="two", share=0.5),
)
TOOLS = tuple(Named(name) for name in ("write_file", "submit", "ask"))
CONFIG = AgentCrowdConfig(SOURCE, TOOLS, people=2, at_once=1, late_s=0.0)
PATIENCE_S = 120.0


@pytest.fixture
def persons(server, monkeypatch):
    """Makes the persons of one process, who have habits of one kind."""

    def make(habits: AgentHabits = EXACT, **changes) -> AgentPersons:
        quick = dataclasses.replace(habits, late=0.0, lost=0.0, twice=0.0)
        monkeypatch.setitem(KINDS, "exact", quick)
        config = dataclasses.replace(CONFIG, kinds=("exact",), **changes)
        return AgentPersons(config, server.url, 0)

    return make


def writes(text: str) -> list[tuple[str, dict]]:
    return [("write", {"content": text}), ("submit", {})]


def told(server: FakeServer) -> list[list[dict]]:
    """Messages of each request to the agent."""
    path = "/v1/chat/completions"
    return [body["messages"] for asked, body, _ in server.requests if asked == path]


def test_a_right_answer_is_kept_opened_and_merged(server, persons):
    made = persons()
    task = made._tasks[0]
    made._tasks = [task]
    server.chat = lambda body: writes(task.reference[task.path])
    (tried,) = made.have(0, "session")
    assert tried.turn.right and tried.turn.passes and tried.decision.satisfaction == 1.0
    made.post.deliver(everything=True)
    kinds = {event["kind"] for event in server.events.values()}
    assert kinds == {"shown", "accepted", "retained", "opened", "merged", "thumbs"}
    body = next(body for path, body, _ in server.requests if path.endswith("completions"))
    declared = [one["function"]["name"] for one in body["tools"]]
    assert declared == ["write", "submit", "ask"] and body["model"] == "auto"


def test_files_are_shown_as_documents_once_in_a_conversation(server, persons):
    """And again to another model, in a conversation of its own."""
    tokens = dict(split="train", tokens=120, files=2, matter=1, spacing=40)
    edit = tuple(Named(name) for name in ("edit_file", "submit"))
    impatient = dataclasses.replace(EXACT, switches=2, patience=2)
    made = persons(impatient, tasks=Named("lookup", tokens), tools=edit)
    (task,) = made._tasks = [made._tasks[0]]
    *files, want = task.messages[0]["content"]
    assert [part["type"] for part in files] == ["document"] * 2
    server.chat = lambda body: [("edit", {"old": "return", "new": "return None\n"}), ("submit", {})]
    assert len(made.have(0, "session")) == 3
    first, again, other = told(server)
    assert [one["content"] for one in first] == [[*files, want]]
    complaint = again[-1]["content"]
    assert again[0] == first[0] and complaint.endswith(want["text"])
    assert all(part["text"] not in complaint for part in files)
    assert [one["role"] for one in other] == ["user"] and other[0]["content"][:-1] == files


def test_who_looks_only_hours_later_tells_what_became_of_the_work_and_nothing_earlier(
    server, persons
):
    # they read carelessly, and run their tests all the same
    careless = dataclasses.replace(EXACT, care=0.0, tests=0.0, patience=0)
    made = persons(careless, seldom=True)
    task = made._tasks[0]
    made._tasks = [task]
    for said, kinds in (
        (task.reference[task.path], {"accepted", "retained", "merged"}),
        ("def f(xs):\n    0\n", {"rejected"}),
    ):
        server.events.clear()
        server.chat = lambda body, said=said: writes(said)
        made.have(0, f"session {kinds}")
        made.post.deliver(everything=True)
        assert {event["kind"] for event in server.events.values()} == kinds
        assert {event["horizon_s"] for event in server.of_kind("retained")} <= {3_600.0}


def test_a_wrong_answer_is_complained_about_in_the_same_conversation(server, persons):
    made = persons()
    unclear = next(one for one in made._tasks[:40] if not one.meta["clear"])
    made._tasks = [unclear]
    wanted = unclear.reference[unclear.path]
    server.chat = lambda body: writes(
        wanted if len(body["messages"]) > 1 else "def f(xs):\n    0\n"
    )
    first, second = made.have(0, "session")
    assert not first.turn.right and second.turn.right
    begun, again = told(server)
    assert begun == [{"role": "user", "content": unclear.messages[-1]["content"]}]
    roles = [one["role"] for one in again]
    assert roles == ["user", "assistant", "tool", "tool", "user"]
    assert [one["content"] for one in again[2:4]] == ["ok", "submitted"]
    # who asks again says what was meant
    assert again[-1]["content"].endswith(unclear.meta["answer"])
    (event,) = server.of_kind("follow_up")
    assert event["answer"] == first.turn.answers[0]
    assert again[-1]["content"].startswith(event["extra"]["text"])
    assert server.of_kind("reverted")[0]["value"] == 1.0


def test_a_question_is_answered_and_said_to_be_needless_or_not(server, persons):
    made = persons()
    tasks = made._tasks[:40]
    for clear in (True, False):
        task = next(one for one in tasks if one.meta["clear"] == clear)
        made._tasks = [task]
        right = writes(task.reference[task.path])
        server.chat = lambda body, right=right: (
            right if any(one["role"] == "tool" for one in body["messages"]) else [("ask", {})]
        )
        (tried,) = made.have(0, f"session {clear}")
        assert told(server)[-1][-1]["content"] == task.meta["answer"]
        assert len(tried.turn.questions) == len(tried.turn.answers) == 1 and tried.turn.right
        said = [one for one in server.of_kind("shown") if one["extra"]]
        assert said[-1]["extra"] == {"ambiguous": not clear}
        assert (tried.decision.satisfaction == 1.0) == (not clear)


def test_what_cannot_be_read_and_what_only_asks_is_refused(server, persons):
    made = persons(dataclasses.replace(EXACT, patience=0))
    for said in ("<|call|>write", [("write", {"text": 1})], [("burn", {})], [("ask", {})]):
        server.chat = lambda body, said=said: said
        (tried,) = made.have(0, repr(said))
        assert tried.decision.disappointed and not tried.turn.change.paths
    assert len(server.of_kind("rejected")) >= 4 and not server.of_kind("accepted")
    results = [one["content"] for all in told(server) for one in all if one["role"] == "tool"]
    assert any("missing argument" in one or "unknown" in one for one in results)


def test_disappointments_in_a_row_have_people_switch_and_leave(server, persons):
    made = persons(dataclasses.replace(EXACT, switches=2, leaves=3, patience=2))
    server.chat = lambda body: "no"
    tried = made.have(0, "session")
    assert [one.model for one in tried] == ["auto", "auto", "policy@1"]
    (switched,) = server.of_kind("switched")
    assert switched["answer"] == tried[1].turn.answers[0]
    made.post.deliver(everything=True)
    (left,) = server.of_kind("left")
    assert left["answer"] == tried[2].turn.answers[0]
    before = {headers["Authorization"] for _, _, headers in server.requests}
    made.have(0, "another")
    after = {headers["Authorization"] for _, _, headers in server.requests}
    assert len(after) == 2 and before < after  # another person, who has the place now


def test_a_conversation_that_is_too_long_is_begun_anew(server, persons):
    made = persons(dataclasses.replace(EXACT, patience=1))
    server.chat = lambda body: 400 if len(body["messages"]) > 2 else "no"
    first, second = made.have(0, "session")
    assert [len(one) for one in told(server)] == [1, 3, 1]
    assert told(server)[-1][0]["content"] == told(server)[1][-1]["content"]
    assert first.turn.answers != second.turn.answers


@pytest.mark.long
def test_every_signal_has_a_sender_and_nothing_else_is_sent(server, persons, tmp_path):
    """Several kinds with an agent that is right now and then: all kinds of events are sent, and
    nowhere stands how content somebody truly is.
    """
    truth = tmp_path / "truth.jsonl"
    config = dataclasses.replace(CONFIG, people=4, kinds=("steady", "namer", "voter", "hurried"))
    made = AgentPersons(config, server.url, 0, truth)
    made._tasks = made._tasks[:12]
    answers = {one.messages[-1]["content"]: one.reference[one.path] for one in made._tasks}

    def chat(body):
        want = body["messages"][0]["content"].split("\n")[-1]
        number = len(told(server))
        if number % 3 == 0:
            return writes(answers.get(want, "def f(xs):\n    return xs\n"))
        return [("ask", {})] if number % 7 == 1 else writes("def f(xs):\n    return 1\n")

    server.chat = chat
    number = 0
    while {event["kind"] for event in server.events.values()} != EVENTS.keys():
        made.have(number % 4, f"session {number}")
        made.post.deliver(everything=True)
        number += 1
        assert number < 120, EVENTS.keys() - {one["kind"] for one in server.events.values()}
    lines = [json.loads(line) for line in truth.read_text().splitlines()]
    assert {0.0 <= one["satisfaction"] <= 1.0 for one in lines} == {True}
    for _, body, headers in server.requests:
        assert "satisfaction" not in json.dumps([body, headers])
        for event in body.get("events", ()):
            assert event["extra"].keys() <= {"text", "ambiguous"}
    kept = {field.name for field in dataclasses.fields(Event)}
    assert all(event.keys() == kept for event in server.events.values())


@pytest.mark.long
def test_persons_come_from_a_process_of_their_own(server, tmp_path):
    server.chat = lambda body: writes("def f(xs):\n    return xs\n")
    config = AgentCrowdConfig(SOURCE, TOOLS, people=2, at_once=2, late_s=0.0)
    truth = tmp_path / "truth.jsonl"
    end = time.monotonic() + PATIENCE_S
    with Crowd(config, server.url, tmp_path / "log", truth=str(truth)) as crowd:
        while time.monotonic() < end and not (truth.exists() and server.events):
            crowd.check()
            with server.changed:
                server.changed.wait(0.2)
    assert server.events and truth.read_text()
    keys = {headers["Authorization"] for _, _, headers in server.requests}
    assert keys <= {f"Bearer agent-person-0-{place}-{n}" for place in (0, 1) for n in range(99)}


def test_a_crowd_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="steady"):
        AgentCrowdConfig(SOURCE, TOOLS, kinds=("saints",))
    with pytest.raises(ValueError, match="processes"):
        AgentCrowdConfig(SOURCE, TOOLS, people=1, processes=2)
    with pytest.raises(ConfigError, match=r"config\.tools"):
        config = AgentCrowdConfig(SOURCE, (Named("telepathy"),))
        AgentPersons(config, "http://127.0.0.1:1/v1", 0)
    assert agent_crowd.AgentCrowdConfig.program == agent_crowd.__name__
