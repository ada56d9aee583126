"""Tab jumps: a small model says where the next edit is, and learns when to say nothing.

What: programmers who edit several files have just made an edit, such as a new parameter or a moved
  constant, and go on elsewhere: in another file, in this one, or nowhere. The model reads the edit
  and the lines of the open files that it may concern, and answers with path:line, or with nothing:
  a warm start from scratch on imperfect demonstrations, then Dr. GRPO on what simulated programmers
  do: +0.75 for a jump that is taken, -0.25 for one that is not, 0 for nothing shown.
Command: python -m launch.train --config=configs/tab_jumps.py --workdir=runs/tab_jumps, then
  python -m experiments.tab_jumps runs/tab_jumps. Three seeds:
  python -m launch.sweep --config=configs/tab_jumps.py --workdir=runs/tab_jumps
Hardware: 2 CPU cores. Run time: see docs/results/tab_jumps.md.
Expected metric: tab_jumps/right_of_shown rises and tab_jumps/needless falls, on kinds of change
  that are held out too.
"""

from collections.abc import Iterator

import ml_collections

from configs import tab

# Who trains; others judge (docs/results/tab_jumps.md).
PEOPLE = "usual"
HABITS = dict(habits=PEOPLE, people=64, seed=0)


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """arg: "" or "smoke" (seconds)."""
    if arg not in ("", "smoke"):
        raise ValueError(f"configs/tab_jumps.py:{arg}: the argument must be empty or smoke")
    config = tab.get_config(arg)
    # it has to find what it read
    config.model.preset = "small_reader"
    with config.ignore_type():
        # every name of a module, a function or a constant is one token
        config.tokenizer.update(vocab_size=576)
        config.reward.signals = (asked(),)
        extra = dict(name="experiments.tab_jumps.metrics:TabJumps", asked=HABITS)
        config.metrics = dict(extra=(extra,))
        config.tasks = moments(seed=2)
        # One warm start for all seeds, on moments of its own.
        config.sft.tasks = moments(seed=0)
        # four of five demonstrated places are right, where there is one
        config.sft.demonstration = dict(p_right=0.8)
    # a page has 100 tokens on average and 183 at most, of 6,000; a place has six
    config.limits.update(tokens=224, turn_tokens=10)
    config.rollout.engine.update(prompt_length=208, prefill_rows=8, prefill_tokens=64)
    config.sft.update(slots=512, rows=6, weight_of_read=0.1)
    config.train.pack.update(slots=512, targets=128)
    if arg == "":
        config.sft.update(steps=600, checkpoint_every=100, demonstrations=20_000)
        config.train.update(steps=120)
        config.checkpoint.update(every=30)
    return config


def moments(seed: int) -> dict:
    """The moments of a seed: 0 is for demonstrations, and 1 for what is compared in the end."""
    return dict(name="jumps", split="train", seed=seed)


def asked() -> dict:
    """The reward: what a simulated programmer does with the jump."""
    return dict(name="experiments.tab_jumps.asked:AskedToJump", label="asked", **HABITS)


def get_sweep(arg: str = "") -> Iterator[dict]:
    """One run per seed."""
    for seed in (2,) if arg == "smoke" else (2, 3, 4):
        yield {"tasks.seed": seed}


def get_figure(arg: str = "") -> tuple[tuple, ...]:
    """Panels of the figure."""
    window = 1 if arg == "smoke" else 5
    names = ("shown", "taken_of_shown", "found", "needless")
    return tuple(("curve", f"tab_jumps/{name}", "step", window) for name in names)
