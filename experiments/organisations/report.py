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
from experiments.report import Estimate, figure, resampled, table
from experiments.tab import held_out
from experiments.tab.asked import suggested
from models.adapted import without_adapters
from models.adapter_rows import with_several
from models.lora import trained
from rl_code.types import Group
from sweeps import done

_SAMPLES = 4


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
    for path, _ in done.finished(folder):
        variant, _, seed = path.name.removeprefix("variant=").partition(",")
        seeds.setdefault(seed, {})[variant] = path
    wanted = {*organisations, "shared"}
    return {seed: found for seed, found in seeds.items() if found.keys() == wanted}


def play(workdirs: Mapping[str, Path], organisations: Sequence[str], count: int) -> Earned:
    """Serves the adapters of a seed beside each other, on ``count`` holes of each organisation."""
    names = (*organisations, "shared")
    with held_out.opened(workdirs["shared"]) as run, jax.set_mesh(run.mesh):
        models = [run.saved_model(workdirs[name])[0] for name in names]
        served = with_several(without_adapters(models[-1]), [trained(one) for one in models])
        settings = {**run.config.tasks.settings, "seed": held_out.SEED}
        stream = Holes(**{**settings, "organisations": tuple(organisations)}).load(None, None)
        tasks = [stream[i] for i in range(count * len(organisations))]
        adapters = [i for i in range(len(names)) for _ in tasks]
        each = tasks * len(names)
        return earned(held_out.fill(run, served, each, _SAMPLES, adapters), names)


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


def rewards(found: Sequence[Earned], organisations: Sequence[str]) -> rich.table.Table:
    """One row for each organisation, one column for each adapter, and what home is ahead of shared;
    95 % intervals by a bootstrap over holes, which all adapters have in common.
    """
    names = found[0].adapters
    rows = []
    for organisation in organisations:
        reward, shown = _at(found, organisation)
        cells = [
            f"{_over_holes(row).told()}, {100 * part.mean():.0f} %"
            for row, part in zip(reward, shown, strict=True)
        ]
        ahead = reward[names.index(organisation)] - reward[names.index("shared")]
        rows.append((organisation, *cells, _over_holes(ahead).told()))
    caption = f"of each adapter: reward of an episode, and share shown; {len(found)} seeds"
    return table(["organisation", *names, "home - shared"], rows, caption)


def draw(found: Sequence[Earned], organisations: Sequence[str], path: Path) -> None:
    """Rewards of each adapter at each organisation, and the lead of home over shared, with the
    intervals of ``rewards``.
    """
    names = found[0].adapters
    places = np.arange(len(organisations))
    earned_at = [_at(found, organisation)[0] for organisation in organisations]
    with figure(path, 9, 3.8, 3, 1) as (earns, gains):
        for number, name in enumerate(names):
            beside = 0.2 * (number - (len(names) - 1) / 2)
            label = name if name == "shared" else f"of {name}"
            values = [each[number] for each in earned_at]
            _points(earns, places + beside, values, color=f"C{number}", label=label)
        shared = names.index("shared")
        ahead = [
            each[names.index(organisation)] - each[shared]
            for organisation, each in zip(organisations, earned_at, strict=True)
        ]
        _points(gains, places, ahead, color="C7")
        for axis in (earns, gains):
            axis.axhline(0, color="grey", linewidth=1, linestyle=":")
            axis.set_xticks(places, [f"at {one}" for one in organisations])
            axis.set(xlim=(-0.5, len(organisations) - 0.5))
        title = f"Adapters, {len(found)} seeds, 95 % intervals"
        earns.set(ylabel="reward of an episode", title=title)
        gains.set(title="Home less shared")


def _points(axis: Any, places: np.ndarray, values: Sequence[np.ndarray], **look: Any) -> None:
    """Draws means with their intervals."""
    found = [_over_holes(one) for one in values]
    errors = np.transpose([one.errors() for one in found])
    axis.errorbar(places, [one.mean for one in found], errors, fmt="o", capsize=4, **look)


def _at(found: Sequence[Earned], organisation: str) -> np.ndarray:
    """[2, adapters, holes], rewards and shown suggestions at an organisation in all seeds."""
    return np.concatenate(
        [
            np.stack((one.reward, one.shown))[..., np.array(one.organisations) == organisation]
            for one in found
        ],
        axis=2,
    )


def _over_holes(values: np.ndarray) -> Estimate:
    return resampled(lambda drawn: values[drawn].mean(), len(values))
