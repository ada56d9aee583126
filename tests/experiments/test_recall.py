"""The recall experiment: it learns, continues where it was stopped, and counts what it says it
counts.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from attention.methods.dense import Dense
from attention.methods.method import LayerShape
from attention.methods.moba import MoBA
from attention.methods.nsa import NSA
from attention.methods.window import Window
from configs import recall as config
from experiments.recall import study
from experiments.recall.study import RecallExperiment, RecallMethod, Stage, run_method
from rl_code.config import read_config
from rl_code.config.named import Named
from rl_code.host.stop import Stopped, StopRequest
from rl_code.metrics.values import read_metrics


@pytest.fixture(scope="module")
def smoke() -> RecallExperiment:
    experiment = read_config.build(RecallExperiment, config.get_config("smoke"))
    return dataclasses.replace(
        experiment,
        methods={"window": RecallMethod((Named("window", {"window": 8}),))},
        stages=(
            Stage(documents=2, rows=4, steps=2, span=0),
            Stage(documents=3, rows=4, steps=2, span=128),
        ),
        checkpoint_every=1,
    )


def run(experiment, folder):
    """(result, losses) of the method, trained in the folder or continued there."""
    with StopRequest() as stop:
        result = run_method(experiment, "window", folder, stop)
    return result, [row["train/loss"] for row in read_metrics(folder)]


@pytest.mark.long
def test_a_stopped_method_continues_to_the_same_result(smoke, tmp_path, monkeypatch):
    # rows of one shape, so that one program serves both stages
    first, last = smoke.stages
    stages = (dataclasses.replace(first, documents=last.documents), last)
    smoke = dataclasses.replace(smoke, stages=stages)
    whole, losses = run(smoke, tmp_path / "whole")
    stop = StopRequest()
    with stop, pytest.raises(Stopped, match="stopped after step 2 of 4 of window"):
        rows = study.rows

        def then_stop(experiment, method, seed, *arguments):
            stop.requested = seed == 1
            return rows(experiment, method, seed, *arguments)

        monkeypatch.setattr(study, "rows", then_stop)
        run_method(smoke, "window", tmp_path / "parts", stop)
    monkeypatch.undo()
    parts, continued = run(smoke, tmp_path / "parts")
    assert continued == losses and len(losses) == smoke.steps
    assert (parts.short, parts.long) == (whole.short, whole.long)
    assert run(smoke, tmp_path / "parts")[0] == parts  # done: read, not run


def test_right_answers_are_those_of_the_highest_logit(smoke):
    method = smoke.methods["window"]
    batch = study.rows(smoke, method, 0, 4, 3)
    vocabulary = smoke.task.vocabulary

    class Oracle:
        """A model that knows every token after the next key, but for row 0."""

        hidden = staticmethod(lambda tokens, positions, where, align: np.roll(tokens, -1, axis=1))

        def logits(self, hidden):
            return jax.nn.one_hot(np.where(np.arange(4)[:, None] == 0, 0, hidden), vocabulary)

    assert study.right_answers.__wrapped__(Oracle(), batch) == batch.mask[1:].sum()


def test_stages_follow_each_other(smoke):
    assert [smoke.stage(step).documents for step in range(smoke.steps)] == [2, 2, 3, 3]
    with pytest.raises(ValueError, match="the last stage has documents=2, task"):
        dataclasses.replace(smoke, stages=smoke.stages[:1])


def test_decoded_bytes_are_those_of_the_papers_count():
    shape = dict(shape=LayerShape(2560, 64, 4, 128), dtype="bfloat16")
    token = 2 * 4 * 128 * 2
    assert Dense().decode_bytes(65536, **shape) == 65536 * token
    assert Window(512).decode_bytes(65536, **shape) == 512 * token
    # 2502.11089, table 4: 11.6 times less than dense at 65,536 tokens
    assert Dense().decode_bytes(65536, **shape) / NSA().decode_bytes(
        65536, **shape
    ) == pytest.approx(11.6, abs=0.05)
    assert MoBA(block=512, picks=1).decode_bytes(1024, **shape) <= 1024 * token + 2 * 4 * 128 * 4
    assert all(
        method.decode_bytes(64, **shape) <= 3 * 64 * token
        for method in (Dense(), Window(512), NSA(), MoBA())
    )
