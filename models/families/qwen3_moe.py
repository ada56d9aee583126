"""Qwen3-MoE: Qwen3 with experts in every layer, softmax routing, and no shared expert.

Shapes are those of the published ``config.json`` of Qwen3-30B-A3B.
"""

from __future__ import annotations

import dataclasses

from models.families import qwen3
from models.families.family import HARMLESS, Experts
from models.families.parameters import (
    EXPERTS,
    O_BIAS,
    QK_NORM,
    QKV_BIAS,
    llama_like,
    with_experts,
)
from models.families.windows import Windows
from models.model_config import MoE

# Fields of MoE and the keys of config.json that hold them.
KEYS = {
    "experts": "num_experts",
    "active": "num_experts_per_tok",
    "mlp_dim": "moe_intermediate_size",
    "normalise": "norm_topk_prob",
}

FAMILY = dataclasses.replace(
    qwen3.FAMILY,
    presets={
        "qwen3-30b-a3b": dataclasses.replace(
            qwen3.SHAPE_8B,
            embed_dim=2048,
            mlp_dim=6144,
            num_layers=48,
            num_kv_heads=4,
            moe=MoE(experts=128, active=8, mlp_dim=768),
        ),
    },
    architecture="qwen3_moe",
    huggingface_class="Qwen3MoeForCausalLM",
    parameters=with_experts(llama_like(QKV_BIAS, O_BIAS, QK_NORM), EXPERTS),
    # transformers gives all layers the window, whatever max_window_layers says
    windows=Windows(switched=True),
    experts=Experts(
        keys=KEYS,
        options={},
        # transformers 5 writes it so
        aliases={"num_experts": "num_local_experts"},
    ),
    # with other values some layers are dense
    harmless={**HARMLESS, "decoder_sparse_step": (1, None), "mlp_only_layers": ([], None)},
)
