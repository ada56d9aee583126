"""SmolLM2-135M-Instruct post-trained by GRPO on MBPP, with real execution.

What: tasks are screened by the base model's success; each answer is a function body, graded on
  hidden asserts and on differential tests against the reference; evaluated on MBPP's test split,
  greedy and sampled, and on HumanEval.
Command: bash launch/get_smollm2.sh && python -m launch.get_mbpp, then
  python -m launch.train --config=configs/smollm2_mbpp.py --workdir=runs/mbpp. Where mbpp.jsonl is
  already in some folder, RL_CODE_DATA=<folder> in the environment instead of launch.get_mbpp.
Hardware: 2 CPU cores. Run time: at most 25 minutes is the aim;
  docs/results/smollm2_mbpp.md has what was measured.
Expected metric: greedy pass@1 on held-out tasks rises, with a paired interval that excludes zero.
"""

import os

import ml_collections


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """arg: "" or "smoke" (ten tasks, one step, no evaluation)."""
    if arg not in ("", "smoke"):
        raise ValueError(f"configs/smollm2_mbpp.py:{arg}: the argument must be empty or smoke")
    weights = "weights/SmolLM2-135M-Instruct.Q4_1.gguf"
    config = dict(
        seed=0,
        # One device: two virtual ones of a CPU would each hold the parameters and their moments.
        mesh=dict(data=1),
        model=dict(preset="smollm2-135m", weights=weights),
        protocol="completion",
        tasks=mbpp("train"),
        limits=dict(turns=1, tokens=256, turn_tokens=64, test_runs=0, command_s=8.0),
        sandbox=dict(memory_mb=1024, cpu_s=6),
        reward=dict(signals=("tests",)),
        rollout=dict(dtype="bfloat16"),
        train=dict(
            steps=40,
            tasks_per_step=8,
            group_size=8,
            advantage="dr_grpo",
            loss=dict(aggregation="constant"),
            optimizer=dict(learning_rate=1e-5, warmup_steps=2),
            screening=dict(samples=8, chunk=64, least=24, retire=3),
        ),
        suites=suites(),
        checkpoint=dict(every=5),
    )
    config = ml_collections.ConfigDict(config)
    if arg == "smoke":
        config.train.update(steps=1, tasks_per_step=1, group_size=2)
        # Two samples of a few tokens solve next to nothing, so screening would not find tasks.
        config.train.screening = None
        config.limits.update(tokens=128, turn_tokens=8)
        # Of its 32 slots for decoding such a step would use two.
        config.rollout.engine = dict(slots=2, prefill_rows=2, prefill_tokens=128, decode_steps=8)
        # Ten tasks, on the asserts of their own.
        config.tasks.split = "prompt"
        config.tasks.differential = None
        config.suites = ()
    return config


def suites() -> tuple[dict, ...]:
    """MBPP's test split, greedy and sampled, and the shortest prompts of HumanEval in float32."""
    test = mbpp("test")
    return (
        dict(
            name="mbpp_test_greedy",
            tasks=test,
            count=192,
            samples=1,
            sampling=dict(temperature=0.0),
        ),
        dict(name="mbpp_test", tasks=test, count=96, samples=8, sampling=dict(temperature=0.6)),
        dict(
            name="humaneval",
            count=82,
            shortest=True,
            limits=dict(turns=1, tokens=288, turn_tokens=160, test_runs=0, command_s=8.0),
            dtype="float32",
        ),
    )


def mbpp(split: str) -> dict:
    """MBPP: one assert shown, the others and differential tests hidden; no near-duplicates in
    training.
    """
    return dict(
        name="mbpp",
        split=split,
        path=os.path.join(os.environ.get("RL_CODE_DATA", "data"), "mbpp.jsonl"),
        form="chat",
        visible=1,
        differential=dict(cases=12, timeout_s=3.0, workers=4),
        duplicates=dict(words=0.8, code=0.8),
    )
