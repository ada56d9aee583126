"""Tables, intervals and figures that reports of experiments share."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import rich.table
import scipy  # reads scipy.stats when it is first used, which takes most of a second
from numpy.typing import ArrayLike
from rich.markup import escape

from rl_code.evaluation.passk import LEVEL

# Samples of a bootstrap, and bins of a calibration.
_REPEATS = 1_000
_BINS = 8
# Ends of an interval, as quantiles.
_ENDS = ((1 - LEVEL) / 2, (1 + LEVEL) / 2)
# Colours of what was before and after, and of a bound.
BEFORE, AFTER, BOUND = "#8a8f98", "#1f5fa8", "#c0392b"


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A number, or an array of them, with the ends of the interval; nan where there is none."""

    mean: Any
    low: Any
    high: Any

    def told(self, form: str = "+.3f", unit: str = "") -> str:
        """One number with its interval, as text. form: as for ``format``."""
        if np.isnan(self.low):
            return f"{self.mean:{form}}{unit}"
        return f"{self.mean:{form}}{unit} [{self.low:{form}}, {self.high:{form}}]"

    def errors(self) -> np.ndarray:
        """[2, ...], lengths of the interval below and above the mean."""
        return np.maximum([self.mean - self.low, self.high - self.mean], 0)  # but for rounding


def spread(values: ArrayLike) -> Estimate:
    """Mean over the first axis, with the range from the lowest to the highest."""
    array = np.asarray(values)
    return Estimate(array.mean(0), array.min(0), array.max(0))


def student(values: ArrayLike) -> Estimate:
    """Mean over the first axis with its interval by Student's t, none of a single value."""
    array = np.asarray(values, np.float64)
    mean, count = array.mean(0), len(array)
    if count < 2:
        return Estimate(mean, mean * np.nan, mean * np.nan)
    half = scipy.stats.t.ppf(_ENDS[1], count - 1) * array.std(0, ddof=1) / np.sqrt(count)
    return Estimate(mean, mean - half, mean + half)


def share(happened: np.ndarray) -> Estimate:
    """Share of what happened with its normal interval, which has a width for shares of 0 and 1."""
    mean, count = happened.mean(), len(happened)
    half = 1.96 * np.sqrt(max(mean * (1 - mean), 0.25 / count) / count)
    return Estimate(mean, mean - half, mean + half)


def resampled(measure: Callable[[np.ndarray], ArrayLike], count: int) -> Estimate:
    """A measure of ``count`` things, with its percentile bootstrap over them.

    measure: takes the numbers of the things that count, which may be repeated. It may be infinite.
    """
    rng = np.random.default_rng(0)
    drawn = [measure(rng.choice(count, count)) for _ in range(_REPEATS)]
    low, high = np.quantile(drawn, _ENDS, axis=0, method="nearest")
    return Estimate(measure(np.arange(count)), low, high)


def table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "", texts: int = 1
) -> rich.table.Table:
    """A table of rows. texts: how many columns, the first ones, have text instead of numbers."""
    view = rich.table.Table(caption=escape(caption) or None, caption_justify="left")
    for at, name in enumerate(columns):
        view.add_column(escape(name), justify="left" if at < texts else "right", overflow="fold")
    for row in rows:
        view.add_row(*map(escape, row))
    return view


@contextlib.contextmanager
def figure(path: Path, width: float, height: float, *panels: float) -> Iterator[Sequence[Any]]:
    """Axes of matplotlib side by side, written to a file in the end.

    width, height: in inches. panels: relative width of each panel.
    """
    from matplotlib.figure import Figure  # slow to import, and only the end draws

    found = Figure(figsize=(width, height), layout="constrained")
    axes = found.subplots(1, len(panels), squeeze=False, width_ratios=panels)[0]
    yield axes
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.title.set_size("medium")
        if axis.get_legend_handles_labels()[1]:
            axis.legend(frameon=False, fontsize="small")
    found.savefig(path, dpi=130)
    print(f"Figure: {path}")


def band(axis: Any, x: ArrayLike, y: Estimate, **look: Any) -> None:
    """Draws a line with a band around it."""
    (line,) = axis.plot(x, y.mean, **look)
    axis.fill_between(x, y.low, y.high, color=line.get_color(), alpha=0.2, linewidth=0)


def calibration(axis: Any, chances: np.ndarray, happened: np.ndarray, **look: Any) -> None:
    """Draws the share of what happened against its predicted chance, in bins of equal counts; where
    there is less than one for each bin, the label alone.
    """
    if len(chances) < _BINS:
        axis.plot([], [], "o", **look)
        return
    bins = np.array_split(np.argsort(chances), _BINS)
    shares = [share(happened[chosen]) for chosen in bins]
    errors = np.transpose([one.errors() for one in shares])
    at = [chances[chosen].mean() for chosen in bins]
    axis.errorbar(at, [one.mean for one in shares], errors, fmt="o", capsize=2, **look)
