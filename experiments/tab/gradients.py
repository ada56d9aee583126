"""The noise of gradients and of the objective, by the size of a batch.

The noise scale is tr(S) / |G|^2 groups (1812.06162, eq. 2.9), where G is the mean gradient of a
group and S its covariance: at that size of a batch signal and noise are alike. Both are estimated
without bias, |G|^2 from products of different groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import rich.table
from matplotlib.figure import Figure

from experiments.tab import held_out
from models.lora import trained
from models.transformer import Transformer
from rl_code import named
from rl_code.learner.advantages import ADVANTAGES, group_advantages
from rl_code.learner.batching import pack
from rl_code.learner.objective import Denominators
from rl_code.learner.update import accumulate, loss_share, split, used
from rl_code.run import Run
from rl_code.run_sections import TrainConfig
from rl_code.types import Batch, Group

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
        some = self.products[np.ix_(chosen, chosen)]
        different = chosen[:, None] != chosen[None, :]
        between = float(some[different].mean())
        return between, float(np.diagonal(some).mean()) - between


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
    groups = held_out.fill(run, model, held_out.holes(run, count), train.group_size)
    rows = gradients(model, groups, train)
    rewards = [np.mean([one.reward.total for one in group.trajectories]) for group in groups]
    return Measured(rows @ rows.T, np.array(rewards))


def scale(measured: Measured, chosen: np.ndarray) -> tuple[float, float, float]:
    """The noise scale of these groups in groups, with its 95 % interval by a bootstrap. Infinite
    where the gradient cannot be told from 0.
    """
    rng = np.random.default_rng(0)
    found = [_scale(measured, rng.choice(chosen, len(chosen))) for _ in range(_REPEATS)]
    low, high = np.quantile(found, [0.025, 0.975], method="nearest")
    return _scale(measured, chosen), float(low), float(high)


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


def table(found: dict[str, Measured], group_size: int) -> rich.table.Table:
    """One row for each policy: noise scales of all groups and of each set, and of the objective."""
    view = rich.table.Table(caption=f"in groups of {group_size} episodes; spread: of one group")
    for name in ("policy", "noise scale", "of each set", "mean reward", "spread"):
        view.add_column(name, justify="left" if name == "policy" else "right")
    for name, one in found.items():
        numbers = np.arange(len(one.rewards))
        middle, low, high = scale(one, numbers)
        each = ", ".join(f"{_scale(one, part):.0f}" for part in np.array_split(numbers, SETS))
        told = f"{middle:.0f} [{low:.0f}, {high:.0f}]"
        view.add_row(name, told, each, f"{one.rewards.mean():+.3f}", f"{one.rewards.std():.3f}")
    return view


def draw(found: dict[str, Measured], path: Path, group_size: int) -> None:
    """Left the cosine between the gradients of two batches by their size, right the standard error
    of the objective.
    """
    figure = Figure(figsize=(9.6, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    sizes = np.array(_SIZES)
    for color, (name, one) in zip(("#8a8f98", "#1f5fa8"), found.items(), strict=False):
        count = len(one.rewards)
        middle, low, high = scale(one, np.arange(count))
        left.plot(sizes * group_size, sizes / (sizes + middle), color=color, label=name)
        band = [sizes / (sizes + bound) for bound in (high, low)]
        left.fill_between(sizes * group_size, *band, color=color, alpha=0.2)
        for size in sizes[2 * sizes <= count]:
            drawn = cosines(one, size)
            left.plot(size * group_size, drawn.mean(), "o", color=color, markersize=4)
        error = one.rewards.std() / np.sqrt(sizes)
        right.plot(sizes * group_size, 1.96 * error, color=color, label=name)
    left.set(xscale="log", ylim=(0, 1), xlabel="episodes of a batch")
    left.set(ylabel="cosine of the gradients of two batches")
    right.set(xscale="log", yscale="log", xlabel="episodes of a batch")
    right.set(ylabel="95 % half-width of the mean reward")
    left.legend(frameon=False)
    figure.savefig(path, dpi=110)
