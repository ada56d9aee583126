"""A run that is killed at any moment and started again ends exactly as one that was not."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from configs import quickstart
from rl_code.checkpoint import checkpoint
from rl_code.config.read_config import build
from rl_code.learner.update import init_state
from rl_code.metrics.values import read_metrics
from rl_code.run.config import RunConfig
from rl_code.run.run import Run
from rl_code.run.trajectory_log import read_trajectories
from tests import programs
from tests.rl_code.repeatable import repeatable

KILLS = 10 if os.environ.get("RUN_SLOW") == "1" else 2
SFT_STEPS, STEPS = 2, 3
MODEL = "tests.models.small:SHALLOW"
FLAGS = (
    "--config=configs/quickstart.py:smoke",
    f"--config.train.steps={STEPS}",
    "--config.train.tasks_per_step=2",
    "--config.train.micro_batches=4",
    "--config.train.optimizer.warmup_steps=1",
    "--config.checkpoint.every=1",
    f"--config.sft.steps={SFT_STEPS}",
    "--config.sft.checkpoint_every=1",
    f"--config.model.preset={MODEL}",
    # one block of a view: each of each layer is a condition that is compiled
    "--config.rollout.engine.view_block=288",
    "--config.limits.turns=3",
)


def _start(workdir: Path, fresh: bool = False) -> subprocess.Popen:
    """A run that is compiled as users do. fresh: with an order of hashes of its own, on which nothing
    may depend; others share one.
    """
    with open(workdir.with_suffix(".log"), "ab") as log:
        settings = dict(fresh=fresh, quickly=False, stdout=log, stderr=log, start_new_session=True)
        return programs.start("launch.train", *FLAGS, f"--workdir={workdir}", **settings)


def _finish(workdir: Path, fresh: bool = False) -> None:
    process = _start(workdir, fresh)
    assert process.wait(500) == 0, workdir.with_suffix(".log").read_text()[-3000:]


def _rows(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _kill(workdir: Path, moment: float) -> None:
    """Starts the run and kills it. moment in [0, 1): from program start over the warm start to the
    last step.
    """
    process = _start(workdir)
    progress = moment * (SFT_STEPS + STEPS)
    deadline = time.monotonic() + 400
    while process.poll() is None and time.monotonic() < deadline:
        if _rows(workdir / "sft") + _rows(workdir) >= int(progress):
            time.sleep(0.4 * (progress % 1.0))
            break
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _state(workdir: Path):
    given = quickstart.get_config("smoke")
    given.model.preset = MODEL
    config = build(RunConfig, given)
    with Run(config, workdir) as run, jax.set_mesh(run.mesh):
        restored = checkpoint.load(workdir, init_state(run.init_model(), config.train.optimizer))
    assert restored is not None
    return restored


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_killed_and_restarted_equals_uninterrupted(tmp_path):
    whole = tmp_path / "whole"
    killed = tmp_path / "killed"
    _finish(whole, fresh=True)

    seed = random.randrange(1 << 32)
    rng = random.Random(seed)
    # Anywhere, and last while it trains: recording/test_replay_training.py interrupts a run behind
    # every checkpoint.
    trained = (SFT_STEPS + 1) / (SFT_STEPS + STEPS)
    moments = sorted(rng.uniform(0, trained) for _ in range(KILLS - 1))
    moments.append(rng.uniform(trained, 1))
    print(f"kill points {moments} of seed {seed}")
    for moment in moments:
        _kill(killed, moment)
    _finish(killed)

    one = _state(whole)
    other = _state(killed)
    assert one.step == other.step == STEPS
    assert one.position == other.position
    for a, b in zip(jax.tree.leaves(one.state), jax.tree.leaves(other.state), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert [repeatable(row) for row in read_metrics(whole)] == [
        repeatable(row) for row in read_metrics(killed)
    ]
    for step in range(STEPS):
        assert _episodes(whole, step) == _episodes(killed, step)
    results = sorted(path.name for path in (whole / "evaluations").iterdir())
    suites = [suite["name"] for suite in quickstart.get_config("smoke").suites]
    assert results == sorted(
        f"{suite}.{label}.json" for suite in suites for label in ("before", "after")
    )
    for name in results:
        assert _result(whole / "evaluations" / name) == _result(killed / "evaluations" / name)


def _result(path: Path) -> dict:
    """An evaluation without what it took."""
    found = json.loads(path.read_text())
    for task in found["tasks"]:
        del task["mean_seconds"]
    return found


def _episodes(workdir: Path, step: int) -> list:
    return [
        (
            group["task_id"],
            group["group"],
            [(t["ids"], t["logprobs"], t["reward"]) for t in group["trajectories"]],
        )
        for group in read_trajectories(workdir, step)
    ]
