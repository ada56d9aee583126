"""Settings that clients name in requests for an adapter and for a step of its optimizer."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from people.serving.tinker import adapters
from people.serving.tinker.adapters import AdapterSettings


def settings_of(fields: Mapping[str, Any], model_id: str, max_rank: int) -> AdapterSettings:
    """The settings of a request for a new adapter. A seed that it leaves out is made of the id.
    Raises ValueError.
    """
    config = fields.get("lora_config")
    if not config:
        raise ValueError("lora_config is missing; only adapters are trained here")
    kind = (fields.get("optimizer_config") or {}).get("type", "adamw")
    if kind != "adamw":
        raise ValueError(f"optimizer {kind!r} is not served here; adamw is")
    rank = config["rank"]
    if type(rank) is not int or not 1 <= rank <= max_rank:
        raise ValueError(f"rank={rank} must be from 1 to {max_rank} (serving.tinker.max_rank)")
    mlp, attention = config.get("train_mlp", True), config.get("train_attn", True)
    if not (mlp or attention):
        raise ValueError(
            "train_mlp and train_attn are False; adapters of the unembedding alone are not served"
        )
    seed = config.get("seed")
    if seed is None:
        seed = int(hashlib.sha256(model_id.encode()).hexdigest()[:7], 16)
    if type(seed) is not int or not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed!r} must be from 0 to {2**32 - 1}")
    return AdapterSettings(rank, seed, bool(mlp), bool(attention))


def adam_params(fields: Mapping[str, Any]) -> dict[str, float]:
    """The settings of a step. Raises ValueError."""
    if "adam_params" not in fields:
        kind = (fields.get("optimizer_params") or {}).get("type", "none")
        raise ValueError(f"optimizer {kind!r} is not served here; AdamParams is")
    params = {"weight_decay": 0.0, "grad_clip_norm": 0.0, **fields["adam_params"]}
    if set(params) != set(adapters.ADAM):
        raise ValueError(f"adam_params has {sorted(params)}; it must have {sorted(adapters.ADAM)}")
    for name, value in params.items():
        if type(value) not in (int, float) or not 0 <= value < float("inf"):
            raise ValueError(f"adam_params[{name!r}]={value!r} must be a number of at least 0")
        if name.startswith("beta") and not value < 1:
            raise ValueError(f"adam_params[{name!r}]={value!r} must be below 1")
    return params
