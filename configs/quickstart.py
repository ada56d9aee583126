"""The embedded default: a coding agent trained from scratch on a CPU.

What: a transformer of 1 M parameters learns to repair and write small Python functions as a
  multi-turn agent (write, run the tests, read what failed, submit): supervised warm start on
  imperfect demonstrations, then GRPO.
Command: bash launch/quickstart.sh
Hardware: 2 CPU cores. Run time: see docs/results/quickstart.md.
Expected metric: held-out pass@1 rises by at least 20 points through GRPO.
"""

import ml_collections


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """arg: "" or "smoke" (seconds)."""
    if arg not in ("", "smoke"):
        raise ValueError(f"configs/quickstart.py:{arg}: the argument must be empty or smoke")
    config = dict(
        seed=0,
        mesh=dict(data=2),
        model=dict(preset="tiny"),
        tokenizer=dict(source="train"),
        protocol="compact",
        tasks=dict(name="generated", split="train", levels=(1, 2, 2)),
        limits=dict(turns=5, tokens=288, turn_tokens=64, test_runs=3, command_s=5.0),
        reward=dict(signals=("tests", dict(name="malformed", weight=0.1))),
        rollout=dict(
            # Prompts of the generated tasks are short, and two thirds of a trajectory are sampled.
            engine=dict(
                slots=24,
                page=16,
                prefill_rows=8,
                prefill_tokens=32,
                prompt_length=96,
                decode_steps=8,
            ),
        ),
        sft=dict(
            steps=340,
            checkpoint_every=85,
            optimizer=dict(
                learning_rate=1e-2, muon_learning_rate=2e-2, schedule="cosine", warmup_steps=20
            ),
        ),
        train=dict(
            steps=72,
            tasks_per_step=16,
            group_size=8,
            # PPO's clip as in GRPO, with DAPO's token aggregation and upper bound
            loss=dict(policy="ppo", aggregation="token"),
            optimizer=dict(learning_rate=4e-4, schedule="cosine", warmup_steps=5),
            pack=dict(targets=224),
            micro_batches=8,
        ),
        # Level 2 holds out 58 pairs of operations, level 1 four operations that never stand alone
        # in training.
        suites=(
            held_out("held_out", level=2, count=128),
            held_out("held_out_single", level=1, count=32),
        ),
        checkpoint=dict(every=18),
        asynchrony=dict(mode="sync"),
    )
    config = ml_collections.ConfigDict(config)
    if arg == "smoke":
        config.tokenizer.update(texts=100)
        config.rollout.engine.update(slots=8)
        config.sft.update(steps=4, demonstrations=100)
        config.train.update(steps=3, tasks_per_step=4, group_size=4)
        for suite in config.suites:
            suite.update(count=4, samples=2)
        config.checkpoint.update(every=2)
    return config


def held_out(name: str, level: int, count: int) -> dict:
    """A suite of generated tasks from the split that is neither trained nor tuned on."""
    tasks = dict(name="generated", split="test", seed=1, levels=(level,))
    return dict(name=name, tasks=tasks, count=count, samples=8)
