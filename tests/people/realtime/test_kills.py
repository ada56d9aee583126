"""A cycle that is killed thirty times goes on: nothing trained on twice, nothing lost, one version
deployed.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from sqlalchemy import select

from people.realtime import tables
from people.realtime.cycle import desired
from people.realtime.ledger import Ledger
from people.realtime.rehearsal import SESSIONS, Weights
from people.realtime.tables import CYCLES, EDGES, VERSIONS
from tests import programs
from tests.people.realtime.killed import CONFIG

ROOT = Path(__file__).resolve().parents[3]
KILLS = 30
CYCLES_RUN = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed")
    done = programs.run("tests.people.realtime.killed", folder, KILLS, CYCLES_RUN)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["killed"], found["whole"]) == (KILLS, 1)
    # it went on between the kills, and not only after them
    assert found["edges"] > 0
    return folder


@pytest.fixture
def ledger(folder):
    return Ledger(tables.connect(f"sqlite:///{folder}/people.db"))


@pytest.mark.long
def test_every_edge_is_taken_once_and_in_order(ledger):
    taken: dict[int, list] = {}
    for edge in ledger.rows(EDGES):
        taken.setdefault(edge.cycle, []).append(edge)
    ends = {}
    for cycle in range(1, CYCLES_RUN + 1):
        edges = taken[cycle]
        assert [edge.number for edge in edges] == list(range(1, len(edges) + 1))
        assert edges[0].before == "collect"
        assert all(one.after == next.before for one, next in itertools.pairwise(edges))
        ends[cycle] = edges[-1].after
    # made bad and broken on purpose
    assert {ends[2], ends[5]} == {"rolled_back"} and ends[3] == "refused"
    assert {"promoted"} == {ends[cycle] for cycle in (1, 4, 6)}


@pytest.mark.long
def test_no_answer_is_trained_on_twice(ledger, folder):
    weights = Weights(folder / "versions")
    with ledger.engine.connect() as connection:
        used = dict(connection.execute(select(SESSIONS.c.number, SESSIONS.c.cycle)).all())
    for cycle in ledger.rows(CYCLES)[:CYCLES_RUN]:
        before = weights.read(cycle.base)["trained"]
        after = weights.read(cycle.candidate)["trained"]
        assert len(set(after)) == len(after)
        assert after[: len(before)] == before
        new = [int(one) for one in after[len(before) :]]
        assert new == sorted(id for id, of in used.items() if of == cycle.number)
        assert len(new) == cycle.answers >= 100


@pytest.mark.long
def test_no_answer_is_lost(ledger):
    with ledger.engine.connect() as connection:
        sessions = connection.execute(select(SESSIONS)).all()
    for cycle in ledger.rows(CYCLES)[:CYCLES_RUN]:
        ripe = [one for one in sessions if one.at <= cycle.watermark]
        ready = [one for one in ripe if one.version == cycle.base]
        assert all(one.cycle is not None and one.cycle <= cycle.number for one in ready)
        # what was left out is counted
        left = [one for one in ripe if one.cycle is None or one.cycle > cycle.number]
        assert cycle.outside == len(left)


@pytest.mark.long
def test_one_version_is_deployed_at_any_time(ledger, folder):
    assert [row.state for row in ledger.rows(VERSIONS)].count("deployed") == 1
    served = [json.loads(line) for line in (folder / "served.log").read_text().splitlines()]
    turns = [tuple(turn) for turn, _, _ in served]
    assert turns == sorted(turns)
    # the same turn always means the same
    assert len({json.dumps(one) for one in served}) == len(set(turns))
    cycles = {row.number: row for row in ledger.rows(CYCLES)}
    for (number, _), deployed, candidate in served:
        cycle = cycles[number]
        assert deployed in (cycle.base, cycle.candidate)
        assert candidate in (None, cycle.candidate)
        # all of the people get it only once it was decided
        if deployed == cycle.candidate:
            assert cycle.state in ("promoted", "promote")


@pytest.mark.long
def test_the_fleet_serves_what_the_last_state_says(ledger, folder):
    last = json.loads((folder / "served.log").read_text().splitlines()[-1])
    now = desired(ledger.current(), CONFIG)
    assert last == [list(now.turn), now.deployed, now.candidate]
    deployed = [row.version for row in ledger.rows(VERSIONS) if row.state == "deployed"]
    assert deployed == [now.deployed] or ledger.current().state == "promote"
