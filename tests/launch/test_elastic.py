"""Actors come and go while a run goes on, and it is the run that it would have been."""

from __future__ import annotations

import collections
import signal
import time

import pytest

from launch.faults import consumed, held
from rl_code.run.workdir import STORE
from rl_code.store.audit import check
from rl_code.store.store import GroupStore
from tests import programs

STEPS = 6


def wait_until(condition, processes, seconds=240.0):
    """Waits for something that running processes do."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        for name, process in processes.items():
            assert process.poll() is None, f"{name}: {process.communicate()[0]}"
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


@pytest.mark.long
@pytest.mark.timeout(900)
def test_actors_join_and_one_is_pre_empted_and_nothing_is_lost_or_sampled_needlessly(tmp_path):
    run = tmp_path / "run"
    settings = [
        "--config=configs/faults.py:smoke",
        f"--workdir={run}",
        "--config.sft=None",
        f"--config.train.steps={STEPS}",
        "--config.model.preset=tests.models.small:SHALLOW",
        "--config.train.tasks_per_step=8",
        # nobody may be taken for lost: who leaves says so
        "--config.asynchrony.work.heartbeat_timeout_s=120.0",
    ]

    def start(name: str):
        role = ["--role=actor", f"--name={name}"] if name != "learner" else ["--role=learner"]
        return programs.start("launch.train", *settings, *role, devices=None)

    processes = {name: start(name) for name in ("learner", "leaves")}
    try:
        wait_until(lambda: consumed(run) >= 1, processes)
        # The run waits while others join, so that it is not over by then.
        processes["learner"].send_signal(signal.SIGSTOP)
        processes |= {name: start(name) for name in ("joins-0", "joins-1")}
        for name in ("joins-0", "joins-1"):
            wait_until((run / STORE / "processes" / name / "0.json").exists, processes)
        processes["learner"].send_signal(signal.SIGCONT)
        wait_until(lambda: len(held(run, "leaves")) >= 2, processes)
        processes["leaves"].send_signal(signal.SIGTERM)
        outputs = {name: p.communicate(timeout=400)[0] for name, p in processes.items()}
    finally:
        for process in processes.values():
            process.kill()
    codes = {name: process.returncode for name, process in processes.items()}
    assert codes == {"learner": 0, "leaves": 130, "joins-0": 0, "joins-1": 0}, outputs
    assert "leaves stopped; what it held may be taken over" in outputs["leaves"]

    report = check(run / STORE, max_staleness=1)
    assert report.problems == [] and report.consumed == STEPS and report.groups == 8 * STEPS
    store = GroupStore(run / STORE)
    by = collections.Counter()
    for step in range(STEPS):
        turns = store.reader.claims(step)
        for record in store.read(step):
            by[record.actor.name] += 1
            # Claimed again is what the one that left had not delivered, and nothing else.
            assert turns[record.number] == 0 or record.actor.name != "leaves"
    assert by["leaves"] and by["joins-0"] + by["joins-1"] and 1 <= report.takeovers <= 8
    replay = programs.run("launch.replay", *settings, devices=None)
    assert replay.returncode == 0, replay.stdout + replay.stderr
    assert "replayed: equal, bit for bit" in replay.stdout
