"""Rewards of adapters at home and elsewhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import rich.table

from experiments.organisations.holes import AskedAtHome, Holes, of
from experiments.tab import held_out
from experiments.tab.asked import suggested
from models.adapter_rows import with_several
from models.lora import trained, without_adapters
from rl_code.types import Group

# What ``launch.sweep_plan`` leaves in the folder of a run that has finished.
DONE = "sweep_done.json"
_SAMPLES = 4
_REPEATS = 2_000


@dataclasses.dataclass(frozen=True)
class Earned:
    """Rewards and shown suggestions of the adapters of one seed at each hole, [adapters, holes];
    columns of one hole are the same hole.
    """

    adapters: tuple[str, ...]
    organisations: tuple[str, ...]
    reward: np.ndarray
    shown: np.ndarray


def finished(folder: Path, organisations: Sequence[str]) -> dict[str, dict[str, Path]]:
    """The runs of each seed whose runs have all finished, by the adapter's name."""
    seeds: dict[str, dict[str, Path]] = {}
    for path in sorted(folder.glob("variant=*")):
        variant, _, seed = path.name.removeprefix("variant=").partition(",")
        if (path / DONE).exists():
            seeds.setdefault(seed, {})[variant] = path
    wanted = {*organisations, "shared"}
    return {seed: runs for seed, runs in seeds.items() if runs.keys() == wanted}


def play(runs: Mapping[str, Path], organisations: Sequence[str], count: int) -> Earned:
    """Serves the adapters of a seed beside each other, on ``count`` holes of each organisation."""
    names = (*organisations, "shared")
    with held_out.opened(runs["shared"]) as run, jax.set_mesh(run.mesh):
        models = [run.saved_model(runs[name])[0] for name in names]
        served = with_several(without_adapters(models[-1]), [trained(one) for one in models])
        settings = {**run.config.tasks.settings, "seed": held_out.SEED}
        stream = Holes(**{**settings, "organisations": tuple(organisations)}).load(None, None)
        tasks = [stream[i] for i in range(count * len(organisations))]
        groups, _ = run.scheduler(run.config.rollout.sampling).rollout(
            served,
            tasks * len(names),
            run.episode,
            group_size=_SAMPLES,
            version=0,
            key=jax.random.key(held_out.SEED),
            adapters=[i for i in range(len(names)) for _ in tasks],
        )
    return earned(groups, names)


def earned(groups: Sequence[Group], names: Sequence[str]) -> Earned:
    """groups: those of the first adapter, then those of the next one, of the same tasks."""
    asked = AskedAtHome()
    texts = [[suggested(one) for one in group.trajectories] for group in groups]
    reward = [
        np.mean([asked.expected(group.task, text) for text in each])
        for group, each in zip(groups, texts, strict=True)
    ]
    shown = [np.mean([bool(text.strip()) for text in each]) for each in texts]
    whose = tuple(of(group.task) for group in groups[: len(groups) // len(names)])
    shape = len(names), len(whose)
    return Earned(tuple(names), whose, np.reshape(reward, shape), np.reshape(shown, shape))


def table(found: Sequence[Earned], organisations: Sequence[str]) -> rich.table.Table:
    """One row for each organisation, one column for each adapter, and what home is ahead of shared;
    95 % intervals by a bootstrap over holes, which all adapters have in common.
    """
    names = found[0].adapters
    view = rich.table.Table(
        caption=f"of each adapter: reward of an episode, and share shown; {len(found)} seeds"
    )
    view.add_column("organisation")
    for name in names:
        view.add_column(name, justify="right")
    view.add_column("home - shared", justify="right")
    for organisation in organisations:
        reward = np.concatenate([_at(one, one.reward, organisation) for one in found], axis=1)
        shown = np.concatenate([_at(one, one.shown, organisation) for one in found], axis=1)
        cells = [
            f"{_told(row)}, {100 * part.mean():.0f} %"
            for row, part in zip(reward, shown, strict=True)
        ]
        ahead = reward[names.index(organisation)] - reward[names.index("shared")]
        view.add_row(organisation, *cells, _told(ahead))
    return view


def draw(found: Sequence[Earned], organisations: Sequence[str], path: Path) -> None:
    """Rewards of each adapter at each organisation, and the lead of home over shared, with the
    intervals of ``table``.
    """
    import matplotlib  # slow to import, and only the end draws

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = found[0].adapters
    figure, (earns, gains) = pyplot.subplots(
        1, 2, figsize=(9, 3.8), gridspec_kw={"width_ratios": (3, 1)}
    )
    places = np.arange(len(organisations))
    rewards = [
        np.concatenate([_at(one, one.reward, organisation) for one in found], axis=1)
        for organisation in organisations
    ]
    for number, name in enumerate(names):
        beside = 0.2 * (number - (len(names) - 1) / 2)
        label = name if name == "shared" else f"of {name}"
        _bars(earns, places + beside, [each[number] for each in rewards], f"C{number}", label)
    ahead = [
        each[names.index(organisation)] - each[names.index("shared")]
        for organisation, each in zip(organisations, rewards, strict=True)
    ]
    _bars(gains, places, ahead, "C7", None)
    for axis in (earns, gains):
        axis.axhline(0, color="grey", linewidth=1, linestyle=":")
        axis.set_xticks(places, [f"at {one}" for one in organisations])
        axis.set_xlim(-0.5, len(organisations) - 0.5)
        axis.grid(alpha=0.3, axis="y")
        axis.spines[["top", "right"]].set_visible(False)
    earns.set(ylabel="reward of an episode", title=f"Adapters, {len(found)} seeds, 95 % intervals")
    earns.legend(title="adapter", frameon=False, fontsize="small")
    gains.set(title="Home less shared")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _bars(axis: Any, places: np.ndarray, values: Sequence[np.ndarray], colour: str, label: Any):
    """Means with their intervals."""
    means, lows, highs = np.array([_interval(one) for one in values]).T
    errors = np.maximum(np.stack([means - lows, highs - means]), 0.0)  # but for rounding
    axis.errorbar(places, means, errors, fmt="o", capsize=4, color=colour, label=label)


def _at(one: Earned, values: np.ndarray, organisation: str) -> np.ndarray:
    return values[:, np.array(one.organisations) == organisation]


def _told(values: np.ndarray) -> str:
    """The mean with its interval."""
    mean, low, high = _interval(values)
    return f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]"


def _interval(values: np.ndarray) -> tuple[float, float, float]:
    """The mean, and the ends of its interval."""
    rng = np.random.default_rng(0)
    draws = [rng.choice(values, len(values)).mean() for _ in range(_REPEATS)]
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(values.mean()), float(low), float(high)
