"""Which implementation each attention call of a run takes: the dry run prints it, a run logs it."""

from __future__ import annotations

from absl import logging

from attention.implementations import XLA, CallShape, Implementation, implementations
from models.model_config import ModelConfig
from models.sharding import MeshConfig
from pallas_kernels import choice
from rl_code.run_config import RunConfig


def attention_calls(
    config: RunConfig, model: ModelConfig, platform: str | None = None
) -> list[Implementation]:
    """One row for each attention call of training, prefill and decoding.

    config: with its derived sizes. platform: "cpu", "tpu", "hopper" or "blackwell", None for the
    one at hand.
    """
    methods = model.attention * model.periods
    sampling = config.rollout.engine.cache_dtype or config.rollout.dtype
    train = implementations(methods, _shape(config, model, config.mesh), model.dtype, platform)
    mesh = config.rollout.mesh if config.rollout.apart else config.mesh
    sample = implementations(methods, _shape(config, model, mesh), sampling, platform)
    # both have the same calls in the same order
    return [
        ours if ours.phase == "train" else theirs
        for ours, theirs in zip(train, sample, strict=True)
    ]


def log_attention(config: RunConfig, model: ModelConfig, platform: str | None = None) -> None:
    """Logs what each attention call takes; on an accelerator, a call without a kernel as a warning.

    Arguments as for ``attention_calls``.
    """
    accelerated = (platform or choice.here()) != "cpu"
    for call in attention_calls(config, model, platform):
        slow = accelerated and call.implementation == XLA
        level = logging.WARNING if slow else logging.INFO
        logging.log(level, "attention without a kernel: %s" if slow else "attention: %s", call)


def _shape(config: RunConfig, model: ModelConfig, mesh: MeshConfig) -> CallShape:
    engine = config.rollout.engine
    pack = config.train.pack
    return CallShape(
        num_heads=max(1, model.num_heads // mesh.tensor),
        num_kv_heads=max(1, model.num_kv_heads // mesh.tensor),
        head_dim=model.head_dim,
        train_rows=max(1, pack.rows // max(1, mesh.row_shards) // config.train.micro_batches),
        train_tokens=pack.slots + pack.prompt_slots,
        prefill_rows=engine.prefill_rows,
        prefill_tokens=engine.prefill_tokens,
        # a drafted token attends as a row of its own
        decode_rows=engine.slots * (1 + engine.draft_tokens),
        page=engine.page,
        pages=-(-engine.length // engine.page),
    )
