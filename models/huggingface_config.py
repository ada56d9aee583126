"""The ``config.json`` of a Hugging Face folder as a ModelConfig, and back.

``models.families`` says which architectures there are and what is special about each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attention.methods.method import Method
from models import families
from models.block_scales import block_of
from models.families import gpt_oss, hybrid, latent
from models.families.windows import only_full
from models.json_files import read_json
from models.model_config import ModelConfig
from models.rope_scaling import DynamicScaling, LinearScaling, RopeScaling, Scaling, Yarn

GENERATION_FILE = "generation_config.json"
# By ``rope_type``: what it is read as, the keys that it has, and those that it may have.
_SCALINGS = {
    "llama3": (
        RopeScaling,
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        (),
    ),
    "yarn": (
        Yarn,
        ("factor", "original_max_position_embeddings"),
        ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate"),
    ),
    "linear": (LinearScaling, ("factor",), ()),
    # which begins at max_position_embeddings
    "dynamic": (DynamicScaling, ("factor",), ()),
}
# Keys whose field has another name.
_FIELDS = {"original_max_position_embeddings": "original_max_positions"}
# Keys of config.json itself that say something about RoPE.
_ROPE_KEYS = ("rope_theta", "original_max_position_embeddings", "partial_rotary_factor")


def config_from_dict(hf: Mapping[str, Any]) -> ModelConfig:
    """ModelConfig of the contents of a ``config.json``; dtypes stay float32.

    Raises ValueError naming a key that is missing or whose value this model cannot compute.
    """

    def need(key: str) -> Any:
        if key not in hf:
            raise ValueError(f"config.json has no {key!r}")
        return hf[key]

    try:
        family = families.of_architecture(need("model_type"))
    except ValueError as error:
        raise ValueError(f"model_type {error}") from error
    own = family.architecture, family.huggingface_class
    kind, known = family.nested if hf["model_type"] != own[0] and family.nested else own
    classes = hf.get("architectures") or [known]
    if known not in classes:
        raise ValueError(
            f"config.json has architectures={classes!r}, which is not supported, only "
            f"{known!r} for model_type {kind!r}"
        )
    if kind != own[0]:
        hf = _text_config(hf)
    family.check(hf)
    block_of(hf)
    layers = need("num_hidden_layers")
    rope = _rope(hf)
    scaling = _rope_scaling(rope, need)
    rotary = rope.get("partial_rotary_factor", family.partial_rotary)
    if rotary != 1 and family.partial_rotary == 1:
        raise ValueError(
            f"config.json has partial_rotary_factor={rope['partial_rotary_factor']!r}, which is "
            "not supported, only 1"
        )
    return ModelConfig(
        vocab_size=need("vocab_size"),
        embed_dim=need("hidden_size"),
        mlp_dim=_mlp_dim(hf, family, need),
        num_layers=layers,
        num_heads=need("num_attention_heads"),
        num_kv_heads=hf.get("num_key_value_heads") or need("num_attention_heads"),
        head_dim=_head_dim(hf, family, need),
        rope_theta=rope["rope_theta"],
        norm_eps=need("rms_norm_eps"),
        tied_embeddings=hf.get("tie_word_embeddings") or False,  # the three architectures' default
        architecture=family.architecture,
        **family.options | family.read_switches(hf),
        rope_scaling=scaling,
        partial_rotary=rotary,
        attention=_methods(hf, family, need, scaling),
        moe=None if family.experts is None else family.experts.read(hf, need),
    )


def config_to_dict(config: ModelConfig, *, max_positions: int) -> dict[str, Any]:
    """The contents of the ``config.json`` of a model.

    max_positions: the longest context that the model was trained for, in tokens. Raises ValueError
    for a model that is of no known architecture, or that has other methods of attention.
    """
    family = families.of_config(config)
    scaling = config.rope_scaling
    if isinstance(scaling, DynamicScaling):
        max_positions = scaling.max_positions  # the place from which it stretches
    return {
        "architectures": [family.huggingface_class],
        "model_type": family.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if scaling is None else _written_scaling(scaling),
        **family.write_switches(config),
        **({} if family.partial_rotary == 1 else {"partial_rotary_factor": config.partial_rotary}),
        **_written_methods(config, family),
        **({"num_nextn_predict_layers": 0} if family.guesses else {}),
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": config.tied_embeddings,
        "torch_dtype": config.param_dtype,
        **family.written,
        **({} if config.moe is None else family.experts.write(config.moe)),
    }


def _methods(
    hf: Mapping[str, Any],
    family: families.Family,
    need: Callable[[str], Any],
    scaling: Scaling | None,
) -> tuple[Method, ...]:
    """The methods of a period of a model's layers. Raises ValueError."""
    layers = need("num_hidden_layers")
    if family.states:
        return hybrid.read_methods(hf, need)
    if family.latent:
        return latent.read_methods(hf, need, scaling, family.index_interleaved)
    if type(layers) is not int or layers < 1:  # which the model's config refuses
        return ModelConfig.attention
    if family.sinks:
        return gpt_oss.read_methods(hf, layers)
    if family.windows is not None:
        return family.windows.read(family.architecture, hf, layers)
    only_full(hf, layers)
    return ModelConfig.attention


def _written_methods(config: ModelConfig, family: families.Family) -> dict[str, Any]:
    """Their part of a config.json. Raises ValueError where it has no words for them."""
    if family.states:
        return hybrid.write_methods(config)
    if family.latent:
        return latent.write_methods(config, family.index_interleaved)
    if family.sinks:
        return gpt_oss.write_methods(config)
    if family.windows is not None:
        return family.windows.write(config)
    if set(config.attention) != set(ModelConfig.attention):
        raise ValueError(
            f"config.json has no words for attention={config.attention}, only for "
            f"{ModelConfig.attention}"
        )
    return {}


def tells_methods(config: ModelConfig) -> bool:
    """True if a config.json has words for a model's methods of attention."""
    try:
        _written_methods(config, families.of_config(config))
    except ValueError:
        return False
    return True


def _text_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of the text model of one that nests it. Raises ValueError."""
    text = hf.get("text_config")
    if not isinstance(text, dict):
        raise ValueError(f"config.json has text_config={text!r}, which is no object")
    # the outer file says what is of all parts
    outer = ("tie_word_embeddings", "quantization_config")
    return {**text, **{key: hf[key] for key in outer if key in hf}}


def _mlp_dim(hf: Mapping[str, Any], family: families.Family, need: Callable[[str], Any]) -> Any:
    """The size of dense feed-forward parts; of a model without any, some files do not say it."""
    aliases = {} if family.experts is None else family.experts.aliases
    key = "intermediate_size"
    return need(aliases[key]) if hf.get(key) is None and key in aliases else need(key)


def _head_dim(hf: Mapping[str, Any], family: families.Family, need: Callable[[str], Any]) -> Any:
    """The size of a head; with latent attention that of its rotated part."""
    if family.latent:
        return need("qk_rope_head_dim")
    return hf.get("head_dim") or need("hidden_size") // need("num_attention_heads")


def special_ids(content: Mapping[str, Any]) -> dict[str, Any]:
    """The ids of special tokens in a ``config.json`` or ``generation_config.json``."""
    return {key: value for key, value in content.items() if key.endswith("_token_id")}


def stop_ids(content: Mapping[str, Any]) -> frozenset[int]:
    """Ids of the tokens that end a turn by such a file, which gives one, a list or none. Raises
    ValueError for anything else.
    """
    found = content.get("eos_token_id")
    ids = [] if found is None else found if isinstance(found, list) else [found]
    if not all(type(one) is int and one >= 0 for one in ids):
        raise ValueError(f"eos_token_id={found!r} must be the id of a token, or a list of ids")
    return frozenset(ids)


def max_positions(content: Mapping[str, Any]) -> int | None:
    """The longest context that a ``config.json`` names; None without one. Raises ValueError."""
    found = content.get("max_position_embeddings")
    if found is not None and (type(found) is not int or found < 1):
        raise ValueError(f"max_position_embeddings={found!r} must be a whole number from 1 on")
    return found


def read_config(directory: str | Path) -> ModelConfig:
    """The ModelConfig of a checkpoint's ``config.json``.

    Raises ValueError that names the file and the key that is wrong.
    """
    path = Path(directory) / "config.json"
    try:
        return config_from_dict(read_json(path))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _rope(hf: Mapping[str, Any]) -> dict[str, Any]:
    """All that a ``config.json`` says about RoPE, in one place.

    Newer files keep it in rope_parameters, older ones in rope_theta and rope_scaling. Of files that
    have several of them, readers take different ones. So ValueError is raised where these differ.
    """
    found: dict[str, Any] = {}
    where: dict[str, str] = {}
    places = {"config.json": {key: hf.get(key) for key in _ROPE_KEYS}}
    places |= {key: hf.get(key) or {} for key in ("rope_parameters", "rope_scaling")}
    for place, content in places.items():
        if not isinstance(content, dict):
            raise ValueError(f"config.json has {place}={content!r}, which is no object")
        for key, value in content.items():
            if isinstance(value, dict):
                raise ValueError(
                    f"config.json has {place}.{key}={value!r}; RoPE that differs by layer is not "
                    "supported"
                )
            name = "rope_type" if key == "type" else key
            if value is None:
                continue
            if name in found and found[name] != value:
                raise ValueError(
                    f"config.json has {name}={found[name]!r} in {where[name]} and {value!r} in "
                    f"{place}, and readers take one or the other; keep the right one"
                )
            found.setdefault(name, value)
            where.setdefault(name, place)
    if "rope_theta" not in found:
        raise ValueError("config.json has no 'rope_theta'")
    return found


def _rope_scaling(rope: Mapping[str, Any], need: Callable[[str], Any]) -> Scaling | None:
    kind = rope.get("rope_type", "default")
    if kind == "default":
        if rope.get("factor", 1) != 1:
            raise ValueError(
                f"config.json has factor={rope['factor']!r} for RoPE of type 'default', which has "
                "none; say which rope_type it is for"
            )
        return None
    if kind not in _SCALINGS:
        known = ", ".join(map(repr, ("default", *_SCALINGS)))
        raise ValueError(f"RoPE of type {kind!r} is not supported, only {known}")
    scaling, keys, optional = _SCALINGS[kind]
    given = {key: rope[key] for key in optional if key in rope}
    try:
        given |= {key: rope[key] for key in keys}
        found = {_FIELDS.get(key, key): _number(key, value) for key, value in given.items()}
        if scaling is DynamicScaling:
            found["max_positions"] = need("max_position_embeddings")
        return scaling(**found)
    except TypeError as error:
        raise ValueError(f"RoPE scaling of type {kind!r}: {error}") from error
    except KeyError as error:
        raise ValueError(f"RoPE scaling of type {kind!r} has no {error}") from error


def _number(key: str, value: Any) -> float | bool:
    """A number of a file, which may write a whole one without a point."""
    if isinstance(value, bool):
        return value
    return int(value) if key in _FIELDS else float(value)


def _written_scaling(scaling: Scaling) -> dict[str, Any]:
    """The part of a config.json that ``_rope_scaling`` reads."""
    kind = next(kind for kind, (cls, *_) in _SCALINGS.items() if isinstance(scaling, cls))
    _, keys, optional = _SCALINGS[kind]
    values = {key: getattr(scaling, _FIELDS.get(key, key)) for key in (*keys, *optional)}
    return {"rope_type": kind} | {key: x for key, x in values.items() if x is not None}
