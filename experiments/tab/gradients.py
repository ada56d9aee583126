"""The noise of gradients and of the objective, by the size of a batch.

The noise scale is tr(S) / |G|^2 groups (1812.06162, eq. 2.9), where G is the mean gradient of a
group and S its covariance: at that size of a batch signal and noise are alike. Both are estimated
without bias, |G|^2 from products of different groups.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import rich.table

from experiments.report import AFTER, BEFORE, Estimate, band, figure, resampled, table
from experiments.tab import held_out
from models.lora import trained
from models.transformer import Transformer
from rl_code.config import named
from rl_code.learner.advantages import ADVANTAGES, group_advantages
from rl_code.learner.batch import Batch
from rl_code.learner.batching import pack
from rl_code.learner.objective import Denominators
from rl_code.learner.update import accumulate, loss_share, split, used
from rl_code.run.run import Run
from rl_code.run.sections import TrainConfig
from rl_code.types import Group

SETS = 3
_REPEATS = 400
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclasses.dataclass(frozen=True)
class Measured:
    """Groups of one policy."""

    # Products of the gradients of every two groups, [n, n].
    products: np.ndarray
    # Mean reward of each group, [n].
    rewards: np.ndarray

    def signal(self, chosen: np.ndarray) -> tuple[float, float]:
        """(|G|^2, tr(S)) from the groups of these numbers, which may be repeated."""
        often = np.bincount(chosen, minlength=len(self.products)).astype(np.float64)
        own = np.diagonal(self.products)
        # of pairs of different groups alone
        pairs = often @ self.products @ often - often**2 @ own
        between = float(pairs / (len(chosen) ** 2 - often @ often))
        return between, float(often @ own / len(chosen)) - between


def gradients(model: Transformer, groups: Sequence[Group], train: TrainConfig) -> np.ndarray:
    """float32 [groups, parameters]: of each group alone, as a step of training has it but divided
    by 1 instead of by the tokens of its batch.
    """
    # Each group is a batch of its own, and those without a gradient count as 0. At worst an episode
    # fills a row, and rows that stay empty are not computed.
    one = dataclasses.replace(train.pack, rows=train.group_size, drop_uninformative=False)
    loss = train.loss.for_staleness(one.max_staleness)
    advantages = group_advantages(groups, named.make(ADVANTAGES, train.advantage, "advantage"))
    total = Denominators(*(jnp.float32(1.0),) * 3)

    @jax.jit
    def gradient(model: Transformer, batch: Batch) -> jax.Array:
        micro = split((batch, None, None), one.rows)

        def share(model: Transformer, _: None, i: jax.Array) -> tuple:
            part = jax.tree.map(lambda x: x[i], micro)
            return loss_share(loss, one.runs, total, model, part)

        _, _, found, _ = accumulate(share, model, None, used(micro[0].mask))
        return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(found)])

    size = sum(leaf.size for leaf in jax.tree.leaves(trained(model)))
    rows = np.empty((len(groups), size), np.float32)
    for row, group, credit in zip(rows, groups, advantages, strict=True):
        batch, _ = pack([group], [credit], one, version=0, choices={})
        row[:] = gradient(model, batch)
    return rows


def measure(run: Run, model: Transformer, count: int) -> Measured:
    """Plays ``count`` held-out holes and takes the gradient at each."""
    train = run.config.train
    tasks = held_out.holes(run, count)
    groups = held_out.fill(run, run.sampler(model), tasks, train.group_size)
    rows = gradients(model, groups, train)
    rewards = [np.mean([one.reward.total for one in group.trajectories]) for group in groups]
    return Measured(rows @ rows.T, np.array(rewards))


def scale(measured: Measured) -> Estimate:
    """The noise scale in groups. Infinite where the gradient cannot be told from 0."""
    return resampled(functools.partial(_scale, measured), len(measured.rewards))


def _scale(measured: Measured, chosen: np.ndarray) -> float:
    squared, spread = measured.signal(chosen)
    return spread / squared if squared > 0 else np.inf


def cosines(measured: Measured, size: int) -> np.ndarray:
    """Cosines between the gradients of two batches that share no group, drawn again and again; 0
    where one has no gradient.
    """
    count = len(measured.rewards)
    rng = np.random.default_rng(size)
    found = []
    for _ in range(_REPEATS):
        drawn = rng.permutation(count)[: 2 * size]
        a, b = drawn[:size], drawn[size:]
        products = [measured.products[np.ix_(x, y)].sum() for x, y in ((a, b), (a, a), (b, b))]
        length = np.sqrt(products[1] * products[2])
        found.append(products[0] / length if length > 0 else 0.0)
    return np.array(found)


def scales(found: dict[str, Measured], group_size: int) -> rich.table.Table:
    """One row for each policy: noise scales of all groups and of each set, and of the objective."""
    rows = []
    for name, one in found.items():
        sets = np.array_split(np.arange(len(one.rewards)), SETS)
        each = ", ".join(f"{_scale(one, part):.0f}" for part in sets)
        mean, spread = f"{one.rewards.mean():+.3f}", f"{one.rewards.std():.3f}"
        rows.append((name, scale(one).told(".0f"), each, mean, spread))
    columns = ["policy", "noise scale", "of each set", "mean reward", "spread"]
    return table(columns, rows, f"in groups of {group_size} episodes; spread: of one group")


def draw(found: dict[str, Measured], path: Path, group_size: int) -> None:
    """Left the cosine between the gradients of two batches by their size, right the standard error
    of the objective.
    """
    sizes = np.array(_SIZES)
    episodes = sizes * group_size
    with figure(path, 9.6, 3.8, 1, 1) as (left, right):
        for color, (name, one) in zip((BEFORE, AFTER), found.items(), strict=False):
            noise = scale(one)
            # the more noise, the lower the cosine
            ends = (noise.mean, noise.high, noise.low)
            agree = Estimate(*(sizes / (sizes + end) for end in ends))
            band(left, episodes, agree, color=color, label=name)
            for size in sizes[2 * sizes <= len(one.rewards)]:
                drawn = cosines(one, size)
                left.plot(size * group_size, drawn.mean(), "o", color=color, markersize=4)
            error = one.rewards.std() / np.sqrt(sizes)
            right.plot(episodes, 1.96 * error, color=color, label=name)
        left.set(xscale="log", ylim=(0, 1), xlabel="episodes of a batch")
        left.set(ylabel="cosine of the gradients of two batches")
        right.set(xscale="log", yscale="log", xlabel="episodes of a batch")
        right.set(ylabel="95 % half-width of the mean reward")
