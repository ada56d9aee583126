"""The small model that is trained from scratch, with experts: the shape of Qwen3-MoE, and the words
of ``compact``.
"""

from __future__ import annotations

import dataclasses

from models.families import compact, qwen3_moe
from models.model_config import MoE

FAMILY = dataclasses.replace(
    compact.FAMILY,
    presets={
        # As many multiplications for a token as "tiny" has, but for the router and the norms of q
        # and k: two of eight experts make up its feed-forward size. 2.7 M parameters, 0.9 M active.
        "tiny_moe": dataclasses.replace(
            compact.FAMILY.presets["tiny"],
            qk_norm=True,
            moe=MoE(experts=8, active=2, mlp_dim=192),
        ),
    },
    architecture=qwen3_moe.FAMILY.architecture,
    huggingface_class=qwen3_moe.FAMILY.huggingface_class,
    options=qwen3_moe.FAMILY.options,
    parameters=qwen3_moe.FAMILY.parameters,
    experts=qwen3_moe.FAMILY.experts,
    harmless=qwen3_moe.FAMILY.harmless,
    windows=qwen3_moe.FAMILY.windows,
)
