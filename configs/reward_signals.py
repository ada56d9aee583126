"""Coverage, structure and partial credit as rewards: each signal beside the tests, 3 seeds each.

What: the agent of configs/repositories.py with one more tool, ``write_tests``. Half of the walks of
  its warm start write tests of their own, which assert two cases, one, or nothing. Runs of a seed
  begin with one warm start; GRPO is paid by the hidden tests, and by one more signal: a share of
  the hidden tests (partial), bugs that its own tests notice (tested), what the change costs a
  reader (quality), or how much it resembles the reference (similarity).
Command: python -m launch.sweep --config=configs/reward_signals.py --workdir=runs/reward_signals
  --figure=docs/reward_signals.png
Hardware: 2 CPU cores. Run time: docs/results/reward_signals.md.
Expected metric: calls/write_tests_used stays near 0.49 where the hidden tests are paid alone, or
  tested beside them, and falls to 0.25 with quality and to 0.14 with similarity; held-out pass@1
  rises by 11 to 13 points with each. Three seeds.
"""

from collections.abc import Iterator, Mapping

import ml_collections

from configs import repositories

# Variant -> the signal beside the tests. Each is worth less than a solution.
SIGNALS = {
    "tests": None,
    "partial": dict(name="partial", weight=0.3),
    "tested": dict(name="tested", weight=0.3, bugs=4),
    "quality": dict(name="quality", weight=0.3),
    "similarity": dict(name="similarity", weight=0.3),
}
PENALTY = dict(name="malformed", weight=0.1)


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """The variant with tests alone. arg: "" or "smoke" (seconds)."""
    if arg not in ("", "smoke"):
        raise ValueError(f"configs/reward_signals.py:{arg}: the argument must be empty or smoke")
    config = repositories.get_config(arg)
    config.tools = (*config.tools[:-1], "write_tests", "submit")
    # tests are written in the message that hands in
    config.limits.update(turn_tokens=128)
    config.sft.demonstration.update(p_own_tests=0.5)
    config.metrics = dict(extra=(dict(name="tool_calls", tools=("write_tests",)),))
    config.suites = config.suites[:1]
    if arg == "":
        config.train.update(steps=24, tasks_per_step=8)
        config.suites[0].update(count=48, samples=4)
    return config


def get_sweep(arg: str = "") -> Iterator[dict]:
    """One set of overrides per run; all variants of a seed before the next seed."""
    yield from by_signal(SIGNALS, arg)


def by_signal(beside: Mapping[str, dict | None], arg: str) -> Iterator[dict]:
    """A run for each seed and variant, which is paid by a signal beside the tests; None for them
    alone.
    """
    for seed in (0,) if arg == "smoke" else (0, 1, 2):
        for name, signal in beside.items():
            signals = ("tests", *([] if signal is None else [signal]), PENALTY)
            yield {"variant": name, "seed": seed, "reward.signals": signals}


def get_figure(arg: str = "") -> tuple[tuple, ...]:
    """Panels of the figure."""
    window = 1 if arg == "smoke" else 3
    return (
        ("curve", "reward/solved", "step", window),
        ("curve", "calls/write_tests_used", "step", window),
        ("curve", "reward/signal_groups", "step", window),
        ("bars", "episode/sampled_tokens", "episode/turns"),
    )
