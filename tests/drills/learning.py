"""One update of a tiny model by a config's learner: what the drills of losses and credit share."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from configs import quickstart
from rl_code.config.read_config import build
from rl_code.learner.learner import Learner
from rl_code.learner.update import TrainState, init_state
from rl_code.run.config import RunConfig
from rl_code.types import Group, ToolCall, Turn
from tests.rl_code.learner.conftest import make_group, make_toy, make_trajectory

PROMPT = 3
# First tokens of the assistant's two turns, each of three tokens, with an answer between them.
TURNS = (3, 8)


def configured(**train: Any) -> RunConfig:
    """The quickstart with a batch of a few small rows; train: keys of the section ``train``."""
    settings = quickstart.get_config("smoke").to_dict()
    pack = dict(rows=2, slots=48, targets=32, drop_uninformative=False)
    settings["train"] |= dict(pack=pack, micro_batches=1) | train
    return build(RunConfig, settings)


def sampled_group(rewards: list[float], malformed: tuple[int, ...] = ()) -> Group:
    """Trajectories of two turns; malformed: indices of those whose second call is malformed."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 32, PROMPT)
    trajectories = []
    for index, reward in enumerate(rewards):
        tokens = np.concatenate([prompt, rng.integers(0, 32, 8)])
        sampled = np.isin(np.arange(11), [start + i for start in TURNS for i in range(3)])
        error = "no such tool" if index in malformed else ""
        turns = tuple(
            Turn("assistant", start, start + 3, "", (ToolCall("write", {}, error * number),))
            for number, start in enumerate(TURNS)
        )
        made = make_trajectory(tokens, sampled, prompt_length=PROMPT, index=index, reward=reward)
        trajectories.append(dataclasses.replace(made, turns=turns))
    return make_group(trajectories)


def one_step(config: RunConfig, group: Group) -> tuple[TrainState, dict[str, Any]]:
    """The state and the metrics after one step on a group."""
    model = jax.tree.map(lambda x: x.copy(), make_toy())
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    state = init_state(model, config.train.optimizer)
    return Learner(config.train, here, model)(state, [group], 0)
