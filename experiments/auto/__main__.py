"""Prints and draws what the router of the model "auto" costs beside fixed shares.

    python -m experiments.auto --figure=docs/auto.png [--seeds=20]

A simulation without a server (``study``); 3 minutes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from absl import flags as absl_flags

from experiments.auto import study
from experiments.report import band, figure, student, table
from launch import command

_COLORS = ("#1f5fa8", "#b3382f", "#8a8f98", "#c0892b", "#24734a")
_AT = (300, 1_000, study.SESSIONS)


def main(argv: list[str]) -> None:
    own = absl_flags.FLAGS
    rows = []
    with figure(Path(own.figure), 19.0, 3.8, *[1] * len(study.SETTINGS)) as axes:
        for axis, setting in zip(axes, study.SETTINGS, strict=True):
            axis.set(title=setting.name, xlabel="sessions", ylabel="regret so far")
            for color, name in zip(_COLORS, study.ROUTERS, strict=True):
                found = study.regrets(setting, name, own.seeds)
                x = np.arange(0, study.SESSIONS, 20)
                label = name if axis is axes[0] else None
                band(axis, x, student(found[:, x]), color=color, label=label)
                cells = [student(found[:, at - 1]).told(".1f") for at in _AT]
                rows.append([setting.name, name, *cells])
    columns = ["setting", "router", *(f"after {at:,}" for at in _AT)]
    caption = (
        f"regret, in rewards, summed over sessions; means of {own.seeds} seeds with 95 % intervals"
    )
    command.console().print(table(columns, rows, caption, texts=2))


if __name__ == "__main__":
    absl_flags.DEFINE_string("figure", "auto.png", "File of the figure.")
    absl_flags.DEFINE_integer("seeds", 20, "Runs of each router.", 2)
    command.run(main)
