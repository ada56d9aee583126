"""Adapters in and out of PEFT's format: ``adapter_config.json`` and ``adapter_model.safetensors``.

A tensor is named after the matrix that it belongs to, and has the outputs first like those of a
Hugging Face checkpoint: lora_A [rank, in] and lora_B [out, rank].
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from models import families
from models.huggingface import check_range
from models.json_files import read_json, write_json
from models.lora import TARGETS, Adapters, LoRA, trained
from models.model_config import ModelConfig
from models.sharding import parameter_shardings
from models.transformer import Transformer, abstract_model

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
# Keys of adapter_config.json that do not change what an adapter computes once it is trained.
_HARMLESS = (
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "lora_dropout",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
)
# What other keys may have: all that says that a variant is off.
_OFF = (None, False, "none", [], {})
# Ways to begin an adapter that leave its base as it is; PiSSA, for one, changes it.
_BEGINNINGS = (True, False, "gaussian", "orthogonal", "eva")


def read_config(directory: str | Path) -> LoRA:
    """The adapters that a folder holds.

    Raises FileNotFoundError when there are none, and ValueError, which names the file and the key,
    for adapters of another kind.
    """
    path = Path(directory) / CONFIG
    content = read_json(path)
    try:
        return config_from_dict(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def config_from_dict(content: Mapping[str, Any]) -> LoRA:
    """``read_config`` of the file's content."""
    content = dict(content)
    kind = content.pop("peft_type", None)
    if kind != "LORA":
        raise ValueError(f"peft_type={kind!r} is not supported, only 'LORA'")
    missing = [key for key in ("r", "lora_alpha", "target_modules") if key not in content]
    if missing:
        raise ValueError(f"there is no {', '.join(missing)}")
    rank, alpha, targets = (content.pop(key) for key in ("r", "lora_alpha", "target_modules"))
    rslora = content.pop("use_rslora", False)
    if not isinstance(targets, list):
        raise ValueError(
            f"target_modules={targets!r} is a pattern; only a list of names among "
            f"{', '.join(TARGETS)} is supported"
        )
    begun = content.pop("init_lora_weights", True)
    if begun not in _BEGINNINGS:
        raise ValueError(f"init_lora_weights={begun!r} is not supported: it changes the base")
    for key, value in content.items():
        if key not in _HARMLESS and value not in _OFF:
            raise ValueError(f"{key}={value!r} is not supported, only a LoRA without it")
    in_order = [name for name in TARGETS if name in targets]
    unknown = [name for name in targets if name not in TARGETS]
    return LoRA(rank, float(alpha), (*in_order, *unknown), rslora)


def config_to_dict(lora: LoRA, base: str | None) -> dict[str, Any]:
    """The content of ``adapter_config.json``.

    base: where PEFT finds the model that the adapters belong to; None where it is not said.
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": list(lora.targets),
        "use_rslora": lora.rslora,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def save(
    directory: str | Path, model: Transformer, *, base: str | None, dtype: str | None = None
) -> None:
    """Writes the adapters of a model. In a program of several processes all of them call it, and
    the first one writes.

    base: as for ``config_to_dict``. dtype: of the stored tensors, that of the model unless given.

    Raises:
      FileExistsError: the directory already holds adapters.
      ValueError: the dtype cannot hold their numbers.
    """
    directory = Path(directory)
    adapters = trained(model)
    check_range(adapters, dtype or model.config.param_dtype)
    found = jax.tree.leaves(adapters)[0].sharding
    if isinstance(found, NamedSharding):
        whole = NamedSharding(found.mesh, PartitionSpec())
        adapters = jax.jit(lambda x: x, out_shardings=whole)(adapters)
    if jax.process_index() == 0:
        if (directory / CONFIG).exists():
            raise FileExistsError(f"{directory} already holds {CONFIG}")
        directory.mkdir(parents=True, exist_ok=True)
        tensors = {}
        for name, stack, part, row in _tensors(model.config, adapters):
            # of several processes each holds all of it
            array = np.asarray(getattr(adapters[stack], part)[...].addressable_data(0)[row])
            rank_last = array.reshape(-1, array.shape[-1])
            flat = rank_last if part.endswith("_a") else array.reshape(array.shape[0], -1)
            tensors[name] = np.ascontiguousarray(flat.T).astype(dtype or array.dtype)
        save_file(tensors, directory / TENSORS, metadata={"format": "pt"})
        # last, so that a folder with this file is complete
        write_json(directory / CONFIG, config_to_dict(model.config.lora, base))
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("peft.save")


def load(directory: str | Path, config: ModelConfig, mesh: Mesh) -> dict[str, Adapters]:
    """The adapters of a folder by their stack, sharded over ``mesh``, in ``config.param_dtype``.

    config: of the model that they belong to, with its ``lora``. Raises as ``check``.
    """
    abstract = trained(abstract_model(config))
    stored = _read(Path(directory), config)
    parts: dict[tuple[str, str], list[np.ndarray]] = {}
    for name, stack, part, _ in _tensors(config, abstract):
        parts.setdefault((stack, part), []).append(stored[name].T)
    shardings = trained(parameter_shardings(abstract_model(config), mesh))
    for (stack, part), rows in parts.items():
        variable = getattr(abstract[stack], part)
        # the axes of the matrix were flattened
        whole = np.stack(rows).reshape(variable.shape).astype(variable.dtype)
        sharding = getattr(shardings[stack], part).get_value()
        array = jax.make_array_from_callback(whole.shape, sharding, lambda index, x=whole: x[index])
        setattr(abstract[stack], part, variable.replace(array))
    return abstract


def check(directory: str | Path, config: ModelConfig) -> None:
    """Raises FileNotFoundError or ValueError, which names what differs, unless a folder holds the
    adapters of ``config.lora`` for a model of this shape.
    """
    there, here = read_config(directory), config.lora
    differing = [
        f"{name}={one!r} there, {other!r} here"
        for name, one, other in (
            ("rank", there.rank, here.rank),
            ("alpha", there.alpha, here.alpha),
            ("targets", there.targets, tuple(name for name in TARGETS if name in here.targets)),
            ("rslora", there.rslora, here.rslora),
        )
        if one != other
    ]
    if differing:
        raise ValueError(f"{directory} holds other adapters: {'; '.join(differing)}")
    _read(Path(directory), config)


def _tensors(
    config: ModelConfig, adapters: Mapping[str, Adapters]
) -> Iterator[tuple[str, str, str, int]]:
    """(PEFT's name, stack, parameter such as "q_a", row of the stack) of each tensor, by layers."""
    parameters = families.of_config(config).parameters
    for stack in adapters:
        first = 0 if stack == "first_layers" else config.dense_layers
        layers = getattr(adapters[stack], f"{TARGETS[config.lora.targets[0]]}_a").shape[0]
        for row in range(layers):
            for target in config.lora.targets:
                name = TARGETS[target]
                matrix = parameters[f"{stack}.{name}"].huggingface.format(first + row)
                for part, letter in (("a", "A"), ("b", "B")):
                    own = matrix.replace(".weight", f".lora_{letter}.weight")
                    yield f"base_model.model.{own}", stack, f"{name}_{part}", row


def _read(directory: Path, config: ModelConfig) -> dict[str, np.ndarray]:
    """The tensors of a folder by name. Raises ValueError unless they are those of the config."""
    path = directory / TENSORS
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        stored = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error
    abstract = trained(abstract_model(config))
    expected = {}
    for name, stack, part, _ in _tensors(config, abstract):
        shape = getattr(abstract[stack], part).shape[1:]
        sizes = (
            (shape[-1], math.prod(shape[:-1]))
            if part.endswith("_a")
            else (math.prod(shape[1:]), shape[0])
        )
        expected[name] = sizes
    found = {name: array.shape for name, array in stored.items()}
    wrong = [
        f"{name}: expected {expected.get(name, 'no such tensor')}, "
        f"found {found.get(name, 'no such tensor')}"
        for name in [*expected, *(name for name in found if name not in expected)]
        if expected.get(name) != found.get(name)
    ]
    if wrong:
        base = read_json(directory / CONFIG).get("base_model_name_or_path")
        more = f"\n  and {len(wrong) - 10} more" if len(wrong) > 10 else ""
        raise ValueError(
            f"{path} does not fit the model; it was made for {base!r}:\n  "
            + "\n  ".join(wrong[:10])
            + more
        )
    return stored
