"""Whole runs with documents in prompts and answers: trained as sampled, resumed and replayed."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from models.families import PRESETS
from rl_code.config import read_config
from rl_code.config.read_config import build
from rl_code.environment.protocols.compact import Compact
from rl_code.metrics.values import read_metrics
from rl_code.recording import kept_config
from rl_code.recording.fork import fork
from rl_code.recording.replay_training import replay
from rl_code.recording.replay_trajectories import find, play_again
from rl_code.run.config import RunConfig
from rl_code.run.run import Run
from rl_code.run.workdir import STORE
from rl_code.store.store import GroupStore
from rl_code.train import train
from rl_code.types import ToolCall
from tests.models.small import narrow_preset
from tests.rl_code.run.lookups import small_settings

pytestmark = pytest.mark.usefixtures("traced_once")

NSA = dict(name="nsa", block=16, picks=3, length=8, stride=4, initial=1, local=1, window=24)


@dataclasses.dataclass(frozen=True)
class Reader(Compact):
    """Reads the task's file in every message, whatever the model writes."""

    def parse(self, text, task, tools):
        return [ToolCall("read_file", {"path": task.path})]


def make_config(steps: int, *, picks: bool = False, fsdp: int = 1) -> RunConfig:
    """A run of a few small steps, whose episodes have three documents in the prompt and read one in
    each turn. picks: of NSA, noted by a sampler of a shorter dtype and replayed.
    """
    settings = small_settings(
        "tests.rl_code.run.test_run_with_documents:Reader",
        steps,
        2,
        prompt=320,
        limits=dict(turns=3, tokens=440),
        pack=dict(rows=2, slots=640, targets=72),
        tokens=60,
        files=3,
    )
    with settings.unlocked():
        settings.mesh.fsdp = fsdp
        settings.documents = dict(longest=64, shortest=8)
        if picks:
            settings.model.attention = NSA
            settings.train.pack.runs = 3
            settings.rollout.update(picks="replay", dtype="bfloat16")
    return build(RunConfig, settings)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny", narrow_preset(num_kv_heads=1))


def arrays(store, step):
    """The bytes of all contexts of a step; records also hold seconds, which differ."""
    names = ("tokens", "sampled", "logprobs", "versions", "documents")
    return [
        array.tobytes()
        for record in store.read(step)
        for trajectory in record.group.trajectories
        for context in trajectory.contexts
        for array in (*(getattr(context, name) for name in names), context.choices["blocks"])
    ]


def check_rows(rows: list[dict], count: int) -> None:
    """Metrics of the steps of a run with documents."""
    assert len(rows) == count
    for row in rows:
        # two prompts of three documents, and four episodes that read twice
        assert row["engine/documents"] >= 8
        assert 0 < row["pack/document_tokens"] < row["pack/tokens"]
        assert row["train/grad_norm"] > 0


@pytest.mark.long
def test_a_run_with_documents_and_picks_is_resumed_and_replayed_bit_for_bit(tmp_path):
    """The sampler's choice of blocks is noted and trained with. That each method computes over
    documents what it sampled is tested in rollout/test_documents.py.
    """
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    config = make_config(3, picks=True)
    train(config, whole)
    train(make_config(2, picks=True), parts)
    train(config, parts)
    rows = read_metrics(whole)
    check_rows(rows, 3)
    for row in rows:
        assert 0.5 < row["policy/picks_overlap"] <= 1.0
        assert 0.0 <= row["policy/picks_equal"] <= row["policy/picks_overlap"]
    stores = [GroupStore(folder / STORE) for folder in (whole, parts)]
    assert stores[0].consumed() == stores[1].consumed() == [0, 1, 2]
    for step in range(3):
        one, other = (store.consumption(step)["weights"] for store in stores)
        assert one == other
        one, other = (arrays(store, step) for store in stores)
        assert one == other and all(one)
    with Run(config, parts, "learner") as run, jax.set_mesh(run.mesh):
        assert [step.same for step in replay(run)] == [True] * 3
    # a trajectory that is sampled again chooses the same blocks
    (again,) = play_again(kept_config.read(parts), parts, find(parts, 1, "0"), [1])
    assert again.difference is None
    (there,), (now,) = again.recorded.contexts, again.now.contexts
    assert np.array_equal(there.choices["blocks"], now.choices["blocks"])


@pytest.mark.long
def test_a_fork_may_begin_or_cease_to_have_documents(tmp_path):
    """On a mesh that cuts parameters."""
    settings = read_config.to_dict(make_config(3, fsdp=2))
    with_documents = build(RunConfig, settings)
    without = build(RunConfig, settings | {"documents": None})
    folders = [tmp_path / name for name in ("plain", "begun", "ceased")]
    train(
        dataclasses.replace(without, train=dataclasses.replace(without.train, steps=1)), folders[0]
    )
    for step, parent, workdir, config in (
        (1, folders[0], folders[1], with_documents),
        (2, folders[1], folders[2], without),
    ):
        fork(parent, workdir, step, config)
        train(config, workdir)
        rows = read_metrics(workdir)
        assert len(rows) == 3
        assert all(row["policy/mismatch_max"] < 1e-4 for row in rows)
        has_documents = [row.get("engine/documents", 0) > 0 for row in rows]
        assert has_documents[step:] == [config.documents is not None] * (3 - step)
        with Run(config, workdir, "learner") as run, jax.set_mesh(run.mesh):
            assert [step.same for step in replay(run)] == [True] * 3
    check_rows(read_metrics(folders[1])[1:], 2)
