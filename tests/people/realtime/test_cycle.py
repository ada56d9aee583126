"""The cycle promotes what is good and rolls back what is bad; what it decides is in the database."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace

import numpy as np
import pytest
import sqlalchemy
from sqlalchemy.exc import OperationalError

from people.realtime import cycle as cycle_module
from people.realtime import served
from people.realtime.cycle import Cycle
from people.realtime.gate import GateConfig, RateBound
from people.realtime.ledger import distance
from people.realtime.monitors import Monitor, MonitorsConfig
from people.realtime.parts import Overtaken, Routing, TrainingFailed
from people.realtime.rehearsal import METADATA as PEOPLE
from people.realtime.rehearsal import SESSIONS
from people.realtime.tables import ALARMS, CYCLES, EDGES, METADATA, VERSIONS
from people.realtime.watching import Guardrail
from rl_code.config.read_config import ConfigError
from rl_code.host.stop import Stopped
from tests.people.realtime.rehearsed import CONFIG, Rehearsed


def content(rehearsed: Rehearsed) -> list:
    """Every row of the database."""
    found = []
    for table in (*METADATA.sorted_tables, *PEOPLE.sorted_tables):
        found += [(table.name, *row) for row in rehearsed.ledger.rows(table)]
    return found


def states(rehearsed: Rehearsed) -> dict[int, str]:
    return {row.version: row.state for row in rehearsed.ledger.rows(VERSIONS)}


def test_good_versions_are_promoted_bad_ones_rolled_back_broken_ones_refused(tmp_path):
    rehearsed = Rehearsed(tmp_path, bad=(2,), broken=(3,), harm=0.25)
    rehearsed.until("train", 4)
    assert states(rehearsed) == {
        0: "retired",
        1: "deployed",
        2: "rolled_back",
        3: "refused",
        4: "training",
    }
    assert rehearsed.parts.fleet.routing().deployed == 1
    _, bad, broken, _ = rehearsed.ledger.rows(CYCLES)
    assert bad.look["decision"] == "roll_back"
    assert broken.verdict["passed"] is False and broken.look is None
    # the time that a version that is bad on purpose serves people
    edges = {edge.after: edge for edge in rehearsed.ledger.rows(EDGES) if edge.cycle == 2}
    served_s = edges["roll_back"].at - edges["watch"].at
    assert 0 < served_s < 30 and sum(bad.look["sessions"]) <= 30 * 150


def test_a_plan_says_what_the_next_edge_does_and_writes_nothing(tmp_path):
    rehearsed = Rehearsed(tmp_path)
    rehearsed.cycle.step()  # deploys the first version
    seen = set()
    while rehearsed.ledger.current().number == 1:
        before = content(rehearsed), rehearsed.parts.fleet.routing()
        plan = rehearsed.cycle.plan()
        assert (content(rehearsed), rehearsed.parts.fleet.routing()) == before
        seen.add((plan.state, plan.due))
        assert rehearsed.cycle.step() is plan.due, plan
        if not plan.due:
            rehearsed.parts.wait(1.0)
    assert {state for state, due in seen if due} == {
        "collect",
        "train",
        "gate",
        "deploy",
        "watch",
        "promote",
    }
    assert ("collect", False) in seen


def test_work_that_was_stopped_takes_no_edge_and_is_done_by_the_next_process(tmp_path):
    rehearsed = Rehearsed(tmp_path)
    rehearsed.until("train")
    stopped = []

    class Trainer:
        def train(self, *asked):
            stopped.append(asked)
            raise Stopped("between two updates")

    before = content(rehearsed)
    parts = dataclasses.replace(rehearsed.parts, trainer=Trainer())
    rehearsed.another(parts).run()
    assert len(stopped) == 1 and content(rehearsed) == before
    rehearsed.until("gate", 1)


def test_the_cadence_and_the_least_sessions_are_waited_for(tmp_path):
    config = dataclasses.replace(CONFIG, cadence_s=50.0, least_sessions=400)
    rehearsed = Rehearsed(tmp_path, config)
    rehearsed.cycle.step()
    rehearsed.parts.wait(1.0)
    assert "wait 50 s" in rehearsed.cycle.plan().text
    rehearsed.now += 50
    assert "wait for 400 sessions: 150 answers" in rehearsed.cycle.plan().text
    rehearsed.parts.wait(1.0)
    rehearsed.parts.wait(1.0)
    assert rehearsed.cycle.plan().due


def test_answers_of_versions_outside_the_window_are_counted_and_left_out(tmp_path):
    rehearsed = Rehearsed(tmp_path)
    rehearsed.until("collect", 2)
    while not rehearsed.cycle.plan().due:
        rehearsed.parts.wait(1.0)
    old = [row for row in rehearsed.ledger.rows(SESSIONS) if row.version == 0 and row.cycle is None]
    new = [row for row in rehearsed.ledger.rows(SESSIONS) if row.version == 1]
    assert old and new
    wide = rehearsed.another(window=2).plan()
    assert f"{len(old) + len(new)} answers" in wide.text and " 0 of versions" in wide.text
    rehearsed.cycle.step()
    row = rehearsed.ledger.current()
    assert (row.answers, row.outside) == (len(new), len(old))


def test_a_batch_takes_the_newest_answers(tmp_path):
    rehearsed = Rehearsed(tmp_path, dataclasses.replace(CONFIG, batch=120))
    rehearsed.until("train")
    used = [row.number for row in rehearsed.ledger.rows(SESSIONS) if row.cycle == 1]
    everything = [row.number for row in rehearsed.ledger.rows(SESSIONS)]
    assert used == everything[-120:]


def test_of_two_processes_one_is_overtaken(tmp_path):
    rehearsed = Rehearsed(tmp_path)
    rehearsed.until("gate")
    old = rehearsed.ledger.current()
    rehearsed.another().step()
    with pytest.raises(Overtaken, match="cycle 1 has left 'gate'"):
        rehearsed.ledger.edge(old, "refused", 0.0, "by the other")
    assert rehearsed.ledger.current().state == "deploy"


def test_a_process_that_slept_cannot_undo_what_is_served(tmp_path):
    rehearsed = Rehearsed(tmp_path)
    rehearsed.until("watch")
    rehearsed.cycle.step()
    with pytest.raises(Overtaken, match="older than what is in force"):
        rehearsed.parts.fleet.apply(Routing(0, turn=(1, 2)))
    assert rehearsed.parts.fleet.routing().candidate == 1


def test_a_copy_that_never_changes_keeps_the_same_users(tmp_path):
    config = dataclasses.replace(CONFIG, control_share=0.3)
    rehearsed = Rehearsed(tmp_path, config)
    rehearsed.until("collect", 2)
    since = rehearsed.now
    rehearsed.until("collect", 3)
    assert rehearsed.parts.fleet.routing().control == 0
    sessions = rehearsed.parts.store.sessions([0, 1, 2], 0.0)
    late = sessions.at > since
    copied = set(sessions.user[(sessions.version == 0) & late])
    assert abs(len(copied) / len(set(sessions.user[late])) - 0.3) < 0.12
    # the others had version 1 or its candidate, and these had neither at any time
    assert copied.isdisjoint(sessions.user[sessions.version > 0])


def test_the_database_refuses_a_second_deployed_version(tmp_path):
    rehearsed = Rehearsed(tmp_path)
    rehearsed.until("gate")
    deployed = sqlalchemy.update(VERSIONS).values(state="deployed")
    with pytest.raises(sqlalchemy.exc.IntegrityError), rehearsed.engine.begin() as connection:
        connection.execute(deployed)
    assert list(states(rehearsed).values()).count("deployed") == 1


def test_a_fleet_that_forgot_is_told_again(tmp_path):
    rehearsed = Rehearsed(tmp_path)
    rehearsed.until("watch")
    rehearsed.cycle.step()
    before = rehearsed.parts.fleet.routing()
    (tmp_path / "fleet.json").unlink()
    rehearsed.cycle.step()
    assert rehearsed.parts.fleet.routing() == before


@pytest.mark.parametrize("acknowledged", [True, False])
def test_an_alarm_holds_a_promotion_until_it_is_acknowledged_or_time_is_over(
    tmp_path, acknowledged
):
    rehearsed = Rehearsed(tmp_path)
    rehearsed.until("watch")
    rehearsed.ledger.raise_alarm(1, "edited", rehearsed.now, "goes down", ["session-7"])
    while "held by edited" not in (plan := rehearsed.cycle.plan()).text:
        rehearsed.parts.wait(1.0)
    assert not plan.due and not rehearsed.cycle.step()
    assert rehearsed.ledger.current().look["held_by"] == ["edited"]
    if acknowledged:
        assert rehearsed.ledger.acknowledge(1, "edited", rehearsed.now)
        assert rehearsed.cycle.step()
        assert rehearsed.ledger.current().state == "promote"
    else:
        rehearsed.now += CONFIG.watch.most_s
        plan = rehearsed.cycle.plan()
        assert plan.due and plan.text.startswith("roll_back: alarms that nobody acknowledged")
        assert rehearsed.cycle.step()
        assert rehearsed.ledger.current().state == "roll_back"
        assert "nobody acknowledged: edited" in rehearsed.ledger.rows(EDGES)[-1].reason


def test_an_alarm_is_raised_once_and_an_unknown_one_cannot_be_acknowledged(tmp_path):
    rehearsed = Rehearsed(tmp_path)
    assert rehearsed.ledger.raise_alarm(1, "edited", 1.0, "first", ["a"])
    assert not rehearsed.ledger.raise_alarm(1, "edited", 2.0, "second", ["b"])
    assert [row.text for row in rehearsed.ledger.rows(ALARMS)] == ["first"]
    assert not rehearsed.ledger.acknowledge(1, "latency", 3.0)


def test_data_that_was_taken_back_is_not_trained_on(tmp_path):
    rehearsed = Rehearsed(tmp_path)
    rehearsed.until("train")
    with rehearsed.engine.begin() as connection:
        some = SESSIONS.c.number % 10 == 3
        gone = connection.execute(sqlalchemy.delete(SESSIONS).where(some)).rowcount
    before = rehearsed.ledger.current()
    assert "train: data was taken back" in rehearsed.cycle.plan().text
    assert gone and rehearsed.cycle.step()
    row = rehearsed.ledger.current()
    assert (row.state, row.answers) == ("train", before.answers - gone)
    assert rehearsed.cycle.step() and rehearsed.ledger.current().state == "gate"
    with rehearsed.engine.begin() as connection:
        connection.execute(sqlalchemy.delete(SESSIONS))
    rehearsed.until("collect", 2)


def test_a_training_that_failed_ends_the_cycle_and_not_the_program(tmp_path):
    class Failing:
        def train(self, cycle, base, version, selection, behind):
            raise TrainingFailed("the loss is nan")

    rehearsed = Rehearsed(tmp_path)
    rehearsed.until("train")
    cycle = rehearsed.another(dataclasses.replace(rehearsed.parts, trainer=Failing()))
    assert cycle.step()
    assert states(rehearsed) == {0: "deployed", 1: "refused"}
    assert rehearsed.ledger.rows(EDGES)[-1].reason == "the loss is nan"


def test_an_answer_is_never_two_cycles(tmp_path):
    rehearsed = Rehearsed(tmp_path)
    rehearsed.cycle.step()
    rehearsed.parts.wait(1.0)
    store = rehearsed.parts.store
    selection = store.select(rehearsed.now, [0], 0)
    store.mark_used(1, selection)
    store.mark_used(1, selection)
    with pytest.raises(ValueError, match="cycle 2: 0 of 150"):
        store.mark_used(2, selection)
    assert store.used(1) == selection and store.used(2) is None


def test_a_run_ends_after_its_cycles_and_goes_on_when_it_is_started_again(tmp_path):
    rehearsed = Rehearsed(tmp_path)
    rehearsed.another(poll_s=0.01).run(cycles=1)
    assert rehearsed.ledger.current().number == 2
    rehearsed.another(poll_s=0.01).run(cycles=1)
    assert rehearsed.ledger.current().number == 2
    calls = []
    rehearsed.cycle.run(stop=lambda: len(calls) == 2 or calls.append(1))
    assert len(calls) == 2


def test_a_look_rests_for_longer_than_it_takes_but_not_for_what_a_version_takes_to_be_served(
    tmp_path, monkeypatch
):
    """A first version may be trained for minutes before it is served."""
    rehearsed = Rehearsed(tmp_path)
    now, waits = [0.0], []
    monkeypatch.setattr(cycle_module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def taking(seconds, function):
        def call(*arguments):
            now[0] += seconds
            return function(*arguments)

        return call

    fleet, store = rehearsed.parts.fleet, rehearsed.parts.store
    monkeypatch.setattr(fleet, "apply", taking(200.0, fleet.apply))
    monkeypatch.setattr(store, "select", taking(0.5, store.select))
    wait = lambda seconds, stop: waits.append(seconds)  # noqa: E731
    parts = dataclasses.replace(rehearsed.parts, wait=wait)
    rehearsed.another(parts, poll_s=0.01).run(stop=lambda: len(waits) == 2)
    assert waits == [2.0, 2.0]
    rehearsed.another(parts, poll_s=3.0).run(stop=lambda: len(waits) == 3)
    assert waits[2:] == [3.0]


def test_whoever_waits_for_an_edge_is_told_to_stop(tmp_path):
    rehearsed = Rehearsed(tmp_path)
    stopping = []

    def wait(seconds, stop):
        assert not stop()
        stopping.append(True)
        assert stop()

    parts = dataclasses.replace(rehearsed.parts, wait=wait)
    rehearsed.another(parts).run(stop=lambda: bool(stopping))
    assert stopping == [True]


def test_the_served_parts_wait_until_they_are_to_stop(monkeypatch):
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds

    time = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr(served, "time", time)
    system = SimpleNamespace(_start_people=lambda: None)
    served.System.wait(system, 2.5)
    assert now == [2.5]
    served.System.wait(system, 100.0, lambda: now[0] >= 5.0)
    assert 5.0 <= now[0] < 6.1


def test_edges_and_what_is_waited_for_are_told(tmp_path):
    rehearsed = Rehearsed(tmp_path)
    told = []
    cycle = Cycle(rehearsed.ledger, rehearsed.parts, rehearsed.config, rehearsed.clock, told.append)
    rehearsed.until("train", 2, cycle)
    edges = [step for step in told if step.after is not None]
    rows = rehearsed.ledger.rows(EDGES)
    assert [(e.cycle, e.before, e.after, e.reason) for e in edges] == [
        (row.cycle, row.before, row.after, row.reason) for row in rows
    ]
    waited = {step.before: step.reason for step in told if step.after is None}
    assert set(waited) == {"collect", "watch"}
    assert "wait for 100 sessions" in waited["collect"]


def test_distance_is_counted_along_the_tree_of_versions():
    # 5 is of a program that did not count
    tree = {0: (None, None), 1: (0, 7), 2: (1, 1), 3: (1, 2), 4: (3, 4), 5: (4, None), 9: (None, 0)}
    assert distance(tree, 4, 4) == distance(tree, 5, 5) == 0
    assert distance(tree, 4, 1) == 6
    assert distance(tree, 2, 4) == distance(tree, 4, 2) == 7
    assert distance(tree, 4, 0) == 13
    assert distance(tree, 4, 9) is None and distance(tree, 5, 4) is None


class Counting:
    """A trainer of updates of 50 answers."""

    def __init__(self, trainer):
        self._trainer = trainer
        self.behind = []

    def train(self, cycle, base, version, selection, behind):
        self._trainer.train(cycle, base, version, selection, behind)
        self.behind.append(behind)
        return -(-len(selection.ids) // 50)


def test_a_batch_that_never_holds_the_sessions_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"batch=50 answers are never of .*least_sessions=100"):
        Rehearsed(tmp_path, dataclasses.replace(CONFIG, batch=50))


def test_the_window_counts_the_updates_of_the_cycle_too(tmp_path):
    rehearsed = Rehearsed(tmp_path)
    trainer = Counting(rehearsed.parts.trainer)
    parts = dataclasses.replace(rehearsed.parts, trainer=trainer, update_size=50)
    # all that fits: 2 updates, so that the last of them is on data of one update before
    rehearsed.until("collect", 2, rehearsed.another(parts, window=2))
    assert trainer.behind == [{0: 0}]
    assert [(row.version, row.updates) for row in rehearsed.ledger.rows(VERSIONS)] == [
        (0, None),
        (1, 2),
    ]
    assert rehearsed.ledger.rows(CYCLES)[0].answers == 100

    def planned(window: int) -> str:
        return rehearsed.another(parts, window=window, batch=100, least_sessions=1).plan().text

    while " 0 answers" in planned(2):
        rehearsed.parts.wait(1.0)
    # answers of version 0 are 2 updates behind before the cycle, and 3 at its second one
    assert re.search("[1-9][0-9]* of versions outside", planned(3))
    assert " 0 of versions outside" in planned(4)
    with pytest.raises(ConfigError, match=r"batch=101 answers are 3 updates of 50.*window=2"):
        rehearsed.another(parts, window=2, batch=101)


@pytest.mark.parametrize(
    "wrong",
    [
        dict(deployed=1, candidate=1, share=0.5),
        dict(deployed=1, candidate=2),
        dict(deployed=1, share=0.5),
        dict(deployed=1, candidate=2, share=1.5),
        dict(deployed=1, control=0),
        dict(deployed=1, control=0, control_share=1.0),
    ],
)
def test_a_routing_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(ValueError, match="share"):
        Routing(**wrong)


class Away:
    """A ledger whose database does not answer now and then, even after it has taken an edge."""

    def __init__(self, ledger):
        self._ledger = ledger
        self._calls = 0

    def __getattr__(self, name: str):
        found = getattr(self._ledger, name)
        if name not in ("current", "edge"):
            return found

        def call(*arguments, **fields):
            result = found(*arguments, **fields)
            self._calls += 1
            if self._calls % 5 == 0:
                raise OperationalError("SELECT", {}, ConnectionError("refused"))
            return result

        return call


def test_a_database_that_goes_away_and_comes_back_stops_no_cycle(tmp_path):
    rehearsed = Rehearsed(tmp_path)
    cycle = Cycle(Away(rehearsed.ledger), rehearsed.parts, rehearsed.config, rehearsed.clock)
    cycle.run(1)
    first = rehearsed.ledger.rows(CYCLES)[0]
    assert first.state == "promoted"
    edges = rehearsed.ledger.rows(EDGES)
    assert [edge.number for edge in edges if edge.cycle == 1] == list(range(1, first.edges + 1))


def test_a_mistake_in_what_is_asked_of_the_database_is_not_waited_for(tmp_path):
    rehearsed = Rehearsed(tmp_path)
    with rehearsed.engine.begin() as connection:
        connection.execute(sqlalchemy.text("DROP TABLE cycle_alarms"))
        connection.execute(sqlalchemy.text("DROP TABLE cycle_edges"))
    with pytest.raises(OperationalError, match="no such table"):
        rehearsed.cycle.run(1)


def test_bounds_of_what_nobody_says_are_named_before_anything_is_done(tmp_path):
    rehearsed = Rehearsed(tmp_path)
    wrong = dict(
        gate=GateConfig(rates=(RateBound("tokens", rise=1.0), RateBound("edited", fall=0.05))),
        watch=dataclasses.replace(CONFIG.watch, guardrails=(Guardrail("latencies", "up", 0.1),)),
        monitors=MonitorsConfig(rates=(Monitor("edited"),), reward=None),
    )
    with pytest.raises(ConfigError) as caught:
        rehearsed.another(**wrong)
    said = str(caught.value)
    for name in (
        "config.cycle.watch.guardrails[0].metric='latencies'",
        "config.cycle.monitors.rates[0].metric='edited': metrics of sessions are accepted, edits,",
        "config.cycle.gate.rates[1].rate='edited': rates of suites are edits, invalid_calls,",
    ):
        assert name in said
    assert "tokens'" not in said
    # parts that do not say what they measure are believed
    parts = dataclasses.replace(rehearsed.parts, metrics=None, rates=None)
    assert rehearsed.another(parts, **wrong)


def test_a_promotion_says_which_monitors_saw_nothing(tmp_path):
    config = dataclasses.replace(
        CONFIG, monitors=MonitorsConfig(rates=(Monitor("questions"),), reward=None)
    )
    rehearsed = Rehearsed(tmp_path, config)
    store = rehearsed.parts.store

    class NobodyAsks:
        def __getattr__(self, name):
            return getattr(store, name)

        def sessions(self, versions, since):
            found = store.sessions(versions, since)
            nothing = np.full(len(found.session), np.nan)
            return dataclasses.replace(found, values={**found.values, "questions": nothing})

    rehearsed.cycle = rehearsed.another(dataclasses.replace(rehearsed.parts, store=NobodyAsks()))
    rehearsed.until("promote")
    reason = rehearsed.ledger.rows(EDGES)[-1].reason
    assert reason.endswith("monitors could say nothing of questions")
