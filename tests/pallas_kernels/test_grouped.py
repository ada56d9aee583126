"""Grouped products equal a loop over groups in float64, in values and gradients, whatever the sizes
of the groups.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from models.moe import feed_forward
from models.sharding import MeshConfig, abstract_mesh, use_mesh
from pallas_kernels.grouped.api import grouped_product
from pallas_kernels.grouped.blocks import TuningConfig
from pallas_kernels.grouped.gpu import _blocks
from planner.kernel_programs import calls
from planner.targets import TARGETS
from tests.models.test_moe import layer_of
from tests.pallas_kernels.judge import normal

GROUPS = 4


@dataclasses.dataclass(frozen=True)
class Case:
    """An implementation, and an input whose sizes are not those of its blocks."""

    options: dict[str, Any]
    dtype: Any
    rows: int
    size: int
    columns: int
    # Largest error relative to the largest element of a result.
    bound: float


def _gpu(unit: str) -> Case:
    interpret = plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan")
    tuning = TuningConfig(128, 64, 128, steps=2, matrix_unit=unit)
    options = {"implementation": "gpu", "interpret": interpret, "tuning": tuning}
    return Case(options, jnp.bfloat16, 150, 72, 136, 5e-3)


CASES = {
    "reference": Case({"implementation": "reference"}, jnp.float32, 72, 8, 6, 1e-6),
    "cpu": Case({"implementation": "cpu"}, jnp.float32, 72, 8, 6, 1e-6),
    "tpu": Case(
        {"implementation": "tpu", "interpret": True, "tuning": TuningConfig(8, 128, 128)},
        jnp.float32,
        72,
        136,
        96,
        1e-6,
    ),
    "wgmma": _gpu("wgmma"),
    "tcgen05": _gpu("tcgen05"),
}


@functools.cache
def inputs(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(rows, matrices, gradients of the result)."""
    case = CASES[name]
    shapes = (
        (case.rows, case.size),
        (GROUPS, case.size, case.columns),
        (case.rows, case.columns),
    )
    return tuple(normal(0, *shapes, dtype=case.dtype))


@functools.cache
def program(name: str):
    """A compiled function of (x, w, gradient, sizes): the result and both gradients."""

    def run(x, w, gradient, sizes):
        found, pull = jax.vjp(
            lambda x, w: grouped_product(x, w, sizes, **CASES[name].options), x, w
        )
        return found, *pull(gradient)

    return jax.jit(run)


def loop(x, w, gradient, sizes) -> tuple[np.ndarray, ...]:
    """The same group by group."""
    x, w, gradient = (np.asarray(y, np.float64) for y in (x, w, gradient))
    found, of_x, of_w = np.zeros_like(gradient), np.zeros_like(x), np.zeros_like(w)
    ends = np.cumsum(sizes)
    for group, (start, end) in enumerate(zip(ends - sizes, ends, strict=True)):
        rows = slice(start, end)
        found[rows] = x[rows] @ w[group]
        of_x[rows] = gradient[rows] @ w[group].T
        of_w[group] = x[rows].T @ gradient[rows]
    return found, of_x, of_w


def check(name: str, sizes: tuple[int, ...]) -> None:
    x, w, gradient = inputs(name)
    behind = np.arange(len(x))[:, None] >= sum(sizes)
    x, gradient = (np.where(behind, np.zeros_like(y), y) for y in (x, gradient))
    found = program(name)(x, w, gradient, np.array(sizes, np.int32))
    for one, wanted in zip(found, loop(x, w, gradient, np.array(sizes)), strict=True):
        assert one.dtype == CASES[name].dtype
        error = np.abs(np.asarray(one, np.float64) - wanted).max()
        assert error <= CASES[name].bound * np.abs(wanted).max(), sizes


def sizes_of(rows: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Sizes of the groups: any, with empty groups, all rows in one, and rows behind the last."""
    marks = st.lists(st.integers(0, rows), min_size=GROUPS, max_size=GROUPS)
    return marks.map(lambda x: tuple(int(y) for y in np.diff([0, *sorted(x)])))


@pytest.mark.quick(first=2)
@pytest.mark.parametrize("name", ["reference", "cpu", "tpu"])
@settings(deadline=None, max_examples=15)
@given(data=st.data())
def test_products_and_gradients_equal_a_loop_over_groups(name, data):
    check(name, data.draw(sizes_of(CASES[name].rows)))


@pytest.mark.parametrize(
    "sizes, name",
    [
        # borders that are not those of tiles, an empty group, and rows behind the last group
        ((0, 129, 3, 5), "wgmma"),
        ((0, 129, 3, 5), "tcgen05"),
        # all rows in one
        ((0, 0, 150, 0), "tcgen05"),
        # no rows at all
        ((0, 0, 0, 0), "wgmma"),
    ],
)
@pytest.mark.long
def test_gpu_kernels_equal_a_loop_over_groups(name, sizes):
    check(name, sizes)


@pytest.mark.parametrize("name", ["cpu", "tpu", pytest.param("wgmma", marks=pytest.mark.long)])
def test_a_row_has_the_same_bits_wherever_it_stands(name):
    x, w, gradient = inputs(name)
    run = program(name)
    first = jax.device_get(run(x, w, gradient, np.array([10, 0, 20, 30], np.int32)))
    # row 12 of group 2 becomes row 45 of the same group, among others
    x, gradient = (np.roll(y, 33, axis=0) for y in (x, gradient))
    second = jax.device_get(run(x, w, gradient, np.array([1, 40, 25, 0], np.int32)))
    for one, two in zip(first[:2], second[:2], strict=True):
        np.testing.assert_array_equal(one[12], two[45])


jit_blocks = jax.jit(_blocks, static_argnums=(1, 2))  # one program for all examples


@settings(deadline=None, max_examples=30)
@given(sizes=sizes_of(1000))
def test_blocks_cover_every_row_of_a_group_once(sizes):
    seen = np.full(1000, -1)
    for group, first, low, high in np.asarray(jit_blocks(np.array(sizes, np.int32), 1000, 64)):
        assert first % 8 == 0 and 0 <= low <= high <= 64
        assert np.all(seen[first + low : first + high] == -1)
        seen[first + low : first + high] = group
    wanted = np.repeat(np.arange(GROUPS), sizes)
    np.testing.assert_array_equal(seen, [*wanted, *[-1] * (1000 - len(wanted))])


def names_in(layer, y, config: MeshConfig, target: str) -> list[str]:
    """The kernels of a layer and its gradient on a mesh of devices that are not here."""
    real = jnp.ones(y.shape[:2], bool)

    def loss(layer, y):
        return jnp.sum(feed_forward(layer, y, real)[0])

    with use_mesh(abstract_mesh(config, TARGETS[target].device)):
        traced = jax.jit(jax.grad(loss, argnums=(0, 1))).trace(layer, y)
    return sorted(equation.params["name"] for equation in calls(traced.jaxpr.jaxpr))


@pytest.mark.quick(first=1)
@pytest.mark.parametrize("target", ["v5p", "h100", "gb200"])
def test_a_layer_takes_the_kernels_on_every_mesh(target):
    """Three products, the gradients of their rows, and those of their matrices."""
    gmm, tgmm = ("gmm", "tgmm") if target == "v5p" else ("grouped_product", "grouped_outer_product")
    layer = layer_of("qwen3")
    y = jax.ShapeDtypeStruct((4, 5, 16), jnp.bfloat16)
    for config in (MeshConfig(1, 1), MeshConfig(2, 2, fsdp=2)):
        assert names_in(layer, y, config, target) == sorted([gmm] * 6 + [tgmm] * 3)


def test_float32_has_no_kernel_on_gpu_and_one_on_tpu():
    y = jax.ShapeDtypeStruct((4, 5, 16), jnp.float32)
    layer = layer_of("qwen3")
    assert names_in(layer, y, MeshConfig(1, 1), "h100") == []
    assert len(names_in(layer, y, MeshConfig(1, 1), "v6e")) == 9


def test_what_does_not_fit_is_refused():
    x, w, _ = inputs("cpu")
    sizes = np.array([1, 1, 1, 1], np.int32)
    with pytest.raises(ValueError, match=r"must be \[P, D\], w "):
        grouped_product(x[:, 1:], w, sizes)
    with pytest.raises(ValueError, match="implementation='tpu' cannot run this: backend='cpu'"):
        grouped_product(x, w, sizes, implementation="tpu")
    with pytest.raises(ValueError, match="rows=64 must be 128 for wgmma"):
        options = CASES["wgmma"].options | {"tuning": TuningConfig(64)}
        grouped_product(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), sizes, **options)
