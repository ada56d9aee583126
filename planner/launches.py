"""Reads from a program compiled for a GPU what it starts on the device: kernels and copies, what
each of them moves, and which of them a loop does again though nothing that it reads has changed.

Bytes are those of the arrays that a launch must read and write once, as if caches were perfect: of
an operand that a fusion slices or gathers from only the part that it uses, of an update in place
only the part that is written. Of a kernel of ours, which the compiler does not see into, operands
and results count whole, unless ``launches`` is told otherwise; a result that lies where an operand
does is written in place, nobody knows how much of it, and does not count. The workspace of a
library's product does not count, and a library may start more than one kernel for a product that is
one launch here.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal

from planner import hlo as hlo_text
from planner.hlo import Instruction, arrays

type Kind = Literal["product", "kernel", "copy", "collective", "other"]
type Computations = Mapping[str, Sequence[Instruction]]

# What starts nothing on the device.
_NOTHING = {
    *("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all"),
    *(
        "add-dependency",
        "opt-barrier",
        "partition-id",
        "replica-id",
        "while",
        "conditional",
        "call",
    ),
}
# What moves numbers and computes none; a cast makes others of them, for which they move as well.
_MOVES = {
    *("bitcast", "broadcast", "concatenate", "convert", "copy", "dynamic-slice", "gather", "pad"),
    *("dynamic-update-slice", "get-tuple-element", "reshape", "reverse", "slice", "transpose"),
    *("tuple", "copy-start", "iota"),
}
# Of these the first operand is read where the others say, or is what is updated in place.
_AT_PLACES = {"dynamic-slice": 1, "gather": 1}
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
_COLLECTIVES = (
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
)
_PRODUCTS = {"dot", "convolution", "scaled-dot"}
_CALLS = re.compile(r"calls=%?([\w.\-]+)")
_INSIDE = {
    "while": re.compile(r"(?:body|condition)=%?([\w.\-]+)"),
    "call": re.compile(r"to_apply=%?([\w.\-]+)"),
    "async-start": _CALLS,
}
_BRANCHES = re.compile(
    r"(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=(%?[\w.\-]+))"
)
_LIBRARY = re.compile(r'custom_call_target="(?:__cublas|__triton_gemm|__cudnn)')
_IN_PLACE = re.compile(r"output_to_operand_aliasing=\{(.*?\))\}")
_SOURCE = re.compile(r'op_name="([^"]*)"')


@dataclasses.dataclass(frozen=True)
class Launch:
    """Something that the program starts on the device, and how often it does."""

    # The instruction's, such as "loop_add_fusion.2".
    name: str
    # A copy computes nothing: it moves numbers, or casts them.
    kind: Kind
    # Of JAX's operation that it comes from.
    source: str
    # Bytes of one launch.
    read: float
    written: float
    # How often it runs in one call of the program.
    times: float
    # Loops around it.
    depth: int
    # Whether nothing that it reads changes from trip to trip of its loop.
    again: bool

    @property
    def bytes(self) -> float:
        """Bytes of all its runs."""
        return self.times * (self.read + self.written)


def launches(
    hlo: str,
    unknown_trips: float | Sequence[float] = 1.0,
    kernel_bytes: Callable[[Instruction, Sequence[str]], tuple[float, float] | None] | None = None,
) -> list[Launch]:
    """All launches of a program in the order in which they are written; of a choice between
    branches those of the one with the most bytes.

    hlo: the optimised HLO text (``compiled.as_text()``). unknown_trips: as for ``hlo.total``.
    kernel_bytes: of a call of a kernel of ours and the shapes of its operands to the bytes that it
      (reads, writes), or to None where its arrays count whole.

    Raises ValueError for a text that is not that of a compiled program.
    """
    computations, entry = hlo_text.parse(hlo)
    depths = [float(unknown_trips)] if isinstance(unknown_trips, int | float) else [*unknown_trips]

    def walk(name: str, times: float, loops: int, unknown: int) -> Iterator[Launch]:
        lines = computations.get(name, ())
        shapes = {line.name: line.shape for line in lines}
        fixed = _fixed(lines) if loops else set()
        for line in lines:
            if line.operation == "while":
                known = hlo_text.trips_of(line, lines, computations)
                trips = depths[min(unknown, len(depths) - 1)] if known is None else known
                for called in _INSIDE["while"].findall(line.rest):
                    yield from walk(called, times * trips, loops + 1, unknown + (known is None))
            elif line.operation == "conditional":
                branches = [list(walk(x, times, loops, unknown)) for x in _branches(line)]
                yield from max(branches, key=lambda own: sum(x.bytes for x in own), default=[])
            elif inside := _INSIDE.get(line.operation):
                for called in inside.findall(line.rest):
                    yield from walk(called, times, loops, unknown)
            elif line.operation not in _NOTHING and not line.operation.endswith(
                ("-done", "-update")
            ):
                source = _SOURCE.search(line.rest)
                yield Launch(
                    line.name,
                    _kind(line, computations),
                    source[1] if source else "",
                    *_moved(line, shapes, computations, kernel_bytes),
                    times,
                    loops,
                    line.name in fixed,
                )

    return list(walk(entry, 1.0, 0, 0))


def _branches(line: Instruction) -> list[str]:
    found = itertools.chain.from_iterable(
        (listed or one).split(",") for listed, one in _BRANCHES.findall(line.rest)
    )
    return [name.strip().removeprefix("%") for name in found]


def _fixed(body: Sequence[Instruction]) -> set[str]:
    """The instructions of a loop's body whose results are the same in every trip."""
    if not body:
        return set()
    root = body[-1]
    by_name = {line.name: line for line in body}
    kept = set()
    if root.operation == "tuple":
        ends = [by_name.get(name) for name in root.operands]
        kept = {at for at, end in enumerate(ends) if end is not None and end.index == at}
    found: set[str] = set()
    for line in body:
        if (
            line.operation == "get-tuple-element"
            and by_name[line.operands[0]].operation == "parameter"
        ):
            same = line.index in kept
        elif line.operation == "parameter":
            same = False
        else:
            same = all(name in found for name in line.operands)
        if same:
            found.add(line.name)
    return found


def _called(line: Instruction, computations: Computations) -> Sequence[Instruction]:
    """The instructions that are fused in one; none of another instruction."""
    fused = line.operation in ("fusion", "fusion-start")
    called = _CALLS.search(line.rest) if fused else None
    return computations.get(called[1], ()) if called else ()


def _kind(line: Instruction, computations: Computations) -> Kind:
    operation = line.operation.removesuffix("-start")
    inside = _called(line, computations)
    if operation in _COLLECTIVES:
        return "collective"
    if operation == "custom-call":
        return "product" if _LIBRARY.search(line.rest) else "kernel"
    if operation in _PRODUCTS or any(_multiplies(x, computations) for x in inside):
        return "product"
    moved = _data_path(inside) if inside else [line]
    return "copy" if all(x.operation in _MOVES for x in moved) else "other"


def _multiplies(line: Instruction, computations: Computations) -> bool:
    if line.operation in _PRODUCTS:
        return True
    if line.operation == "custom-call":
        return bool(_LIBRARY.search(line.rest))
    return any(_multiplies(x, computations) for x in _called(line, computations))


def _data_path(lines: Sequence[Instruction]) -> list[Instruction]:
    """Instructions that a fusion's numbers go through; without those that say where they lie."""
    by_name = {line.name: line for line in lines}
    found: dict[str, Instruction] = {}
    left = [lines[-1]]
    while left:
        line = left.pop()
        if line.name in found or line.operation in ("parameter", "constant"):
            continue
        found[line.name] = line
        operands = line.operands
        if line.operation in _AT_PLACES:
            operands = operands[:1]
        elif line.operation == "dynamic-update-slice":
            operands = operands[:2]
        left += [by_name[name] for name in operands if name in by_name]
    return list(found.values())


def _moved(
    line: Instruction,
    shapes: Mapping[str, str],
    computations: Computations,
    kernel_bytes: Callable[[Instruction, Sequence[str]], tuple[float, float] | None] | None,
) -> tuple[float, float]:
    """Bytes that one launch (reads, writes)."""
    given = [shapes[name] for name in line.operands if name in shapes]
    if line.operation == "custom-call" and not _LIBRARY.search(line.rest):
        told = kernel_bytes(line, given) if kernel_bytes else None
        if told is not None:
            return told
    if inside := _called(line, computations):
        return _fused(inside)
    whole = sum(_bytes(x) for x in given)
    if line.operation in ("dynamic-slice", "slice", "gather"):
        return _bytes(line.shape), _bytes(line.shape)
    if (at := _UPDATES.get(line.operation)) is not None:
        part = _bytes(given[at])
        return whole - _bytes(given[0]), part
    if line.operation == "copy-start":
        return whole, whole
    result = arrays(line.shape)
    if line.operation.endswith("-start"):  # its operands stand before its results
        result = [x for x in result if x.sizes or x.dtype not in ("u32", "s32")]
        return whole, sum(x.bytes for x in result[len(result) // 2 :])
    if _LIBRARY.search(line.rest):
        result = [x for x in result if x.dtype != "s8"]
    elif line.operation == "custom-call":
        return whole, results(line)
    return whole, sum(x.bytes for x in result)


def results(line: Instruction) -> float:
    """Bytes of the results of a call of a kernel that lie apart from its operands."""
    found = _IN_PLACE.search(line.rest)
    places = re.findall(r"\{(\d*)\}:", found[1]) if found else []
    in_place = {int(at or 0) for at in places}
    return sum(x.bytes for at, x in enumerate(arrays(line.shape)) if at not in in_place)


def _bytes(shape: str) -> float:
    return sum(x.bytes for x in arrays(shape))


def _elements(shape: str) -> int:
    return sum(x.elements for x in arrays(shape))


def _fused(lines: Sequence[Instruction]) -> tuple[float, float]:
    """Bytes that a fusion (reads, writes), from which elements of what each instruction needs."""
    by_name = {line.name: line for line in lines}
    needed: dict[str, float] = dict.fromkeys(by_name, 0.0)
    root = lines[-1]
    written = 0.0
    for end in _ends(root, by_name):
        place = _in_place(end, by_name)
        written += (
            _bytes(by_name[place.operands[_UPDATES[place.operation]]].shape)
            if place
            else (_bytes(end.shape))
        )
        needed[end.name] = _elements(end.shape)
    read = 0.0
    for line in reversed(lines):
        size = _elements(line.shape)
        wanted = min(needed[line.name], size)
        if not wanted:
            continue
        if line.operation == "parameter":
            read += _bytes(line.shape) * wanted / max(size, 1)
            continue
        for name, count in _needs(line, wanted, size, by_name):
            needed[name] += count
    return read, written


def _ends(root: Instruction, by_name: Mapping[str, Instruction]) -> list[Instruction]:
    return [by_name[x] for x in root.operands] if root.operation == "tuple" else [root]


def _in_place(end: Instruction, by_name: Mapping[str, Instruction]) -> Instruction | None:
    """The update that a fusion's result is, if what it updates is an argument of the fusion."""
    while end.operation == "bitcast":
        end = by_name[end.operands[0]]
    if end.operation not in _UPDATES:
        return None
    begin = by_name[end.operands[0]]
    while begin.operation == "bitcast":
        begin = by_name[begin.operands[0]]
    return end if begin.operation == "parameter" else None


def _needs(
    line: Instruction, wanted: float, size: int, by_name: Mapping[str, Instruction]
) -> Iterable[tuple[str, float]]:
    """(operand, how many of its elements are needed) for so many elements of an instruction."""
    operands = [name for name in line.operands if name in by_name]
    part = wanted / max(size, 1)
    for at, name in enumerate(operands):
        own = _elements(by_name[name].shape)
        if line.operation in _UPDATES:
            # what is not updated stays where it is
            yield name, 0 if at == 0 and _in_place(line, by_name) else own
        elif line.operation in ("slice", *_AT_PLACES):
            yield name, min(wanted, own) if at == 0 else own
        elif line.operation in ("reduce", "concatenate"):
            yield name, part * own
        elif line.operation in ("dot", "convolution", "fusion", "reduce-window", "sort"):
            yield name, own
        else:
            yield name, min(wanted, own)
