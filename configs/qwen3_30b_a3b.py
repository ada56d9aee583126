"""Qwen3-30B-A3B on 64 H100 and on 72 GB200 of one domain: agents of 131,072 and 262,144 tokens.

What: GRPO on generated repositories, learner and actors in processes of their own, one step apart.
  64 H100: 4 hosts learn (rows cut over context, experts exchanged within a host, moments on the
  host), 3 actors of a host each decode with tensor 8, and a host prefills for all of them. :gb200:
  36 devices learn (whole experts folded over expert 3 x tensor 12, hidden states cut by tokens) and
  36 decode as one actor (expert 9 x tensor 4); heads and experts are padded for these axes.
Command: with the weights in weights/Qwen3-30B-A3B-Instruct-2507, on SLURM
  python -m launch.cluster --engine=slurm --role=learner_and_actors --hosts=4 --devices=8 --actors=3
  --config=configs/qwen3_30b_a3b.py --workdir=/shared/runs/a3b, and for 72 GB200
  python -m launch.cluster --engine=slurm --role=learner_and_actors --hosts=9 --devices=4 --actors=1
  --actor_hosts=9 --config=configs/qwen3_30b_a3b.py:gb200 --workdir=/shared/runs/a3b; on Ray
  python -m launch.on_ray --address=auto --hosts=4 --actors=3 --learner_needs=GPU=8
  --actor_needs=GPU=8 --prefill_needs=GPU=8 with the same config and workdir, or --hosts=9
  --actors=1 --actor_hosts=9 --learner_needs=GPU=4 --actor_needs=GPU=4. Hosts need --network
  (docs/operations.md).
Hardware: 64 H100 in hosts of 8, 170 GB of each learner's host for moments; or 18 hosts of 4 GB200
  in one domain. Run time: not run.
Expected metric: reward/solved rises within 100 steps; not run.

From python -m launch.plan --model=qwen3-30b-a3b with --chip=h100 --devices=32 --actor_devices=8 or
--chip=gb200 --devices=36 --fold_experts, with the sizes of each variant;
tests/planner/test_real_sizes.py computes it again. Times are bounds at peak rates.

role: mesh | memory of a device | least time of a step or of a token for each row | tokens/s of a
device at most
(64 H100, 131,072 tokens, 64 rows; 16 decode together in each actor; 21 GB wait on the host. Without
the axis context, fsdp 4 x expert 8, a learner takes 81 GB and does not fit)
learner: fsdp 2 x context 2 x expert 8 | 57.4 GB | 118.82 s, compute | 2,206
actor: tensor 8 | 59.2 GB | 9.19 ms, HBM | 218
(:gb200, 262,144 tokens, 72 rows; 16 decode together on each shard of rows. fsdp 4 x expert 9 would
take 160.6 GB, of 182 that may be filled, and 11 % less time)
learner: expert 3 x tensor 12 | 84.5 GB | 139.34 s, compute | 3,763
actor: expert 9 x tensor 4 | 105.7 GB | 6.78 ms, HBM | 590
"""

import ml_collections

from configs import quickstart_moe
from configs.coder_1_5b import agent, sizes

PRESET = "qwen3-30b-a3b"


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """arg: "", "gb200", or "smoke" (seconds; a small model on 8 devices that learn and sample)."""
    if arg not in ("", "gb200", "smoke"):
        raise ValueError(
            f"configs/qwen3_30b_a3b.py:{arg}: the argument must be empty, gb200 or smoke"
        )
    if arg == "smoke":
        return small()
    config = agent("weights/Qwen3-30B-A3B-Instruct-2507", smoke=False)
    with config.unlocked(), config.ignore_type():
        config.asynchrony = dict(mode="one_step")
        if arg == "gb200":
            sizes(config, context=262144, slots=16, tasks=9, row_shards=3, turns=128, prompt=8192)
            config.mesh = dict(expert=3, tensor=12)
            config.rollout.mesh = dict(expert=9, tensor=4)
            config.model.update(fold_experts=True, sequence_parallel=True)
            # 32 heads to 36 for tensor 12; 128 experts to 144 for the 36 devices of either mesh
            config.model.update(pad_for=12, pad_experts_for=36)
            return config
        sizes(config, context=131072, slots=16, tasks=8, row_shards=16, turns=64, prompt=8192)
        config.mesh = dict(fsdp=2, context=2, expert=8)
        config.rollout.mesh = dict(tensor=8)
        config.rollout.prefill = dict(mesh=dict(tensor=8))
        config.train.optimizer.offload = True
    return config


def small() -> ml_collections.ConfigDict:
    """The quickstart with experts, a run of seconds, with every axis of the two variants."""
    config = quickstart_moe.get_config("smoke")
    with config.unlocked(), config.ignore_type():
        config.mesh = dict(context=2, expert=2, tensor=2)
        config.model.update(fold_experts=True, sequence_parallel=True, remat=True, pad_for=2)
        config.train.optimizer.muon_learning_rate = None
        if config.sft is not None:
            config.sft.optimizer.muon_learning_rate = None
    return config
