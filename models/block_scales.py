"""Matrices in FP8 with a scale for every block, as the files of DeepSeek-V3 have them.

Beside a matrix "weight" of e4m3 numbers stands "weight_scale_inv", float32, with a scale for each
block of rows and columns. The matrix is the product of both. It is expanded when it is read.

Dimensions: R rows, C columns, of which a block has some.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from models.json_files import read_json

# How the names of scales end, behind those of their matrices.
SUFFIX = "_scale_inv"
# The dtype of such matrices in the header of a safetensors file.
DTYPE = "F8_E4M3"
_KEY = "quantization_config"


def block_of(hf: Mapping[str, Any]) -> tuple[int, int] | None:
    """(rows, columns) of a block by a ``config.json``; None for files that are not in FP8.

    Raises ValueError for numbers of another kind.
    """
    found = hf.get(_KEY)
    if found is None:
        return None
    match found:
        case {"quant_method": "mxfp4"}:
            return None  # ``mxfp4`` knows its tensors by their names
        case {"quant_method": "fp8", "weight_block_size": [int(rows), int(columns)]}:
            if found.get("fmt", "e4m3") == "e4m3" and rows > 0 and columns > 0:
                return rows, columns
    raise ValueError(
        f"config.json has {_KEY}={found!r}, which is not supported, only quant_method='fp8' with "
        "fmt='e4m3' and weight_block_size=[rows, columns], or 'mxfp4', or no such key"
    )


def block_in(directory: Path) -> tuple[int, int] | None:
    """``block_of`` the ``config.json`` of a folder, which need not have one."""
    path = directory / "config.json"
    return block_of(read_json(path)) if path.exists() else None


def eight_bit(path: Path, name: str) -> np.ndarray:
    """The e4m3 numbers of a tensor of a safetensors file, mapped from the file.

    The published reader has no e4m3 for numpy.
    """
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        entry = json.loads(file.read(length))[name]
    first, _ = entry["data_offsets"]
    raw = np.memmap(path, np.uint8, "r", 8 + length + first, tuple(entry["shape"]))
    return raw.view(ml_dtypes.float8_e4m3fn)


def expanded(
    numbers: np.ndarray, scales: np.ndarray, block: tuple[int, int], part: tuple[slice, ...]
) -> np.ndarray:
    """A part of the matrix [R, C] in float32.

    numbers: e4m3, [R, C]. scales: [R / rows, C / columns], rounded up. part: a slice of each axis.
    """
    rows, columns = (
        np.arange(*one.indices(size)) for one, size in zip(part, numbers.shape, strict=True)
    )
    own = scales[rows // block[0]][:, columns // block[1]]
    return numbers[part].astype(np.float32) * own.astype(np.float32)


def scales_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """The shape of the scales of a matrix [R, C]."""
    return tuple(-(-size // one) for size, one in zip(shape, block, strict=False))
