"""The noise of gradients is found from products of groups."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from experiments.tab import gradients as noise
from rl_code.config.named import Named
from rl_code.learner.batching import PackConfig
from rl_code.learner.objective import LossConfig
from rl_code.run.sections import TrainConfig
from tests.rl_code.learner.conftest import make_groups, make_toy
from tests.rl_code.learner.steps import OPTIMIZER


def made(mean: float, count: int = 300, size: int = 50) -> noise.Measured:
    """Gradients of ``size`` numbers whose mean is ``mean`` each, with a variance of 1 each."""
    rng = np.random.default_rng(0)
    gradients = rng.normal(mean, 1.0, (count, size))
    return noise.Measured(gradients @ gradients.T, rng.normal(0.1, 0.3, count))


def test_signal_and_noise_are_told_apart():
    one = made(0.5)
    squared, spread = one.signal(np.arange(300))
    assert squared == pytest.approx(50 * 0.25, rel=0.1)
    assert spread == pytest.approx(50, rel=0.05)
    found = noise.scale(one)
    assert found.low < found.mean < found.high and found.mean == pytest.approx(4, rel=0.15)


def test_the_gradient_of_a_group_does_not_depend_on_its_rows():
    groups = make_groups((3, 4, 3), seed=1)
    for number, group in enumerate(groups):
        rewarded = [
            dataclasses.replace(one, reward=dataclasses.replace(one.reward, total=float(at)))
            for at, one in enumerate(group.trajectories)
        ]
        groups[number] = dataclasses.replace(group, trajectories=tuple(rewarded))

    def found(slots: int, targets: int) -> np.ndarray:
        train = TrainConfig(
            steps=1,
            tasks_per_step=3,
            group_size=4,
            optimizer=OPTIMIZER,
            advantage=Named("rloo"),
            loss=LossConfig(policy=Named("ppo"), aggregation="token"),
            pack=PackConfig(1, slots, targets, 0, False),
        )
        return noise.gradients(make_toy(), groups, train)

    wide, narrow = found(96, 64), found(32, 20)
    assert np.abs(wide).max(axis=1).min() > 1e-3
    np.testing.assert_allclose(narrow, wide, atol=1e-5)


def test_two_batches_agree_as_the_noise_scale_says():
    one = made(0.5)
    for size in (1, 4, 16):
        assert noise.cosines(one, size).mean() == pytest.approx(size / (size + 4), abs=0.06)


def test_a_gradient_of_nothing_but_noise_has_no_bound():
    assert noise.scale(made(0.0)).high > 1_000


@pytest.mark.long
def test_the_report_has_a_row_for_each_policy(tmp_path):
    found = {"before": made(0.5), "after": made(0.1)}
    view = noise.scales(found, 8)
    assert list(view.columns[0].cells) == ["before", "after"]
    noise.draw(found, tmp_path / "noise.png", 8)
    assert (tmp_path / "noise.png").stat().st_size > 10_000
