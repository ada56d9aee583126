"""Matrices of experts in MXFP4 (OCP Microscaling Formats 1.0), as the files of gpt-oss have them.

In place of a tensor "name" stand "name_blocks", two numbers of 4 bits (e2m1) in each byte, the
lower half first, and "name_scales", the exponent of 2 of each block of 32 numbers, with 127 for 0.
They are expanded to bfloat16, which holds all of these numbers exactly unless they are almost 0.

Dimensions: E experts, O outputs, G blocks of a row, I = 32 G inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import ml_dtypes
import numpy as np

BLOCKS, SCALES = "_blocks", "_scales"
# Numbers of a block.
_SIZE = 32
# By sign, exponent and mantissa.
_NUMBERS = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_NUMBERS = np.concatenate([_NUMBERS, -_NUMBERS])


def expanded(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The matrices [E, I, O] in bfloat16, with the inputs first.

    blocks: uint8 [E, O, G, 16]. scales: uint8 [E, O, G].
    """
    experts, outputs, groups, _ = blocks.shape
    out = np.empty((experts, groups * _SIZE, outputs), ml_dtypes.bfloat16)
    for expert in range(experts):  # in float32 one at a time
        halves = np.stack([blocks[expert] & 15, blocks[expert] >> 4], axis=-1)
        numbers = _NUMBERS[halves.reshape(outputs, groups, _SIZE)]
        powers = scales[expert].astype(np.int32) - 127
        out[expert] = np.ldexp(numbers, powers[..., None]).reshape(outputs, -1).T
    return out


def views(
    shapes: dict[str, tuple[int, ...]], read: Callable[[str], np.ndarray]
) -> dict[str, Callable[[], np.ndarray]]:
    """Functions that give the tensors that stand in MXFP4, by name.

    shapes: of the files' tensors; those in MXFP4 give way to what they are expanded to. read: the
    whole of one of them. Pairs whose shapes do not fit are left, and the check that follows names
    them.
    """
    found = {}
    for blocks in [name for name in shapes if name.endswith(BLOCKS)]:
        name = blocks.removesuffix(BLOCKS)
        shape = shapes[blocks]
        if len(shape) != 4 or shape[3] != _SIZE // 2 or shapes.get(name + SCALES) != shape[:3]:
            continue
        del shapes[blocks], shapes[name + SCALES]
        experts, outputs, groups, _ = shape
        shapes[name] = experts, groups * _SIZE, outputs
        found[name] = functools.partial(_read, name, read)
    return found


def _read(name: str, read: Callable[[str], np.ndarray]) -> np.ndarray:
    return expanded(read(name + BLOCKS), read(name + SCALES))
