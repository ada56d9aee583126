"""The embedded default: a coding agent trained from scratch on a CPU.

What: a transformer of 1 M parameters learns to repair and write small Python functions as a
  multi-turn agent (write, run the tests, read what failed, submit): supervised warm start on
  imperfect demonstrations, then GRPO.
Command: bash launch/quickstart.sh
Hardware: 2 CPU cores. Run time: see the README's table.
Expected metric: held-out pass@1 rises by at least 20 points through GRPO.
"""

import ml_collections


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """arg: "" or "smoke" (seconds)."""
    if arg not in ("", "smoke"):
        raise ValueError(f"configs/quickstart.py:{arg}: the argument must be empty or smoke")
    sampling = dict(temperature=1.0, top_k=0, top_p=1.0)
    config = dict(
        seed=0,
        mesh=dict(data=2, tensor=1),
        model=dict(preset="tiny", weights="", dtype="float32", remat=False),
        tokenizer=dict(source="train", vocab_size=512, texts=2000),
        protocol="compact",
        tasks=dict(name="generated", split="train", seed=0, levels=(1, 2, 2)),
        limits=dict(turns=5, tokens=288, turn_tokens=64, test_runs=3, command_s=5.0),
        sandbox=dict(
            workers=2, memory_mb=512, processes=16, workspace_mb=8, cpu_s=4, output_bytes=4000
        ),
        reward=dict(signals=("tests", dict(name="malformed", weight=0.1))),
        rollout=dict(
            engine=dict(
                slots=24,
                episodes=40,
                page=16,
                pages=520,
                prefill_rows=8,
                prefill_tokens=32,
                prompt_length=96,
                length=288,
                decode_steps=8,
                cache_dtype="float32",
            ),
            sampling=sampling,
            workers=4,
            tool_timeout_s=60.0,
            dtype="float32",
            mesh=dict(data=1, tensor=1),
            apart=False,
        ),
        sft=dict(
            steps=340,
            demonstrations=60_000,
            demonstration=dict(p_right=0.65, p_test=0.5, p_give_up=0.4),
            rows=32,
            slots=160,
            micro_batches=1,
            checkpoint_every=85,
            optimizer=optimizer(
                1e-2, "cosine", warmup_steps=20, total_steps=340, muon_learning_rate=2e-2
            ),
        ),
        train=dict(
            steps=72,
            tasks_per_step=16,
            group_size=8,
            epochs=1,
            advantage="grpo",
            loss=loss(),
            optimizer=optimizer(4e-4, "cosine", warmup_steps=5, total_steps=72),
            pack=dict(
                rows=128,
                slots=288,
                targets=224,
                max_staleness=0,
                drop_uninformative=True,
                runs=0,
                prompt_slots=0,
            ),
            micro_batches=8,
            screening=None,
        ),
        # Level 2 holds out 58 pairs of operations, level 1 four operations that never stand alone
        # in training.
        suites=(
            held_out("held_out", sampling, level=2, count=128),
            held_out("held_out_single", sampling, level=1, count=32),
        ),
        checkpoint=dict(every=18, keep=2),
        asynchrony=asynchrony("sync", 0),
    )
    config = ml_collections.ConfigDict(config)
    if arg == "smoke":
        config.rollout.engine.update(slots=8, episodes=8, pages=160)
        config.sft.update(steps=4, demonstrations=100)
        config.train.update(steps=3, tasks_per_step=4, group_size=4)
        for suite in config.suites:
            suite.update(count=4, samples=2)
        config.checkpoint.update(every=2)
    return config


def held_out(name: str, sampling: dict, level: int, count: int) -> dict:
    """A suite of generated tasks from the split that is neither trained nor tuned on."""
    tasks = dict(name="generated", split="test", seed=1, levels=(level,))
    return dict(name=name, tasks=tasks, count=count, samples=8, sampling=sampling)


def loss() -> dict:
    """PPO clip as in GRPO, with DAPO's token aggregation and upper bound."""
    return dict(
        policy="ppo",
        aggregation="token",
        constant_length=64,
        kl_coef=0.0,
        kl_estimator="k3",
        entropy_coef=0.0,
        correction="auto",
        correction_low=0.0,
        correction_high=2.0,
        temperature=1.0,
    )


def asynchrony(mode: str, max_staleness: int) -> dict:
    """How far sampling may run ahead of training, and when a process counts as lost."""
    return dict(
        mode=mode,
        max_staleness=max_staleness,
        recompute=False,
        work=dict(heartbeat_s=1.0, heartbeat_timeout_s=15.0, stall_s=300.0, deadline_s=1800.0),
        weights=dict(full_every=16, keep=max_staleness + 2, deadline_s=300.0),
    )


def optimizer(
    learning_rate: float,
    schedule: str,
    warmup_steps: int,
    total_steps: int,
    muon_learning_rate: float | None = None,
) -> dict:
    """AdamW, or Muon for matrices and AdamW for the rest."""
    return dict(
        learning_rate=learning_rate,
        muon_learning_rate=muon_learning_rate,
        schedule=schedule,
        warmup_steps=warmup_steps,
        total_steps=total_steps,
        b1=0.9,
        b2=0.95,
        eps=1e-8,
        weight_decay=0.0,
        clip_norm=1.0,
    )
