"""Architectures by name, as their authors published them; dtypes and rematerialisation are the
caller's to replace.

Numbers are from the models' ``config.json``. Parameter counts are tested against the published
ones.
"""

from __future__ import annotations

from models.transformer import ModelConfig, RopeScaling


def _qwen2(
    embed: int,
    mlp: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head: int,
    *,
    vocab: int,
    tied: bool,
):
    return ModelConfig(
        vocab_size=vocab,
        embed_dim=embed,
        mlp_dim=mlp,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head,
        rope_theta=1e6,
        norm_eps=1e-6,
        tied_embeddings=tied,
        qkv_bias=True,
    )


PRESETS = {
    # The embedded default: trains from scratch on two CPU cores in minutes.
    "tiny": ModelConfig(
        vocab_size=512,
        embed_dim=128,
        mlp_dim=384,
        num_layers=4,
        num_heads=4,
        num_kv_heads=4,
        head_dim=32,
        rope_theta=1e4,
        norm_eps=1e-6,
        tied_embeddings=True,
    ),
    "smollm2-135m": ModelConfig(
        vocab_size=49_152,
        embed_dim=576,
        mlp_dim=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rope_theta=1e5,
        norm_eps=1e-5,
        tied_embeddings=True,
    ),
    "qwen2.5-coder-0.5b": _qwen2(896, 4864, 24, 14, 2, 64, vocab=151_936, tied=True),
    "qwen2.5-coder-1.5b": _qwen2(1536, 8960, 28, 12, 2, 128, vocab=151_936, tied=True),
    "qwen2.5-coder-7b": _qwen2(3584, 18_944, 28, 28, 4, 128, vocab=152_064, tied=False),
    "qwen2.5-coder-32b": _qwen2(5120, 27_648, 64, 40, 8, 128, vocab=152_064, tied=False),
    "qwen3-8b": ModelConfig(
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
    ),
    "llama-3.1-8b": ModelConfig(
        vocab_size=128_256,
        embed_dim=4096,
        mlp_dim=14_336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rope_theta=5e5,
        norm_eps=1e-5,
        tied_embeddings=False,
        rope_scaling=RopeScaling(
            factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
        ),
    ),
}
