"""VinePPO (2410.01679): credit of turns by Monte-Carlo values, beside RLOO at about equal tokens.

What: the quickstart's agent from a common recorded step. RLOO plays 12 episodes of a task. Monte-
  Carlo credit plays 4, forks each at its first two turn borders into 2 continuations, and credits
  a turn with the difference of values; "parted" also trains on the continuations, each against the
  others of its border. What was sampled is rollout/sampled_tokens + forks/sampled_tokens.
Command: python -m launch.train --config=configs/papers/vineppo.py --workdir=runs/vine, then
  python -m launch.sweep --config=configs/papers/vineppo.py --workdir=runs/vines
  --fork=runs/vine --step=20
Hardware: 2 CPU cores. Run time: not run.
Expected metric: pass@1 on held-out tasks by updates and by sampled tokens, paired by seed. The
  paper has Monte-Carlo credit ahead of RLOO on long solutions; here episodes have at most 5 turns.
  Not run.
"""

from collections.abc import Iterator

import ml_collections

from configs import quickstart

_FORKS = dict(continuations=2, borders=2)


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """The run that is forked. arg: "" or "smoke" (seconds)."""
    if arg not in ("", "smoke"):
        raise ValueError(f"configs/papers/vineppo.py:{arg}: the argument must be empty or smoke")
    config = quickstart.get_config(arg)
    config.train.update(steps=_steps(arg)[0], advantage="rloo", tasks_per_step=8)
    config.train.optimizer.update(schedule="constant")
    config.train.pack.update(drop_uninformative=True)
    # all that stands before a border is prefilled once for its continuations
    config.rollout.engine.update(prompt_length=config.limits.tokens)
    config.suites = config.suites[:1]
    return config


def get_sweep(arg: str = "") -> Iterator[dict]:
    """One set of overrides per run; all variants of a seed before the next seed."""
    base, more = _steps(arg)
    variants = {
        "rloo": {"train.group_size": 12},
        "monte_carlo": {"train.group_size": 4, "train.advantage": "monte_carlo"},
        "parted": {
            "train.group_size": 4,
            "train.advantage": "monte_carlo",
            "train.continuations": True,
        },
    }
    for seed in (0,) if arg == "smoke" else (0, 1, 2):
        for variant, keys in variants.items():
            forks = None if variant == "rloo" else _FORKS
            yield {
                "variant": variant,
                "seed": seed,
                "train.steps": base + more,
                "rollout.forks": forks,
                **keys,
            }


def get_figure(arg: str = "") -> tuple[tuple, ...]:
    """Panels of the figure."""
    return ("curve", "reward/solved", "step", 5), ("curve", "reward/solved", "minutes", 5)


def _steps(arg: str) -> tuple[int, int]:
    """Steps of the run that is forked, and steps of each fork."""
    return (2, 1) if arg == "smoke" else (20, 30)
