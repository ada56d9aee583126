"""DeepSeek-V3.2: DeepSeek-V3 whose layers attend to the keys that an indexer chooses.

Published files have no chat template; the one here is DeepSeek-V3's, which declares no tools.
Shapes are those of the published ``config.json`` of DeepSeek-V3.2-Exp.
"""

from __future__ import annotations

import dataclasses

from attention.methods.dsa import DSA
from models.families import deepseek_v3
from models.families.latent import INDEXED
from models.families.parameters import EXPERTS, SHARED_EXPERT, with_experts, without_attention

_LAYER = DSA(**dataclasses.asdict(deepseek_v3.LAYER))

FAMILY = dataclasses.replace(
    deepseek_v3.FAMILY,
    presets={
        "deepseek-v3.2": dataclasses.replace(
            deepseek_v3.SHAPE, architecture="deepseek_v32", attention=(_LAYER,)
        ),
    },
    architecture="deepseek_v32",
    huggingface_class="DeepseekV32ForCausalLM",
    parameters=with_experts(without_attention(INDEXED), EXPERTS, SHARED_EXPERT),
    harmless={**deepseek_v3.FAMILY.harmless, "indexer_rope_interleave": (False, None)},
    index_interleaved=False,
)
