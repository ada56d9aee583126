"""A stronger agent from scratch, for effects that 1 M parameters cannot show.

What: a transformer of 8 M parameters with one tokenizer and one set of tools for functions to write
  and for repositories to mend, two repositories for each function (``rl_code/tasks/mixed.py``). The
  warm start alone makes the agent; other configs begin with it by ``model.weights``. :functions and
  :repositories are GRPO on one of the two from there.
Command: python -m launch.sft --config=configs/base_agent.py --workdir=runs/base_agent, then
  python -m launch.sweep --config=configs/base_agent.py:repositories --workdir=runs/stronger
Hardware: 2 CPU cores. Run time: the warm start an hour, GRPO 15 to 30 minutes.
Expected metric: held-out pass@1 on repositories 44 to 49 -> 92 to 94 % (three seeds), on functions
  70 to 72 -> 82 to 83 % (two seeds).
"""

from collections.abc import Iterator

import ml_collections

from configs import quickstart, repositories

# Where the runs that start from the agent look for it.
WEIGHTS = "runs/base_agent/sft"
FUNCTIONS = dict(name="generated", split="train", levels=(1, 2, 3))
REPOSITORIES = repositories.repositories(split="train")
TASKS = {
    "": dict(name="mixed", of=(FUNCTIONS, REPOSITORIES), weights=(1, 2)),
    "functions": FUNCTIONS,
    "repositories": REPOSITORIES,
}


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """arg: "" for the warm start, "functions" or "repositories" for GRPO from there, or "smoke"
    (seconds).
    """
    known = (*TASKS, "smoke")
    if arg not in known:
        raise ValueError(
            f"configs/base_agent.py:{arg}: expected nothing, {', '.join(known[1:-1])} or smoke"
        )
    config = repositories.get_config("smoke" if arg == "smoke" else "")
    with config.ignore_type():
        config.tools = (*config.tools, "write_file", "run_tests")
        config.tasks = TASKS.get(arg, TASKS[""])
        config.suites = suites(arg)
    config.model.preset = "reader"
    # a wide model learns at lower rates
    config.train.optimizer.update(learning_rate=2.5e-4)
    if arg in ("functions", "repositories"):
        with config.ignore_type():
            config.sft = None
        config.model.weights = WEIGHTS
        return config
    if arg == "":
        # 12 M tokens of demonstrations
        config.sft.update(steps=3000, demonstrations=200_000, checkpoint_every=100)
    config.sft.optimizer.update(learning_rate=3e-3, muon_learning_rate=1e-2, warmup_steps=100)
    return config


def get_sweep(arg: str = "") -> Iterator[dict]:
    """Seeds, which differ in their tasks and samples alone where they begin with one warm start."""
    return ({"seed": seed} for seed in ((0,) if arg == "smoke" else (0, 1, 2)))


def get_figure(arg: str = "") -> tuple[tuple, ...]:
    """Panels of the figure."""
    window = 1 if arg == "smoke" else 3
    metrics = ("reward/solved", "reward/signal_groups", "policy/entropy", "episode/turns")
    return tuple(("curve", metric, "step", window) for metric in metrics)


def suites(arg: str) -> tuple[dict, ...]:
    """Held-out functions and repositories, or those of the one that is trained on."""
    both = {
        "functions": quickstart.held_out("held_out_functions", level=2, count=64),
        "repositories": repositories.held_out("held_out", levels=(0, 1, 2), count=64),
    }
    if arg == "smoke":
        for suite in both.values():
            suite.update(count=2, samples=2)
    return (both[arg],) if arg in both else tuple(both.values())
