"""The arithmetic of an agent's cycle, and the report of one."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from experiments.agent_people import report, sizes
from people.feedback.identity import AnswerIds
from people.feedback.records import Event
from people.feedback.store import FeedbackStore
from people.realtime import tables
from people.realtime.ledger import Ledger
from tests.people.realtime.test_training import ANSWER

SECRET = bytes(range(32))


def test_a_better_agent_earns_more_and_more_users_are_needed_for_less():
    worse, better = (sizes.simulate(right, 60, 3) for right in (0.2, 0.9))
    assert better.mean > worse.mean + 0.2
    variance = better.variance(4)
    assert variance < better.variance(2)
    needed = [sizes.users_needed(effect, variance) for effect in (0.4, 0.2, 0.1)]
    # four times as many for half of an effect, and more, since the sequence is looked at always
    assert needed[0] < needed[1] / 3 < needed[2] / 9
    assert sizes.users_needed(0.2, variance, power=False) < needed[1]
    assert sizes.simulate(0.5, 20, 2).rewards.tolist() == (
        sizes.simulate(0.5, 20, 2).rewards.tolist()
    )


def test_who_looks_only_hours_later_tells_less_and_what_is_paid_is_nearer_to_the_truth():
    quick, seldom = (sizes.simulate(0.5, 40, 2, seldom=late) for late in (False, True))
    assert seldom.correlation > quick.correlation + 0.05
    rows = sizes.looks((quick, sizes.simulate(0.9, 8, 2)), (seldom, sizes.simulate(0.9, 8, 2)))
    assert [len(column._cells) for column in rows.columns] == [2] * 7


def test_an_update_of_the_noise_scale_does_half_of_a_step():
    assert sizes.done_by(500, 500.0) == 0.5
    shares = [sizes.done_by(size, 500.0) for size in sizes.BATCHES]
    assert shares == sorted(shares) and shares[-1] < 1


@pytest.fixture
def folder(tmp_path):
    """Answers of two cycles: version 1 is deployed in the second, and keeps more than version 0."""
    engine = tables.connect(f"sqlite:///{tmp_path}/people.db")
    ledger = Ledger(engine)
    ledger.start(0, 100.0)
    ids, lines = AnswerIds(SECRET), []
    rng = np.random.default_rng(0)
    with FeedbackStore(engine, ids=ids) as store:
        for number in range(160):
            cycle = number // 80
            version = number % 2 if cycle else 0
            user = f"{number % 20:032x}"
            id = ids.make(user, version, number)
            at = 110.0 + 100.0 * cycle
            fields = dict(user=user, session=f"s{number}", arm=f"policy@{version}", kind="chat")
            fields |= dict(asked_at=at, answered_at=at, version=version, versions=(version,) * 2)
            store.record_answer(dataclasses.replace(ANSWER, id=id, **fields))
            kept = float(rng.random() < (0.9 if version else 0.4))
            events = [
                Event("a", id, "accepted", at + 1, 1.0),
                Event("b", id, "retained", at + 3_601, kept, 3_600.0),
            ]
            store.record_events([dataclasses.replace(e, key=f"{e.key}{id}") for e in events], user)
            lines.append(json.dumps({"answers": [id], "right": kept > 0, "satisfaction": kept}))
        for before in ("train", "gate", "deploy", "watch", "promote"):
            new = 1 if before == "train" else None
            ledger.edge(
                ledger.current(),
                before,
                150.0,
                "why",
                new_version=new,
                changes=({"candidate": 1} if new else {}),
            )
        states = [(0, "retired"), (1, "deployed")]
        ledger.edge(ledger.current(), "promoted", 200.0, "better", versions=states)
    (tmp_path / "people.truth.jsonl").write_text("\n".join([*lines, '{"answers": ["cut']))
    return tmp_path


def test_checkpoints_are_compared_with_the_copy_in_the_same_time(folder, capsys):
    first, second = report.read(folder)
    assert (first.version, second.version) == (0, 1) and first.state == "promoted"
    gain = report._difference(second, "reward/retention")
    assert 0.2 < gain.low < gain.mean < gain.high < 0.8
    assert second.sessions == (40, 40) and second.satisfaction[0].mean > 0.8
    # what is paid is what people are content with, here
    assert 0.9 < second.correlation.low <= second.correlation.mean <= 1.0
    rows = report.differences([first, second])
    assert [len(column._cells) for column in rows.columns] == [2] * 10
    report.draw([first, second], folder / "agent.png")
    assert (folder / "agent.png").stat().st_size > 1_000
    turns = report.versions(folder).columns[1]._cells
    assert list(turns) == ["120", "40"]
    kinds = report.senders(folder).columns
    assert dict(zip(kinds[0]._cells, kinds[1]._cells, strict=True))["accepted"] == "160"


def test_a_cycle_with_few_sessions_of_an_arm_is_left_out(folder, monkeypatch):
    monkeypatch.setattr(report, "_LEAST", 41)
    assert [one.cycle for one in report.read(folder)] == [1]


def test_without_what_people_keep_to_themselves_the_correlation_is_unknown(folder):
    (folder / "people.truth.jsonl").unlink()
    assert all(math.isnan(one.correlation.mean) for one in report.read(folder))
