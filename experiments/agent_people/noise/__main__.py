"""Noise scale of the gradient of an agent's cycle, in answers.

    python -m experiments.agent_people.noise --config=configs/realtime_agent.py \\
        --workdir=runs/realtime_agent [--answers=256] [--cycle=1]

The answers of a cycle are read from the record as its trainer reads them, and the gradient of each
is taken alone, at the version that gave them. From the products of all pairs follows the noise
scale (``experiments.tab.gradients``). Nothing is trained; take a copy of a workdir whose cycle
runs.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import ml_collections
import numpy as np
from absl import flags as absl_flags

from experiments.tab.gradients import Measured, gradients, scale
from launch import flags
from launch.realtime import RealtimeConfig
from people.feedback.database import make_engine
from people.feedback.poisoning import weigh
from people.feedback.rewards.answered import answered
from people.feedback.rewards.combine import make_reward
from people.feedback.store import FeedbackStore
from people.realtime.api import PARTS
from people.realtime.ledger import Ledger
from people.realtime.served import Served
from people.realtime.tables import CYCLES
from people.realtime.training import groups_of, leave_one_out
from people.realtime.versions import Versions
from rl_code.config import named, read_config
from rl_code.config.named import Named
from rl_code.config.read_config import ConfigError
from rl_code.host.stop import StopRequest
from rl_code.run.run import Run
from rl_code.types import Group

_BASELINED = Named("people.realtime.training:baselined")


def main(config: ml_collections.ConfigDict, workdir: str | None) -> None:
    realtime = read_config.build(RealtimeConfig, config)
    served = named.make(PARTS, realtime.parts, "config.parts")
    if not isinstance(served, Served):
        raise ConfigError(f"config.parts={realtime.parts.name!r} serves nobody")
    folder, own = Path(workdir or ""), absl_flags.FLAGS
    version, groups = trained_on(folder, served, own.cycle)
    chosen = np.random.default_rng(0).permutation(len(groups))[: own.answers]
    with Run(served.run, folder) as run, jax.set_mesh(run.mesh):
        model = Versions(run, StopRequest()).model(version)
        train = dataclasses.replace(served.run.train, advantage=_BASELINED, group_size=1)
        rows = gradients(model, [groups[i] for i in chosen], train)
    rewards = np.array([groups[i].trajectories[0].reward.total for i in chosen])
    found = scale(Measured(rows @ rows.T, rewards))
    print(f"noise scale {found.told('.0f')} answers, from {len(chosen)} of cycle {own.cycle}")


def trained_on(folder: Path, served: Served, cycle: int) -> tuple[int, list[Group]]:
    """The version that gave the answers of a cycle, and these as the trainer has them.

    Raises ConfigError for a cycle that has not marked its answers.
    """
    engine = make_engine(f"sqlite:///{folder / 'people.db'}", new=False)
    reward = make_reward(served.feedback.reward)
    with FeedbackStore(engine) as store:
        selection = store.used(cycle)
        if selection is None:
            raise ConfigError(f"--cycle={cycle} of {folder} has no answers yet")
        given = answered(store.joined(selection.ids, selection.watermark))
        rewards = [reward(one) for one in given]
        totals = np.array([one.total for one in rewards], np.float64)
        weights = weigh(given, served.feedback.poisoning).weights
        answers = [one.answer for one in given]
        advantages = leave_one_out(totals, weights)
        groups, _ = groups_of(answers, [*advantages], rewards, store.earlier(answers))
        base = next(row.base for row in Ledger(engine).rows(CYCLES) if row.number == cycle)
    return base, groups


def define_flags() -> None:
    """Other commands have flags of these names, so they are defined where this one is run."""
    absl_flags.DEFINE_integer("answers", 256, "Answers whose gradients are taken.", 8)
    absl_flags.DEFINE_integer("cycle", 1, "Cycle whose answers these are.", 1)


if __name__ == "__main__":
    define_flags()
    flags.run(main, kind=RealtimeConfig)
