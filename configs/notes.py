"""Notes on repositories, made in idle time and reused: the tokens that a solved task costs.

What: repositories of six modules, on each of which up to 16 changes are asked for. The warm start
  shows three kinds of episodes: walks in idle time, which read each file once and note what each
  function does; changes by searching and reading; and changes by recalling a note. Then the trained
  model walks through repositories that it has not seen, and its own notes are what it recalls. Both
  variants, with notes and without, are the same weights on the same tasks. There is no
  reinforcement learning here.
Command: python -m launch.sweep --config=configs/notes.py --workdir=runs/notes, then
  python -m experiments.notes runs/notes
Hardware: 2 CPU cores. Run time: see docs/results/notes.md.
Expected metric: with many tasks of a repository a solved task takes fewer tokens with notes, those
  of the walk included; with one it takes more.
"""

from collections.abc import Iterator

import ml_collections

from configs import repositories

# The repositories on which both variants are compared, and the tasks of each.
COMPARED, TASKS = 12, 16


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """arg: "" or "smoke" (seconds)."""
    if arg not in ("", "smoke"):
        raise ValueError(f"configs/notes.py:{arg}: the argument must be empty or smoke")
    config = repositories.get_config(arg)
    with config.ignore_type():
        config.tools = (
            "grep",
            dict(name="read_file", numbered=True),
            "think",
            "replace_lines",
            dict(name="memory_recall", most=1),
            "memory_store",
            "submit",
        )
    config.tasks = dict(name="experiments.notes.source:Requests", split="train", files=6, seed=0)
    config.limits = dict(turns=10, tokens=1024, turn_tokens=128, test_runs=0, command_s=5.0)
    config.rollout.sampling = dict(temperature=0.0)
    config.suites = ()
    config.mesh.update(data=1)
    config.sft.update(slots=704)
    # the policy is that of the warm start
    config.train.update(steps=0)
    if arg == "":
        config.sft.update(steps=700, rows=6, checkpoint_every=100)
    else:
        # what an untrained model writes has no end
        config.limits.update(turns=2, tokens=256, turn_tokens=16)
    return config


def get_sweep(arg: str = "") -> Iterator[dict]:
    """One run per seed: another model, and other demonstrations."""
    for seed in (0,) if arg == "smoke" else (0, 1, 2):
        yield {"seed": seed, "tasks.seed": seed}
