"""Optimising against a process reward model, beside the outcome, for hundreds of updates.

What: the quickstart's agent goes on from a recorded step with one of six rewards: the outcome, the
  scores of a process reward model (2312.08935) in each of four forms, and the mean with a pull
  towards the start (KL). Both curves are drawn over updates, and policy/kl says how far it went
  (2210.10760 draws them over its root). The model was trained on forks of the same policy.
Command: python -m launch.train --config=configs/process_rewards.py --workdir=runs/forked
  --config.rollout.forks="{'continuations': 4}" --config.train.advantage=monte_carlo, then
  python -m launch.process_model --config=configs/process_model.py --workdir=runs/prm
  --config.runs="('runs/forked',)" --config.backbone=runs/forked, then
  python -m launch.sweep --config=configs/process_rewards.py --workdir=runs/paid
  --fork=runs/forked --step=40
Hardware: 2 CPU cores. Run time: not run.
Expected metric: reward/process/score rises throughout; reward/solved turns after about 200 updates
  where the scores alone are paid, and not where the outcome is. Not run.
"""

from collections.abc import Iterator

import ml_collections

from configs import quickstart

MODEL = "runs/prm@300"
FORMS = ("sum", "mean", "minimum", "difference")


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """The run that is forked, whose continuations are the model's labels. arg: "" or "smoke"."""
    if arg not in ("", "smoke"):
        raise ValueError(f"configs/process_rewards.py:{arg}: the argument must be empty or smoke")
    config = quickstart.get_config(arg)
    config.train.update(steps=_steps(arg)[0], tasks_per_step=8, group_size=4)
    config.train.optimizer.update(schedule="constant")
    config.rollout.engine.update(prompt_length=config.limits.tokens)
    config.suites = config.suites[:1]
    return config


def get_sweep(arg: str = "") -> Iterator[dict]:
    """One set of overrides per run; all variants of a seed before the next seed."""
    base, more = _steps(arg)
    common = {"train.steps": base + more, "train.group_size": 8}
    penalty = dict(name="malformed", weight=0.1)
    for seed in (0,) if arg == "smoke" else (0, 1, 2):
        yield {
            "variant": "outcome",
            "seed": seed,
            "train.advantage": "grpo",
            "reward.signals": ("tests", penalty),
            **common,
        }
        for form, kl_coef in (*((form, 0.0) for form in FORMS), ("mean", 0.05)):
            signal = dict(name="process", weights=MODEL, form=form)
            yield {
                "variant": f"{form} with KL" if kl_coef else form,
                "seed": seed,
                "train.advantage": "process",
                "train.loss.kl_coef": kl_coef,
                "train.pack.drop_uninformative": not kl_coef,
                "reward.signals": (signal, penalty),
                **common,
            }


def get_figure(arg: str = "") -> tuple[tuple, ...]:
    """Panels of the figure."""
    return (
        ("curve", "reward/solved", "step", 20),
        ("curve", "reward/process/score", "step", 20),
    )


def _steps(arg: str) -> tuple[int, int]:
    """Steps of the run that is forked, and steps of each fork."""
    return (2, 1) if arg == "smoke" else (40, 600)
