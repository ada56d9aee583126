"""Agents that look things up in 4,000 tokens: dense, window, NSA, MoBA and squid attention, trained
from scratch.

What: ten files stand in the prompt, two of which define the constants that a function needs
  (``rl_code/tasks/lookup.py``). A warm start goes from short prompts to long ones; then GRPO, with
  the prompt shared by each group. In every method the layers alternate with ones that see the last
  8 tokens, which bind a value to its name. squid is dense attention with each file as a document.
Command: python -m launch.sweep --config=configs/long_context.py --workdir=runs/long_context
  --figure=docs/long_context.png runs or continues all 11 runs, and draws the figure. One run:
  python -m launch.train --config=configs/long_context.py:nsa --workdir=runs/nsa
Hardware: 2 CPU cores. Run time: see docs/results.md.
Expected metric: held-out pass@1 of NSA, MoBA and squid near dense, window near 0; tokens and
  seconds per method. No run has been completed yet.
"""

from collections.abc import Iterable, Iterator

import ml_collections

LOCAL = dict(name="window", window=8)
SPARSE = dict(length=16, stride=8, block=32)
METHODS = {
    "dense": dict(name="dense"),
    "nsa": dict(name="nsa", picks=8, initial=1, local=2, window=128) | SPARSE,
    "squid": dict(name="dense"),
    "window": dict(name="window", window=256),
    "moba": dict(name="moba", block=32, picks=12),
}
# Each file is a document.
DOCUMENTS = dict(longest=448, answers=False)
# Warm start: (tasks, tokens of the files, constants to look up, tokens for each constant). Only the
# digits of constants teach to look up, and they are few among the tokens of an answer, so the first
# examples ask for many. Files grow by less than two times at once, so that what was learned about
# short ones still finds some of the constants.
CURRICULUM = (
    *((8000, 25, 5, 5), (4000, 45, 8, 5), (3000, 80, 8, 10), (3000, 130, 8, 15)),
    *((2000, 220, 8, 20), (1200, 400, 8, 30), (800, 700, 8, 40), (500, 1200, 6, 50)),
    *((300, 2000, 4, 50),),
)


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """arg: "" for dense, a name of METHODS, or "smoke" (seconds)."""
    if arg not in ("", "smoke", *METHODS):
        known = ", ".join(METHODS)
        raise ValueError(
            f"configs/long_context.py:{arg}: expected nothing, smoke or one of {known}"
        )
    method = arg if arg in METHODS else "dense"
    config = dict(
        seed=0,
        mesh=dict(data=2),
        model=dict(preset="tiny_reader", attention=(LOCAL, METHODS[method])),
        tokenizer=dict(source="train", vocab_size=704, texts=400),
        protocol="compact",
        documents=DOCUMENTS if method == "squid" else None,
        tasks=lookup(split="train"),
        limits=dict(turns=1, tokens=4352, turn_tokens=80, test_runs=0, command_s=5.0),
        reward=dict(signals=("tests", dict(name="malformed", weight=0.1))),
        rollout=dict(
            engine=dict(slots=16, page=32, prefill_rows=2, prefill_tokens=512, decode_steps=16),
        ),
        sft=dict(
            steps=880,
            rows=2,
            slots=4352,
            checkpoint_every=100,
            tasks=lookup(split="train", seed=1, first=stages(CURRICULUM)),
            demonstration=dict(p_right=1.0),
            optimizer=dict(
                learning_rate=3e-3, muon_learning_rate=2e-2, schedule="cosine", warmup_steps=20
            ),
        ),
        train=dict(
            steps=40,
            tasks_per_step=4,
            group_size=8,
            loss=dict(policy="ppo", aggregation="token"),
            optimizer=dict(learning_rate=3e-4, schedule="cosine", warmup_steps=5),
        ),
        suites=(
            dict(
                name="held_out",
                tasks=lookup(split="test", seed=2),
                count=32,
                samples=4,
            ),
        ),
        checkpoint=dict(every=10),
        asynchrony=dict(mode="sync"),
    )
    config = ml_collections.ConfigDict(config)
    if arg == "smoke":
        shrink(config)
    return config


def lookup(**changes) -> dict:
    """A source of lookup tasks."""
    return dict(name="lookup", tokens=3600, files=10, matter=2, spacing=50) | changes


def stages(curriculum: Iterable[tuple[int, int, int, int]]) -> tuple[dict, ...]:
    """The stages of a curriculum by name."""
    names = ("tasks", "tokens", "matter", "spacing")
    return tuple(dict(zip(names, stage, strict=True)) for stage in curriculum)


def shrink(config: ml_collections.ConfigDict) -> None:
    """A run of seconds: prompts of about 250 tokens, few steps."""
    for tasks in (config.tasks, config.sft.tasks, config.suites[0]["tasks"]):
        tasks.update(tokens=160, files=3)
    config.limits.tokens = 512
    config.rollout.engine.update(slots=4, prefill_tokens=64)
    config.sft.update(steps=3, slots=512, demonstrations=50)
    config.sft.tasks.first = stages([(10, 60, 4, 10)])
    config.train.update(steps=2, tasks_per_step=2, group_size=2)
    config.train.pack = dict(drop_uninformative=False)
    config.suites[0].update(count=2, samples=2)


def get_sweep(arg: str = "") -> Iterator[dict]:
    """One set of overrides per run; all methods of a seed before the next seed."""
    for seed in (0,) if arg == "smoke" else (0, 1, 2):
        for variant, method in METHODS.items():
            if seed == 0 or variant in ("dense", "nsa", "squid"):
                overrides = {"seed": seed, "model.attention": (LOCAL, method)}
                if variant == "squid":
                    overrides["documents"] = DOCUMENTS
                yield {"variant": variant} | overrides


def get_figure(arg: str = "") -> tuple[tuple, ...]:
    """Panels of the figure."""
    return (
        ("curve", "reward/solved", "step", 5),
        ("curve", "reward/solved", "minutes", 5),
        ("totals", "engine/prefilled_tokens", "pack/tokens"),
        ("totals", "time/rollout_s", "time/update_s"),
    )
