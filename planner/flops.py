"""Counts the floating-point operations of a compiled program's matrix products.

On a GPU, a matrix product is a call of cuBLAS or a dot within a fusion, on a TPU a convolution. Of
kernels only the grouped
products are counted, by the shapes of their arrays: compilers do not see inside of kernels.
"""

from __future__ import annotations

import functools
import math
import re
import statistics
from collections.abc import Mapping, Sequence

from attention.blockwise import block_size, mean_trips
from attention.methods.method import Method
from pallas_kernels.tokens import Tokens
from planner import hlo as hlo_text
from planner.hlo import Instruction

# Parts of HLO text: a shape, the contracted axes of a product's left operand, and a call of cuBLAS.
_SHAPE = re.compile(r"\w+\[([\d,]*)\]")
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)[}\]]')
_GEMM = re.compile(r'custom_call_target="__cublas\$')
# A kernel of ``pallas_kernels.grouped``, the shapes of a kernel's operands, and a matrix of floats.
_GROUPED = re.compile(
    r'custom_call_target="(?:mosaic_gpu|tpu_custom_call).*op_name="[^"]*\bgrouped_(?:outer_)?product\b'
)
# A convolution: of its window the sizes and others, and which of its axes are which: b batch, f
# features, i and o those of a matrix, numbers the axes that the window goes along.
_WINDOW = re.compile(r"window=\{(.*?)\}")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_NAMES = re.compile(r"%([\w.\-]+)")
_OPERANDS = re.compile(r"operand_layout_constraints=\{(.*?)\}, [a-z_]+=")
_MATRIX = re.compile(r"\bb?f\d+\[(\d+),(\d+)\]")


def matmul_flops(
    hlo: str, unknown_trips: float | Sequence[float] = 1.0, filled: float = 1.0
) -> float:
    """Floating-point operations of all matrix products of a program; a multiply-add counts 2.

    A grouped product counts every row that it is given once, as if none were padding.

    filled: which part of the rows of grouped products is no padding. Other arguments as for
    ``hlo.total``.
    """
    products = functools.partial(_products, filled=filled)
    return hlo_text.total(hlo, products, unknown_trips)["flops"]


def _products(line: Instruction, shapes: Mapping[str, str], filled: float) -> dict[str, float]:
    if line.operation == "custom-call" and _GROUPED.search(line.rest):
        return {"flops": filled * _grouped(line)}
    if line.operation == "convolution":
        return {"flops": _convolution(line, shapes)}
    cublas = line.operation == "custom-call" and _GEMM.search(line.rest)
    if line.operation != "dot" and not cublas:
        return {}
    return {"flops": _dot(line.shape, shapes, line.rest)}


def attention_trips(methods: Sequence[Method], tokens: Tokens) -> float:
    """The average number of trips of the loops over blocks of keys, for ``unknown_trips``, on CPU.

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


def _dot(kind: str, shapes: Mapping[str, str], rest: str) -> float:
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


def _convolution(line: Instruction, shapes: Mapping[str, str]) -> float:
    """Operations of a convolution; of its window only what meets an element of the input counts.

    A product with axes beside rows, columns and one contracted axis has windows along them, which
    go over padding where such an axis is of the batch.
    """
    labels = _LABELS.search(line.rest)
    names = _NAMES.findall(line.rest.split(")")[0])
    given, matrix, result = (
        dict(zip(axes, _sizes(_SHAPE.search(shape)[1]), strict=True))
        for axes, shape in zip(
            labels.groups(), (shapes[names[0]], shapes[names[1]], line.shape), strict=True
        )
    )
    window = _WINDOW.search(line.rest)
    words = dict(word.split("=") for word in window[1].split()) if window else {}
    along = {name: text.split("x") for name, text in words.items()}
    products = 2.0 * result["b"] * result["f"] * matrix["i"]
    for number, axis in enumerate(sorted(set(given) - {"b", "f"})):

        def of(name: str, default: str, number: int = number) -> str:
            return along[name][number] if name in along else default

        stride, before = int(of("stride", "1")), int(of("pad", "0_0").split("_")[0])
        apart, between = int(of("rhs_dilate", "1")), int(of("lhs_dilate", "1"))
        steps = range(result[axis])
        places = (at * stride + i * apart - before for at in steps for i in range(matrix[axis]))
        products *= sum(x % between == 0 and 0 <= x // between < given[axis] for x in places)
    return products


def _grouped(line: Instruction) -> float:
    """Operations of a grouped product, or of the outer product that is its gradient.

    Two of its arrays are matrices, [P, D] and [P, F]: its rows and its result, or its two operands.
    The third has a matrix for each group.
    """
    operands = _OPERANDS.search(line.rest)[1]
    (rows, size), (_, columns) = (map(int, x) for x in _MATRIX.findall(f"{line.shape} {operands}"))
    return 2.0 * rows * size * columns


def _sizes(text: str) -> list[int]:
    """The numbers of a list that is separated by commas."""
    return [int(part) for part in text.replace('"', "").split(",") if part]
