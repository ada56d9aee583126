"""SmolLM2-135M-Instruct post-trained by GRPO on MBPP, with real execution.

What: tasks are screened by the base model's success; each answer is a function body, graded on
  hidden asserts and on differential tests against the reference; evaluated on MBPP's test split,
  greedy and sampled, and on HumanEval.
Command: bash launch/get_smollm2.sh && python -m launch.train --config=configs/smollm2_mbpp.py
  --workdir=runs/mbpp with RL_CODE_DATA=<folder of mbpp.jsonl> in the environment; data/ without it
Hardware: 2 CPU cores. Run time: at most 25 minutes is the aim; what was measured is in the README's
table. Expected metric: greedy pass@1 on held-out tasks rises, with a paired interval that excludes
zero.
"""

import os

import ml_collections

from configs.quickstart import asynchrony, loss, optimizer


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """arg: "" or "smoke" (few tasks and steps)."""
    if arg not in ("", "smoke"):
        raise ValueError(f"configs/smollm2_mbpp.py:{arg}: the argument must be empty or smoke")
    weights = "weights/SmolLM2-135M-Instruct.Q4_1.gguf"
    config = dict(
        seed=0,
        mesh=dict(data=2, tensor=1),
        model=dict(preset="smollm2-135m", weights=weights, dtype="float32", remat=False),
        protocol="completion",
        tasks=mbpp("train"),
        limits=dict(turns=1, tokens=256, turn_tokens=64, test_runs=0, command_s=8.0),
        sandbox=dict(
            workers=2, memory_mb=1024, processes=16, workspace_mb=8, cpu_s=6, output_bytes=4000
        ),
        reward=dict(signals=("tests",)),
        rollout=dict(
            engine=engine(prompt_length=192, length=256, cache_dtype="bfloat16"),
            sampling=sampling(1.0),
            workers=4,
            tool_timeout_s=120.0,
            dtype="bfloat16",
            mesh=dict(data=1, tensor=1),
            apart=False,
        ),
        sft=dict(
            steps=0,
            demonstrations=0,
            demonstration=dict(p_right=1.0, p_test=0.0, p_give_up=0.0),
            rows=1,
            slots=256,
            micro_batches=1,
            checkpoint_every=1,
            optimizer=optimizer(1e-5, "constant", warmup_steps=0, total_steps=1),
        ),
        train=dict(
            steps=40,
            tasks_per_step=8,
            group_size=8,
            epochs=1,
            advantage="dr_grpo",
            loss=loss() | dict(aggregation="constant", constant_length=64),
            optimizer=optimizer(1e-5, "constant", warmup_steps=2, total_steps=40),
            pack=dict(
                rows=8,
                slots=704,
                targets=512,
                max_staleness=0,
                drop_uninformative=True,
                runs=0,
                prompt_slots=0,
            ),
            micro_batches=4,
            screening=dict(samples=8, chunk=64, least=24, retire=3),
        ),
        suites=suites(),
        checkpoint=dict(every=5, keep=2),
        asynchrony=asynchrony("sync", 0),
    )
    config = ml_collections.ConfigDict(config)
    if arg == "smoke":
        config.train.update(steps=1, tasks_per_step=2, group_size=2)
        config.train.screening.update(samples=2, chunk=8, least=1)
        config.limits.update(turn_tokens=8)
        for suite in config.suites:
            suite.update(count=2, samples=1)
    return config


def engine(prompt_length: int, length: int, cache_dtype: str) -> dict:
    """Shapes of prefill and decoding."""
    return dict(
        slots=32,
        episodes=32,
        page=32,
        pages=32 * (length - prompt_length) // 32 + 32 + 8 * prompt_length // 32,
        prefill_rows=4,
        prefill_tokens=64,
        prompt_length=prompt_length,
        length=length,
        decode_steps=16,
        cache_dtype=cache_dtype,
    )


def sampling(temperature: float) -> dict:
    """From the whole vocabulary; temperature 0 is greedy."""
    return dict(temperature=temperature, top_k=0, top_p=1.0)


def suites() -> tuple[dict, ...]:
    """MBPP's test split, greedy and sampled, and the shortest prompts of HumanEval in float32."""
    test = mbpp("test")
    humaneval = dict(name="humaneval", form="raw")
    return (
        dict(name="mbpp_test_greedy", tasks=test, count=192, samples=1, sampling=sampling(0.0)),
        dict(name="mbpp_test", tasks=test, count=96, samples=8, sampling=sampling(0.6)),
        dict(
            name="humaneval",
            tasks=humaneval,
            count=82,
            samples=1,
            sampling=sampling(0.0),
            shortest=True,
            protocol="raw_completion",
            limits=dict(turns=1, tokens=288, turn_tokens=160, test_runs=0, command_s=8.0),
            engine=engine(prompt_length=128, length=288, cache_dtype="float32"),
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
