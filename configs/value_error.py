"""Values by a network and by rollouts: how wrong each is, and what each is worth at equal tokens.

What: the quickstart's agent with a value function on a copy of the policy, which is fitted and not
  used (RLOO). From a recorded step on, 32 episodes go on from each of the first two turn borders of
  one episode of a task (VinePPO, 2410.01679): the error of V, and that of the mean of k of them,
  is measured at these borders. The argument "reward" trains from there instead, by V or by k
  continuations, with as many tasks in a step as make the sampled tokens about equal.
Command: python -m launch.train --config=configs/value_error.py --workdir=runs/valued, then
  python -m launch.sweep --config=configs/value_error.py --workdir=runs/value_error
  --fork=runs/valued --step=24, and the same with configs/value_error.py:reward
Hardware: 2 CPU cores. Run time: 3 minutes a fork that measures; "reward" is not run.
Expected metric: value/border_error 0.45, value/border_error_of_1 0.22 and that of 8 0.08; the best
  constant has value/border_error_constant, 0.41. Held-out pass@1 over lengths/sampled_in_all.
"""

from collections.abc import Iterator

import ml_collections

from configs import ppo, quickstart

# Continuations of a border -> tasks of a step. A group of 4 episodes has 8 borders, and what goes
# on from one is about half an episode: 4 + 4k episodes a task, beside 128 in a step of the others.
TASKS = {1: 16, 2: 11, 4: 6, 8: 4, 32: 1}


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """The run that is forked. arg: "", "reward" or "smoke" (seconds)."""
    if arg not in ("", "reward", "smoke"):
        raise ValueError(f"configs/value_error.py:{arg}: expected nothing, reward or smoke")
    config = quickstart.get_config("smoke" if arg == "smoke" else "")
    config.train.update(steps=_steps(arg)[0], advantage="rloo")
    config.train.optimizer.update(schedule="constant")
    # a group of equal rewards counts for a value function
    config.train.pack.drop_uninformative = False
    with config.train.ignore_type():
        config.train.value = dict(ppo.VALUES["separate"], pretrain_steps=0, pretrain_epochs=1)
    # all that stands before a border is prefilled once for its continuations
    config.rollout.engine.update(prompt_length=config.limits.tokens)
    config.metrics = dict(extra=("all_sampled",))
    config.checkpoint.update(every=1 if arg == "smoke" else 12)
    config.suites = config.suites[:1]
    return config


def get_sweep(arg: str = "") -> Iterator[dict]:
    """One set of overrides per run; all variants of a seed before the next seed."""
    base, more = _steps(arg)
    for seed in (0,) if arg == "smoke" else (0, 1, 2):
        common = {"seed": seed, "train.steps": base + more}
        if arg != "reward":
            count = 2 if arg == "smoke" else 32
            forks = dict(continuations=count, borders=2, episodes=1)
            yield {"variant": "measured", **common, "rollout.forks": forks}
            continue
        for name, advantage in (("rloo", "rloo"), ("V", ppo.ADVANTAGE)):
            yield {"variant": name, **common, "train.advantage": advantage}
        for count, tasks in TASKS.items():
            yield {
                "variant": f"{count} continuations",
                **common,
                "train.advantage": "monte_carlo",
                "train.tasks_per_step": tasks,
                "train.group_size": 4,
                "rollout.forks": dict(continuations=count, borders=2),
            }


def get_figure(arg: str = "") -> tuple[tuple, ...]:
    """Panels of the figure."""
    if arg == "reward":
        return (
            ("curve", "reward/solved", "step", 5),
            ("curve", "reward/solved", "minutes", 5),
            ("totals", "lengths/sampled_in_all"),
        )
    counts = (1, 2) if arg == "smoke" else (1, 2, 4, 8, 16, 32)
    errors = [f"value/border_error_of_{count}" for count in counts]
    return (
        ("bars", "value/border_error", "value/border_error_constant", *errors),
        ("bars", "lengths/sampled_in_all"),
    )


def _steps(arg: str) -> tuple[int, int]:
    """Steps of the run that is forked, and steps of each fork."""
    return {"": (24, 4), "reward": (24, 36), "smoke": (2, 1)}[arg]
