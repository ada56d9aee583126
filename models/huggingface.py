"""Reads and writes Hugging Face checkpoints: ``config.json`` and safetensors, in one file or in
several with an index.

``models.families`` says which architectures there are and what is special about each. Tensors are
read by slices straight into their shards, and written one at a time (``models.weights``).
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  gives numpy the name bfloat16
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from models import families, weights
from models.families.parameters import Parameter
from models.functions import RopeScaling
from models.model_config import ModelConfig
from models.transformer import Transformer

INDEX = "model.safetensors.index.json"
GENERATION_FILE = "generation_config.json"


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
    for key, harmless in family.harmless.items():
        if key in hf and hf[key] not in harmless:
            raise ValueError(
                f"config.json has {key}={hf[key]!r}, which is not supported, only {harmless[0]!r}"
            )
    layers = need("num_hidden_layers")
    if hf.get("layer_types") not in (None, []) and hf["layer_types"] != ["full_attention"] * layers:
        raise ValueError(
            f"config.json has layer_types={hf['layer_types']!r}; only 'full_attention' is "
            f"supported, once for each of num_hidden_layers={layers!r}"
        )
    family.check_windows(hf, layers)
    rope = _rope(hf)
    if rope.get("partial_rotary_factor", 1) != 1:
        raise ValueError(
            f"config.json has partial_rotary_factor={rope['partial_rotary_factor']!r}, which is "
            "not supported, only 1"
        )
    return ModelConfig(
        vocab_size=need("vocab_size"),
        embed_dim=need("hidden_size"),
        mlp_dim=need("intermediate_size"),
        num_layers=layers,
        num_heads=need("num_attention_heads"),
        num_kv_heads=hf.get("num_key_value_heads") or need("num_attention_heads"),
        head_dim=hf.get("head_dim") or need("hidden_size") // need("num_attention_heads"),
        rope_theta=rope["rope_theta"],
        norm_eps=need("rms_norm_eps"),
        tied_embeddings=hf.get("tie_word_embeddings") or False,  # the three architectures' default
        **family.options,
        rope_scaling=_rope_scaling(rope),
        moe=None if family.experts is None else family.experts.read(hf, need),
    )


def config_to_dict(config: ModelConfig, *, max_positions: int) -> dict[str, Any]:
    """The contents of the ``config.json`` of a model.

    max_positions: the longest context that the model was trained for, in tokens. Raises ValueError
    for a model that is of no known architecture, or that has other methods of attention.
    """
    family = families.of_config(config)
    if set(config.attention) != set(ModelConfig.attention):
        raise ValueError(
            f"config.json has no words for attention={config.attention}, only for "
            f"{ModelConfig.attention}"
        )
    scaling = config.rope_scaling
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
        "rope_scaling": None
        if scaling is None
        else {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_positions,
        },
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": config.tied_embeddings,
        "torch_dtype": config.param_dtype,
        **({} if config.moe is None else family.experts.write(config.moe)),
    }


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


def load(directory: str | Path, config: ModelConfig, mesh: Mesh) -> Transformer:
    """The model of a checkpoint, sharded over ``mesh``.

    config: that of ``read_config``, perhaps with other dtypes.

    Raises ValueError naming each tensor that is missing, unexpected or of another shape, and files
    that are broken.
    """
    with _Checkpoint(Path(directory), config.tied_embeddings) as source:
        return weights.load(source, "huggingface", config, mesh)


def save(
    directory: str | Path,
    model: Transformer,
    *,
    max_positions: int,
    dtype: str | None = None,
    extra: Mapping[str, Any] | None = None,
    max_file_bytes: int = 5 * 10**9,
) -> None:
    """Writes ``config.json`` and safetensors, in several files above ``max_file_bytes``.

    In a program of several processes all of them call it, with one directory that all can write
    to. Tensors are gathered one by one, and the processes take turns with the files, so that a host
    holds one file's tensors at a time and never the whole model.

    dtype: of the stored tensors, ``config.param_dtype`` unless given. extra: more keys of
    ``config.json``, such as the ids of special tokens.

    Raises:
      FileExistsError: the directory already holds a checkpoint.
      ValueError: the model is none that ``config.json`` can describe, or the dtype cannot hold its
        numbers.
    """
    directory = Path(directory)
    dtype = dtype or model.config.param_dtype
    check_range(model, dtype)
    files = _split(model, np.dtype(dtype).itemsize, max_file_bytes)
    content = config_to_dict(model.config, max_positions=max_positions)
    content |= {"torch_dtype": dtype} | dict(extra or {})
    directory.mkdir(parents=True, exist_ok=True)
    present = sorted(path.name for path in directory.glob("*.safetensors*"))
    _wait_for_all("looked for files")  # before the first of them writes one
    if present:
        raise FileExistsError(f"{directory} already holds {', '.join(present)}")
    for index, (file_name, tensors) in enumerate(files.items()):
        writes = index % jax.process_count() == jax.process_index()
        arrays = {}
        for name, parameter, variable, at in tensors:
            array = _gathered(variable.get_value(), at, keep=writes)
            if writes:
                arrays[name] = parameter.to_stored(array).astype(dtype, copy=False)
        if writes:
            save_file(arrays, directory / file_name, metadata={"format": "pt"})
    _wait_for_all("wrote weights")
    if jax.process_index() == 0:
        if len(files) > 1:
            _write_index(directory, files, np.dtype(dtype).itemsize)
        # last, so that a folder with a config.json is complete
        write_json(directory / "config.json", content)
    _wait_for_all("wrote config.json")


def check_range(model: Any, dtype: str) -> None:
    """Raises ValueError, which names the parameters, where the dtype would make a finite number of
    a model infinite.
    """
    too_large = {}
    for path, size in jax.tree_util.tree_leaves_with_path(jax.device_get(_largest(model))):
        with np.errstate(over="ignore"):  # it is what is looked for
            stored = np.asarray(size, np.float32).astype(dtype)
        if np.isfinite(size) and not np.isfinite(stored):
            too_large[jax.tree_util.keystr(path)] = float(size)
    if too_large:
        name = max(too_large, key=too_large.get)
        raise ValueError(
            f"dtype={dtype!r} holds numbers up to {float(jnp.finfo(dtype).max):g}, and "
            f"{len(too_large)} parameters have larger ones, the largest {name} with "
            f"{too_large[name]:g}; use 'bfloat16' or 'float32'"
        )


@jax.jit
def _largest(model: Any) -> Any:
    """The largest absolute value of each parameter, float32, whole on every device."""
    return jax.tree.map(lambda x: jnp.max(jnp.abs(x)).astype(jnp.float32), model)


def _split(
    model: Transformer, itemsize: int, max_file_bytes: int
) -> dict[str, list[tuple[str, Parameter, Any, tuple[int, ...]]]]:
    """File name -> the tensors in it, as ``weights.stored_tensors`` gives them."""
    files: list[list] = [[]]
    size = 0
    for tensor in weights.stored_tensors(model, "huggingface"):
        num_bytes = _elements(tensor) * itemsize
        if files[-1] and size + num_bytes > max_file_bytes:
            files.append([])
            size = 0
        files[-1].append(tensor)
        size = size + num_bytes
    if len(files) == 1:
        return {"model.safetensors": files[0]}
    return {
        f"model-{number:05}-of-{len(files):05}.safetensors": tensors
        for number, tensors in enumerate(files, start=1)
    }


def _write_index(directory: Path, files: Mapping[str, list], itemsize: int) -> None:
    """The index of a checkpoint in several files: which tensor is in which."""
    total = sum(_elements(tensor) for tensors in files.values() for tensor in tensors) * itemsize
    weight_map = {tensor[0]: name for name, tensors in files.items() for tensor in tensors}
    write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _elements(tensor: tuple[str, Parameter, Any, tuple[int, ...]]) -> int:
    """Number of elements of a stored tensor."""
    _, _, variable, at = tensor
    return math.prod(variable.shape[len(at) :])


def _gathered(array: jax.Array, at: tuple[int, ...], keep: bool) -> np.ndarray | None:
    """The part of a parameter at this layer and expert, on this host; None unless it is kept here.

    at: as ``weights.stored_tensors`` gives it.
    """
    if array.is_fully_addressable:
        return np.asarray(array[at]) if keep else None
    # Shards are on other hosts. All hosts run this program, which gives each the whole tensor.
    everywhere = NamedSharding(array.sharding.mesh, PartitionSpec())
    whole = _replicate(array, tuple(map(jnp.int32, at)), everywhere)
    return np.asarray(whole.addressable_data(0)) if keep else None


@functools.partial(jax.jit, static_argnames="sharding")
def _replicate(array: jax.Array, at: tuple[jax.Array, ...], sharding: NamedSharding) -> jax.Array:
    """The part of an array at these indices of its first axes, whole on every device."""
    return jax.lax.with_sharding_constraint(array[at], sharding)


def _wait_for_all(reached: str) -> None:
    """Blocks until every process of the program is here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"huggingface.save: {reached}")


class _Checkpoint:
    """The safetensors files of a directory as one ``weights.Source``; a context manager that closes
    them.
    """

    def __init__(self, directory: Path, tied_embeddings: bool):
        self.path = directory
        self._files = ExitStack()
        self._owner: dict[str, Any] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        try:
            self._open()
        except BaseException:
            self._files.close()
            raise
        if tied_embeddings and "lm_head.weight" in self.shapes:
            self._drop_copy_of_embedding()

    def __enter__(self) -> _Checkpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self._files.close()

    def read(self, name: str, block: tuple[slice, ...]) -> np.ndarray:
        """A block of a tensor."""
        return self._owner[name].get_slice(name)[block]

    def _open(self) -> None:
        index = self.path / INDEX
        if index.exists():
            names = sorted(
                set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
        else:
            names = ["model.safetensors"]
        for name in names:
            if not (self.path / name).exists():
                raise FileNotFoundError(
                    f"{self.path / name}, which {index.name if index.exists() else 'load'} needs"
                )
            try:
                file = self._files.enter_context(safe_open(self.path / name, framework="np"))
            except SafetensorError as error:
                raise ValueError(
                    f"{self.path / name} is not a whole safetensors file: {error}"
                ) from error
            for key in file.keys():
                self._owner[key] = file
                self.shapes[key] = tuple(file.get_slice(key).get_shape())

    def _drop_copy_of_embedding(self) -> None:
        """Some tied checkpoints hold the embedding twice; a different second one is left to be
        refused.
        """
        head, table = "lm_head.weight", "model.embed_tokens.weight"
        if self.shapes.get(table) == self.shapes[head]:
            if np.array_equal(
                self._owner[head].get_tensor(head), self._owner[table].get_tensor(table)
            ):
                del self.shapes[head]


# Keys of config.json itself that say something about RoPE.
_ROPE_KEYS = ("rope_theta", "original_max_position_embeddings")


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


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", "default")
    if kind == "default":
        if rope.get("factor", 1) != 1:
            raise ValueError(
                f"config.json has factor={rope['factor']!r} for RoPE of type 'default', which has "
                "none; say which rope_type it is for"
            )
        return None
    if kind != "llama3":
        raise ValueError(f"RoPE of type {kind!r} is not supported, only 'default' and 'llama3'")
    try:
        return RopeScaling(
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_positions=int(rope["original_max_position_embeddings"]),
        )
    except TypeError as error:
        raise ValueError(f"RoPE scaling of type 'llama3': {error}") from error
    except KeyError as error:
        raise ValueError(f"RoPE scaling of type 'llama3' has no {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; raises ValueError, which names the file, when it holds none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object")
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes an indented JSON file."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
