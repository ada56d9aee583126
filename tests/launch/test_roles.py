"""A learner and an actor on two hosts each, as the command line starts them."""

from __future__ import annotations

import json
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
    ]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_roles_of_two_processes_train_as_one_process_replays(tmp_path):
    processes = []
    for role in (["--role=learner"], ["--role=actor", "--name=actor-0"]):
        hosts = [*role, f"--coordinator=127.0.0.1:{programs.free_port()}", "--processes=2"]
        for process in range(2):
            command = ["launch.train", *flags(tmp_path), *hosts, f"--process={process}"]
            processes.append(programs.start(*command, devices=1, cache=tmp_path / "compiled"))
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
