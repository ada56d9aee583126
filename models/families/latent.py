"""Families whose layers have multi-head latent attention (MLA): the names of its parameters in
files, and how a config.json tells its sizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from attention.methods.dsa import DSA
from attention.methods.method import Method
from attention.methods.mla import MLA
from models.families.parameters import HEADS_IN, HEADS_OUT, LAYER, LINEAR, ROW, Parameter
from models.model_config import ModelConfig
from models.rope_scaling import Scaling, Yarn

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

_INDEXER = _SELF_ATTENTION + "indexer."
# Those and an indexer's.
INDEXED = {
    **LATENT,
    "mixer.index_q": Parameter(_INDEXER + "wq_b.weight", None, HEADS_OUT),
    "mixer.index_k": Parameter(_INDEXER + "wk.weight", None, LINEAR),
    "mixer.index_k_norm": Parameter(_INDEXER + "k_norm.weight", None, ROW),
    "mixer.index_k_bias": Parameter(_INDEXER + "k_norm.bias", None, ROW),
    "mixer.index_weights": Parameter(_INDEXER + "weights_proj.weight", None, LINEAR),
}
# Fields of DSA and the keys of config.json that hold them.
_INDEX_KEYS = {
    "picks": "index_topk",
    "index_heads": "index_n_heads",
    "index_size": "index_head_dim",
}
# Keys of config.json that say which layers share an indexer, the others by a rule.
_TYPES, _PATTERN = "indexer_types", "index_topk_pattern"
_EVERY, _FROM = "index_topk_freq", "index_skip_topk_offset"


def score_factor(scaling: Scaling | None) -> float:
    """The square of YaRN's magnitude of all elements, by which scores are multiplied."""
    if not isinstance(scaling, Yarn) or not scaling.mscale_all_dim:
        return 1.0
    return scaling.magnitude(scaling.mscale_all_dim) ** 2


def read_methods(
    hf: Mapping[str, Any],
    need: Callable[[str], Any],
    scaling: Scaling | None,
    index_interleaved: bool | None,
) -> tuple[MLA, ...]:
    """The methods of a period of layers, from a config.json.

    need: the value of a key of it, or ValueError. scaling: of its RoPE. index_interleaved: as
    ``Family.index_interleaved``. Raises ValueError for sizes that are none.
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
    if index_interleaved is None:
        return (method,)
    if method.query_latent is None:
        raise ValueError("config.json has q_lora_rank=None, which no layer with an indexer has")
    _check_layers(hf, need)
    indexer = {name: need(key) for name, key in _INDEX_KEYS.items()}
    full = DSA(**dataclasses.asdict(method), **indexer, index_interleaved=index_interleaved)
    shared = dataclasses.replace(full, shared=True)
    types = _types(hf, need("num_hidden_layers"))
    return tuple(shared if kind == "shared" else full for kind in _period(types))


def _check_layers(hf: Mapping[str, Any], need: Callable[[str], Any]) -> None:
    """Raises ValueError for a config.json with other kinds of layers than these families have."""
    if set(hf.get("layer_types") or ()) - {"indexed_attention"}:
        raise ValueError(
            f"config.json has layer_types={hf['layer_types']!r}, which is not supported, only "
            "'indexed_attention' for every layer"
        )
    kinds = hf.get("mlp_layer_types")
    dense, layers = need("first_k_dense_replace"), need("num_hidden_layers")
    if kinds is not None and kinds != ["dense"] * dense + ["sparse"] * (layers - dense):
        raise ValueError(
            f"config.json has mlp_layer_types={kinds!r}, which is not supported, only 'dense' for "
            f"the first_k_dense_replace={dense} first layers and 'sparse' behind them"
        )


def _types(hf: Mapping[str, Any], layers: int) -> list[str]:
    """The kind of every layer: "full" with an indexer, "shared" without. Raises ValueError."""
    pattern = hf.get(_PATTERN)
    found: Any = hf.get(_TYPES)
    if found is None and isinstance(pattern, str):
        found = [{"F": "full", "S": "shared"}.get(one, one) for one in pattern]
    elif found is None and pattern is not None:
        found = pattern
    if found is None:
        every, first = hf.get(_EVERY) or 1, hf.get(_FROM, 2)
        if type(every) is not int or type(first) is not int or every < 1:
            raise ValueError(
                f"config.json has {_EVERY}={every!r} and {_FROM}={first!r}, not whole numbers"
            )
        return ["full" if max(i - first + 1, 0) % every == 0 else "shared" for i in range(layers)]
    good = isinstance(found, list) and all(kind in ("full", "shared") for kind in found)
    if not good or len(found) != layers or found[0] != "full":
        raise ValueError(
            f"config.json has {_TYPES}={hf.get(_TYPES)!r} and {_PATTERN}={pattern!r}: one of them "
            f"must say 'full' or 'shared' for each of the {layers} layers, 'full' for the first"
        )
    return found


def _period(types: list[str]) -> list[str]:
    """The shortest list that repeats over all layers."""
    for size in range(1, len(types)):
        if len(types) % size == 0 and types == types[:size] * (len(types) // size):
            return types[:size]
    return types


def write_methods(config: ModelConfig, index_interleaved: bool | None) -> dict[str, Any]:
    """The part of a config.json that tells the methods; arguments as for ``read_methods``. How
    indexers are trained has no words there. Raises ValueError where it cannot.
    """
    method = config.attention[0]
    kind = MLA if index_interleaved is None else DSA
    same = {_plain(each) for each in config.attention} == {_plain(method)}
    if not isinstance(method, MLA) or type(method) is not kind or not same:
        raise ValueError(
            f"config.json has no words for attention={config.attention}, only for one kind of "
            f"{kind.__name__}"
        )
    if isinstance(method, DSA) and method.index_interleaved != index_interleaved:
        raise ValueError(
            f"config.json has no words for {method}: index_interleaved must be {index_interleaved}"
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
        **_written_indexers(config),
    }


def _plain(method: Method) -> Method:
    """A method without what is no part of files, or told of each layer."""
    if not isinstance(method, DSA):
        return method
    return dataclasses.replace(method, shared=False, all_keys=False, index_loss=0.0)


def _written_indexers(config: ModelConfig) -> dict[str, Any]:
    """The part of a config.json that tells the indexers, and which layers share one."""
    found = [method for method in config.attention if isinstance(method, DSA)]
    if not found:
        return {}
    types = ["shared" if method.shared else "full" for method in found] * config.periods
    keys = {key: getattr(found[0], name) for name, key in _INDEX_KEYS.items()}
    return keys | ({_TYPES: types} if "shared" in types else {})
