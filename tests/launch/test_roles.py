"""A learner and an actor in processes of their own, on one host and on two each, as the command
line starts them.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests import programs

STEPS = 3


def flags(folder: Path) -> list[str]:
    return [
        "--config=configs/faults.py:smoke",
        f"--workdir={folder / 'run'}",
        f"--config.train.steps={STEPS}",
        "--config.sft.steps=2",
        "--config.mesh.data=2",
        "--config.rollout.mesh.data=2",
        "--config.model.preset=tests.models.small:SHALLOW",
    ]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_roles_of_two_processes_train_as_one_process_replays(tmp_path):
    processes = []
    for role in (["--role=learner"], ["--role=actor", "--name=actor-0"]):
        hosts = [*role, f"--coordinator=127.0.0.1:{programs.free_port()}", "--processes=2"]
        for process in range(2):
            command = ["launch.train", *flags(tmp_path), *hosts, f"--process={process}"]
            processes.append(programs.start(*command, devices=1))
    outputs = [process.communicate(timeout=400)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, outputs
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert all(row["train/finite"] for row in rows)
    (actor,) = (tmp_path / "run" / "actors").iterdir()
    did = [json.loads(line) for line in (actor / "metrics.jsonl").read_text().splitlines()]
    assert did[0]["step"] == 0 and did[-1]["step"] == STEPS
    assert sum(row["engine/generated_tokens"] for row in did) == sum(
        row["rollout/sampled_tokens"] for row in rows
    )
    assert (
        all(0.0 < row["engine/occupancy"] <= 1.0 for row in did[1:])
        and did[1]["weights/fetch_live_bytes"] > 0
    )

    replay = programs.run("launch.replay", *flags(tmp_path), devices=2)
    assert replay.returncode == 0, replay.stdout + replay.stderr
    assert (
        f"{STEPS} of {STEPS} steps consumed" in replay.stdout
        and "replayed: equal, bit for bit" in replay.stdout
    )


@pytest.mark.long
@pytest.mark.timeout(600)
def test_what_an_actor_in_a_process_of_its_own_sampled_is_sampled_again(tmp_path):
    """In flight, where a trajectory may have several versions."""
    run = tmp_path / "run"
    settings = [
        "--config=configs/faults.py:smoke",
        f"--workdir={run}",
        "--config.train.steps=4",
        "--config.sft=None",
        "--config.asynchrony.mode=in_flight",
        # the learner has more devices than the actor, whose weights it makes again
        "--config.mesh.data=2",
        "--config.model.preset=tests.models.small:SHALLOW",
    ]
    processes = [
        programs.start("launch.train", *settings, *role, devices=None)
        for role in (["--role=learner"], ["--role=actor", "--name=actor-0"])
    ]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    # Weights of step 2 are in no storage and no checkpoint then, and are made again.
    shutil.rmtree(run / "weights")
    versions = set()
    for step in (3, 1):
        told = programs.run("launch.replay", str(run), f"--step={step}", "--task=1", devices=None)
        assert told.returncode == 0, told.stdout + told.stderr
        assert "replayed: equal, token for token" in told.stdout
        assert "sampled by actor-0" in told.stdout
        versions |= set(re.search(r"with weights of versions \[(.*)\]", told.stdout)[1].split(", "))
        if versions & {"1", "2"}:
            break
    assert versions & {"1", "2"}
