"""The model families, one file each. A new one is a file here and an entry in ``FAMILIES``
(``docs/adding.md`` has a whole example).
"""

from __future__ import annotations

from models.families import (
    compact,
    compact_moe,
    deepseek_v3,
    deepseek_v32,
    dots1,
    glm4_moe,
    glm_moe_dsa,
    gpt_oss,
    kimi_k2,
    llama,
    mistral,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_coder,
    qwen3_moe,
    qwen3_next,
    smollm2,
)
from models.families.family import Family
from models.model_config import ModelConfig

# Where several families share an architecture, the first is the one that files of it are read by.
FAMILIES: dict[str, Family] = {
    "llama3": llama.FAMILY,
    "mistral": mistral.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen3": qwen3.FAMILY,
    "qwen3_coder": qwen3_coder.FAMILY,
    "qwen3_moe": qwen3_moe.FAMILY,
    "qwen3_next": qwen3_next.FAMILY,
    "qwen3_5": qwen3_5.FAMILY,
    "qwen3_5_moe": qwen3_5.MOE_FAMILY,
    "dots1": dots1.FAMILY,
    "deepseek_v3": deepseek_v3.FAMILY,
    "kimi_k2": kimi_k2.FAMILY,
    "deepseek_v32": deepseek_v32.FAMILY,
    "glm_moe_dsa": glm_moe_dsa.FAMILY,
    "glm4_moe": glm4_moe.FAMILY,
    "gpt_oss": gpt_oss.FAMILY,
    "smollm2": smollm2.FAMILY,
    "compact": compact.FAMILY,
    "compact_moe": compact_moe.FAMILY,
}

# Every family's published shapes, by name.
PRESETS: dict[str, ModelConfig] = {
    name: config for family in FAMILIES.values() for name, config in family.presets.items()
}


def of_architecture(architecture: str) -> Family:
    """The family that reads files of an architecture, such as "qwen2".

    Raises:
      ValueError: no family has it; names those that there are.
    """
    for family in FAMILIES.values():
        if architecture in (family.architecture, *(family.nested or ())[:1]):
            return family
    known = dict.fromkeys(family.architecture for family in FAMILIES.values())
    raise ValueError(f"{architecture!r} is not supported, only {', '.join(known)}")


def of_protocol(protocol: str) -> Family | None:
    """The first family that talks in a protocol; None where no family does."""
    found = (family for family in FAMILIES.values() if family.protocol == protocol)
    return next(found, None)


def of_config(config: ModelConfig) -> Family:
    """The family that writes the files of a model: that of its architecture, or the first one with
    its options.

    Raises:
      ValueError: no family has the model's options.
    """
    for family in FAMILIES.values():
        if config.architecture in (None, family.architecture) and family.describes(config):
            return family
    one = f" of architecture {config.architecture}" if config.architecture else ""
    experts = "" if config.moe is None else f" and moe={config.moe}"
    raise ValueError(
        f"no model family{one} has qkv_bias={config.qkv_bias} together with "
        f"qk_norm={config.qk_norm}{experts}"
    )
