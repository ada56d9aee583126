"""Qwen3-8B on one host of 8 H100: an agent of long episodes, and answers to long prompts.

What: GRPO on generated repositories in episodes of 32,768 tokens. All 8 devices learn (fsdp) and
  then sample, each with whole weights; they fit together because moments and hidden states wait in
  the host's memory (without: 92 GB). :answers reads modules of 8,000 tokens and answers in 512:
  4 devices learn, 2 decode and 2 prefill at the same time, one step apart, and the update computes
  the prompts while answers are still sampled (train.pack.prompt_slots).
Command: python -m launch.train --config=configs/qwen3_8b.py --workdir=runs/qwen3_8b (or :answers),
  with the weights in weights/Qwen3-8B; under SLURM python -m launch.cluster --engine=slurm
  --role=all --devices=8 --config=configs/qwen3_8b.py --workdir=/shared/runs/qwen3_8b.
Hardware: 8 H100 of one host, 200 GB of its memory. Run time: not run.
Expected metric: reward/solved rises within 100 steps; not run.

From python -m launch.plan --model=qwen3-8b --chip=h100 --devices=8, with the sizes of each variant;
tests/planner/test_real_sizes.py computes it again. Times are bounds at peak rates.

role: mesh | memory of a device | least time of a step or of a token for each row | tokens/s of a
device at most
(32,768 tokens, 64 rows; 8 rows decode together on each device; 18 GB of each wait on the host)
learner: fsdp 8 | 18.9 GB | 28.52 s, compute | 9,193
actor: data 8 | 55.0 GB | 10.28 ms, HBM | 778
(:answers, 8,192 tokens of prompt and 8 answers in a row, 16 rows; 64 decode together. Of the
learner 14.5 GB are the prompts' hidden states, keys and values, which wait for the second phase)
learner: fsdp 4 | 68.7 GB | 3.66 s, compute | 13,447
actor: tensor 2 | 49.3 GB | 8.38 ms, HBM | 3,817
"""

import ml_collections

from configs import long_context
from configs.coder_1_5b import agent, sizes

PRESET = "qwen3-8b"


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """arg: "", "answers", or "smoke" (seconds; :answers with a small model on 4 devices)."""
    if arg not in ("", "answers", "smoke"):
        raise ValueError(f"configs/qwen3_8b.py:{arg}: the argument must be empty, answers or smoke")
    if arg == "smoke":
        config = long_context.get_config("smoke")
        config.train.pack.update(prompt_slots=512)
        return apart(config, learners=2, tensor=1)
    config = agent("weights/Qwen3-8B", smoke=False)
    if arg == "answers":
        limits = dict(context=8192 + 512, turns=1, turn_tokens=512, prompt=8192)
        sizes(config, slots=64, tasks=16, row_shards=4, **limits)
        config.tasks = long_context.lookup(split="train", tokens=6000)
        config.train.micro_batches = 16 // 4  # a row has the answers to one prompt
        config.train.pack = dict(prompt_slots=8192)
        return apart(config, learners=4, tensor=2)
    config.mesh = dict(fsdp=8)
    sizes(config, context=32768, slots=8, tasks=8, row_shards=8)
    config.model.offload_activations = True
    config.train.optimizer.offload = True
    return config


def apart(
    config: ml_collections.ConfigDict, *, learners: int, tensor: int
) -> ml_collections.ConfigDict:
    """The config with learning, decoding and prefill on devices of their own, one step apart.

    tensor: devices that decode together, and as many that prefill.
    """
    with config.unlocked(), config.ignore_type():
        config.mesh = dict(fsdp=learners)
        config.rollout.update(
            apart=True, mesh=dict(tensor=tensor), prefill_mesh=dict(tensor=tensor)
        )
        config.asynchrony = dict(mode="one_step")
    return config
