"""Whole runs with documents in prompts and answers: trained as sampled, resumed and replayed."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from models.families import PRESETS
from rl_code.config import read_config
from rl_code.config.read_config import build
from rl_code.environment.protocols.compact import Compact
from rl_code.metrics.values import read_metrics
from rl_code.recording.fork import fork
from rl_code.recording.replay_training import replay
from rl_code.run.config import RunConfig
from rl_code.run.run import Run
from rl_code.run.workdir import STORE
from rl_code.store.store import GroupStore
from rl_code.train import train
from rl_code.types import ToolCall
from tests.models.small import narrow_preset
from tests.rl_code.run.lookups import small_settings

pytestmark = pytest.mark.usefixtures("traced_once")

BLOCKS = dict(block=16, picks=3)
METHODS = {
    "dense": dict(name="dense"),
    "nsa": dict(name="nsa", length=8, stride=4, initial=1, local=1, window=24, **BLOCKS),
    "moba and gated": (dict(name="moba", **BLOCKS), dict(name="gated_documents")),
}


@dataclasses.dataclass(frozen=True)
class Reader(Compact):
    """Reads the task's file in every message, whatever the model writes."""

    def parse(self, text, task, tools):
        return [ToolCall("read_file", {"path": task.path})]


def make_config(method: str, steps: int, fsdp: int = 1) -> RunConfig:
    """A run of a few small steps, whose episodes have three documents in the prompt and read one in
    each turn.
    """
    settings = small_settings(
        "tests.rl_code.run.test_run_with_documents:Reader",
        steps,
        2,
        prompt=520,
        limits=dict(turns=3, tokens=640),
        pack=dict(rows=2, slots=1300, targets=72),
        tokens=150,
        files=3,
    )
    with settings.unlocked():
        settings.mesh.fsdp = fsdp
        settings.documents = dict(longest=64, shortest=8)
        settings.model.attention = METHODS[method]
        if "block" in str(METHODS[method]):
            settings.train.pack.runs = 3
    return build(RunConfig, settings)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny", narrow_preset(num_layers=2, num_kv_heads=1))


def arrays(store, step):
    """The bytes of all contexts of a step; records also hold seconds, which differ."""
    names = ("tokens", "sampled", "logprobs", "versions", "documents")
    return [
        getattr(context, name).tobytes()
        for record in store.read(step)
        for trajectory in record.group.trajectories
        for context in trajectory.contexts
        for name in names
    ]


def check_computes_what_was_sampled(step: dict) -> None:
    """Metrics of a step with documents."""
    assert step["policy/mismatch_max"] < 1e-4, step["policy/mismatch_max"]
    # two prompts of three documents, and four episodes that read twice
    assert step["engine/documents"] >= 8
    assert 0 < step["pack/document_tokens"] < step["pack/tokens"]
    assert step["train/grad_norm"] > 0


@pytest.mark.long
@pytest.mark.parametrize("method", ["nsa", "moba and gated"])
def test_the_trainer_computes_what_was_sampled_over_documents(method, tmp_path):
    """Dense attention is in the tests below, each method in rollout/test_documents.py."""
    train(make_config(method, steps=2), tmp_path)
    steps = read_metrics(tmp_path)
    assert len(steps) == 2
    for step in steps:
        check_computes_what_was_sampled(step)


@pytest.mark.long
def test_a_run_with_documents_is_resumed_and_replayed_bit_for_bit(tmp_path):
    """On a mesh that cuts parameters."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    config = make_config("dense", steps=4, fsdp=2)
    train(config, whole)
    train(make_config("dense", steps=2, fsdp=2), parts)
    train(config, parts)
    rows = read_metrics(whole)
    assert len(rows) == 4
    for row in rows:
        check_computes_what_was_sampled(row)
    stores = [GroupStore(folder / STORE) for folder in (whole, parts)]
    assert stores[0].consumed() == stores[1].consumed() == [0, 1, 2, 3]
    for step in range(4):
        one, other = (store.consumption(step)["weights"] for store in stores)
        assert one == other
        one, other = (arrays(store, step) for store in stores)
        assert one == other and one
    with Run(config, parts, "learner") as run, jax.set_mesh(run.mesh):
        assert [step.same for step in replay(run)] == [True] * 4


@pytest.mark.long
def test_a_fork_may_begin_or_cease_to_have_documents(tmp_path):
    settings = read_config.to_dict(make_config("dense", steps=4, fsdp=2))
    with_documents = build(RunConfig, settings)
    without = build(RunConfig, settings | {"documents": None})
    folders = [tmp_path / name for name in ("plain", "begun", "ceased")]
    train(
        dataclasses.replace(without, train=dataclasses.replace(without.train, steps=2)), folders[0]
    )
    for step, parent, workdir, config in (
        (1, folders[0], folders[1], with_documents),
        (3, folders[1], folders[2], without),
    ):
        fork(parent, workdir, step, config)
        train(config, workdir)
        steps = read_metrics(workdir)
        assert len(steps) == 4
        assert all(row["policy/mismatch_max"] < 1e-3 for row in steps)
        has_documents = [row.get("engine/documents", 0) > 0 for row in steps]
        assert has_documents[step:] == [config.documents is not None] * (4 - step)
        with Run(config, workdir, "learner") as run, jax.set_mesh(run.mesh):
            assert [step.same for step in replay(run)] == [True] * 4
