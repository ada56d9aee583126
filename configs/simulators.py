"""A Tab model that is trained on one simulated programmer and judged by another.

What: the model and the holes of configs/tab.py, at their lowest level. Two simulators that differ:
  one rejects most of what is not exactly wanted, one accepts much of what is not. Both runs of a
  seed begin with the same warm start; each step's suggestions are judged by both, whoever pays.
Command: python -m launch.sweep --config=configs/simulators.py --workdir=runs/simulators, then
  python -m experiments.simulators runs/simulators
Hardware: 2 CPU cores. Run time: see docs/results/simulators.md.
Expected metric: by each judge, the policy trained on it earns more (judged/picky, judged/lenient).
"""

from collections.abc import Iterator

import ml_collections

from configs import tab

HABITS = ("picky", "lenient")
PEOPLE = dict(people=64, seed=0)


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """The run that is trained on the first simulator. arg: "" or "smoke" (seconds)."""
    if arg not in ("", "smoke"):
        raise ValueError(f"configs/simulators.py:{arg}: the argument must be empty or smoke")
    config = tab.get_config(arg)
    config.mesh.update(data=1)
    config.tasks.update(levels=(1,))
    config.limits.update(tokens=96)
    config.reward.signals = (asked(HABITS[0]),)
    judged = dict(name="experiments.simulators.judged:Judged", habits=HABITS, **PEOPLE)
    config.metrics = dict(extra=(judged,))
    config.rollout.engine.update(prompt_length=64)
    config.sft.update(rows=12, slots=80)
    if arg == "":
        config.sft.update(steps=80, checkpoint_every=80)
        config.train.update(steps=16, tasks_per_step=12, group_size=4)
        config.checkpoint.update(every=16)
    return config


def asked(habits: str) -> dict:
    """The reward: what a simulated programmer of these habits does with the suggestion."""
    return dict(name="experiments.tab.asked:Asked", label="asked", habits=habits, **PEOPLE)


def get_sweep(arg: str = "") -> Iterator[dict]:
    """One set of overrides per run; both simulators of a seed before the next seed."""
    for seed in (0,) if arg == "smoke" else (0, 1, 2):
        for habits in HABITS:
            yield {"variant": habits, "seed": seed, "reward.signals": (asked(habits),)}


def get_figure(arg: str = "") -> tuple[tuple, ...]:
    """Panels of the figure."""
    window = 1 if arg == "smoke" else 3
    names = (*HABITS, "shown", "shown_unknowable")
    return tuple(("curve", f"judged/{name}", "step", window) for name in names)
