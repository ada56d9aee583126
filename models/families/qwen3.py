"""Qwen3: RMSNorm on q and k instead of biases; it talks as Qwen2 does."""

from __future__ import annotations

import dataclasses

from models.families import qwen2
from models.families.parameters import O_BIAS, QK_NORM, QKV_BIAS, llama_like
from models.model_config import ModelConfig

SHAPE_8B = ModelConfig(
    vocab_size=151_936,
    embed_dim=4096,
    mlp_dim=12_288,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope_theta=1e6,
    norm_eps=1e-6,
    tied_embeddings=False,
    qk_norm=True,
)

FAMILY = dataclasses.replace(
    qwen2.FAMILY,
    presets={
        "qwen3-1.7b": dataclasses.replace(
            SHAPE_8B,
            embed_dim=2048,
            mlp_dim=6144,
            num_layers=28,
            num_heads=16,
            tied_embeddings=True,
        ),
        "qwen3-8b": SHAPE_8B,
        "qwen3-32b": dataclasses.replace(
            SHAPE_8B, embed_dim=5120, mlp_dim=25_600, num_layers=64, num_heads=64
        ),
    },
    architecture="qwen3",
    huggingface_class="Qwen3ForCausalLM",
    options={"qkv_bias": False, "qk_norm": True},
    switches={"attention_bias": ("qkv_bias", "o_bias")},
    parameters=llama_like(QKV_BIAS, O_BIAS, QK_NORM),
)
