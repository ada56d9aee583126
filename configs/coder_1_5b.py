"""Qwen2.5-Coder-1.5B as an agent on one card of 80 GB: it mends generated repositories.

What: GRPO on the tasks of configs/repositories.py from published weights, learner and sampler on
  the same device in turn. :long has episodes of 32,768 tokens, which fit because moments and
  hidden states wait in the host's memory: on the device they would make it 83 GB.
Command: python -m launch.train --config=configs/coder_1_5b.py --workdir=runs/coder_1_5b (or :long),
  with the weights in weights/Qwen2.5-Coder-1.5B-Instruct.
Hardware: one H100 or A100 of 80 GB; :long 16 GB of the host's memory more. Run time: not run.
Expected metric: reward/solved rises within 100 steps; not run.

From python -m launch.plan --model=qwen2.5-coder-1.5b --chip=h100 --devices=1, with the sizes of
each variant; tests/planner/test_real_sizes.py computes it again. Times are bounds at peak rates.

role: mesh | memory of a device | least time of a step or of a token for each row | tokens/s of a
device at most
(16,384 tokens, 32 rows; 64 rows decode together)
learner: one device | 31.1 GB | 9.75 s, compute | 53,760
actor: one device | 33.2 GB | 5.41 ms, HBM | 11,839
(:long, 32,768 tokens, 32 rows; 48 decode together; 15 GB wait on the host)
learner: one device | 20.2 GB | 27.72 s, compute | 37,824
actor: one device | 48.2 GB | 7.65 ms, HBM | 6,276
"""

from typing import Any

import ml_collections

from configs import repositories

PRESET = "qwen2.5-coder-1.5b"


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """arg: "", "long", or "smoke" (seconds; :long with a small model)."""
    if arg not in ("", "long", "smoke"):
        raise ValueError(f"configs/coder_1_5b.py:{arg}: the argument must be empty, long or smoke")
    config = agent("weights/Qwen2.5-Coder-1.5B-Instruct", smoke=arg == "smoke")
    if arg != "smoke":
        context, slots = (32768, 48) if arg == "long" else (16384, 64)
        sizes(config, context=context, slots=slots, tasks=4, row_shards=1)
    if arg != "":
        config.model.update(remat=True, offload_activations=True)
        config.train.optimizer.update(offload=True)
    return config


def agent(weights: str, *, smoke: bool) -> ml_collections.ConfigDict:
    """The agent of configs/repositories.py with published weights, or its smoke run."""
    config = repositories.get_config("smoke" if smoke else "")
    with config.unlocked(), config.ignore_type():
        config.mesh = dict(data=1)
        if smoke:
            return config
        config.model = dict(weights=weights, dtype="bfloat16", remat=True)
        del config.tokenizer
        config.sft = None
        config.protocol = "hermes"
        # without a KL penalty no copy of the first model stays in memory
        config.train = dict(
            steps=200,
            group_size=8,
            loss=dict(aggregation="token"),
            optimizer=dict(learning_rate=1e-6, warmup_steps=10),
        )
    return config


def sizes(
    config: ml_collections.ConfigDict,
    *,
    context: int,
    slots: int,
    tasks: int,
    row_shards: int,
    turns: int = 32,
    turn_tokens: int = 2048,
    prompt: int = 2048,
) -> None:
    """Sets the sizes of episodes, of a batch and of the engine.

    context: tokens of an episode and of a row. slots: rows that decode together on each shard of
    the sampler. tasks: groups of 8 a step. row_shards: devices over which the learner cuts rows,
    one of which each has at a time. turns: messages of the agent, of at most turn_tokens.
    prompt: tokens of the longest prompt.
    """
    rows = 8 * tasks
    engine: dict[str, Any] = dict(slots=slots, page=64, prompt_length=prompt)
    engine |= dict(prefill_rows=4, prefill_tokens=min(2048, prompt))
    with config.unlocked(), config.ignore_type():
        config.limits = dict(
            turns=turns, tokens=context, turn_tokens=turn_tokens, test_runs=8, command_s=20.0
        )
        config.rollout = dict(gather_s=0.05, workers=32, engine=engine)
        config.train.update(tasks_per_step=tasks, micro_batches=rows // row_shards)
        config.train.pack = dict(rows=rows, slots=context, targets=context // 2)
