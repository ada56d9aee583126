"""A tool that the warm start uses rarely and clumsily: does RL raise its use, and the score?

What: the agent of configs/diagnostics.py in repositories with a call of an undefined name, which
  ``diagnostics`` shows at once. The walks of the warm start check names always ("often"), in a
  tenth of the cases and then half of the time in vain ("rarely"), or never ("never"); the tool is
  offered to all, and GRPO is the same. With the argument "run_tests" it is the quickstart's agent,
  whose walks run the tests in half of the cases or in a tenth, and then hardly ever mend.
Command: python -m launch.sweep --config=configs/rare_tool.py --workdir=runs/rare_tool
  --figure=docs/rare_tool.png, and the same with configs/rare_tool.py:run_tests
Hardware: 2 CPU cores. Run time: 8 to 14 minutes a run of run_tests beside other programs.
Expected metric: calls/run_tests_used rises from 0.09 to 0.53 and stays 0 where no walk shows the
  tool; held-out pass@1 gains 18 to 20 points in all three. diagnostics is not run.
"""

from collections.abc import Iterator

import ml_collections

from configs import diagnostics, quickstart, repositories

# Tool -> warm start -> what its demonstrations are like.
WALKS = {
    "diagnostics": {
        "often": dict(p_check=1.0, p_heed=1.0),
        "rarely": dict(p_check=0.1, p_heed=0.5),
        "never": dict(p_check=0.0, p_heed=1.0),
    },
    "run_tests": {
        "often": dict(p_test=0.5, p_give_up=0.4),
        "rarely": dict(p_test=0.1, p_give_up=0.8),
        "never": dict(p_test=0.0, p_give_up=0.0),
    },
}


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """The variant "rarely". arg: "" for diagnostics, "run_tests", or "smoke" (seconds)."""
    if arg not in ("", "run_tests", "smoke"):
        raise ValueError(f"configs/rare_tool.py:{arg}: expected nothing, run_tests or smoke")
    if arg == "run_tests":
        config = quickstart.get_config()
        config.suites = config.suites[:1]
        config.sft.demonstration = dict(p_right=0.65)
    else:
        config = diagnostics.get_config(arg)
        # nothing but what the tool is made for
        config.tasks = repositories.repositories(split="train", faults=("name",))
        config.suites = config.suites[1:]
    if arg == "":
        config.train.update(steps=24, tasks_per_step=8)
    tool = _tool(arg)
    config.sft.demonstration.update(WALKS[tool]["rarely"])
    config.metrics = dict(extra=(dict(name="tool_calls", tools=(tool,)),))
    return config


def _tool(arg: str) -> str:
    return "run_tests" if arg == "run_tests" else "diagnostics"


def get_sweep(arg: str = "") -> Iterator[dict]:
    """One set of overrides per run; all variants of a seed before the next seed."""
    for seed in (0,) if arg == "smoke" else (0, 1, 2):
        for name, walks in WALKS[_tool(arg)].items():
            overrides = {f"sft.demonstration.{key}": value for key, value in walks.items()}
            yield {"variant": name, "seed": seed} | overrides


def get_figure(arg: str = "") -> tuple[tuple, ...]:
    """Panels of the figure."""
    window = 1 if arg == "smoke" else 3
    return (
        ("curve", f"calls/{_tool(arg)}_used", "step", window),
        ("curve", f"calls/{_tool(arg)}", "step", window),
        ("curve", "reward/solved", "step", window),
        ("bars", "episode/sampled_tokens", "episode/tokens"),
    )
