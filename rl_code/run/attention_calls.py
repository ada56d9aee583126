"""Implementations that the attention calls and the experts of a run take: the dry run prints them,
a run logs them.
"""

from __future__ import annotations

from absl import logging

from attention.calls import PHASES, CallShape
from attention.implementations import XLA, Implementation, implementations, kernel_or_xla
from models.model_config import ModelConfig
from models.sharding import MeshConfig
from pallas_kernels import choice
from pallas_kernels.grouped import api as grouped
from rl_code.run.config import RunConfig


def attention_calls(
    config: RunConfig, model: ModelConfig, platform: str | None = None, role: str = "all"
) -> list[Implementation]:
    """One row for each attention call of training, prefill and decoding.

    config: with its derived sizes. platform: "cpu", "tpu", "hopper" or "blackwell", None for the
    one at hand. role: of this process, which says on which mesh it samples.
    """
    methods = model.attention * model.periods
    sampling = config.rollout.engine.cache_dtype or config.rollout.dtype
    train = implementations(methods, _shape(config, model, config.mesh), model.dtype, platform)
    # a process that prefills for actors cuts heads as they do
    apart = config.rollout.apart or role in ("actor", "prefill")
    mesh = config.rollout.mesh if apart else config.mesh
    sample = implementations(methods, _shape(config, model, mesh), sampling, platform)
    # both have the same calls in the same order
    return [
        ours if ours.phase == "train" else theirs
        for ours, theirs in zip(train, sample, strict=True)
    ]


def expert_calls(
    config: RunConfig, model: ModelConfig, platform: str | None = None
) -> list[Implementation]:
    """One row for the grouped products of training, prefill and decoding; none without experts.

    Arguments as for ``attention_calls``.
    """
    if model.moe is None:
        return []
    platform = platform or choice.here()
    found = []
    for phase in PHASES:
        dtype = model.dtype if phase == "train" else config.rollout.dtype
        name, reason = kernel_or_xla(grouped.KERNELS, grouped.obstacle_on, platform, dtype)
        layers = model.num_layers - model.moe.first_dense
        found.append(Implementation("experts", layers, "products", phase, name, reason))
    return found


def log_attention(
    config: RunConfig, model: ModelConfig, platform: str | None = None, role: str = "all"
) -> None:
    """Logs what each attention call takes, and the experts: for whoever asks for details
    (--verbosity=1), and on an accelerator, for one without a kernel, as a warning.

    Arguments as for ``attention_calls``.
    """
    accelerated = (platform or choice.here()) != "cpu"
    calls = {
        "attention": attention_calls(config, model, platform, role),
        "experts": expert_calls(config, model, platform),
    }
    for what, found in calls.items():
        for call in found:
            slow = accelerated and call.implementation == XLA
            level = logging.WARNING if slow else logging.DEBUG
            logging.log(level, f"{what} without a kernel: %s" if slow else f"{what}: %s", call)


def _shape(config: RunConfig, model: ModelConfig, mesh: MeshConfig) -> CallShape:
    engine = config.rollout.engine
    pack = config.train.pack
    return CallShape(
        num_heads=max(1, model.num_heads // mesh.tensor),
        num_kv_heads=max(1, model.num_kv_heads // mesh.tensor),
        head_dim=model.head_dim,
        train_rows=max(1, pack.rows // max(1, mesh.row_shards) // config.train.micro_batches),
        # of a device: attention goes through the keys of one after another
        train_tokens=(pack.slots + pack.prompt_slots) // (mesh.context or 1),
        prefill_rows=engine.prefill_rows,
        prefill_tokens=engine.prefill_tokens,
        # a drafted token attends as a row of its own
        decode_rows=engine.slots * (1 + engine.draft_tokens),
        page=engine.page,
        pages=-(-engine.length // engine.page),
    )
