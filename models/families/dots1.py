"""dots.llm1: the attention of Qwen3 with the experts of DeepSeek-V3.

The experts are DeepSeek-V3's whole block: sigmoid scores, a bias that only ranks, groups, a scale,
shared experts, dense first layers. DeepSeek-V3 itself (architecture "deepseek_v3") is not here,
since its attention, MLA, is missing.

Published tokenizers bring their own chat template; a tokenizer without one gets Qwen2's.
"""

from __future__ import annotations

import dataclasses

from models.families import qwen3
from models.families.family import Experts
from models.families.parameters import (
    EXPERTS,
    O_BIAS,
    QK_NORM,
    QKV_BIAS,
    SHARED_EXPERT,
    llama_like,
    with_experts,
)
from models.families.windows import Windows

# DeepSeek-V3's words for its experts.
DEEPSEEK_EXPERTS = Experts(
    keys={
        "experts": "n_routed_experts",
        "active": "num_experts_per_tok",
        "mlp_dim": "moe_intermediate_size",
        "normalise": "norm_topk_prob",
        "scale": "routed_scaling_factor",
        "groups": "n_group",
        "active_groups": "topk_group",
        "shared": "n_shared_experts",
        "first_dense": "first_k_dense_replace",
    },
    options={"scores": "sigmoid", "ranking_bias": True},
)

FAMILY = dataclasses.replace(
    qwen3.FAMILY,
    presets={},
    architecture="dots1",
    huggingface_class="Dots1ForCausalLM",
    parameters=with_experts(llama_like(QKV_BIAS, O_BIAS, QK_NORM), EXPERTS, SHARED_EXPERT),
    windows=Windows(first=62),
    experts=DEEPSEEK_EXPERTS,
)
