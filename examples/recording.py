"""A finished run as a recording: read it, train again on it bit for bit, compare it with another.

    python -m examples.recording runs/first [runs/second]

``python -m launch.train --config=configs/quickstart.py:smoke --workdir=runs/first`` makes one in a
minute. ``launch.replay``, ``launch.fork`` and ``launch.bisect`` are the commands of the same.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import jax

from launch.flags import use_virtual_devices
from rl_code.config.read_config import ConfigError
from rl_code.recording import bisect, kept_config
from rl_code.recording.replay_training import replay
from rl_code.run.config import meshes
from rl_code.run.run import Run
from rl_code.run.workdir import STORE
from rl_code.store.store import GroupStore


def read(workdir: Path) -> None:
    """Prints what every step sampled."""
    store = GroupStore(workdir / STORE)
    for step in store.consumed():
        for record in store.read(step):
            group = record.group
            rewards = [round(t.reward.total, 2) for t in group.trajectories]
            print(f"step {step}: {group.task.id}, versions {list(record.versions)}: {rewards}")


def train_again(workdir: Path) -> list[bool]:
    """Makes every update again from the record; True where the weights have the recorded bits."""
    config = kept_config.read(workdir)
    use_virtual_devices(*meshes(config, "learner"))
    with Run(config, workdir, "learner") as run, jax.set_mesh(run.mesh):
        same = [replayed.same for replayed in replay(run)]
    print(f"{sum(same)} of {len(same)} replayed updates have the recorded bits")
    return same


def main(arguments: Sequence[str] | None = None) -> list[bool]:
    parser = argparse.ArgumentParser(prog="python -m examples.recording")
    parser.add_argument("run", type=Path, help="workdir of a finished run")
    parser.add_argument("other", type=Path, nargs="?", help="workdir of a run to compare it with")
    given = parser.parse_args(arguments)
    try:
        kept_config.read(given.run)
        parting = None if given.other is None else bisect.compare(given.run, given.other).parting
    except ConfigError as error:
        parser.error(str(error))
    read(given.run)
    if given.other is not None:
        print(parting or "the runs are equal")
    return train_again(given.run)


if __name__ == "__main__":
    main()
