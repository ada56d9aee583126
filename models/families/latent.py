"""Families whose layers have multi-head latent attention (MLA): the names of its parameters in
files, and how a config.json tells its sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attention.methods.mla import MLA
from models.families.parameters import HEADS_IN, HEADS_OUT, LAYER, LINEAR, ROW, Parameter
from models.functions import Scaling, Yarn
from models.model_config import ModelConfig

_SELF_ATTENTION = LAYER + "self_attn."
# Parameters of a layer; ``mixer.q`` is of models whose queries have no latent vector.
LATENT = {
    "mixer.q": Parameter(_SELF_ATTENTION + "q_proj.weight", None, HEADS_OUT),
    "mixer.q_a": Parameter(_SELF_ATTENTION + "q_a_proj.weight", None, LINEAR),
    "mixer.q_a_norm": Parameter(_SELF_ATTENTION + "q_a_layernorm.weight", None, ROW),
    "mixer.q_b": Parameter(_SELF_ATTENTION + "q_b_proj.weight", None, HEADS_OUT),
    "mixer.kv_a": Parameter(_SELF_ATTENTION + "kv_a_proj_with_mqa.weight", None, LINEAR),
    "mixer.kv_a_norm": Parameter(_SELF_ATTENTION + "kv_a_layernorm.weight", None, ROW),
    "mixer.kv_b": Parameter(_SELF_ATTENTION + "kv_b_proj.weight", None, HEADS_OUT),
    "mixer.out": Parameter(_SELF_ATTENTION + "o_proj.weight", None, HEADS_IN),
}


def score_factor(scaling: Scaling | None) -> float:
    """The square of YaRN's magnitude of all elements, by which scores are multiplied."""
    if not isinstance(scaling, Yarn) or not scaling.mscale_all_dim:
        return 1.0
    return scaling.magnitude(scaling.mscale_all_dim) ** 2


def read_methods(
    hf: Mapping[str, Any], need: Callable[[str], Any], scaling: Scaling | None
) -> tuple[MLA, ...]:
    """The method of all layers, from a config.json.

    need: the value of a key of it, or ValueError. scaling: of its RoPE. Raises ValueError for sizes
    that are none.
    """
    interleaved = hf.get("rope_interleave", True)
    if not isinstance(interleaved, bool):
        raise ValueError(f"config.json has rope_interleave={interleaved!r}, not true or false")
    method = MLA(
        latent=need("kv_lora_rank"),
        query_latent=hf.get("q_lora_rank"),
        plain_size=need("qk_nope_head_dim"),
        value_size=need("v_head_dim"),
        interleaved=interleaved,
        score_factor=score_factor(scaling),
    )
    return (method,)


def write_methods(config: ModelConfig) -> dict[str, Any]:
    """The part of a config.json that tells the method. Raises ValueError where it cannot."""
    method = config.attention[0]
    if set(config.attention) != {method} or not isinstance(method, MLA):
        raise ValueError(
            f"config.json has no words for attention={config.attention}, only for one kind of MLA"
        )
    wanted = score_factor(config.rope_scaling)
    if (method.score_factor, method.eps) != (wanted, MLA.eps):
        raise ValueError(
            f"config.json has no words for {method}: score_factor must be {wanted}, that of "
            f"rope_scaling={config.rope_scaling}, and eps {MLA.eps}"
        )
    sizes = method.sizes(config.layer_shape)
    return {
        "q_lora_rank": method.query_latent,
        "kv_lora_rank": sizes.latent,
        "qk_nope_head_dim": sizes.plain,
        "qk_rope_head_dim": sizes.rotated,
        "v_head_dim": sizes.value,
        "rope_interleave": method.interleaved,
    }
