"""An environment of the package verifiers, trained on and evaluated with: name yours.

What: the unmodified environment plays the episodes through the endpoint (``rl_code/harness/``), and
  its reward is what is learned; any weights with a chat template. ``:sums`` is a model of 1 M
  parameters from scratch, without a warm start, in an environment of two turns (the sum of two
  digits, with a hint after a wrong guess; ``tests/rl_code/harness/environments``), with 20 of 100
  pairs held out. ``:smoke`` is two steps of it.
Command: python -m venv vf && vf/bin/pip install verifiers==0.4.0 (and the package of the taskset)
  python -m launch.train --config=configs/verifiers.py --workdir=runs/vf
    --config.tasks.taskset=... --config.model.weights=...
  python -m launch.train --config=configs/verifiers.py:sums --workdir=runs/sums
Hardware: what --dry_run says; ``:sums`` and ``:smoke`` 2 CPU cores. Run time: ``:sums`` 4 minutes
  (docs/results/verifiers.md); with weights not run.
Expected metric: scores/reward rises; with ``:sums`` held-out pass@1 by 20 to 31 points
"""

import ml_collections

WEIGHTS = "weights/Qwen2.5-Coder-0.5B-Instruct"
PYTHON = "vf/bin/python"
# of the tests; a guess counts as solved within 3 of the sum, or a second one within 1
SUMS = dict(taskset="guessed_sums", folder="tests/rl_code/harness/environments", solved_at=0.5)


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """arg: "" (any weights), "sums" (from scratch, minutes) or "smoke" (seconds)."""
    if arg not in ("", "sums", "smoke"):
        raise ValueError(f"configs/verifiers.py:{arg}: the argument must be empty, sums or smoke")
    own = SUMS if arg else dict(taskset="my_taskset", folder="")
    train, held_out = (
        dict(name="verifiers", python=PYTHON, env=dict(taskset=dict(split=split)), **own)
        for split in ("train", "eval")
    )
    config = dict(
        mesh=dict(data=0),  # every device
        model=dict(weights=WEIGHTS, remat=True),
        protocol="hermes",
        tasks=train,
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
        suites=(dict(name="held_out", tasks=held_out, count=0, samples=4),),
    )
    config = ml_collections.ConfigDict(config)
    if arg:
        config.mesh = dict(data=1)
        config.model = dict(preset="tiny")
        config.protocol = "compact"
        # a tokenizer of one's own is made of demonstrations, of which one step is learned
        config.tokenizer = dict(source="train", vocab_size=320, texts=200)
        config.sft = dict(
            steps=1,
            demonstrations=20,
            rows=4,
            tasks=dict(name="generated", split="train", levels=(1,)),
            optimizer=dict(learning_rate=1e-5),
        )
        config.limits.update(turns=2, tokens=96, turn_tokens=4)
        config.rollout = dict(
            engine=dict(slots=32, page=16, prefill_rows=8, prefill_tokens=32, prompt_length=64)
        )
        config.train.update(steps=24, tasks_per_step=8, group_size=8)
        config.train.optimizer = dict(learning_rate=1e-3, schedule="constant", warmup_steps=3)
        config.train.loss = dict(entropy_coef=0.01)
        config.train.pack = dict(drop_uninformative=False)
        config.checkpoint = dict(every=8)
    if arg == "smoke":
        config.suites[0].update(count=2, samples=1)
        config.rollout.engine.update(slots=4, prefill_rows=2)
        config.train.update(steps=2, tasks_per_step=2, group_size=2)
        config.checkpoint = dict(every=1)
    return config
