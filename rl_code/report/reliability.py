"""The reliability plot of probabilities: the share of good outcomes over what was said of them."""

from __future__ import annotations

from pathlib import Path

from rl_code.rewards.calibration import Quality


def draw(quality: Quality, path: Path) -> None:
    """Writes the plot as a picture: above the share of good outcomes of each bin beside the
    diagonal, below the number of outcomes.
    """
    import matplotlib  # slow to import

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (upper, lower) = pyplot.subplots(
        2, 1, sharex=True, figsize=(4.5, 5), height_ratios=(3, 1), layout="constrained"
    )
    x = [one.probability for one in quality.bins]
    upper.plot([0, 1], [0, 1], color="0.7", linewidth=1)
    upper.plot(x, [one.share for one in quality.bins], marker="o")
    auc = "" if quality.auc is None else f"AUC {quality.auc:.3f}, "
    upper.set(ylabel="share of good outcomes", ylim=(0, 1), title=f"{auc}ECE {quality.ece:.3f}")
    centers = [(one.low + one.high) / 2 for one in quality.bins]
    widths = [one.high - one.low for one in quality.bins]
    lower.bar(centers, [one.count for one in quality.bins], width=widths, edgecolor="white")
    lower.set(xlabel="probability", ylabel="outcomes", xlim=(0, 1))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
