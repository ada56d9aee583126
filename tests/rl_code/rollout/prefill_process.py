"""A process that prefills prompts, or an actor that decodes, for tests.

    python -m tests.rl_code.rollout.prefill_process prefill WORKDIR VERSION
    python -m tests.rl_code.rollout.prefill_process decode WORKDIR NAME

The first one serves with version VERSION of the weights until it is killed; it says "ready". The
second one plays tasks with version 1, writes what was sampled to <WORKDIR>/<NAME>.npz, and says
what it counted.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import numpy as np

from models.sharding import MeshConfig, make_mesh
from rl_code.rollout.engine import Engine
from rl_code.rollout.prefill_client import PrefillClient
from rl_code.rollout.prefill_server import PrefillServer
from rl_code.rollout.prefill_wire import PrefillConfig
from rl_code.rollout.scheduler import Scheduler
from rl_code.weights.versions import WeightError
from tests.rl_code.rollout.small import (
    ENGINE,
    ONE_LAYER,
    SAMPLING,
    STOP,
    Episode,
    Letters,
    model_on,
    task_of,
)

HOST = "127.0.0.1"
TASKS = 5


class OneVersion:
    """A Subscriber that has one version of the weights and no other."""

    fetched = None

    def __init__(self, mesh, version: int):
        self._mesh, self._version = mesh, version

    def newest(self):
        return self._version

    def wait(self, *, exactly: int, deadline_s: float):
        if exactly != self._version:
            raise WeightError(f"version {exactly} is not there")
        return exactly, model_on(self._mesh, ONE_LAYER)


def prefill(workdir: Path, version: int) -> None:
    mesh = make_mesh(MeshConfig())
    engine = Engine(ONE_LAYER, ENGINE, SAMPLING, (STOP,), mesh)
    weights = OneVersion(mesh, version)
    server = PrefillServer(engine, weights, workdir, host=HOST, deadline_s=5.0)
    print("ready", flush=True)
    while True:
        server.turn(0.2)


def decode(workdir: Path, name: str) -> None:
    engine = Engine(ONE_LAYER, ENGINE, SAMPLING, (STOP,), make_mesh(MeshConfig()))
    client = PrefillClient(workdir, name, HOST, PrefillConfig(deadline_s=60.0), engine)
    scheduler = Scheduler(engine, Letters(), workers=4, worker_deadline_s=30.0, remote=client)
    groups, stats = scheduler.rollout(
        model_on(engine.mesh, ONE_LAYER),
        [task_of(seed) for seed in range(TASKS)],
        Episode,
        group_size=4,
        version=1,
        key=jax.random.key(7),
    )
    scheduler.close()
    played = [trajectory for group in groups for trajectory in group.trajectories]
    arrays = {
        f"{what}{at}": getattr(trajectory, what)
        for at, trajectory in enumerate(played)
        for what in ("tokens", "logprobs")
    }
    np.savez(workdir / f"{name}.npz", **arrays)
    print(json.dumps(vars(stats)), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "prefill":
        prefill(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        decode(Path(sys.argv[2]), sys.argv[3])
