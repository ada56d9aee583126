"""Episodes that models pay are paid the same when they are sampled again.

Nothing is replaced: the reward model is trained inside the run, and the policy judges its own work.
"""

from __future__ import annotations

import dataclasses

import pytest

from configs import quickstart
from models.families import PRESETS
from rl_code.config.read_config import build
from rl_code.environment.protocols.compact import Compact
from rl_code.recording.replay_trajectories import find, play_again
from rl_code.rewards.combine import RewardConfig
from rl_code.run.config import RunConfig
from rl_code.run.workdir import STORE
from rl_code.store.store import GroupStore
from rl_code.train import train
from rl_code.types import ToolCall
from tests.models.small import narrow_preset
from tests.rl_code.rewards.folders import make_folder

STEPS = 2

pytestmark = pytest.mark.usefixtures("traced_once")


@dataclasses.dataclass(frozen=True)
class Writer(Compact):
    """Writes the task's file and hands it in, whatever the model writes."""

    def parse(self, text, task, tools):
        content = f"LENGTH = {len(text)}\n"
        write = ToolCall("write_file", {"path": task.path, "content": content})
        return [write, ToolCall("submit", {})]


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_what_models_paid_is_paid_again(tmp_path, monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny", narrow_preset())
    folder = make_folder(tmp_path / "rm")
    settings = quickstart.get_config("smoke")
    settings.suites = ()
    settings.sft = None
    settings.mesh.data = 1
    settings.tokenizer.update(texts=20, vocab_size=300)
    settings.protocol = "tests.rl_code.recording.test_replay_signals:Writer"
    settings.train.update(steps=STEPS, tasks_per_step=2, group_size=2, micro_batches=1)
    config = build(RunConfig, settings)
    signals = (
        "tests",
        dict(
            name="reward_model",
            folder=str(folder),
            weight=0.3,
            retrain=dict(every=1, fit=dict(updates=2, rows=1)),
        ),
        dict(
            name="rubric",
            weight=0.2,
            criteria=(dict(name="short", question="Is the change short?"),),
            tokens=1024,
        ),
    )
    config = dataclasses.replace(config, reward=build(RewardConfig, dict(signals=signals)))
    workdir = tmp_path / "run"
    train(config, workdir)
    store = GroupStore(workdir / STORE)
    noted = [
        (trajectory.reward.notes or {}).keys()
        for step in range(STEPS)
        for record in store.read(step)
        for trajectory in record.group.trajectories
    ]
    assert all(names == {"reward_model", "rubric"} for names in noted)
    for step in range(STEPS):
        found = play_again(config, workdir, find(workdir, step, "0"), range(2))
        assert [one.difference for one in found] == [None] * 2
