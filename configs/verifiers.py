"""An environment of the package verifiers, trained on and evaluated with: name yours.

What: the unmodified environment plays the episodes through the endpoint (``rl_code/harness/``), and
  its reward is what is learned; any weights with a chat template. ``:smoke`` is a model of 1 M
  parameters from scratch in the environment of the tests.
Command: python -m venv vf && vf/bin/pip install verifiers==0.3.1 (and the environment's package)
  python -m launch.train --config=configs/verifiers.py --workdir=runs/vf
    --config.tasks.environment=... --config.model.weights=...
Hardware: what --dry_run says. Run time: not run in full, only ``:smoke``.
Expected metric: scores/reward rises; not run
"""

import ml_collections

WEIGHTS = "weights/Qwen2.5-Coder-0.5B-Instruct"
PYTHON = "vf/bin/python"
ENVIRONMENT = dict(environment="my_environment", args=dict(), folder="")
OF_TESTS = dict(
    environment="small_sums", args=dict(held_out=2), folder="tests/rl_code/harness/environments"
)


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """arg: "" or "smoke" (seconds)."""
    if arg not in ("", "smoke"):
        raise ValueError(f"configs/verifiers.py:{arg}: the argument must be empty or smoke")
    environment = OF_TESTS if arg == "smoke" else ENVIRONMENT
    tasks = dict(name="verifiers", python=PYTHON, **environment)
    config = dict(
        mesh=dict(data=0),  # every device
        model=dict(weights=WEIGHTS, remat=True),
        protocol="hermes",
        tasks=tasks | dict(split="train"),
        harness="verifiers",
        limits=dict(turns=8, tokens=4096, turn_tokens=512, test_runs=0, command_s=10.0),
        reward=dict(signals=("score",)),
        rollout=dict(dtype="bfloat16"),
        train=dict(
            steps=200,
            tasks_per_step=16,
            group_size=8,
            optimizer=dict(learning_rate=1e-6, warmup_steps=10),
        ),
        suites=(dict(name="held_out", tasks=tasks | dict(split="eval"), count=0, samples=4),),
    )
    config = ml_collections.ConfigDict(config)
    if arg == "smoke":
        config.mesh = dict(data=1)
        config.model = dict(preset="tiny")
        config.protocol = "compact"
        # a tokenizer of one's own is made of demonstrations
        config.tokenizer = dict(source="train", vocab_size=512, texts=200)
        config.sft = dict(
            steps=1,
            demonstrations=20,
            rows=4,
            tasks=dict(name="generated", split="train", levels=(1,)),
            optimizer=dict(learning_rate=1e-3),
        )
        config.suites[0].update(count=2, samples=1)
        config.limits.update(tokens=256, turn_tokens=8)
        config.rollout = dict(
            engine=dict(slots=4, page=16, prefill_rows=2, prefill_tokens=64, prompt_length=128)
        )
        config.train.update(steps=2, tasks_per_step=2, group_size=2)
        # a random model says no number, and what cannot be told apart would be dropped
        config.train.loss = dict(entropy_coef=0.01)
        config.train.pack = dict(drop_uninformative=False)
        config.checkpoint = dict(every=1)
    return config
