"""Suggestions that people kept become holes that the gate plays."""

from __future__ import annotations

import dataclasses
import json

import pytest

from models.tokenizer import Tokenizer
from people.feedback.records import HORIZONS_S, AnswerRecord, Event
from people.feedback.store import FeedbackStore
from people.realtime import cases
from people.realtime.held_out import JudgeConfig
from people.realtime.kept import Reader, hole_rows
from people.simulated.at_work import Hole, work
from people.simulated.client import Client
from people.simulated.fit import embedded
from people.simulated.programmer import Habits, Programmer
from rl_code.config.named import Named
from rl_code.environment.protocols.infill import Infill
from rl_code.environment.tools.suggest import around
from rl_code.harness.endpoint.completions import FillInTheMiddle
from rl_code.tasks import records
from rl_code.tasks.api import find_source
from rl_code.tasks.row_files import TaskFileError
from tests.people.feedback import people
from tests.people.serving.scripted import openai_client, scripted

TOKENIZER = Tokenizer.train(
    ["return x + 1"], 330, Infill.SPECIAL_TOKENS, eos="<|eot|>", pad="<|pad|>"
)
GAPS = FillInTheMiddle()
READER = Reader(TOKENIZER, GAPS)
BEFORE, BEHIND = 'def f(x):  # é <|fim_middle|>\n    return "', '"\n'


def suggested(id: str, text: str, user: str = "ann", **fields) -> AnswerRecord:
    given = tuple(GAPS.tokens(BEFORE, BEHIND, TOKENIZER))
    tokens = tuple(TOKENIZER.encode(f"{text}<|eot|>"))
    numbers = dict(logprobs=(-1.0,) * len(tokens), versions=(1,) * len(tokens))
    return people.answer(id, user, **dict(given=given, tokens=tokens) | numbers | fields)


def looked(id: str, *shares: float) -> list[Event]:
    looks = zip(HORIZONS_S, shares, strict=False)
    events = [Event(f"{id}{at}", id, "retained", 2.0 + at, share, at) for at, share in looks]
    return [Event(f"{id}a", id, "accepted", 2.0, 1.0), *events]


def made(joined, **changes) -> cases.SuiteRows:
    return hole_rows(joined, READER, **dict(per_user=5, count=0, seed=0) | changes)


def test_a_row_has_the_texts_around_the_gap_and_what_was_kept_there():
    (row,) = made([(suggested("a", "x + 1"), looked("a", 1.0, 1.0, 1.0))]).rows
    assert {key: row[key] for key in row if key != "id"} == {
        "before": BEFORE,
        "behind": BEHIND,
        "wanted": "x + 1",
    }
    # what came behind the text at which the request stopped was never shown
    stopped = suggested("a", "x + 1; y", extra={"stop": [";"]})
    assert made([(stopped, looked("a", 1.0))]).rows[0]["wanted"] == "x + 1"


def test_only_what_is_alive_at_its_last_look_was_wanted():
    rejected = [Event("r", "d", "rejected", 2.0, 1.0)]
    joined = [
        (suggested("a", "a"), looked("a")),  # nobody has looked
        (suggested("b", "b"), looked("b", 1.0, 0.5)),
        (suggested("c", "c"), looked("c", 0.5, 1.0)),
        (suggested("d", "d"), rejected),
        (suggested("e", "e"), []),
        (suggested("f", " \n"), looked("f", 1.0)),
        (suggested("g", "g", extra={"store": False}), looked("g", 1.0)),
        (suggested("h", "h", given=(5, 6)), looked("h", 1.0)),  # no gap
        (suggested("i", "i", kind="chat"), looked("i", 1.0)),  # an agent's
    ]
    found = made(joined)
    assert [row["wanted"] for row in found.rows] == ["c"] and found.ungraded == 7


def test_nobodys_habits_are_the_suite():
    joined = [(suggested(id, id), looked(id, 1.0)) for id in "abc"]
    joined += [(suggested(id, "same", "bob"), looked(id, 1.0)) for id in "de"]
    found = made(joined, per_user=2)
    assert (len(found.rows), found.crowded, found.repeated) == (3, 1, 1)
    assert len(made(joined, count=2).rows) == 2
    assert "ann" not in json.dumps(found.rows)


def test_rows_are_holes_that_a_judge_scores(tmp_path):
    (row,) = made([(suggested("a", "x + 1"), looked("a", 1.0))]).rows
    path = tmp_path / "holes.jsonl"
    path.write_text(json.dumps(row))
    source = find_source(Named("holes", {"path": str(path)}), "tasks")
    (task,) = source.load(None, None)
    assert around(task) == (BEFORE, BEHIND) and task.meta["wanted"] == "x + 1"
    judge = JudgeConfig()
    assert judge.chance(task, "x + 1") > judge.chance(task, "raise") + 0.1
    path.write_text('{"id": "a", "before": "x"}')
    with pytest.raises(TaskFileError, match="line 1"):
        source.load(None, None)


def written(tmp_path, store) -> list:
    """The sessions of a store, as ``launch.export_sessions`` writes them and they are read."""
    lines = [cases.line_of(*one) for one in store.joined(store.of_sessions(None, 0.0))]
    (tmp_path / "sessions.jsonl").write_text("".join(lines))
    return cases.read_answers(tmp_path / "sessions.jsonl")[0]


def test_what_people_kept_over_http_becomes_a_suite(tmp_path):
    """With a server, a store and a simulated programmer as a cycle has them."""
    holes = [Hole(f"def f{i}(x):\n    return ", "\n", "one") for i in range(12)]
    with FeedbackStore(f"sqlite:///{tmp_path}/people.db") as store:
        with scripted(on_answer=store.submit_answer) as found:
            client = Client(f"{found.endpoint.url}/v1", "ann", session="s")
            client.report = lambda events: store.record_events(
                events, store.joined([events[0].answer])[0][0].user
            )
            tally = work(
                client, Programmer(embedded(), Habits(leniency=9.0), 0), holes, model="policy"
            )
            client.close()
            tokenizer = found.fleet.text._tokenizer
        joined = written(tmp_path, store)
    kept = [one for one in joined if any(e.value == 1.0 for e in one[1] if e.horizon_s == 3600.0)]
    assert tally.accepted > 6 and kept
    rows = hole_rows(joined, Reader(tokenizer, GAPS), per_user=99, count=0, seed=0).rows
    assert len(rows) == len(kept) and {row["wanted"] for row in rows} == {"one"}
    assert {row["before"] for row in rows} <= {hole.prefix for hole in holes}


def test_what_an_agent_did_over_http_becomes_a_suite(tmp_path):
    """Its program knows the task, and says so with an event of its own answer."""
    source = find_source(Named("repositories", {"split": "train"}), "tasks")
    task = source.load(None, None)[0]
    with FeedbackStore(f"sqlite:///{tmp_path}/people.db") as store:
        with scripted(on_answer=store.submit_answer) as found:
            client = openai_client(f"{found.endpoint.url}/v1")
            said = client.chat.completions.create(
                model="policy",
                messages=[{"role": "user", "content": task.messages[0]["content"]}],
                extra_headers={"X-Session": "issue 7"},
            )
        user = store.joined([said.id])[0][0].user
        extra = {"record": records.row_of(task), "files": dict(task.reference)}
        opened = Event("1", said.id, "opened", 3.0, 1.0, extra=extra)
        assert store.record_events([opened], user)[0].status == "recorded"
        sessions = cases.sessions(written(tmp_path, store))
    (row,) = cases.suite_rows(sessions, per_user=5, count=0, seed=0).rows
    path = tmp_path / "suite.jsonl"
    path.write_text(json.dumps(row))
    columns = {name: name for name in row}
    (again,) = find_source(Named("records", {"path": str(path), "columns": columns}), "tasks").load(
        None, None
    )
    assert again.messages == tuple(task.messages) and again.files == task.files
    wanted = [case for case in task.hidden_tests.cases if not case.target]
    assert [dataclasses.replace(c, tolerance=None) for c in again.hidden_tests.cases] == wanted


def test_a_task_that_no_row_holds_is_refused():
    task = find_source(Named("infill", {"split": "train", "levels": (1,)}), "t").load(None, None)[0]
    with pytest.raises(ValueError, match="needs tests"):
        records.row_of(task)
