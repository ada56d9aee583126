"""Code against short answers: the same agent learns both from an equal pass rate, 3 seeds each.

What: the quickstart's agent and GRPO on two sources. "code" is functions to write or to repair in
  several turns. "short" asks for the larger or the smaller of two numbers, with the answer in one
  line. Nearly half of its demonstrations are off by a digit, so that both warm starts solve about
  half of their tasks (``tasks.right`` moves it).
Command: python -m launch.sweep --config=configs/short_answers.py --workdir=runs/short_answers
  --figure=docs/short_answers.png, then python -m experiments.gains runs/short_answers
Hardware: 2 CPU cores. Run time: 5 to 8 minutes a run beside another program.
Expected metric: 43 % of the groups of code are without a signal (1 - reward/signal_groups) and 14 %
  of those of short answers; held-out pass@1 gains 19 to 21 points for code and 19 to 27 for short
  answers, which begin 6 to 11 points higher; two seeds.
"""

from collections.abc import Iterator

import ml_collections

from configs import quickstart

CODE = dict(name="generated", levels=(1, 2, 2))
# this agent learns to compare numbers, and sums by heart alone
COMPARED = dict(name="sums", signs=("max", "min"), most=99, right=0.55)
SOURCES = {"code": CODE, "short": COMPARED}


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """The variant with short answers. arg: "" or "smoke" (seconds)."""
    if arg not in ("", "smoke"):
        raise ValueError(f"configs/short_answers.py:{arg}: the argument must be empty or smoke")
    config = quickstart.get_config(arg)
    with config.ignore_type():
        config.tasks = COMPARED | dict(split="train")
        config.suites = (held_out(COMPARED, arg),)
        # how fast it goes is what is asked, and not where it ends
        config.evaluate = dict(every=1 if arg == "smoke" else 8)
    if arg == "":
        config.train.update(steps=48)
    # as fine as the evaluations
    config.checkpoint.update(every=config.evaluate.every)
    return config


def held_out(source: dict, arg: str) -> dict:
    """The suite of a source."""
    tasks = source | dict(split="test", seed=1)
    if source is CODE:
        tasks |= dict(levels=(2,))
    count, samples = (4, 2) if arg == "smoke" else (96, 4)
    return dict(name="held_out", tasks=tasks, count=count, samples=samples)


def get_sweep(arg: str = "") -> Iterator[dict]:
    """One set of overrides per run; both sources of a seed before the next seed."""
    for seed in (0,) if arg == "smoke" else (0, 1, 2):
        for name, source in SOURCES.items():
            yield {
                "variant": name,
                "seed": seed,
                "tasks": source | dict(split="train"),
                "suites": (held_out(source, arg),),
            }


def get_figure(arg: str = "") -> tuple[tuple, ...]:
    """Panels of the figure."""
    window = 1 if arg == "smoke" else 5
    return (
        ("curve", "reward/solved", "step", window),
        ("curve", "reward/signal_groups", "step", window),
        ("bars", "episode/sampled_tokens", "episode/turns"),
    )
