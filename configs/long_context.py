"""Agents that look things up in 4,000 tokens: dense, window, NSA, MoBA and squid attention.

What: ten files stand in the prompt, two of which define the constants that a function needs
  (``rl_code/tasks/lookup.py``). Each run takes over a model that has been warmed up with its method
  (configs/long_context_base.py), and learns by GRPO, with the prompt shared by each group. Two
  layers see the last 4 tokens, which bind a value to its name, and the third has the method. squid
  is dense attention with each file as a document.
Command: python -m launch.sweep --config=configs/long_context.py --workdir=runs/long_context
  --jobs=2 --figure=docs/long_context.png runs or continues all 11 runs, two at a time on a core
  each, and draws the figure. One run:
  python -m launch.train --config=configs/long_context.py:nsa --workdir=runs/nsa
Hardware: 2 CPU cores. Run time: see docs/results/long_context.md.
Expected metric: held-out pass@1 depends on the warm start more than on the method: of dense
  attention 48 and 9 %, of squid 42 and 6, of NSA 39 and 9 with two warm starts; of MoBA 1 and of a
  window 0 with the second
"""

from collections.abc import Iterator

import ml_collections

LOCAL = dict(name="window", window=4)
SPARSE = dict(length=16, stride=8, block=32)
METHODS = {
    "dense": dict(name="dense"),
    # Dense attention too. What makes the difference is the section documents below, by which each
    # file sees itself alone.
    "squid": dict(name="squid"),
    "window": dict(name="window", window=256),
    "moba": dict(name="moba", block=16, picks=24),
    "nsa": dict(name="nsa", picks=8, initial=1, local=2, window=128) | SPARSE,
}
# Each file is a document, filled up to whole pages: these are small, since short files are many.
# MoBA's pages are its blocks.
DOCUMENTS = dict(longest=448, results=False)
PAGE = 32
PAGES = {"squid": 8, "moba": METHODS["moba"]["block"]}
# The models that runs start from, by method.
BASES = "runs/long_base"


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """arg: "" for dense, a name of METHODS, or "smoke" (seconds, from scratch)."""
    if arg not in ("", "smoke", *METHODS):
        known = ", ".join(METHODS)
        raise ValueError(
            f"configs/long_context.py:{arg}: expected nothing, smoke or one of {known}"
        )
    method = arg if arg in METHODS else "dense"
    config = dict(
        seed=0,
        mesh=dict(data=2),
        model=dict(
            preset="tiny_reader",
            weights="" if arg == "smoke" else base_of(method),
            attention=(LOCAL, LOCAL, METHODS[method]),
        ),
        tokenizer=dict(source="train", vocab_size=704, texts=400),
        protocol="compact",
        documents=DOCUMENTS if method == "squid" else None,
        tasks=lookup(split="train"),
        limits=dict(turns=1, tokens=4352, turn_tokens=48, test_runs=0, command_s=5.0),
        reward=dict(signals=("tests", dict(name="malformed", weight=0.1))),
        rollout=dict(
            engine=dict(
                slots=16,
                page=PAGES.get(method, PAGE),
                prefill_rows=2,
                prefill_tokens=512,
                decode_steps=16,
            ),
        ),
        train=dict(
            steps=40,
            tasks_per_step=8,
            group_size=8,
            loss=dict(policy="ppo", aggregation="token"),
            optimizer=dict(learning_rate=1e-3, schedule="cosine", warmup_steps=5),
        ),
        suites=(dict(name="held_out", tasks=lookup(split="test", seed=2), count=48, samples=4),),
        sft=None,
        checkpoint=dict(every=10),
        asynchrony=dict(mode="sync"),
    )
    config = ml_collections.ConfigDict(config)
    if arg == "smoke":
        shrink(config)
    return config


def base_of(method: str) -> str:
    """The model that runs of a method start from."""
    return f"{BASES}/{method}/sft"


def lookup(**changes) -> dict:
    """A source of lookup tasks."""
    return dict(name="lookup", tokens=3600, files=10, matter=2, spacing=50) | changes


def shrink(config: ml_collections.ConfigDict) -> None:
    """A run of seconds: prompts of about 250 tokens, few steps."""
    config.sft = dict(
        steps=3, rows=2, slots=512, demonstrations=50, optimizer=dict(learning_rate=1e-3)
    )
    for tasks in (config.tasks, config.suites[0]["tasks"]):
        tasks.update(tokens=160, files=3)
    config.limits.tokens = 512
    config.rollout.engine.update(slots=4, prefill_tokens=64)
    config.train.update(steps=2, tasks_per_step=2, group_size=2)
    config.train.pack = dict(drop_uninformative=False)
    config.suites[0].update(count=2, samples=2)


def get_sweep(arg: str = "") -> Iterator[dict]:
    """One set of overrides per run; all methods of a seed before the next seed."""
    for seed in (0,) if arg == "smoke" else (0, 1, 2):
        for variant, method in METHODS.items():
            if seed == 0 or variant in ("dense", "nsa", "squid"):
                # two runs at a time, each on a core
                overrides = {
                    "seed": seed,
                    "mesh.data": 1,
                    "model.attention": (LOCAL, LOCAL, method),
                    "model.weights": "" if arg == "smoke" else base_of(variant),
                }
                if variant == "squid":
                    overrides["documents"] = DOCUMENTS
                if variant in PAGES:
                    overrides["rollout.engine.page"] = PAGES[variant]
                yield {"variant": variant} | overrides


def get_figure(arg: str = "") -> tuple[tuple, ...]:
    """Panels of the figure."""
    return (
        ("curve", "reward/solved", "step", 5),
        ("curve", "reward/solved", "minutes", 5),
        ("totals", "engine/prefilled_tokens", "pack/tokens"),
        ("totals", "time/rollout_s", "time/update_s"),
    )
