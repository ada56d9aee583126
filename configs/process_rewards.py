"""Optimising against a process reward model, beside the outcome, for hundreds of updates.

What: the quickstart's agent goes on from a recorded step with one of six rewards: the outcome, the
  scores of a process reward model (2312.08935) in each of four forms, and the mean with a pull
  towards the start (KL). Both curves are drawn over updates, and policy/kl says how far it went
  (2210.10760 draws them over its root). The model was trained on forks of the same policy.
Command: python -m launch.train --config=configs/process_rewards.py:labels
  --workdir=runs/forked, then
  python -m launch.process_model --config=configs/process_model.py --workdir=runs/prm
  --config.runs="('runs/forked',)" --config.backbone=runs/forked, then
  python -m launch.sweep --config=configs/process_rewards.py --workdir=runs/paid
  --fork=runs/forked --step=40
Hardware: 2 CPU cores. Run time: 7 to 18 minutes a fork beside other programs.
Expected metric: held-out pass@1 of 69 % keeps at 71 % where the outcome is paid, and at 69 % with
  the difference of the scores. With their mean it falls below 60 % within 160 updates and below 5 %
  within 600, while reward/process/score rises from 0.74 to 0.9.
"""

from collections.abc import Iterator

import ml_collections

from configs import quickstart

MODEL = "runs/prm@300"
FORMS = ("sum", "mean", "minimum", "difference")
# Beside the signal that is compared, in every run.
PENALTY = dict(name="malformed", weight=0.1)


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """A fork; or, with the argument "labels", the run that is forked, whose continuations are the
    model's labels; or "smoke" (seconds).
    """
    if arg not in ("", "labels", "smoke"):
        raise ValueError(f"configs/process_rewards.py:{arg}: expected nothing, labels or smoke")
    smoke = arg == "smoke"
    config = quickstart.get_config("smoke" if smoke else "")
    config.mesh.update(data=1)
    if arg == "labels":
        with config.unlocked(), config.ignore_type():
            config.rollout.forks = dict(continuations=4)
            config.train.advantage = "monte_carlo"
    config.train.update(
        steps=_steps(arg)[0], tasks_per_step=8, group_size=4, micro_batches=4 if smoke else 16
    )
    config.train.optimizer.update(schedule="constant")
    # as in configs/ten_thousand.py, whose updates are as small
    config.rollout.engine.update(slots=12, prompt_length=config.limits.tokens)
    config.suites = (quickstart.held_out("held_out", 2, 4 if smoke else 96) | dict(samples=2),)
    config.checkpoint.update(every=1 if smoke else 20)
    with config.ignore_type():
        config.evaluate = dict(every=1 if smoke else 100)
    return config


def get_sweep(arg: str = "") -> Iterator[dict]:
    """One set of overrides per run; all variants of a seed before the next seed."""
    common = of_forks(arg)
    for seed in (0,) if arg == "smoke" else (0, 1, 2):
        yield {
            "variant": "outcome",
            "seed": seed,
            **common,
            "reward.signals": ("tests", PENALTY),
        }
        for form in FORMS:
            signal = dict(name="process", weights=MODEL, form=form)
            paid = {"train.advantage": "process", "reward.signals": (signal, PENALTY)}
            yield {"variant": form, "seed": seed, **common, **paid}
            if form == "mean":
                pulled = common | {"train.loss.kl_coef": 0.05}
                yield {"variant": f"{form} with KL", "seed": seed, **pulled, **paid}


def of_forks(arg: str) -> dict:
    """Overrides of all forks: small updates at a quarter of the rate, and many of them."""
    return {
        "rollout.forks": None,
        "train.advantage": "grpo",
        "train.steps": sum(_steps(arg)),
        "train.tasks_per_step": 4,
        "train.optimizer.learning_rate": 1e-4,
        # pulls nothing, and has policy/kl measured, on all groups
        "train.loss.kl_coef": 1e-6,
        "train.pack.drop_uninformative": False,
    }


def get_figure(arg: str = "") -> tuple[tuple, ...]:
    """Panels of the figure."""
    window = 1 if arg == "smoke" else 20
    return (
        ("curve", "reward/solved", "step", window),
        ("curve", "reward/process/score", "step", window),
        ("curve", "reward/solved", "sqrt_kl", window),
        ("curve", "episode/turns", "step", window),
    )


def _steps(arg: str) -> tuple[int, int]:
    """Steps of the run that is forked, and steps of each fork."""
    return (2, 1) if arg == "smoke" else (40, 600)
