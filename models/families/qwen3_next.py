"""Qwen3-Next: gated delta net in three of four layers, gated attention in the fourth, experts with
a gated shared one.

Shapes are those of the published ``config.json`` of Qwen3-Next-80B-A3B.
"""

from __future__ import annotations

import dataclasses

from attention.methods.dense import Dense
from attention.methods.gated_delta import GatedDelta
from models.families import hybrid, qwen3, qwen3_moe
from models.families.family import HARMLESS, Experts
from models.families.parameters import EXPERTS, QK_NORM, llama_like, with_experts
from models.model_config import ModelConfig, MoE

STATE = GatedDelta(key_heads=16, value_heads=32, key_size=128, value_size=128)
OPTIONS = {"qkv_bias": False, "qk_norm": True, "norm_offset": True, "output_gate": True}
SHAPE_80B = ModelConfig(
    vocab_size=151_936,
    embed_dim=2048,
    mlp_dim=5120,
    num_layers=48,
    num_heads=16,
    num_kv_heads=2,
    head_dim=256,
    rope_theta=1e7,
    norm_eps=1e-6,
    tied_embeddings=False,
    partial_rotary=0.25,
    attention=(STATE, STATE, STATE, Dense()),
    moe=MoE(experts=512, active=10, mlp_dim=512, shared=1, shared_gate=True),
    qk_norm=True,
    norm_offset=True,
    output_gate=True,
)
PARAMETERS = with_experts(llama_like(QK_NORM, hybrid.STATE), EXPERTS, hybrid.GATED_SHARED_EXPERT)

FAMILY = dataclasses.replace(
    qwen3.FAMILY,
    presets={"qwen3-next-80b-a3b": SHAPE_80B},
    architecture="qwen3_next",
    huggingface_class="Qwen3NextForCausalLM",
    options=OPTIONS,
    parameters=PARAMETERS,
    experts=Experts(
        keys=qwen3_moe.KEYS,
        options={"shared_gate": True},
        shared_size="shared_expert_intermediate_size",
    ),
    harmless={
        **HARMLESS,
        "decoder_sparse_step": (1, None),
        "mlp_only_layers": ([], None),
    },
    partial_rotary=0.25,
    states=True,
    switches={},
    windows=None,
    regrouped=hybrid.BY_HEADS,
    skipped=("mtp.",),
)
