"""A comparison of tools: the terminal alone, each tool added to it alone, and all of them.

What: the agent from scratch of configs/repositories.py on generated repositories, with other tools
  in each variant and a warm start of its own, whose walks use the tools that there are: what no
  tool is made for is a command in the terminal. Thoughts on each line are left out, or are a call
  of ``think``, or stand in front of the calls ("think first"). Then some steps of GRPO.
  ``try_lines`` is the only tool that tests, so only its variant learns to try again. diagnostics
  and history have tasks of their own (configs/diagnostics.py, configs/history.py). No walk has a
  use for memory, so it is no variant.
Command: python -m launch.sweep --config=configs/tools.py --workdir=runs/tools
  --figure=docs/tools.png
Hardware: 2 CPU cores. Run time: docs/results/tools.md.
Expected metric: held-out pass@1, tokens, calls and seconds of an episode, mean and range over 3
  seeds; thoughts help most
"""

from collections.abc import Iterator

import ml_collections

from configs import repositories

GREP = "grep"
READ = dict(name="read_file", numbered=True)
JUMP = dict(name="jump", numbered=True)
# Name of a variant -> the tools beside the terminal, and the protocol.
VARIANTS = {
    "terminal": ((), "compact"),
    "grep": ((GREP,), "compact"),
    "semantic_search": (("semantic_search",), "compact"),
    "read_file": ((READ,), "compact"),
    "jump": ((JUMP,), "compact"),
    "replace_lines": (("replace_lines",), "compact"),
    "try_lines": (("try_lines",), "compact"),
    "think": (("think",), "compact"),
    "think first": ((), "compact_thoughts"),
    "all": ((GREP, READ, "think", "replace_lines", "try_lines"), "compact"),
}


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """The variant with all tools. arg: "" or "smoke" (seconds)."""
    config = repositories.get_config(arg)
    tools, _ = VARIANTS["all"]
    config.tools = offered(tools)
    config.sft.demonstration.p_guess = 0.0
    # most variants have no verdicts
    config.sft.update(decisive=(), weight_of_decisive=1.0)
    if arg == "smoke":
        return config
    config.sft.update(steps=250, checkpoint_every=125)
    config.train.update(steps=8, tasks_per_step=8)
    config.suites = config.suites[:1]
    config.suites[0].update(count=48, samples=4)
    return config


def get_sweep(arg: str = "") -> Iterator[dict]:
    """One set of overrides per run; all variants of a seed before the next seed."""
    for seed in (0,) if arg == "smoke" else (0, 1, 2):
        for variant, (tools, protocol) in VARIANTS.items():
            yield {
                "variant": variant,
                "seed": seed,
                "tools": offered(tools),
                "protocol": protocol,
            }


def get_figure(arg: str = "") -> tuple[tuple, ...]:
    """Panels of the figure."""
    return (
        ("curve", "reward/solved", "step", 2),
        ("curve", "reward/solved", "minutes", 2),
        ("bars", "episode/sampled_tokens", "episode/tokens"),
        ("bars", "episode/turns", "time/tools_s"),
    )


def offered(tools: tuple) -> tuple:
    """The tools of a variant."""
    return ("terminal", *tools, "submit")
