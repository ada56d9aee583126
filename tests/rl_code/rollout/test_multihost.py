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
from tests.rl_code.rollout.small import MODEL, SAMPLING, SCARCE, STOP, Letters, play, task_of


def start(out: Path, *arguments: int) -> list[subprocess.Popen]:
    """Both processes, with a device each."""
    shared = [str(out), programs.free_port()]
    module = "tests.rl_code.rollout.multihost_process"
    return [programs.start(module, *shared, process, *arguments, devices=1) for process in range(2)]


@pytest.mark.long
@pytest.mark.parametrize("data, tensor", [(2, 1), (1, 2)])
def test_two_processes_sample_what_one_does(tmp_path, data, tensor):
    processes = start(tmp_path / "played.npz", data, tensor)
    outputs = [process.communicate(timeout=400)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    played = np.load(tmp_path / "played.npz")
    assert played["preempted"] > 0  # their pages came to the host and went back to all devices

    mesh = make_mesh(MeshConfig(data=data, tensor=tensor))
    scheduler = Scheduler(
        Engine(MODEL, SCARCE, SAMPLING, (STOP,), mesh), Letters(), workers=4, worker_deadline_s=30.0
    )
    groups, _ = play([task_of(seed) for seed in range(5)], scheduler=scheduler)
    scheduler.close()
    for i, t in enumerate(t for group in groups for t in group.trajectories):
        np.testing.assert_array_equal(played[f"tokens{i}"], t.tokens)
        np.testing.assert_array_equal(played[f"logprobs{i}"], t.logprobs)


@pytest.mark.long
def test_a_follower_says_when_the_first_process_has_ended(tmp_path):
    leader, follower = start(tmp_path / "played.npz", 2, 1, 3)
    output = follower.communicate(timeout=400)[0]
    leader.communicate(timeout=400)
    assert (leader.returncode, follower.returncode) == (9, 3), output
    assert "the first process of this actor has ended" in output


def test_a_host_that_is_no_address_is_named():
    with pytest.raises(ValueError, match="host='node7' must be an IPv4 address in numbers"):
        Channel("node7", 1.0)
