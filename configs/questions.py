"""A reward of edits alone, under which asking replaces editing, and one under which asking pays
where a task is ambiguous.

What: functions to write from a few words, in two messages: the agent edits, or asks first. Half of
  the tasks name two constants of which one is meant; the simulated person who is asked says which.
  Both variants of a seed begin with the same warm start. Under "edits alone" a right edit earns 1,
  a wrong one -2, and an episode without an edit 0. Under "deferring pays nothing" it earns -2 too,
  and each question on a clear task costs 1/4.
Command: python -m launch.sweep --config=configs/questions.py --workdir=runs/questions
Hardware: 2 CPU cores. Run time: see docs/results/questions.md.
Expected metric: under "edits alone" questions/edits_clear and questions/edits_unclear fall. Under
  the other reward they stay near 1, questions/asks_clear falls to 0 and questions/asks_unclear does
  not.
"""

from collections.abc import Iterator

import ml_collections

from configs import broken_calls


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """The variant that is paid by edits alone. arg: "" or "smoke" (seconds)."""
    if arg not in ("", "smoke"):
        raise ValueError(f"configs/questions.py:{arg}: the argument must be empty or smoke")
    config = broken_calls.from_words(
        arg,
        steps=120,
        updates=20,
        tasks_per_step=6,
        group_size=8,
        unclear="two",
        asks_clear=0.2,
        asks_unclear=0.8,
        again=0.3,
    )
    config.tools = (*config.tools, "ask")
    config.limits = dict(turns=2, tokens=96, turn_tokens=48, test_runs=0, command_s=5.0)
    config.reward.signals = paid()
    config.metrics = dict(extra=("experiments.incidents.questions:Questions",))
    return config


# What a wrong edit earns.
WRONG = -2.0


def paid(**settings: float) -> tuple[dict, ...]:
    """The signals of a reward: a broken call costs as in the quickstart."""
    name = "experiments.incidents.questions:Edited"
    edited = dict(name=name, label="edited", wrong=WRONG, **settings)
    return edited, dict(name="malformed", weight=0.1)


def get_sweep(arg: str = "") -> Iterator[dict]:
    """One set of overrides per run; every variant of a seed before the next seed."""
    for seed in (0,) if arg == "smoke" else (0, 1, 2):
        for variant, signals in (
            ("edits alone", paid()),
            ("deferring pays nothing", paid(without=WRONG, clear=0.25)),
        ):
            yield {"variant": variant, "seed": seed, "reward.signals": signals}


def get_figure(arg: str = "") -> tuple[tuple, ...]:
    """Panels of the figure."""
    window = 1 if arg == "smoke" else 3
    names = (f"{what}_{kind}" for what in ("edits", "asks") for kind in ("clear", "unclear"))
    return tuple(("curve", f"questions/{name}", "step", window) for name in names)
