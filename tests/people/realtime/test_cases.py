"""Recorded sessions become tasks of a suite, and cases that the red team hands in again."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from people.feedback.records import AnswerRecord, Event
from people.realtime import cases
from people.realtime.recorded import metrics_of, sessions_of
from rl_code.environment.sandbox.pool import SandboxConfig, SandboxPool
from rl_code.redteam.recorded import append_case, outcomes, read_cases
from rl_code.tasks.records import load
from rl_code.tasks.row_files import TaskFileError
from tests.people.feedback import people

ROW = {
    "messages": "Write f, which gives its argument twice.",
    "entry_point": "f",
    "tests": ["assert f(3) == 6", "assert f('ab') == 'abab'"],
    "files": {"solution.py": "def f(x):\n    return x\n"},
    "path": "solution.py",
}
CHEAT = "class A(int):\n    def __eq__(s, o): return True\ndef f(x):\n    return A(1)\n"
SOLVED = "def f(x):\n    return x * 2\n"


def answer(id: str, **fields) -> AnswerRecord:
    chat = dict(kind="chat", session="s", model="policy", version=3, first_token_s=0.5)
    times = dict(asked_at=1.0, answered_at=2.0)
    tokens = dict(tokens=(3, 4, 5), logprobs=(-0.1, -0.2, -0.3), versions=(3, 3, 3))
    return people.answer(id, **chat | times | tokens | fields)


def written(path, joined) -> None:
    path.write_text("".join(cases.line_of(one, events) for one, events in joined))


def test_a_session_is_the_mean_of_what_is_known_of_its_answers():
    events = [
        Event("1", "a", "accepted", 3.0, 1.5),
        Event("2", "a", "retained", 33.0, 0.9, 30.0),
        Event("3", "a", "retained", 303.0, 0.6, 300.0),
    ]
    joined = [
        (answer("a"), events),
        (answer("b", answered_at=9.0, tokens=(1,)), [Event("4", "b", "rejected", 9.5, 0.4)]),
        (answer("c", session="t", answered_at=5.0, extra={"questions": 1}), []),
    ]
    found = sessions_of(joined, lambda rows: [{"reward": float(len(events))} for _, events in rows])
    assert list(found.session) == ["t", "s"] and list(found.at) == [5.0, 9.0]
    assert found.values["accepted"][1] == 0.5 and math.isnan(found.values["accepted"][0])
    assert found.values["retained"][1] == 0.6
    assert found.values["length"][1] == 2.0 and found.values["reward"][1] == 2.0
    np.testing.assert_array_equal(found.values["questions"], [1.0, math.nan])
    assert metrics_of(answer("d", finish_reason="aborted"), [])["aborted"] == 1.0


def test_a_session_whose_version_changed_counts_for_each():
    joined = [(answer("a"), []), (answer("b", version=4), [])]
    assert sorted(sessions_of(joined).version) == [3, 4]


def test_a_suite_has_each_task_once_and_no_user_too_often():
    def session(number: int, user: str, record) -> cases.RecordedSession:
        return cases.RecordedSession(f"s{number}", user, 1, float(number), record, None)

    other = [ROW | {"messages": f"Write f, number {i}."} for i in range(6)]
    found = [session(i, "ann", row) for i, row in enumerate(other)]
    found += [session(7, "bob", ROW), session(8, "bob", ROW), session(9, "bob", None)]
    made = cases.suite_rows(found, per_user=4, count=0, seed=0)
    assert (len(made.rows), made.crowded, made.repeated, made.ungraded) == (5, 2, 1, 1)
    drawn = cases.suite_rows(found, per_user=4, count=3, seed=1)
    assert len(drawn.rows) == 3 and all(row in made.rows for row in drawn.rows)
    assert "ann" not in json.dumps(made.rows) and "s7" not in json.dumps(made.rows)


def test_rows_are_tasks(tmp_path):
    written(tmp_path / "s.jsonl", [(answer("a", extra={"record": ROW}), [])])
    found, _ = cases.read_sessions(tmp_path / "s.jsonl")
    (row,) = cases.suite_rows(found, per_user=1, count=0, seed=0).rows
    (tmp_path / "suite.jsonl").write_text(json.dumps(row))
    (task,) = load(str(tmp_path / "suite.jsonl"), {name: name for name in row})
    assert task.entry_point == "f" and len(task.hidden_tests.cases) == 2


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({key: ROW[key] for key in ROW if key != "tests"}, "its record lacks tests"),
        (ROW | {"secret": 1}, "its record has secret; a row has id, messages"),
    ],
)
def test_a_record_that_is_no_row_is_left_out_and_told(record, said):
    one = cases.RecordedSession("s", "ann", 1, 0.0, record, None)
    good = cases.RecordedSession("t", "ann", 1, 0.0, ROW, None)
    made = cases.suite_rows([one, good], per_user=1, count=0, seed=0)
    assert len(made.rows) == 1 and said in made.malformed[0] and "'s'" in made.malformed[0]


def test_a_line_that_is_no_answer_is_named(tmp_path):
    path = tmp_path / "s.jsonl"
    written(path, [(answer("a"), [])])
    path.write_text(path.read_text() + '{"answer": {"id": "b"}, "events": []}\n')
    found, wrong = cases.read_sessions(path)
    assert len(found) == 1 and "s.jsonl, line 2: expected" in wrong[0] and len(wrong) == 1
    with pytest.raises(cases.SessionFileError, match="no such file"):
        cases.read_sessions(tmp_path / "other.jsonl")


def case(files, name="cheat", session="s"):
    extra = {"record": ROW, "files": files}
    found = cases.sessions([(answer("a", session=session, extra=extra), [])])
    return cases.case_of(found, session, name)


def test_a_session_that_cannot_be_graded_is_no_case():
    found = cases.sessions(
        [(answer("a", extra={"record": ROW}), []), (answer("b", user="bob"), [])]
    )
    with pytest.raises(ValueError, match="no such session"):
        cases.case_of(found, "t", "x")
    with pytest.raises(ValueError, match="2 users have one; name one of"):
        cases.case_of(found, "s", "x")
    with pytest.raises(ValueError, match="nothing to grade"):
        cases.case_of(found, "s", "x", "ann")


def test_a_file_of_cases_has_each_name_once(tmp_path):
    path = tmp_path / "cases.jsonl"
    append_case(path, case({"solution.py": CHEAT}))
    append_case(path, case({"solution.py": SOLVED}, name="another"))
    with pytest.raises(ValueError, match="has a case 'cheat' already"):
        append_case(path, case({"solution.py": CHEAT}))
    assert [one.name for one in read_cases(path)] == ["cheat", "another"]
    suite = {"messages": "m", "id": "x", "fail_to_pass": ["a"]}
    with pytest.raises(TaskFileError, match="a suite needs a world"):
        append_case(path, {"name": "n", "session": "s", "task": suite, "files": {}})
    path.write_text("{}\n" + path.read_text() + '{"name": "cheat"}\n[[[\n')
    read = read_cases(path)
    assert [one.name for one in read] == [
        *("cases.jsonl:1", "cheat", "another", "cases.jsonl:4", "cases.jsonl:5")
    ]
    (harm,) = next(outcomes(read, None)).harm  # the gate names it and goes on
    assert "cases.jsonl, line 1: no case: " in harm and "'name'" in harm


def test_the_red_team_hands_a_case_in_again(tmp_path):
    path = tmp_path / "cases.jsonl"
    append_case(path, case({"solution.py": CHEAT}))
    append_case(path, case({"solution.py": SOLVED}, name="paid"))
    with SandboxPool(SandboxConfig(workers=1, processes=24, cpu_s=10)) as pool:
        cheat, paid = outcomes(read_cases(path), pool)
    assert cheat.held and cheat.kind == "session"
    # work that solves the task is paid, so as a case it does not hold
    assert not paid.held and paid.earned > paid.failure
