"""One process of an actor that has two, for tests.

    python -m tests.rl_code.rollout.multihost_process OUT PORT PROCESS DATA TENSOR [KILLED]

Plays tasks with so few pages that episodes lose theirs; the first process writes what was sampled
to OUT (.npz). KILLED: then plays them again and ends without a word after so many decode
dispatches; the other one prints what it raises.
"""

from __future__ import annotations

import os
import sys

import jax
import numpy as np

from models.sharding import MeshConfig, make_mesh
from rl_code.rollout import multihost
from rl_code.rollout.engine import Engine
from rl_code.rollout.scheduler import Scheduler
from tests.rl_code.rollout.small import (
    ONE_LAYER,
    SAMPLING,
    SCARCE,
    STOP,
    Episode,
    Letters,
    model_on,
    task_of,
)


class _Weights:
    """Version 1 for everybody who waits."""

    fetched = None

    def __init__(self, mesh):
        self._mesh = mesh

    def newest(self):
        return 1

    def wait(self, **wanted):
        return 1, model_on(self._mesh, ONE_LAYER)


def main(out: str, port: str, process: str, data: str, tensor: str, killed: str = "") -> None:
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(process))
    mesh = make_mesh(MeshConfig(data=int(data), tensor=int(tensor)), jax.devices())
    weights = _Weights(mesh)
    channel = multihost.Channel("127.0.0.1", 30.0)
    if not channel.leads:
        try:
            multihost.follow(Engine(ONE_LAYER, SCARCE, SAMPLING, (STOP,), mesh), weights, channel)
        except multihost.ProcessLost as error:
            print("raised:", error, flush=True)
            os._exit(3)  # the other one has gone, so nobody would meet this one to say goodbye
        return
    engine = multihost.LeadingEngine(ONE_LAYER, SCARCE, SAMPLING, (STOP,), mesh, channel=channel)
    scheduler = Scheduler(engine, Letters(), workers=4, worker_deadline_s=30.0)
    version, model = multihost.LeadingWeights(weights, channel).wait(exactly=1, deadline_s=30.0)
    tasks = [task_of(seed) for seed in range(5)]
    key = jax.random.key(7)
    way = dict(group_size=4, version=version, key=key)
    groups, stats = scheduler.rollout(model, tasks, Episode, **way)
    played = [t for group in groups for t in group.trajectories]
    arrays = {
        f"{name}{i}": getattr(t, name)
        for i, t in enumerate(played)
        for name in ("tokens", "logprobs")
    }
    np.savez(out, preempted=stats.preempted, **arrays)
    if killed:
        decode = engine.decode
        left = [int(killed)]

        def dying(*arguments):
            left[0] -= 1
            return decode(*arguments) if left[0] else os._exit(9)

        engine.decode = dying
        scheduler.rollout(model, tasks, Episode, **way)
    scheduler.close()
    channel.tell("stop")


if __name__ == "__main__":
    main(*sys.argv[1:])
