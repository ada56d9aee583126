"""GLM-5: the architecture of DeepSeek-V3.2 in other sizes, with indexers that rotate interleaved
pairs. One indexer may serve the layers behind it too (``indexer_types``).

Shapes are those of the published ``config.json`` of GLM-5. It talks as GLM-4.5 does.
"""

from __future__ import annotations

import dataclasses

from attention.methods.dsa import DSA
from models.families import deepseek_v32, glm4_moe
from models.model_config import ModelConfig, MoE

_LAYER = DSA(
    latent=512,
    query_latent=2048,
    plain_size=192,
    value_size=256,
    interleaved=True,
    index_heads=32,
    index_interleaved=True,
)
SHAPE = ModelConfig(
    vocab_size=154_880,
    embed_dim=6144,
    mlp_dim=12_288,
    num_layers=78,
    num_heads=64,
    num_kv_heads=64,
    head_dim=64,
    rope_theta=1e6,
    norm_eps=1e-5,
    tied_embeddings=False,
    attention=(_LAYER,),
    moe=MoE(
        experts=256,
        active=8,
        mlp_dim=2048,
        scores="sigmoid",
        scale=2.5,
        ranking_bias=True,
        shared=1,
        first_dense=3,
    ),
)

FAMILY = dataclasses.replace(
    glm4_moe.FAMILY,
    presets={"glm-5": SHAPE},
    architecture="glm_moe_dsa",
    huggingface_class="GlmMoeDsaForCausalLM",
    options=deepseek_v32.FAMILY.options,
    switches={},
    parameters=deepseek_v32.FAMILY.parameters,
    partial_rotary=1.0,
    experts=deepseek_v32.FAMILY.experts,
    harmless={**deepseek_v32.FAMILY.harmless, "indexer_rope_interleave": (True, None)},
    skipped=(),
    written={},
    latent=True,
    index_interleaved=True,
    guesses=True,
)
