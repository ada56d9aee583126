"""Tasks for which a context is too short: summaries trained, untrained and absent.

What: a transformer of 1 M parameters reads four to six modules and writes down one value of each
  (``experiments/summaries/source.py``). A context has room for two to four of them. The warm start
  shows parts of episodes, whose summaries are wrong in three of ten cases; then GRPO. The arms are
  the same but for the summaries: trained with the episode's advantage, not trained, or absent, with
  the same context and with one that holds the whole episode.
Command: python -m launch.sweep --config=configs/summaries.py --workdir=runs/summaries
Hardware: 2 CPU cores. Run time: docs/results/summaries.md.
Expected metric: held-out pass@1 from about 33 to 96 % where summaries are trained, by 2 to 12
  points where they are not; near 0 where they are absent and contexts short.
"""

from collections.abc import Iterator

import ml_collections

from configs import quickstart

# Tokens of a context, of all contexts of an episode, and those from which on it is summarised.
CONTEXT, EPISODE, TRIGGER = 176, 640, 104
SUMMARIES = dict(
    trigger=TRIGGER, context=CONTEXT, tokens=48, most=4, request="sum up", go_on="go on"
)


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """arg: "" or "smoke" (seconds)."""
    if arg not in ("", "smoke"):
        raise ValueError(f"configs/summaries.py:{arg}: the argument must be empty or smoke")
    config = quickstart.get_config(arg)
    with config.unlocked(), config.ignore_type():
        # what was read has to be found by its name
        config.model.preset = "small_reader"
        config.tools = ("read_file", "write_file", "submit")
        config.tasks = gather("train", seed=0)
        config.summaries = SUMMARIES
        config.limits = dict(turns=10, tokens=EPISODE, turn_tokens=64, test_runs=0, command_s=5.0)
        config.suites = (dict(name="held_out", tasks=gather("test", seed=1), count=64, samples=4),)
        config.train.parts = dict(summaries="episode")
        config.train.pack = dict()
        config.train.micro_batches = None
    config.mesh.update(data=1)
    config.rollout.engine.update(prompt_length=64)
    config.sft.update(slots=224)
    if arg == "smoke":
        for suite in config.suites:
            suite.update(count=4, samples=2)
    else:
        config.sft.update(steps=400)
        config.train.update(steps=40)
    return config


def gather(split: str, seed: int) -> dict:
    """The source of a split."""
    name = "experiments.summaries.source:Gather"
    return dict(name=name, split=split, seed=seed, files=(4, 6))


def get_sweep(arg: str = "") -> Iterator[dict]:
    """Four arms for each seed."""
    arms = {
        "trained": {},
        "not trained": {"train.parts.summaries": "none"},
        "absent": {"summaries.most": 0},
        "absent, long context": {"summaries.most": 0, "summaries.context": EPISODE},
    }
    for seed in (0,) if arg == "smoke" else (0, 1, 2):
        for variant, arm in arms.items():
            yield {"variant": variant, "seed": seed, **arm}


def get_figure(arg: str = "") -> tuple[tuple, ...]:
    """Panels of the figure: what is solved, and the tokens of an episode."""
    window = 1 if arg == "smoke" else 5
    metrics = ("reward/solved", "episode/tokens")
    return tuple(("curve", metric, "step", window) for metric in metrics)
