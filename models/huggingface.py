"""Reads and writes Hugging Face checkpoints: safetensors, in one file or in several with an index,
and a ``config.json`` (``models.huggingface_config``).

``models.families`` says which architectures there are and what is special about each. Tensors are
read by slices straight into their shards, and written one at a time (``models.weights``).
"""

from __future__ import annotations

import functools
import logging
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

from models import block_scales, weights
from models.families.parameters import Parameter
from models.file_tensors import belongs_to_previous, file_names, file_tensors, own_name, views
from models.huggingface_config import config_to_dict
from models.json_files import read_json, write_json
from models.model_config import ModelConfig
from models.transformer import Transformer

INDEX = "model.safetensors.index.json"


def load(directory: str | Path, config: ModelConfig, mesh: Mesh) -> Transformer:
    """The model of a checkpoint, sharded over ``mesh``.

    config: that of ``huggingface_config.read_config``, perhaps with other dtypes.

    Raises ValueError naming each tensor that is missing, unexpected or of another shape, and files
    that are broken.
    """
    with _Checkpoint(Path(directory), config) as source:
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
                array = parameter.to_stored(array).astype(dtype, copy=False)
                arrays[name] = array
        if writes:
            arrays = file_tensors(model.config, arrays)
            save_file(arrays, directory / file_name, metadata={"format": "pt"})
    _wait_for_all("wrote weights")
    if jax.process_index() == 0:
        if len(files) > 1:
            _write_index(directory, model.config, files, np.dtype(dtype).itemsize)
        # last, so that a folder with a config.json is complete
        write_json(directory / "config.json", content)
    _wait_for_all("wrote config.json")


def check_range(model: Any, dtype: str) -> None:
    """Raises ValueError, which names the parameters, where the dtype would make a finite number of
    a model infinite.
    """
    if all(_holds(dtype, leaf.dtype) for leaf in jax.tree.leaves(model)):
        return
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


def _holds(dtype: str, other: np.dtype) -> bool:
    """A floating dtype has no finite number that is infinite in ``dtype``."""
    floating = jnp.issubdtype(other, jnp.floating)
    return floating and float(jnp.finfo(other).max) <= float(jnp.finfo(dtype).max)


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
        full = size + num_bytes > max_file_bytes
        if files[-1] and full and not belongs_to_previous(model.config, tensor[0]):
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


def _write_index(
    directory: Path, config: ModelConfig, files: Mapping[str, list], itemsize: int
) -> None:
    """The index of a checkpoint in several files: which tensor is in which."""
    total = sum(_elements(tensor) for tensors in files.values() for tensor in tensors) * itemsize
    weight_map = {
        stored: name
        for name, tensors in files.items()
        for tensor in tensors
        for stored in file_names(config, tensor[0])
    }
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
        if not keep:
            return None
        if [device.platform for device in array.devices()] == ["cpu"]:
            return np.asarray(array)[at]  # in this memory already: no program has to copy it
        return np.asarray(array[at])
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
    """Safetensors files of a directory as one ``weights.OpenCheckpoint``; a context manager that
    closes them.
    """

    def __init__(self, directory: Path, config: ModelConfig):
        self.path = directory
        self._files = ExitStack()
        self._config = config
        self._skipped: list[str] = []
        # rows and columns of a block of scales
        self._block = block_scales.block_in(directory)
        # the file of each tensor, and its name there
        self._owner: dict[str, tuple[Any, str]] = {}
        # the file of every matrix in FP8
        self._eight_bit: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        try:
            self._open()
            self._views = views(config, self.shapes, self._whole)
        except BaseException:
            self._files.close()
            raise
        if config.tied_embeddings and "lm_head.weight" in self.shapes:
            self._drop_copy_of_embedding()

    def __enter__(self) -> _Checkpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self._files.close()

    def read(self, name: str, block: tuple[slice, ...]) -> np.ndarray:
        """A block of a tensor."""
        if name in self._views:
            return self._views[name]()[block]
        owner, stored = self._owner[name]
        if name in self._eight_bit:
            return self._expanded(name, block)
        return owner.get_slice(stored)[block]

    def _whole(self, name: str) -> np.ndarray:
        owner, stored = self._owner[name]
        if name in self._eight_bit:
            return self._expanded(name, (slice(None),) * len(self.shapes[name]))
        return owner.get_tensor(stored)

    def _expanded(self, name: str, part: tuple[slice, ...]) -> np.ndarray:
        """A part of a matrix in FP8."""
        numbers = block_scales.eight_bit(self._eight_bit[name], self._owner[name][1])
        owner, stored = self._owner[name + block_scales.SUFFIX]
        return block_scales.expanded(numbers, owner.get_tensor(stored), self._block, part)

    def _open(self) -> None:
        index = self.path / INDEX
        if index.exists():
            names = sorted(set(read_json(index)["weight_map"].values()))
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
                own = own_name(self._config, key)
                if own is None:
                    self._skipped.append(key)
                    continue
                self._owner[own] = file, key
                self.shapes[own] = tuple(file.get_slice(key).get_shape())
                if file.get_slice(key).get_dtype() == block_scales.DTYPE:
                    self._eight_bit[own] = self.path / name
        self._take_scales()
        if self._skipped:
            logging.warning(
                "%s: %d tensors are no part of the text model and are not read, such as %s",
                self.path,
                len(self._skipped),
                self._skipped[0],
            )

    def _take_scales(self) -> None:
        """Takes the scales of matrices in FP8 from the tensors. Raises ValueError for those that
        are not there or have another shape.
        """
        for name in self._eight_bit:
            found = self.shapes.pop(name + block_scales.SUFFIX, None)
            if self._block is None:
                raise ValueError(
                    f"{self.path}: {name} is in FP8, and config.json has no quantization_config "
                    "that says how large the blocks of its scales are"
                )
            wanted = block_scales.scales_shape(self.shapes[name], self._block)
            if found != wanted:
                raise ValueError(
                    f"{self.path}: {name}{block_scales.SUFFIX}: expected {wanted}, found "
                    f"{found or 'no such tensor'}"
                )

    def _drop_copy_of_embedding(self) -> None:
        """Some tied checkpoints hold the embedding twice; a different second one is left to be
        refused.
        """
        head, table = "lm_head.weight", "model.embed_tokens.weight"
        if self.shapes.get(table) == self.shapes[head]:
            if np.array_equal(self._whole(head), self._whole(table)):
                del self.shapes[head]
