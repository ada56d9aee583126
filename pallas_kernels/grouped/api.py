"""Grouped products: rows that are sorted by group, each multiplied with the matrix of its group.

The gradient of the rows is a grouped product with the transposed matrices. That of a matrix is the
outer product of its group's rows with their gradients. Both have kernels too.

Dimensions: P rows, E groups, D and F sizes of a matrix.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from pallas_kernels.choice import (
    REFERENCE,
    backend_obstacle,
    choose,
    device,
    dtype_obstacle,
    platform_obstacle,
)
from pallas_kernels.grouped import cpu, gpu, reference, tpu
from pallas_kernels.grouped.blocks import TuningConfig, heuristic
from pallas_kernels.tuned import tuned

KERNELS = {"tpu": tpu, "gpu": gpu, "cpu": cpu}


def grouped_product(
    x: jax.Array,
    w: jax.Array,
    sizes: jax.Array,
    *,
    implementation: str | None = None,
    tuning: TuningConfig | None = None,
    interpret: Any = False,
) -> jax.Array:
    """The product of each row of x [P, D] with the matrix of its group, w [E, D, F]: [P, F].

    sizes: int32 [E], how many rows each group has, from row 0 on. Rows behind the last group's must
      be 0, and so is their result.
    implementation: "tpu", "gpu", "cpu", "reference", or None for the one that suits the backend and
      input.
    tuning: block sizes, or None for those of the heuristic.
    interpret: False, or what the kernel's interpreter takes (True on TPU,
      ``plgpu.InterpretGPUParams`` on GPU), which needs a named implementation.

    Sums are in float32, results in x's dtype. A row's result does not depend on the rows beside it.
    Differentiable in x and w. Raises ValueError for shapes and dtypes that do not fit, and for a
    named implementation that cannot run.
    """
    if x.shape[1] != w.shape[1] or sizes.shape != w.shape[:1] or x.dtype != w.dtype:
        raise ValueError(
            f"x {x.dtype}{x.shape} must be [P, D], w {w.dtype}{w.shape} [E, D, F] of the same "
            f"dtype, and sizes {sizes.shape} [E]"
        )

    def obstacle(name: str) -> str | None:
        return backend_obstacle(name, (x, w), KERNELS[name].DTYPES, interpret)

    implementation = choose(implementation, [*KERNELS], obstacle, interpret)
    if implementation != REFERENCE and tuning is None:
        tuning = _sizes(implementation, len(x), w.shape)
    return _product(x, w, sizes, _Options(implementation, tuning, interpret))


@dataclasses.dataclass(frozen=True)
class _Options:
    implementation: str
    tuning: TuningConfig | None
    interpret: Any

    def kernel(self, name: str):
        """One of the implementation's functions with its static arguments."""
        if self.implementation == REFERENCE:
            return getattr(reference, name)
        function = getattr(KERNELS[self.implementation], name)
        return functools.partial(function, tuning=self.tuning, interpret=self.interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _product(x, w, sizes, options: _Options):
    return options.kernel("product")(x, w, sizes, transposed=False)


def _forward(x, w, sizes, options: _Options):
    return _product(x, w, sizes, options), (x, w, sizes)


def _backward(options: _Options, kept, gradient):
    x, w, sizes = kept
    of_x = options.kernel("product")(gradient, w, sizes, transposed=True)
    of_w = options.kernel("outer_product")(x, gradient, sizes)
    return of_x, of_w, None


_product.defvjp(_forward, _backward)


def _sizes(implementation: str, rows: int, shape: tuple[int, ...]) -> TuningConfig:
    groups, size, columns = shape
    on = "cpu" if implementation == "cpu" else device(implementation)
    chosen = heuristic(on, rows, groups)
    return tuned(chosen, "grouped", on, groups=groups, size=size, columns=columns)


def obstacle_on(platform: str, name: str, dtype: str) -> str | None:
    """Reason why a kernel could not multiply arrays of a dtype on a platform, or None.

    platform: as from ``choice.here``.
    """
    return platform_obstacle(name, platform) or dtype_obstacle({dtype}, KERNELS[name].DTYPES)
