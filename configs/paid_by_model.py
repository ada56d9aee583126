"""Optimising against reward models, with and without sight of the truth, kept or retrained.

What: the quickstart's agent goes on from a recorded step and is paid by its tests ("outcome") or by
  a reward model of its own outcomes alone. The model reads the task and the change of the work, or
  the change of the reference too ("sighted"). It stays as it is, or is trained again every 50
  updates on the newest outcomes. All variants of a seed have the same random numbers.
Command: the run that configs/process_rewards.py forks, runs/forked, then
  python -m launch.reward_model --config=configs/reward_model.py --workdir=runs/blind
  --config.weights=runs/forked --config.runs="('runs/forked',)", the same with :truth and
  --workdir=runs/sighted, then python -m launch.sweep --config=configs/paid_by_model.py
  --workdir=runs/paid_by_model --fork=runs/forked --step=40, then
  python -m experiments.gains runs/paid_by_model
Hardware: 2 CPU cores. Run time: 15 to 18 minutes a fork beside other programs.
Expected metric: held-out pass@1 of 69 % keeps at 71 % where the outcome is paid, and falls to 41 %
  in 600 updates by a blind model, to 55 % where that is retrained. Sighted: not run.
"""

from collections.abc import Iterator

import ml_collections

from configs import process_rewards
from configs.process_rewards import PENALTY

# Folders of launch.reward_model, without sight of the truth and with it.
FOLDERS = {"blind": "runs/blind", "sighted": "runs/sighted"}
# Training of a version on the newest outcomes.
FIT = dict(updates=60, rows=8, optimizer=dict(learning_rate=3e-4, warmup_steps=5))


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """A fork of the run that configs/process_rewards.py makes. arg: "" or "smoke"."""
    if arg not in ("", "smoke"):
        raise ValueError(f"configs/paid_by_model.py:{arg}: the argument must be empty or smoke")
    return process_rewards.get_config(arg)


def get_sweep(arg: str = "") -> Iterator[dict]:
    """One set of overrides per run; all variants of a seed before the next seed."""
    smoke = arg == "smoke"
    retrain = dict(every=1, fit=FIT | dict(updates=2)) if smoke else dict(every=50, fit=FIT)
    for seed in (0,) if smoke else (0, 1, 2):
        common = {"seed": seed} | process_rewards.of_forks(arg)
        yield {"variant": "outcome", **common, "reward.signals": ("tests", PENALTY)}
        for name, folder in FOLDERS.items():
            signal = dict(name="reward_model", folder=folder)
            yield {"variant": name, **common, "reward.signals": (signal, PENALTY)}
            signal = signal | dict(retrain=retrain)
            yield {"variant": f"{name}, retrained", **common, "reward.signals": (signal, PENALTY)}


def get_figure(arg: str = "") -> tuple[tuple, ...]:
    """Panels of the figure."""
    window = 1 if arg == "smoke" else 20
    return (
        ("curve", "reward/solved", "step", window),
        ("curve", "reward/total", "step", window),
        ("curve", "reward/solved", "sqrt_kl", window),
        ("curve", "episode/turns", "step", window),
    )
