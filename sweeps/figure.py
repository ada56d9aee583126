"""The panels of a sweep's figure, drawn and in numbers.

A config names a panel by a tuple, its kind first:

  ("curve", metric, "step", n)     the metric against the step, as moving averages over n steps
  ("curve", metric, "minutes", n)  the same against the minutes that the steps took so far
  ("curve", metric, "sqrt_kl", n)  the same against the square root of policy/kl, by which one
                                   sees how far a reward can be optimised (2210.10760)
  ("bars", metric, ...)            the mean of each metric over all steps
  ("totals", metric, ...)          the sum of each metric over all steps
  ("histogram", prefix)            the mean over all steps of each metric whose name begins with
                                   the prefix; in a step without the metric it counts as 0

Where a variant has several seeds, its mean is shown with the range from the lowest to the highest.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import rich.markup
import rich.table

from rl_code.config.read_config import ConfigError
from rl_code.metrics.values import read_metrics

# The folders of each variant's runs, one for each seed.
Variants = Mapping[str, Sequence[Path]]
# Name of a quantity -> variant -> its value in each run.
Numbers = dict[str, dict[str, list[float]]]

# Most panels side by side.
_COLUMNS = 2
# Characters that fit side by side above and below a panel.
_WIDTH = 70
# Parts of a curve's range, for each of which the table has a mean.
_SPANS = 4


class Panel(Protocol):
    """One plot of the figure."""

    @property
    def title(self) -> str: ...

    def draw(self, axis, variants: Variants, colours: Mapping[str, Any]) -> None:
        """Draws on a matplotlib axis. Raises ConfigError for a metric that a run did not write."""

    def numbers(self, variants: Variants) -> Numbers:
        """The panel's content as a few numbers, for a table. Raises as ``draw``."""


def steps(workdir: Path) -> dict[int, float]:
    """Each step of a run, by its number: the values of the axis "step"."""
    return {row["step"]: row["step"] for row in read_metrics(workdir)}


def minutes(workdir: Path) -> dict[int, float]:
    """For each step of a run, the minutes that this step and those before it took together.

    Time between steps, such as that of evaluations, does not count.
    """
    seconds = series(workdir, "time/step_s")
    return dict(zip(seconds, np.cumsum(list(seconds.values())) / 60, strict=True))


def series(workdir: Path, metric: str) -> dict[int, float]:
    """The values of a metric by step, in a run. Raises ConfigError if no step has it."""
    rows = read_metrics(workdir)
    points = {row["step"]: row[metric] for row in rows if metric in row}
    if not points:
        names = sorted({name for row in rows for name in row})
        raise ConfigError(
            f"get_figure(): {workdir} has no metric {metric!r}; it has {', '.join(names)}"
        )
    return points


def having(variants: Variants, metric: str) -> Variants:
    """The variants of which a run wrote a metric; all where none did, as ``series`` then says."""

    def wrote(workdirs: Sequence[Path]) -> bool:
        return any(metric in row for workdir in workdirs for row in read_metrics(workdir))

    return {name: runs for name, runs in variants.items() if wrote(runs)} or variants


def sqrt_kl(workdir: Path) -> dict[int, float]:
    """For each step of a run, the square root of its KL divergence from the reference policy."""
    return {step: max(0.0, kl) ** 0.5 for step, kl in series(workdir, "policy/kl").items()}


# The horizontal axes that a curve can have.
X: dict[str, Callable[[Path], dict[int, float]]] = {
    "step": steps,
    "minutes": minutes,
    "sqrt_kl": sqrt_kl,
}


@dataclasses.dataclass(frozen=True)
class Curve:
    """A metric against the step, time or divergence, as moving averages.

    The runs of a variant are averaged step by step, in both coordinates. A variant that did not
    write the metric has no curve.
    """

    metric: str
    # The horizontal axis, a key of X.
    x: str
    # Consecutive steps that a moving average goes over.
    window: int

    def __post_init__(self):
        if self.x not in X:
            raise ValueError(f"x={self.x!r} is not one of {', '.join(X)}")
        if self.window < 1:
            raise ValueError(f"window={self.window} must be at least 1")

    @property
    def title(self) -> str:
        return f"{self.metric} against {self.x}"

    def draw(self, axis, variants: Variants, colours: Mapping[str, Any]) -> None:
        """As ``Panel.draw``."""
        for variant, workdirs in having(variants, self.metric).items():
            points = [self._points(workdir) for workdir in workdirs]
            common = sorted(set.intersection(*(set(run) for run in points)))
            values = np.array([[run[step] for step in common] for run in points])
            windows = np.lib.stride_tricks.sliding_window_view(
                values, min(self.window, len(common)), axis=1
            )
            x, y = np.moveaxis(windows.mean(-1), 2, 0)
            axis.plot(x.mean(0), y.mean(0), color=colours[variant], linewidth=1.6)
            axis.fill_between(
                x.mean(0), y.min(0), y.max(0), color=colours[variant], alpha=0.12, linewidth=0
            )
        axis.set(xlabel=self.x + f" (means of {self.window} steps)" * (self.window > 1))
        axis.set_xlim(left=0)
        axis.grid(alpha=0.3)

    def numbers(self, variants: Variants) -> Numbers:
        """The mean of the curve over each quarter of the horizontal axis.

        The axis ends where the shortest run ends. Between two points the curve is a straight line.
        """
        points = {
            variant: [sorted(self._points(w).values()) for w in workdirs]
            for variant, workdirs in having(variants, self.metric).items()
        }
        ends = np.linspace(
            0, min(run[-1][0] for runs in points.values() for run in runs), _SPANS + 1
        )
        found: Numbers = {}
        for begin, end in itertools.pairwise(ends):
            grid = np.linspace(begin, end, 101)
            found[f"{self.x} {begin:.3g} to {end:.3g}"] = {
                variant: [
                    _mean(np.interp(grid, *zip(*run, strict=True), left=np.nan)) for run in runs
                ]
                for variant, runs in points.items()
            }
        return found

    def _points(self, workdir: Path) -> dict[int, tuple[float, float]]:
        x = X[self.x](workdir)
        return {step: (x[step], y) for step, y in series(workdir, self.metric).items() if step in x}


@dataclasses.dataclass(frozen=True)
class Bars:
    """The mean of each of some metrics over all steps, or the sum.

    whole: whether they are summed.
    """

    metrics: tuple[str, ...]
    whole: bool = False

    @property
    def title(self) -> str:
        return f"{', '.join(self.metrics)}: {'sum' if self.whole else 'mean'} over steps"

    def draw(self, axis, variants: Variants, colours: Mapping[str, Any]) -> None:
        """As ``Panel.draw``."""
        _draw_bars(axis, self.numbers(variants), colours)

    def numbers(self, variants: Variants) -> Numbers:
        """The height of every bar."""
        merge = math.fsum if self.whole else _mean
        return {
            metric: {
                v: [merge([*series(w, metric).values()]) for w in workdirs]
                for v, workdirs in variants.items()
            }
            for metric in self.metrics
        }


@dataclasses.dataclass(frozen=True)
class Histogram:
    """The mean over all steps of each metric whose name begins with ``prefix``."""

    prefix: str

    @property
    def title(self) -> str:
        return f"{self.prefix.rstrip('/')}: mean over steps"

    def draw(self, axis, variants: Variants, colours: Mapping[str, Any]) -> None:
        """As ``Panel.draw``."""
        _draw_bars(axis, self.numbers(variants), colours)
        axis.set(xlabel=self.prefix.rstrip("/"))

    def numbers(self, variants: Variants) -> Numbers:
        """The height of every bar."""
        rows = {
            variant: [read_metrics(workdir) for workdir in workdirs]
            for variant, workdirs in variants.items()
        }
        every = (row for runs in rows.values() for run in runs for row in run)
        metrics = sorted({name for row in every for name in row if name.startswith(self.prefix)})
        if not metrics:
            raise ConfigError(f"get_figure(): no run has a metric that begins with {self.prefix!r}")
        return {
            metric.removeprefix(self.prefix): {
                variant: [_mean([row.get(metric, 0.0) for row in run]) for run in runs]
                for variant, runs in rows.items()
            }
            for metric in sorted(metrics, key=lambda metric: (len(metric), metric))
        }


PANELS: dict[str, Callable[..., Panel]] = {
    "curve": Curve,
    "bars": lambda *metrics: Bars(metrics),
    "totals": lambda *metrics: Bars(metrics, whole=True),
    "histogram": Histogram,
}


def parse(figure: Iterable[tuple]) -> list[Panel]:
    """The panels that a config's get_figure() describes.

    Raises ConfigError for an unknown kind and for arguments that the kind does not accept.
    """
    found = []
    for kind, *what in figure:
        if kind not in PANELS:
            raise ConfigError(f"get_figure(): {kind!r} is not one of {', '.join(PANELS)}")
        try:
            found.append(PANELS[kind](*what))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"get_figure(): {(kind, *what)}: {error}") from error
    return found


def table(panel: Panel, variants: Variants) -> rich.table.Table:
    """The numbers of a panel, one row per variant that has any."""
    numbers = panel.numbers(variants)
    view = rich.table.Table(title=rich.markup.escape(panel.title), title_justify="left")
    view.add_column("variant", no_wrap=True)
    for name in numbers:
        view.add_column(rich.markup.escape(name), justify="right", overflow="fold")
    for variant in variants:
        if not all(variant in numbers[name] for name in numbers):
            continue
        view.add_row(
            rich.markup.escape(variant), *(_cell(numbers[name][variant]) for name in numbers)
        )
    return view


def draw(variants: Variants, panels: Sequence[Panel], path: Path) -> None:
    """Draws the panels, two side by side. A variant has the same colour in all of them.

    Raises ConfigError for a metric that a run did not write.
    """
    import matplotlib  # slow to import, and only a sweep draws

    matplotlib.use("Agg")
    from matplotlib import patches, pyplot

    palette = matplotlib.color_sequences["tab10" if len(variants) <= 10 else "tab20"]
    colours = {variant: palette[i % len(palette)] for i, variant in enumerate(variants)}
    columns = min(_COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    size = (6.5 * columns, 4.2 * rows + 0.7)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    for panel, axis in zip(panels, axes.flat, strict=False):
        panel.draw(axis, variants, colours)
        axis.set_title(textwrap.fill(panel.title, _WIDTH))
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(
        handles=[
            patches.Patch(color=colours[variant], label=f"{variant} ({len(workdirs)})")
            for variant, workdirs in variants.items()
        ],
        title="variant (seeds); shades and black lines reach from the lowest seed to the highest",
        loc="outside lower center",
        ncols=2 * columns,
        frameon=False,
    )
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _draw_bars(axis, numbers: Numbers, colours: Mapping[str, Any]) -> None:
    """Draws one group of bars for each number, with one bar for each variant."""
    width = 0.8 / len(colours)
    for i, (variant, colour) in enumerate(colours.items()):
        values = [numbers[name][variant] for name in numbers]
        x = np.arange(len(values)) + (i - (len(colours) - 1) / 2) * width
        axis.bar(x, [_mean(runs) for runs in values], 0.9 * width, color=colour)
        axis.vlines(
            x,
            [min(runs) for runs in values],
            [max(runs) for runs in values],
            color="black",
            linewidth=0.8,
        )
    axis.set_xticks(range(len(numbers)), numbers)
    if sum(map(len, numbers)) > _WIDTH:  # side by side they would lie on each other
        axis.tick_params(axis="x", labelrotation=30)
        for label in axis.get_xticklabels():
            label.set_horizontalalignment("right")
    axis.grid(alpha=0.3, axis="y")
    axis.set_axisbelow(True)


def _cell(values: Sequence[float]) -> str:
    digits = 0 if _mean(values) >= 1000 else 3
    mean, low, high = (
        f"{value:,.{digits}f}" for value in (_mean(values), min(values), max(values))
    )
    if mean == "nan":
        return "-"
    return mean if low == high else f"{mean} [{low}, {high}]"


def _mean(values: Sequence[float]) -> float:
    """The mean of the values that are not NaN; NaN if there are none."""
    known = [value for value in values if not math.isnan(value)]
    return float(np.mean(known)) if known else math.nan
