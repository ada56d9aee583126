"""The agent of the package mini-swe-agent, trained on generated repositories.

What: the unmodified package plays the episodes through the endpoint (``rl_code/harness/``). A model
  of 1 M parameters from scratch gets a warm start on walks in shell commands, in the words of the
  package (``rl_code/tasks/walks_in_shell.py``), then GRPO. In the walks a third of all files that
  are read is changed without a thought and handed in: a habit that GRPO should unlearn.
  With real weights (--config.model.weights=..., --config.protocol=hermes, --config.sft=None and
  --config.harness.calls=tools) there is no warm start.
Command: python -m venv mini && mini/bin/pip install mini-swe-agent==2.4.6
  python -m launch.train --config=configs/mini_swe_agent.py --workdir=runs/mini
Hardware: 2 CPU cores for the model from scratch. Run time: docs/results/mini_swe_agent.md.
Expected metric: reward/solved and held-out pass@1 rise; docs/results/mini_swe_agent.md says how far
"""

import ml_collections

from configs import repositories

# The package's own prompts have 1,500 tokens and more, too many for a small model. With real
# weights set these to "", which is the package's own.
TEMPLATES = dict(
    system="Answer with one command in a block that begins with ```mswea_bash_command.",
    instance="{{task}}\nEnd with echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
    observation="{{output.output}}exit {{output.returncode}}",
    format_error="one command in a block",
)


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """arg: "" or "smoke" (seconds)."""
    if arg not in ("", "smoke"):
        raise ValueError(f"configs/mini_swe_agent.py:{arg}: the argument must be empty or smoke")
    config = dict(
        seed=0,
        mesh=dict(data=2),
        model=dict(preset="small_reader"),
        # Every name of a module or a function is one token.
        tokenizer=dict(source="train", vocab_size=896, texts=1500),
        protocol="compact",
        tasks=repositories.repositories(split="train"),
        harness=dict(
            name="mini_swe_agent",
            python="mini/bin/python",
            calls="text",
            format_errors=0,
            **TEMPLATES,
        ),
        # A search, the files of level 2 with one more, a change, and the end; one message may fail.
        limits=dict(
            turns=8, tokens=512, turn_tokens=64, test_runs=0, command_s=10.0, tools_s=300.0
        ),
        reward=dict(signals=("tests",)),
        rollout=dict(
            # Programs that ask at once are decoded together.
            gather_s=0.15,
            workers=8,
            engine=repositories.ENGINE | dict(prompt_length=112),
        ),
        # Demonstrations have 240 tokens on average, of which the agent writes 90.
        sft=repositories.WARM_START,
        train=dict(
            steps=40,
            tasks_per_step=6,
            group_size=8,
            loss=dict(policy="ppo", aggregation="token", kl_coef=0.1),
            optimizer=dict(learning_rate=5e-4, schedule="cosine", warmup_steps=3),
            pack=dict(slots=1024, targets=768, drop_uninformative=False),
        ),
        suites=(repositories.held_out("held_out", (0, 1, 2), 64) | dict(samples=4),),
        checkpoint=dict(every=5),
        asynchrony=dict(mode="sync"),
    )
    config = ml_collections.ConfigDict(config)
    if arg == "smoke":
        config.tokenizer.update(texts=200)
        config.limits.update(turn_tokens=16)
        config.rollout.engine.update(slots=4)
        config.sft.update(steps=3, demonstrations=60, rows=4)
        config.train.update(steps=2, tasks_per_step=2, group_size=2)
        config.suites[0].update(count=2, samples=1)
        config.checkpoint.update(every=1)
    return config
