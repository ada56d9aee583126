"""Reads from a compiled program what its devices send each other: collectives by kind, by the
devices that take part, and in bytes.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from planner import hlo as hlo_text
from planner.hlo import Instruction

_LISTED = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_COUNTED = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_NAMED = re.compile(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}")
_AXIS = re.compile(r"'(\w+)'=(\d+)")
_PART = re.compile(r"'(\w+)'(?::\((\d+)\)(\d+))?")
# The first operand of an instruction.
_FIRST = re.compile(r"[^%)]*%([\w.\-]+)")
_PAIRS = re.compile(r"\{(\d+),(\d+)\}")

# By kind: bytes that one device of n sends for each byte of its result, with a ring or a direct
# exchange. They are the fewest that give the result without sums inside the network.
_SENT = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: float(n - 1),
    "all-to-all": lambda n: (n - 1) / n,
    "ragged-all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1.0 if n > 1 else 0.0,
}


@dataclasses.dataclass(frozen=True, order=True)
class Kind:
    """Collectives that are alike."""

    # As HLO names it, such as "all-reduce".
    operation: str
    # How many devices take part in one.
    devices: int
    # Whether these are not all in one domain of fast links.
    leaves_domain: bool


def sent_bytes(
    hlo: str, domain: int, unknown_trips: float | Sequence[float] = 1.0
) -> dict[Kind, float]:
    """Bytes that each device sends while a program runs once, by kind of collective.

    Of a ragged all-to-all no more rows are counted than a device has to send.

    hlo: the optimised HLO text of a program that is cut over several devices.
    domain: device i is in domain i // domain. unknown_trips: as for ``hlo.total``.

    Raises ValueError for a collective whose devices are written in a way that is not known.
    """

    def value(line: Instruction, shapes: Mapping[str, str]) -> dict[Kind, float]:
        operation = line.operation.removesuffix("-start")
        if operation not in _SENT:
            return {}
        groups = device_groups(line)
        kind = Kind(operation, groups.shape[1], bool(np.any(np.ptp(groups // domain, axis=1))))
        size = _result_bytes(line)
        if operation == "ragged-all-to-all" and (rows := _FIRST.match(line.rest)):
            size = min(size, hlo_text.arrays(shapes[rows[1]])[0].bytes)
        return {kind: _SENT[operation](groups.shape[1]) * size}

    found = hlo_text.total(hlo, value, unknown_trips)
    return {kind: size for kind, size in sorted(found.items()) if size}


def device_groups(line: Instruction) -> np.ndarray:
    """The devices that take part in a collective together: one row of numbers for each group.

    Of groups that a program lists only the first is given, of a permutation the pairs that differ.
    """
    if line.operation.startswith("collective-permute"):
        text = line.rest.partition("source_target_pairs={")[2].partition("}}")[0] + "}"
        pairs = np.array([(int(a), int(b)) for a, b in _PAIRS.findall(text)]).reshape(-1, 2)
        apart = pairs[pairs[:, 0] != pairs[:, 1]]
        return apart if len(apart) else np.zeros((1, 1), int)
    if found := _LISTED.search(line.rest):
        return np.array([[int(x) for x in found[1].split(",")]])
    if found := _COUNTED.search(line.rest):
        sizes = _numbers(found[3])
        ids = np.arange(math.prod(sizes)).reshape(sizes)
        if found[4]:
            ids = ids.transpose(_numbers(found[4]))
        return ids.reshape(int(found[1]), int(found[2]))
    if found := _NAMED.search(line.rest):
        return _of_axes(found[1], found[2])
    raise ValueError(f"which devices take part is not known: {line.operation}({line.rest[:300]}")


def _of_axes(mesh: str, chosen: str) -> np.ndarray:
    """Groups that are written as axes of a mesh, or as parts of axes: 'a':(2)4 is the part of size
    4 of the axis a that has 2 places of larger stride before it.
    """
    parts = {
        name: (int(before or 1), int(size or 0)) for name, before, size in _PART.findall(chosen)
    }
    shape: list[int] = []
    together: list[int] = []
    for name, text in _AXIS.findall(mesh):
        size = int(text)
        before, own = parts.get(name, (size, 1))
        own = own or size
        together += [len(shape) + 1] * (name in parts)
        shape += [before, own, size // (before * own)]
    ids = np.arange(math.prod(shape)).reshape(shape)
    ids = np.moveaxis(ids, together, range(-len(together), 0))
    return ids.reshape(-1, math.prod(shape[axis] for axis in together))


def _result_bytes(line: Instruction) -> float:
    """Bytes of a collective's result on one device. That of an asynchronous one is written after
    its operands.
    """
    shapes = hlo_text.arrays(line.shape)
    if line.operation.endswith("-start"):
        shapes = [x for x in shapes if x.sizes or x.dtype not in ("u32", "s32")]
        shapes = shapes[len(shapes) // 2 :]
    return sum(x.bytes for x in shapes)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]
