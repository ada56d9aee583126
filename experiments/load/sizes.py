"""A model of 15.5 M parameters for a load, between the compact ones and SmolLM2-135M."""

from __future__ import annotations

from models.model_config import ModelConfig

# --config.parts.run.model.preset=experiments.load.sizes:MIDDLE
MIDDLE = ModelConfig(
    vocab_size=512,
    embed_dim=384,
    mlp_dim=1152,
    num_layers=8,
    num_heads=6,
    num_kv_heads=6,
    head_dim=64,
    rope_theta=1e4,
    norm_eps=1e-6,
    tied_embeddings=True,
)
