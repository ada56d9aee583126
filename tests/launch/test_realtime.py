"""The commands of the cycle, in this process: a run of three cycles, its dry run, its page."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import runpy
import sqlite3
import time
import urllib.request
from types import SimpleNamespace

import pytest
import rich.console
import sqlalchemy

from launch import export_sessions, make_case, make_suite, realtime
from people.feedback import database
from people.feedback.outcomes import Selection
from people.feedback.records import Event
from people.feedback.store import FeedbackStore
from people.realtime import tables
from people.realtime.cycle import Cycle, Notice
from people.realtime.dashboard import Dashboard
from people.realtime.ledger import Ledger
from people.realtime.rehearsal import FileFleet
from people.realtime.tables import ALARMS
from rl_code.config import read_config
from rl_code.config.read_config import ConfigError
from tests.people.realtime.test_cases import ROW, answer, written


def config(database: str | None = None) -> realtime.RealtimeConfig:
    given = runpy.run_path("configs/rehearsal.py")["get_config"]("smoke")
    given.database = database
    return read_config.build(realtime.RealtimeConfig, given)


def test_a_dry_run_of_a_new_workdir_writes_nothing(tmp_path):
    folder = tmp_path / "new"
    assert "holds no cycle yet" in realtime.dry_run(config(), folder)
    assert not folder.exists()
    url = f"sqlite:///{tmp_path}/other.db"
    assert "other.db holds no cycle yet" in realtime.dry_run(config(url), folder)
    assert list(tmp_path.iterdir()) == []


def content(folder) -> tuple[list[str], list[str]]:
    """Files of a workdir, and its database as SQL."""
    with contextlib.closing(sqlite3.connect(folder / "people.db")) as connection:
        dump = list(connection.iterdump())
    return sorted(str(path) for path in folder.rglob("*") if "people.db" not in path.name), dump


@pytest.mark.parametrize("form", ["head", "feedback_1"])
def test_a_dry_run_starts_no_cycle_and_migrates_nothing(tmp_path, form):
    """A database that answers are recorded in, without a cycle, or of an older form with one."""
    engine = tables.connect(f"sqlite:///{tmp_path}/people.db")
    database.migrate(engine)
    if form != "head":
        Ledger(engine).start(0, 1.0)
        with engine.begin() as connection:
            connection.execute(sqlalchemy.text(f"UPDATE alembic_version SET version_num='{form}'"))
    engine.dispose()
    before = content(tmp_path)
    said = realtime.dry_run(config(), tmp_path)
    assert ("holds no cycle yet" if form == "head" else "tables of an older form") in said
    assert content(tmp_path) == before


def test_a_dry_run_of_a_cycle_that_has_begun_changes_nothing(tmp_path):
    cycle, _, _ = realtime.open_cycle(config(), tmp_path)
    cycle.step()
    before = content(tmp_path)
    assert "cycle 1, collect: wait for 200 sessions" in realtime.dry_run(config(), tmp_path)
    assert content(tmp_path) == before


def test_bounds_of_the_config_are_of_what_its_parts_say(tmp_path):
    given = runpy.run_path("configs/realtime.py")["get_config"]("smoke")
    realtime.open_cycle(read_config.build(realtime.RealtimeConfig, given), tmp_path / "a")
    given.cycle.watch.guardrails = (dict(metric="latencies", harm="up", scale=1.0),)
    wrong = read_config.build(realtime.RealtimeConfig, given)
    with pytest.raises(ConfigError, match=r"guardrails\[0\].metric='latencies': metrics of"):
        realtime.open_cycle(wrong, tmp_path / "b")


def test_a_file_of_satisfaction_is_of_parts_that_record_answers(tmp_path):
    given = runpy.run_path("configs/realtime.py")["get_config"]("smoke")
    served = read_config.build(realtime.RealtimeConfig, given)
    _, _, parts = realtime.open_cycle(served, tmp_path)
    assert realtime.truth_of(None, parts, 0) is None
    # people have not written it yet
    assert realtime.truth_of(str(tmp_path / "new.jsonl"), parts, 0) is not None
    for path in (tmp_path, tmp_path / "nowhere" / "people.truth.jsonl"):
        with pytest.raises(ConfigError, match=f"--truth={path}: expected the file"):
            realtime.truth_of(str(path), parts, 0)
    rehearsed = dataclasses.replace(parts, rewards=None)
    with pytest.raises(ConfigError, match="these parts record no answers"):
        realtime.truth_of(str(tmp_path / "new.jsonl"), rehearsed, 0)


def test_three_cycles_of_the_config_end_as_its_docstring_says(tmp_path):
    cycle, ledger, _ = realtime.open_cycle(config(), tmp_path)
    cycle.run(3)
    columns = realtime.table(ledger).columns
    states = list(columns[6].cells)
    assert states == ["promoted", "rolled_back", "promoted", "collect"]
    assert "worse than the deployed version" in list(columns[7].cells)[1]
    assert "sessions" in list(columns[5].cells)[1]
    assert realtime.dry_run(config(), tmp_path).startswith("cycle 4, collect: wait for 200")
    # a second start goes on where the first one ended
    again, ledger, _ = realtime.open_cycle(config(), tmp_path)
    again.run(3)
    assert ledger.current().number == 4


def test_a_cycle_that_collects_removes_what_is_older_than_keep_days(tmp_path):
    given = runpy.run_path("configs/realtime.py")["get_config"]("smoke")
    given.parts.feedback.keep_days = 30.0
    served = read_config.build(realtime.RealtimeConfig, given)
    _, ledger, parts = realtime.open_cycle(served, tmp_path)
    # no weights are loaded: the fleet is that of a rehearsal
    parts = dataclasses.replace(parts, fleet=FileFleet(tmp_path / "fleet.json"))
    cycle = Cycle(ledger, parts, served.cycle)
    now = time.time()
    with contextlib.ExitStack() as stack:

        def store_at(days: float) -> FeedbackStore:
            """A store whose clock stood so many days ago."""
            at = now - days * 86_400.0
            return stack.enter_context(FeedbackStore(ledger.engine, clock=lambda: at))

        for id, days in (("marked", 60), ("old", 60), ("new", 29)):
            store_at(days).record_answer(answer(id, session=f"session {id}"))
            store_at(days).record_events([Event(f"k{id}", id, "accepted", now, 1.0)], "ann")
        store = store_at(0)
        # a process was killed when it had marked its answers and not yet taken the edge
        selection = Selection(("marked",), store.digest(["marked"], now), now, 1)
        store.mark_used(1, selection)
        ledger.raise_alarm(1, "latency", now, "", ["session old", "session new"])
        assert cycle.step() and ledger.current().state == "train"
        left = store.joined(["marked", "old", "new"])
        assert [one.id for one, events in left if events] == ["marked", "new"]
        assert store.used(1).ids == ("marked",)
        (alarm,) = ledger.rows(ALARMS)
        assert alarm.sessions == ["session new"]


def test_edges_are_printed_and_now_and_then_what_is_waited_for():
    printed = io.StringIO()
    lines = realtime.Lines(rich.console.Console(file=printed, width=40))
    waiting = Notice(1, "collect", None, "wait for [200] sessions: 3 answers of 2 sessions")
    lines(waiting)
    lines(waiting)
    lines(Notice(1, "collect", "train", "train on 400 answers"))
    first, second = printed.getvalue().splitlines()
    now = realtime.Lines(rich.console.Console(file=printed, width=40), every_s=0.0)
    now(waiting)
    now(waiting)
    assert printed.getvalue().count("collect: wait for [200] sessions") == 3
    assert first.endswith("cycle 1, collect: wait for [200] sessions: 3 answers of 2 sessions")
    assert second.endswith("cycle 1, collect -> train: train on 400 answers")


def test_the_page_is_served_meanwhile_and_a_taken_port_is_said(tmp_path):
    _, ledger, parts = realtime.open_cycle(config(), tmp_path)
    board = Dashboard(ledger, parts.store, config().cycle)
    said: list[str] = []

    class Console:
        def print(self, text, **_):
            said.append(text)

    with realtime.served(parts, board, 0, Console()):
        (url,) = said
        with urllib.request.urlopen(f"{url}/state.json") as answered:
            assert json.load(answered)["cycle"]["state"] == "collect"
        port = int(url.rpartition(":")[2].partition("/")[0])
        with (
            pytest.raises(ConfigError, match=f"--port={port}: no server can listen"),
            realtime.served(parts, board, port, Console()),
        ):
            pass


def test_a_workdir_whose_cycles_have_ended_loads_nothing_and_prints_them(
    tmp_path, monkeypatch, capsys
):
    _, ledger, _ = realtime.open_cycle(config(), tmp_path)
    ledger.edge(ledger.current(), "refused", 5.0, "no reason")
    given = runpy.run_path("configs/rehearsal.py")["get_config"]("smoke")
    own = dict(dry_run=False, cycles=1, port=None, stay=False, keys=None, truth=None)
    monkeypatch.setattr(realtime.absl_flags, "FLAGS", SimpleNamespace(**own))
    monkeypatch.setattr(Cycle, "run", lambda *_: pytest.fail("a cycle is run"))
    realtime.main(given, str(tmp_path))
    said = " ".join(capsys.readouterr().out.split())
    assert "cycle 1 has ended" in said and "refused" in said and "window" in said
    monkeypatch.setenv(realtime.ADMIN_KEY, "short")
    own |= dict(cycles=2, stay=True, port=0)
    monkeypatch.setattr(realtime.absl_flags, "FLAGS", SimpleNamespace(**own))
    with pytest.raises(ConfigError, match="the admin key has 5 characters"):
        realtime.main(given, str(tmp_path / "other"))
    own |= dict(port=None)
    monkeypatch.setattr(realtime.absl_flags, "FLAGS", SimpleNamespace(**own))
    with pytest.raises(ConfigError, match="--stay needs --port"):
        realtime.main(given, str(tmp_path / "third"))


def run(monkeypatch, module, **flags) -> None:
    """A command, with its flags as they were given."""
    monkeypatch.setattr(module, "FLAGS", SimpleNamespace(**flags))
    module.main([module.__name__])


def test_sessions_become_a_suite_and_a_case(tmp_path, monkeypatch, capsys):
    sessions = tmp_path / "sessions.jsonl"
    extra = {"record": ROW, "files": {"solution.py": "def f(x):\n    return 6\n"}}
    written(sessions, [(answer("a", extra=extra), []), (answer("b", session="t"), [])])
    out = tmp_path / "suites" / "people.jsonl"
    flags = dict(sessions=str(sessions), out=str(out), per_user=5, count=0, seed=0, workdir=None)
    run(monkeypatch, make_suite, **flags)
    assert "1 tasks in" in (said := capsys.readouterr().out) and "1 sessions without tests" in said
    assert json.loads(out.read_text())["entry_point"] == "f"
    assert out.stat().st_mode & 0o777 == 0o600  # it holds people's files
    with pytest.raises(SystemExit):
        run(monkeypatch, make_suite, **flags)
    assert "exists; a suite stays as it is" in capsys.readouterr().err
    cases = tmp_path / "cases.jsonl"
    flags = dict(sessions=str(sessions), name="six", user="", out=str(cases))
    run(monkeypatch, make_case, **flags, session="s")
    assert json.loads(cases.read_text())["name"] == "six"
    assert cases.stat().st_mode & 0o777 == 0o600
    with pytest.raises(SystemExit):
        run(monkeypatch, make_case, **flags, session="t")
    assert "nothing to grade" in capsys.readouterr().err


def test_suggestions_are_read_with_the_workdir_that_gave_them(tmp_path, monkeypatch, capsys):
    sessions = tmp_path / "sessions.jsonl"
    written(sessions, [(answer("a", kind="completion"), [])])
    flags = dict(sessions=str(sessions), out=str(tmp_path / "o"), per_user=5, count=0, seed=0)
    for workdir, words in (
        (None, "for its suggestions name --workdir="),
        (str(tmp_path), "neither config.json nor a version of launch.realtime"),
    ):
        with pytest.raises(SystemExit):
            run(monkeypatch, make_suite, **flags, workdir=workdir)
        assert words in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"serving": {"fill_in": null}}')
    with pytest.raises(SystemExit):
        run(monkeypatch, make_suite, **flags, workdir=str(tmp_path))
    assert "its config has no serving.fill_in" in capsys.readouterr().err


def test_recorded_sessions_become_a_case(tmp_path, monkeypatch, capsys):
    """What the agent's program said of its task when it opened a pull request."""
    out = tmp_path / "sessions.jsonl"
    flags = dict(workdir=str(tmp_path), database=None, out=str(out), session=["s"], days=0.0)
    with pytest.raises(SystemExit):
        run(monkeypatch, export_sessions, **flags)
    assert "there is no such file" in capsys.readouterr().err
    assert not (tmp_path / "people.db").exists()
    extra = {"record": ROW, "files": {"solution.py": "def f(x):\n    return 6\n"}}
    with FeedbackStore(f"sqlite:///{tmp_path}/people.db") as store:
        for id, session in (("a", "s"), ("b", "s"), ("c", "t")):
            store.record_answer(answer(id, session=session))
        store.record_answer(answer("d", finish_reason="aborted"))
        opened = [Event("1", "a", "opened", 3.0, extra=extra)]
        store.record_events(opened, answer("a").user)
    run(monkeypatch, export_sessions, **flags)
    assert "2 answers in" in capsys.readouterr().out
    assert [json.loads(line)["answer"]["id"] for line in out.open()] == ["a", "b"]
    cases = tmp_path / "cases.jsonl"
    flags |= dict(sessions=str(out), session="s", name="six", user="", out=str(cases))
    run(monkeypatch, make_case, **flags)
    assert json.loads(cases.read_text())["files"] == extra["files"]
    suite = tmp_path / "people.jsonl"
    flags |= dict(out=str(suite), per_user=5, count=0, seed=0, workdir=None)
    run(monkeypatch, make_suite, **flags)
    assert "1 tasks in" in capsys.readouterr().out


def test_all_of_them_are_written_where_no_session_is_named(tmp_path, monkeypatch, capsys):
    with FeedbackStore(f"sqlite:///{tmp_path}/people.db") as store:
        for id, session in (("a", "s"), ("c", "t")):
            store.record_answer(answer(id, session=session))
    url = f"sqlite:///{tmp_path}/people.db"
    flags = dict(workdir=None, database=url, session=[], days=0.0)
    run(monkeypatch, export_sessions, **flags, out=str(tmp_path / "all.jsonl"))
    assert "2 answers in" in capsys.readouterr().out
    # they were asked for long ago
    with pytest.raises(SystemExit):
        run(monkeypatch, export_sessions, **flags | dict(days=1.0, out=str(tmp_path / "new")))
    assert "no answer of such a session" in capsys.readouterr().err
