"""An operator removes a person, whose key may be withdrawn, from all that is kept."""

from __future__ import annotations

import dataclasses
import json
import time
from types import SimpleNamespace

import pytest
import sqlalchemy

from launch import forget, serve
from people.feedback.identity import load_secret, user_key
from people.feedback.store import FeedbackStore
from people.feedback.tables import METADATA
from people.realtime import tables
from people.realtime.ledger import Ledger
from people.serving.begun import Begun
from tests.people.feedback.people import answer, event
from tests.people.serving.killed import dead

KEY = "sk-ann"


@pytest.fixture
def ann(tmp_path):
    (tmp_path / "key.txt").write_text(f"{KEY}\n")
    return user_key(load_secret(tmp_path / "secret"), KEY)


def run(monkeypatch, **given) -> None:
    names = "workdir", "database", "documents", "record", "user", "key_file", "secret"
    monkeypatch.setattr(forget, "FLAGS", SimpleNamespace(**dict.fromkeys(names) | given))
    forget.main(["forget"])


def test_a_person_is_removed_from_a_workdir_with_the_names_in_alarms(
    tmp_path, ann, monkeypatch, capsys
):
    engine = tables.connect(f"sqlite:///{tmp_path}/people.db")
    ledger = Ledger(engine)
    ledger.start(0, 1.0)
    with FeedbackStore(engine) as store:
        for id, user in (("a", ann), ("b", "bob")):
            store.record_answer(answer(id, user))
            store.record_events([event("shown", id)], user)
        store.mark_used(1, store.select(time.time(), [1]))
        ledger.raise_alarm(1, "latency", 2.0, "", [f"session of {ann}", "session of bob"])
    for file in ("begun.jsonl", "secret.begun"):  # as a killed server has left them
        begun = Begun(tmp_path / file)
        begun.begin([dataclasses.replace(dead(user), user=user) for user in (ann, "bob")])
        begun.close()
    for owner in ("shared", "acme"):
        kept = tmp_path / "documents" / owner / "0.keys"
        kept.parent.mkdir(parents=True)
        kept.touch()
    run(monkeypatch, workdir=str(tmp_path), key_file=str(tmp_path / "key.txt"))
    said = capsys.readouterr().out
    assert "2 files of documents are removed" in said and not [*tmp_path.glob("documents/*/*")]
    assert "2 answers are removed that a killed server was sampling" in said
    for file in ("begun.jsonl", "secret.begun"):
        assert [one.user for one in Begun(tmp_path / file).left] == ["bob"]
    assert "1 answers and 1 events are removed" in said and "cycles 1 trained on them" in said
    with engine.connect() as connection:
        for table in (*METADATA.sorted_tables, *tables.METADATA.sorted_tables):
            for row in connection.execute(sqlalchemy.select(table)):
                assert ann not in str(row)
        assert connection.scalar(sqlalchemy.select(tables.ALARMS.c.sessions)) == ["session of bob"]
    with FeedbackStore(engine) as store:
        assert store.counts()["answers"] == 1 and store.training_sets()[0].deleted == 1


def test_a_person_is_removed_from_the_record_of_a_server_that_has_ended(
    tmp_path, ann, monkeypatch, capsys
):
    record = tmp_path / "answers.jsonl"
    way = dict(record=str(record), user=ann)
    with serve.recorder(str(record)) as write:
        write(answer("a", ann))
        write(answer("b", "bob"))
        with pytest.raises(SystemExit):
            run(monkeypatch, **way)
        assert "a server writes to it" in capsys.readouterr().err
        write(answer("c", ann))
    run(monkeypatch, **way)
    assert "2 answers are removed" in capsys.readouterr().out
    (left,) = map(json.loads, record.read_text().splitlines())
    assert left == json.loads(json.dumps(dataclasses.asdict(answer("b", "bob"))))


@pytest.mark.parametrize("line", ["hello", "[]", "{}"])
def test_a_line_without_an_answer_is_named_and_nothing_is_removed(
    tmp_path, ann, monkeypatch, capsys, line
):
    record = tmp_path / "answers.jsonl"
    record.write_text(json.dumps({"user": ann}) + "\n" + line + "\n")
    with pytest.raises(SystemExit):
        run(monkeypatch, record=str(record), user=ann)
    told = capsys.readouterr().err
    assert "answers.jsonl, line 2: expected an answer as launch.serve records it" in told
    assert len(record.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (dict(user="0" * 32), "where the person is to be removed"),
        (dict(workdir="{}"), "either --user or --key_file"),
        (dict(workdir="{}", user="ann"), "32 hex digits"),
        (dict(workdir="{}", user="0" * 32), "people.db': there is no such file"),
        (dict(workdir="{}", key_file="{}/key.txt"), "no such file"),
        (dict(workdir="{}/typo", user="0" * 32), "there is no such file"),
        (dict(database="mysql://x", user="0" * 32), "expected sqlite"),
    ],
)
def test_a_wrong_command_is_told_and_makes_no_file(tmp_path, monkeypatch, capsys, given, says):
    given = {name: value.format(tmp_path) for name, value in given.items()}
    with pytest.raises(SystemExit):
        run(monkeypatch, **given)
    assert says in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
