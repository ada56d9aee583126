"""Linked pairs of tasks: is storing learned, and does it beat rules?

What: a transformer of 1 M parameters. The first task of a pair shows a module, the second asks for
  a value of it that only a note still tells (``experiments/pairs/source.py``). The warm start
  recalls and copies well, and stores any value or none; drills teach to copy a value by its name.
  Then GRPO on fresh pairs. A repository keeps one note, the newest. Of the arms of learning, one
  credits stores by what their notes do to second tasks (``memory.left_out``). In the arms of rules
  first tasks ask for notes of all constants, and a rule keeps the newest, or all, or none.
Command: python -m launch.sweep --config=configs/pairs.py --workdir=runs/pairs
Hardware: 2 CPU cores. Run time: docs/results/pairs.md.
Expected metric: pairs/stored_wanted from 0.12, 0.18, 0.18 to 0.93, 0.86, 0.97 where stores are
  credited; where they are not it drifts, to 0.02, 0.31 and 0.02 (three seeds).
"""

from collections.abc import Iterator

import ml_collections

from configs import quickstart

TASKS = 16
# One note of a repository, the newest.
NEWEST = dict(name="recency", most=1)


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """arg: "" or "smoke" (seconds)."""
    if arg not in ("", "smoke"):
        raise ValueError(f"configs/pairs.py:{arg}: the argument must be empty or smoke")
    config = quickstart.get_config(arg)
    tasks = 4 if arg == "smoke" else TASKS
    with config.unlocked(), config.ignore_type():
        # what was read has to be found by its name
        config.model.preset = "small_reader"
        config.tools = (
            "read_file",
            dict(name="memory_store", most=16, longest=40),
            dict(name="memory_recall", most=1),
            "write_file",
            "submit",
        )
        # notes of a step are read two steps later
        config.tasks = dict(
            name="experiments.pairs.source:Pairs",
            split="train",
            seed=0,
            apart=2 * tasks,
            asks_for_all=False,
        )
        # other pairs, and most of them drills: copying is slower to learn than all else
        config.sft.tasks = config.tasks.to_dict() | dict(seed=1, drills=0.7)
        config.memory = dict(rule=NEWEST, left_out=4 if arg == "" else 2)
        config.limits = dict(turns=4, tokens=160, turn_tokens=64, test_runs=0, command_s=5.0)
        config.metrics = dict(extra=("experiments.pairs.metrics:OfPairs",))
        config.train.pack = dict()
        config.train.micro_batches = None
        # fresh pairs are what is measured: an evaluation begins without notes
        config.suites = ()
    config.mesh.update(data=1)
    config.rollout.engine.update(prompt_length=32)
    config.sft.update(slots=160)
    if arg == "":
        config.sft.update(steps=900)
    steps = 6 if arg == "smoke" else 128
    config.train.update(steps=steps, tasks_per_step=tasks, shuffled=False)
    # few tokens are credited, and little else is to be learned
    config.train.optimizer.update(learning_rate=8e-4)
    return config


def get_sweep(arg: str = "") -> Iterator[dict]:
    """For each seed stores that are credited, and not, and rules that choose instead."""

    def chosen(**rule) -> dict:
        return {"memory.left_out": 0, "tasks.asks_for_all": True, "memory.rule": rule}

    arms = {
        "credited": {},
        "not credited": {"memory.left_out": 0},
        "newest kept": chosen(**NEWEST),
        "all kept": chosen(name="all"),
        "none kept": chosen(name="none"),
    }
    for seed in (0,) if arg == "smoke" else (0, 1, 2):
        for variant, arm in arms.items():
            yield {"variant": variant, "seed": seed, **arm}


def get_figure(arg: str = "") -> tuple[tuple, ...]:
    """Panels of the figure: reading and storing."""
    window = 1 if arg == "smoke" else 5
    metrics = ("pairs/stored_wanted", "pairs/stored", "pairs/there", "pairs/notes")
    return tuple(("curve", metric, "step", window) for metric in metrics)
