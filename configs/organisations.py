"""Specialisation: an adapter for each of two organisations, and one that both share.

What: the Tab model of configs/tab.py after its training serves two organisations. Programmers of
  one take short suggestions and leave long ones, those of the other do the opposite. LoRA adapters
  are trained on the files and decisions of one organisation, or on both in turn ("shared"), with as
  many episodes; nothing in a file says whose it is.
Command: python -m launch.sweep --config=configs/tab.py --workdir=runs/tab, then
  python -m launch.sweep --config=configs/organisations.py --workdir=runs/organisations, then
  python -m experiments.organisations runs/organisations. TAB=<workdir of a run> in the environment
  where the first run lies elsewhere.
Hardware: 2 CPU cores. Run time: see docs/results/tab.md.
Expected metric: each adapter earns more at home than the shared one, and less than it elsewhere.
"""

import os
from collections.abc import Iterator

import ml_collections

from configs import tab

ORGANISATIONS = ("brief", "thorough")


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """The shared adapter. arg: "" or "smoke" (seconds; the weights are random)."""
    config = tab.get_config(arg)
    config.tasks = holes(ORGANISATIONS, seed=5)
    with config.ignore_type():
        config.reward.signals = (
            dict(name="experiments.organisations.holes:AskedAtHome", label="asked"),
        )
        config.metrics = dict(extra=())
        config.model.lora = dict(rank=16, alpha=32.0)
        if arg == "":
            # Both parts come with the weights.
            config.model = dict(
                weights=os.environ.get("TAB", "runs/tab/seed=2"), lora=dict(rank=16, alpha=32.0)
            )
            del config.tokenizer
        config.sft = None
    if arg == "":
        # after 60 steps the adapter of "thorough" earns no more at home than the shared one
        config.train.update(steps=200)
        config.train.optimizer.learning_rate = 3e-3
    return config


def holes(organisations: tuple[str, ...], seed: int) -> dict:
    """The files of organisations."""
    return dict(
        name="experiments.organisations.holes:Holes",
        organisations=organisations,
        seed=seed,
        silent=tab.SILENT,
    )


def get_sweep(arg: str = "") -> Iterator[dict]:
    """One run for each adapter and seed."""
    for seed in (0,) if arg == "smoke" else (0, 1, 2):
        for name in (*ORGANISATIONS, "shared"):
            chosen = ORGANISATIONS if name == "shared" else (name,)
            yield {"variant": name, "seed": seed, "tasks.organisations": chosen}


def get_figure(arg: str = "") -> tuple[tuple, ...]:
    """Panels of the figure."""
    return (("curve", "reward/total", "step", 1 if arg == "smoke" else 5),)
