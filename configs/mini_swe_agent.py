"""The agent of the package mini-swe-agent, trained on generated repositories.

What: the unmodified package plays the episodes through the endpoint (``rl_code/harness/``); a model
  of 1 M parameters from scratch, or --config.model.weights=... with --config.protocol=hermes and
  --config.harness.calls=tools, learns from what it did with the answers.
Command: python -m venv mini && mini/bin/pip install mini-swe-agent==2.4.6
  python -m launch.train --config=configs/mini_swe_agent.py --workdir=runs/mini
Hardware: 2 CPU cores for the model from scratch. Run time: not run in full, only ``:smoke``.
Expected metric: reward/solved rises, with a model that writes commands already; not run
"""

import ml_collections

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
        mesh=dict(data=1),
        model=dict(preset="tiny"),
        tokenizer=dict(source="train", vocab_size=512, texts=1000),
        protocol="compact",
        tools=("grep", "read_file", dict(name="edit_file", named=True), "run_tests", "submit"),
        tasks=dict(name="repositories", split="train", levels=(0, 1, 2), files=(5, 8)),
        harness=dict(
            name="mini_swe_agent",
            python="mini/bin/python",
            calls="text",
            format_errors=0,
            **TEMPLATES,
        ),
        limits=dict(
            turns=6, tokens=1024, turn_tokens=64, test_runs=1, command_s=10.0, episode_s=300.0
        ),
        reward=dict(signals=("tests",)),
        rollout=dict(
            engine=dict(slots=8, page=16, prefill_rows=4, prefill_tokens=64, prompt_length=512),
        ),
        train=dict(
            steps=60,
            tasks_per_step=4,
            group_size=4,
            loss=dict(policy="ppo", aggregation="token"),
            optimizer=dict(learning_rate=4e-4, schedule="cosine", warmup_steps=5),
        ),
        checkpoint=dict(every=20),
        asynchrony=dict(mode="sync"),
    )
    config = ml_collections.ConfigDict(config)
    if arg == "smoke":
        config.tokenizer.update(texts=200)
        config.limits.update(turn_tokens=16)
        config.train.update(steps=2, tasks_per_step=2, group_size=2)
        # a random model solves nothing, and what cannot be told apart would be dropped
        config.train.loss.update(entropy_coef=0.01)
        config.train.pack = dict(drop_uninformative=False)
        config.checkpoint.update(every=1)
    return config
