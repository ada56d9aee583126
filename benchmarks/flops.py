"""Counts the floating-point operations of a compiled program's matrix products.

A product within a loop counts as often as the loop runs. XLA's own ``cost_analysis`` counts the
body of a loop only once. On a GPU, a matrix product is a call of cuBLAS or a dot within a fusion.
"""

from __future__ import annotations

import functools
import math
import re
import statistics
from collections.abc import Sequence

from attention.blockwise import block_size, mean_trips
from attention.methods.method import Method
from pallas_kernels.tokens import Tokens

# Parts of HLO text: the head of a computation, an instruction (its name, shape, operation, and the
# rest of the line), a shape, the computations that an instruction calls, how often a loop runs if
# that is known, the contracted axes of a product's left operand, and a call of cuBLAS.
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%?([\w.\-]+) = (\(?[\w\[\]{},:()*\s/=\"T]*?\)?) ([\w\-]+)\((.*)$"
)
_SHAPE = re.compile(r"\w+\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)[}\]]')
_GEMM = re.compile(r'custom_call_target="__cublas\$')


def matmul_flops(hlo: str, unknown_trips: float | Sequence[float] = 1.0) -> float:
    """Floating-point operations of all matrix products of a program; a multiply-add counts 2.

    hlo: the optimised HLO text (``compiled.as_text()``).
    unknown_trips: for loops whose number of runs depends on data, how often they run on average.
      Several numbers are for nested loops, the outermost first. The last number is for all loops
      that are nested deeper.
    """
    computations, entry = _parse(hlo)
    depths = [float(unknown_trips)] if isinstance(unknown_trips, int | float) else [*unknown_trips]

    @functools.cache
    def total(name: str, depth: int = 0) -> float:
        shapes = {}
        found = 0.0
        for result, kind, opcode, rest in computations.get(name, ()):
            shapes[result] = kind
            called = _CALLED.findall(rest)
            if opcode == "dot" or (opcode == "custom-call" and _GEMM.search(rest)):
                found += _dot(kind, shapes, rest)
            elif opcode == "while":
                trips = _TRIPS.search(rest)
                times = float(trips[1]) if trips else depths[min(depth, len(depths) - 1)]
                found += times * sum(total(body, depth if trips else depth + 1) for body in called)
            else:
                found += sum(total(body, depth) for body in called)
        return found

    return total(entry)


def attention_trips(methods: Sequence[Method], tokens: Tokens) -> float:
    """How often the loops over blocks of keys run on average, for ``unknown_trips``, on CPU.

    It is exact if the blocks of all layers have the same size. MoBA's loops do not depend on data,
    so MoBA does not count.
    """
    windows = [window for method in methods for window in method.windows()]
    sizes = [block_size(tokens.shape[1], window) for window in windows]
    return (
        statistics.mean(map(mean_trips, [tokens] * len(windows), windows, sizes))
        if windows
        else 1.0
    )


def _parse(hlo: str) -> tuple[dict[str, list[tuple[str, str, str, str]]], str]:
    """(the instructions of each computation by its name, the name of the entry computation).

    An instruction is (its name, its shape, its operation, its operands and attributes).
    """
    computations: dict[str, list[tuple[str, str, str, str]]] = {}
    entry, current = "", None
    for line in hlo.splitlines():
        if match := _COMPUTATION.match(line):
            current = computations.setdefault(match[1], [])
            entry = match[1] if line.startswith("ENTRY") else entry
        elif current is not None and (match := _INSTRUCTION.match(line)):
            current.append((match[1], match[2], match[3], match[4]))
    if not entry:
        raise ValueError("no ENTRY computation: is this the text of a compiled program?")
    return computations, entry


def _dot(kind: str, shapes: dict[str, str], rest: str) -> float:
    """Operations of one product: 2 for each element of the result and of the contracted axes.

    kind: the shape of the result. shapes: those of the computation's earlier instructions by name.
    rest: the operands and attributes.
    """
    # the left operand is written with its shape, or only by the name of its instruction
    left = rest.split(")")[0]
    shape = _SHAPE.search(left.split("%")[0]) or _SHAPE.search(
        shapes[re.search(r"%?([\w.\-]+)", left)[1]]
    )
    sizes = _sizes(shape[1])
    contracted = _CONTRACTED.search(rest)
    return (
        2.0
        * math.prod(_sizes(_SHAPE.search(kind)[1]))
        * math.prod(sizes[i] for i in _sizes(contracted[1]))
    )


def _sizes(text: str) -> list[int]:
    """The numbers of a list that is separated by commas."""
    return [int(part) for part in text.replace('"', "").split(",") if part]
