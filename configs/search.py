"""Semantic search against grep in repositories of 10, 40 and 160 files.

What: the agent from scratch of configs/tools.py finds the function that a task names with grep, or
  with semantic_search; all else is the same. It is trained on repositories of 5 to 160 files, and
  then plays held-out ones of each size.
Command: python -m launch.sweep --config=configs/search.py --workdir=runs/search
  --figure=docs/search.png
Hardware: 2 CPU cores. Run time: docs/results/search.md.
Expected metric: held-out pass@1 and tokens of an episode by size, mean and range over 3 seeds. The
  task tells the name, so grep finds it always; semantic search shows more, and may miss it.
"""

from collections.abc import Iterator

import ml_collections

from configs import repositories, tools

SIZES = (10, 40, 160)
SMOKE = (5, 10)


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """The variant with grep. arg: "" or "smoke" (seconds)."""
    config = tools.get_config(arg)
    config.tools = offered("grep")
    sizes, count = (SMOKE, 2) if arg == "smoke" else (SIZES, 48)
    config.tasks = repositories.repositories(split="train", files=(5, max(sizes)))
    config.suites = tuple(_suite(size, count) for size in sizes)
    if arg == "":
        # after 400 steps most agents have not learned to copy the name of a file
        config.sft.update(steps=1200, checkpoint_every=100, demonstrations=20_000)
    return config


def _suite(files: int, count: int) -> dict:
    """Held-out repositories of so many files."""
    suite = repositories.held_out(f"files_{files}", (0, 1, 2), count)
    return suite | dict(tasks=suite["tasks"] | dict(files=(files, files)), samples=4)


def get_sweep(arg: str = "") -> Iterator[dict]:
    """One run for each tool and seed."""
    for seed in (0,) if arg == "smoke" else (0, 1, 2):
        for name in ("grep", "semantic_search"):
            yield {"variant": name, "seed": seed, "tools": offered(name)}


def get_figure(arg: str = "") -> tuple[tuple, ...]:
    """Panels of the figure."""
    return (
        ("curve", "reward/solved", "step", 2),
        ("bars", "episode/sampled_tokens", "episode/tokens"),
        ("bars", "episode/turns", "time/tools_s"),
    )


def offered(search: str) -> tuple:
    """The tools of a variant."""
    return (search, tools.READ, "think", "replace_lines", "try_lines", "submit")
