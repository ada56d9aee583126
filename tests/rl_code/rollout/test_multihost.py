"""An actor of two processes samples what one process samples; the loss of either is told."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from models.sharding import MeshConfig, make_mesh
from rl_code.rollout.engine import Engine
from rl_code.rollout.multihost import Channel
from rl_code.rollout.scheduler import Scheduler
from tests import programs
from tests.rl_code.rollout.small import ONE_LAYER, SAMPLING, SCARCE, STOP, Letters, play, task_of


def start(out: Path, *arguments: int) -> list[subprocess.Popen]:
    """Both processes, with a device each."""
    shared = [str(out), programs.free_port()]
    module = "tests.rl_code.rollout.multihost_process"
    return [programs.start(module, *shared, process, *arguments, devices=1) for process in range(2)]


@pytest.mark.long
@pytest.mark.parametrize("data, tensor, killed", [(2, 1, True), (1, 2, False)])
def test_two_processes_sample_what_one_does_and_a_follower_says_when_the_first_has_ended(
    tmp_path, data, tensor, killed
):
    leader, follower = start(tmp_path / "played.npz", data, tensor, *[3] * killed)
    output = follower.communicate(timeout=400)[0]
    outputs = leader.communicate(timeout=400)[0], output
    codes = (leader.returncode, follower.returncode)
    assert codes == ((9, 3) if killed else (0, 0)), outputs
    assert ("the first process of this actor has ended" in output) == killed
    played = np.load(tmp_path / "played.npz")
    assert played["preempted"] > 0  # their pages came to the host and went back to all devices

    mesh = make_mesh(MeshConfig(data=data, tensor=tensor))
    scheduler = Scheduler(
        Engine(ONE_LAYER, SCARCE, SAMPLING, (STOP,), mesh),
        Letters(),
        workers=4,
        worker_deadline_s=30.0,
    )
    groups, _ = play([task_of(seed) for seed in range(5)], scheduler=scheduler, model=ONE_LAYER)
    scheduler.close()
    for i, t in enumerate(t for group in groups for t in group.trajectories):
        np.testing.assert_array_equal(played[f"tokens{i}"], t.tokens)
        np.testing.assert_array_equal(played[f"logprobs{i}"], t.logprobs)


def test_a_host_that_is_no_address_is_named():
    with pytest.raises(ValueError, match="host='node7' must be an IPv4 address in numbers"):
        Channel("node7", 1.0)
