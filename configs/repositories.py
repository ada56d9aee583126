"""The agent from scratch on generated repositories: it searches, reads, thinks, tries and submits.

What: a transformer of 1 M parameters learns to find a wrong line in 5 to 8 small modules, up to two
  imports away from the function that fails (``rl_code/tasks/repositories.py``), and to mend it:
  supervised warm start on imperfect demonstrations, then GRPO. A line that it tries is taken back
  if the tests fail (``try_lines``), so it can begin again; to do so is what GRPO should teach.
Command: python -m launch.train --config=configs/repositories.py --workdir=runs/repositories
Hardware: 2 CPU cores. Run time: 17 minutes.
Expected metric: held-out pass@1 rises by at least 20 points through GRPO, in each of 3 seeds.
"""

import ml_collections

# A search, three times as many files as have to be read at level 2, and as many attempts.
LIMITS = dict(turns=16, tokens=768, turn_tokens=64, test_runs=6, command_s=5.0)
# A prompt has 45 tokens on average, and a file that is read about 35. Turns are short.
ENGINE = dict(
    slots=24,
    page=16,
    prefill_rows=8,
    prefill_tokens=48,
    prompt_length=96,
    # Most of what the agent writes stands in what it read, and in the rest of its group.
    decode_steps=4,
    draft_tokens=4,
)
WARM_START = dict(
    # Demonstrations have 270 tokens on average, of which the agent writes 90; long ones are cut.
    steps=760,
    slots=512,
    rows=8,
    weight_of_read=0.25,
    demonstrations=40_000,
    checkpoint_every=80,
    # Mistakes are shown and not learned. What is learned, and left to GRPO to unlearn, is to change
    # a line without a thought, to submit without a test, and to give up.
    demonstration=dict(p_right=0.8, p_test=0.5, p_give_up=0.2, p_guess=0.35),
    # Whether a line is right, by a thought.
    decisive=(" yes", " no"),
    weight_of_decisive=5.0,
    optimizer=dict(learning_rate=1e-2, muon_learning_rate=2e-2, schedule="cosine", warmup_steps=20),
)


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """arg: "" or "smoke" (seconds)."""
    if arg not in ("", "smoke"):
        raise ValueError(f"configs/repositories.py:{arg}: the argument must be empty or smoke")
    config = dict(
        seed=0,
        mesh=dict(data=2),
        model=dict(preset="small_reader"),
        # Every name of a module or a function is one token.
        tokenizer=dict(source="train", vocab_size=896, texts=1500),
        protocol="compact",
        tools=(
            "grep",
            dict(name="read_file", numbered=True),
            "think",
            "replace_lines",
            "try_lines",
            "submit",
        ),
        tasks=repositories(split="train", levels=(0, 1, 2)),
        limits=LIMITS,
        reward=dict(
            signals=(
                "tests",
                dict(name="malformed", weight=0.1),
            )
        ),
        rollout=dict(
            # Episodes wait for tools most of their time.
            gather_s=0.15,
            engine=ENGINE,
        ),
        sft=WARM_START,
        train=dict(
            steps=40,
            tasks_per_step=16,
            group_size=8,
            # PPO's clip as in GRPO, with DAPO's token aggregation and upper bound. Without the pull
            # towards the warm start thoughts get worse while it learns to try again.
            loss=dict(policy="ppo", aggregation="token", kl_coef=0.1),
            optimizer=dict(learning_rate=6e-4, schedule="cosine", warmup_steps=5),
            # Episodes of a group search and read alike: in long rows they share that.
            pack=dict(slots=1024, targets=768, drop_uninformative=False),
        ),
        # Level 3 is never trained on.
        suites=(
            held_out("held_out", levels=(0, 1, 2), count=64),
            held_out("held_out_far", levels=(3,), count=16),
        ),
        checkpoint=dict(every=10),
        asynchrony=dict(mode="sync"),
    )
    config = ml_collections.ConfigDict(config)
    if arg == "smoke":
        shrink(config)
    return config


def shrink(config: ml_collections.ConfigDict) -> None:
    """Makes a run of seconds of it."""
    config.tokenizer.update(texts=200)
    config.rollout.engine.update(slots=4)
    config.sft.update(steps=3, demonstrations=60, rows=4)
    config.train.update(steps=2, tasks_per_step=2, group_size=2)
    config.suites = config.suites[:1]
    config.suites[0].update(count=2, samples=2)
    config.checkpoint.update(every=1)


def repositories(**changes) -> dict:
    """A source of generated repositories."""
    return dict(name="repositories", levels=(0, 1, 2), files=(5, 8), alone=True) | changes


def held_out(name: str, levels: tuple[int, ...], count: int, **changes) -> dict:
    """A suite of repositories whose chains are composed as none in training is."""
    tasks = repositories(split="test", seed=1, levels=levels, **changes)
    return dict(name=name, tasks=tasks, count=count, samples=8)
