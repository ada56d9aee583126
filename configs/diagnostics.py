"""The value of diagnostics where half of the faults are a call of an undefined name.

What: the agent from scratch of configs/tools.py with the terminal alone, and with ``diagnostics``,
  on generated repositories in which an operation of a line is wrong, or the name in a call. The
  walks of the variant with diagnostics begin with a check of all files.
Command: python -m launch.sweep --config=configs/diagnostics.py --workdir=runs/diagnostics
  --figure=docs/diagnostics.png
Hardware: 2 CPU cores. Run time: docs/results/diagnostics.md.
Expected metric: held-out pass@1, tokens, calls and seconds of an episode for each kind of fault,
  mean and range over 3 seeds; wrong names are mended more often and with fewer tokens
"""

from collections.abc import Iterator

import ml_collections

from configs import repositories, tools

FAULTS = ("operation", "name")


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """The variant with diagnostics. arg: "" or "smoke" (seconds)."""
    config = tools.get_config(arg)
    config.tools = tools.offered(("diagnostics",))
    config.tasks = repositories.repositories(split="train", faults=FAULTS)
    settings = dict(count=2, samples=2) if arg == "smoke" else dict(count=48, samples=4)
    config.suites = tuple(
        repositories.held_out(f"wrong_{fault}", (0, 1, 2), 0, faults=(fault,)) | settings
        for fault in FAULTS
    )
    return config


def get_sweep(arg: str = "") -> Iterator[dict]:
    """One run for each variant and seed."""
    for seed in (0,) if arg == "smoke" else (0, 1, 2):
        for name, added in (("terminal", ()), ("diagnostics", ("diagnostics",))):
            yield {"variant": name, "seed": seed, "tools": tools.offered(added)}


def get_figure(arg: str = "") -> tuple[tuple, ...]:
    """Panels of the figure."""
    return tools.get_figure(arg)
