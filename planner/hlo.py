"""Reads the text of a compiled program: its instructions, each as often as it runs.

An instruction within a loop counts as often as the loop runs. XLA's own ``cost_analysis`` counts
the body of a loop only once.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Hashable, Mapping, Sequence

# Parts of HLO text: the head of a computation, an instruction (its name, shape, operation, and the
# rest of the line), the computations that an instruction calls, and how often a loop runs if that
# is known.
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%?([\w.\-]+) = (\(?[\w\[\]{},:()*\s/=\"T]*?\)?) ([\w\-]+)\((.*)$"
)
_CALLED = re.compile(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
# The computation that says whether a loop goes on, the names of operands, the number of a constant,
# and which part of a tuple is taken.
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_NAME = re.compile(r"%([\w.\-]+)")
_NUMBER = re.compile(r"(\d+)\)")
_INDEX = re.compile(r"index=(\d+)")
# An array within a shape, and the bits of its dtype.
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_BITS = re.compile(r"^(?:pred|[a-z]+?(\d+))")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    # The shape of its result, or of several in parentheses, as "bf16[2,128]{1,0}".
    shape: str
    operation: str
    # Operands and attributes.
    rest: str

    @property
    def operands(self) -> list[str]:
        """The names of its operands."""
        return _NAME.findall(self.rest.partition(")")[0])

    @property
    def index(self) -> int | None:
        """The part of a tuple that it takes; None for an instruction that takes none."""
        found = _INDEX.search(self.rest)
        return int(found[1]) if self.operation == "get-tuple-element" and found else None


@dataclasses.dataclass(frozen=True)
class Array:
    """A shape that is no tuple."""

    dtype: str
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        """The count of its numbers."""
        return math.prod(self.sizes)

    @property
    def bytes(self) -> float:
        """Bytes that it takes; what is no number takes none."""
        bits = _BITS.match(self.dtype)
        return self.elements * int(bits[1] or 8) / 8 if bits else 0.0


def arrays(shape: str) -> list[Array]:
    """The arrays of a shape such as "bf16[2,128]{1,0}", or of several in parentheses."""
    return [
        Array(dtype, tuple(int(part) for part in sizes.split(",") if part))
        for dtype, sizes in _ARRAY.findall(shape)
    ]


def total[K: Hashable](
    hlo: str,
    value: Callable[[Instruction, Mapping[str, str]], Mapping[K, float]],
    unknown_trips: float | Sequence[float] = 1.0,
) -> collections.Counter[K]:
    """The sum over all instructions that run of what ``value`` says of them, by its keys.

    hlo: the optimised HLO text (``compiled.as_text()``).
    value: takes an instruction, and the shapes of those before it in its computation by their
      names.
    unknown_trips: for loops whose number of runs depends on data, how often they run on average.
      Several numbers are for nested loops, the outermost first. The last number is for all loops
      that are nested deeper.

    Raises ValueError for a text that is not that of a compiled program.
    """
    computations, entry = parse(hlo)
    depths = [float(unknown_trips)] if isinstance(unknown_trips, int | float) else [*unknown_trips]

    @functools.cache
    def of(name: str, depth: int = 0) -> collections.Counter[K]:
        shapes: dict[str, str] = {}
        found: collections.Counter[K] = collections.Counter()
        for line in computations.get(name, ()):
            shapes[line.name] = line.shape
            _add(found, value(line, shapes))
            times, inside = 1.0, depth
            if line.operation == "while":
                trips = trips_of(line, computations[name], computations)
                times = depths[min(depth, len(depths) - 1)] if trips is None else trips
                inside = depth + 1 if trips is None else depth
            for called in _CALLED.findall(line.rest):
                _add(found, of(called, inside), times)
        return found

    return of(entry)


def trips_of(
    loop: Instruction,
    around: Sequence[Instruction],
    computations: Mapping[str, Sequence[Instruction]],
) -> float | None:
    """The number of trips of a loop; None where that depends on data.

    The compilers for CPU and GPU write it down. In a TPU's program it is read from the condition: a
    number that JAX counts from 0 by 1 must be less than a constant.

    around: the computation that the loop stands in.
    """
    if known := _TRIPS.search(loop.rest):
        return float(known[1])
    inside = {line.name: line for line in computations[_CONDITION.search(loop.rest)[1]]}
    *_, last = inside.values()
    if last.operation != "compare" or "direction=LT" not in last.rest:
        return None
    counted, bound = (inside[name] for name in last.operands)
    if (counted.operation, bound.operation) != ("get-tuple-element", "constant"):
        return None
    before = {line.name: line for line in around}
    begin = before.get(loop.operands[0])
    if begin is not None and begin.operation == "tuple":
        begin = before.get(begin.operands[counted.index])
    while begin is not None and begin.operation == "copy":
        begin = before.get(begin.operands[0])
    if begin is None or begin.operation != "constant" or _NUMBER.match(begin.rest)[1] != "0":
        return None
    return float(_NUMBER.match(bound.rest)[1])


def _add(sums: collections.Counter, more: Mapping, times: float = 1.0) -> None:
    for key, number in more.items():
        sums[key] += times * number


def parse(hlo: str) -> tuple[dict[str, list[Instruction]], str]:
    """(the instructions of each computation by its name, the name of the entry computation).

    Raises ValueError for a text that is not that of a compiled program.
    """
    computations: dict[str, list[Instruction]] = {}
    entry, current = "", None
    for line in hlo.splitlines():
        if match := _COMPUTATION.match(line):
            current = computations.setdefault(match[1], [])
            entry = match[1] if line.startswith("ENTRY") else entry
        elif current is not None and (match := _INSTRUCTION.match(line)):
            current.append(Instruction(match[1], match[2], match[3], match[4]))
    if not entry:
        raise ValueError("no ENTRY computation: is this the text of a compiled program?")
    return computations, entry
