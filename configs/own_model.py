"""An experiment on one's own model and tasks: copy this file, and name yours.

What: GRPO on the tasks of a file, from a Hugging Face folder (or a .gguf file, or a run's workdir).
Command: python -m launch.train --config=configs/own_model.py --workdir=runs/own [--dry_run]
Hardware: what --dry_run says. Run time: depends on both. Expected metric: reward/solved rises.
Step by step, with a file of tasks to try it on: docs/my_tasks.md.
"""

import ml_collections

WEIGHTS = "weights/Qwen2.5-Coder-0.5B-Instruct"
TASKS = "configs/sample_tasks.jsonl"
COLUMNS = dict(id="name", messages="question", entry_point="function", tests="asserts")
# whether a row is for training or held out, and what solves it, which only launch.validate runs
COLUMNS |= dict(split="split", reference="solution")


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """arg: "" or "smoke" (one step of few tasks)."""
    if arg not in ("", "smoke"):
        raise ValueError(f"configs/own_model.py:{arg}: the argument must be empty or smoke")
    smoke = arg == "smoke"
    tasks = dict(name="records", path=TASKS, columns=COLUMNS, form="agent")
    config = dict(
        mesh=dict(data=0),  # every device
        # products in bfloat16, for which GPUs and TPUs have kernels; trained weights are float32
        model=dict(weights=WEIGHTS, dtype="bfloat16", remat=True),
        protocol="hermes",
        tasks=tasks | dict(split="train"),
        limits=dict(turns=4, tokens=4096, turn_tokens=512, test_runs=3, command_s=10.0),
        reward=dict(signals=("tests",)),
        train=dict(
            steps=1 if smoke else 200,
            tasks_per_step=2 if smoke else 16,
            group_size=2 if smoke else 8,
            optimizer=dict(learning_rate=1e-6, warmup_steps=10),
        ),
        suites=(dict(name="held_out", tasks=tasks | dict(split="test"), samples=4),),
    )
    return ml_collections.ConfigDict(config)
