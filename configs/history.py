"""The value of history where one of the last commits made the fault.

What: the agent from scratch of configs/tools.py with the terminal alone, and with ``history``, on
  generated repositories with a git history: 3 to 5 commits changed one line each, and one of them
  is wrong. The walks of the variant with history read the files of the chain with ``history
  blame``, which shows the lines that were changed.
Command: python -m launch.sweep --config=configs/history.py --workdir=runs/history
  --figure=docs/history.png
Hardware: 2 CPU cores. Run time: docs/results/history.md.
Expected metric: held-out pass@1, tokens, calls and seconds of an episode, mean and range over 3
  seeds; more is solved with history
"""

from collections.abc import Iterator

import ml_collections

from configs import repositories, tools

CHANGES = (3, 5)
# Read-only layers, each the history of a task.
LAYERS = "runs/layers"


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """The variant with history. arg: "" or "smoke" (seconds)."""
    config = tools.get_config(arg)
    config.tools = tools.offered(("history",))
    config.sandbox = dict(layers=LAYERS)
    source = repositories.repositories(split="train", changes=CHANGES)
    config.tasks = source
    config.sft.tasks = source | dict(built=False)
    count, samples = (2, 2) if arg == "smoke" else (48, 4)
    config.suites = (
        repositories.held_out("held_out", (0, 1, 2), count, changes=CHANGES)
        | dict(samples=samples),
    )
    if arg == "":
        # after 250 steps an agent has not learned to copy the name of a file out of the blame
        config.sft.update(steps=800, checkpoint_every=100)
    return config


def get_sweep(arg: str = "") -> Iterator[dict]:
    """One run for each variant and seed."""
    for seed in (0,) if arg == "smoke" else (0, 1, 2):
        for name, added in (("terminal", ()), ("history", ("history",))):
            yield {"variant": name, "seed": seed, "tools": tools.offered(added)}


def get_figure(arg: str = "") -> tuple[tuple, ...]:
    """Panels of the figure."""
    return tools.get_figure(arg)
