"""The kernels that decode from compressed keys in pages equal the definition in float64."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.compressed import paged
from pallas_kernels.compressed.paged import TuningConfig, paged_compressed_attention
from tests.attention.rows import relative
from tests.pallas_kernels.judge import normal

TPU = {
    "implementation": "tpu",
    "interpret": pltpu.InterpretParams(
        detect_races=True, dma_execution_mode="eager", uninitialized_memory="nan"
    ),
}
GPU = {
    "implementation": "gpu",
    "interpret": plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan"),
}
EACH, PAGES, HEAD_DIM = 4, 80, 128


@dataclasses.dataclass(frozen=True)
class Case:
    """A batch of rows: the last entries that the queries of each row see."""

    heads: int
    kv_heads: int
    last: tuple[tuple[int, ...], ...]
    # Pages of a table.
    count: int = 36
    first: int = 1
    # Entries that no query sees, as between documents.
    holes: tuple[int, ...] = ()


def inputs(case: Case, dtype, poison: float):
    """(q, k, v, table, last), ``poison`` in all entries that no query of their row sees."""
    last = np.array(case.last, np.int32)
    (batch, queries) = last.shape
    shape = (PAGES, case.kv_heads, EACH, HEAD_DIM)
    drawn = normal(0, (batch, queries, case.heads, HEAD_DIM), shape, shape, dtype=jnp.float64)
    q, k, v = (x.astype(jnp.dtype(dtype)) for x in drawn)
    table = np.random.default_rng(0).permutation(PAGES)[: batch * case.count]
    table = table.reshape(batch, case.count).astype(np.int32)
    entry = np.arange(case.count * EACH).reshape(case.count, EACH)
    seen = np.zeros((PAGES, EACH), bool)
    for row, high in enumerate(last.max(axis=1)):
        seen[table[row]] = (entry >= case.first) & (entry <= high) & ~np.isin(entry, case.holes)
        table[row, max(0, high // EACH + 1) :] = -1  # pages that were not written yet
    for x in (k, v):
        x.swapaxes(1, 2)[~seen] = poison
    real = ~np.isin(entry.reshape(1, -1), case.holes) & np.ones((batch, 1), bool)
    return q, k, v, table, last, real


@functools.cache
def exact(case: Case) -> tuple[np.ndarray, ...]:
    """(out, lse, scores) by the definition in float64."""
    definition = dict(first=case.first, implementation="reference")
    run = jax.jit(functools.partial(paged_compressed_attention, **definition))
    return jax.device_get(run(*inputs(case, jnp.float64, 0.0)))


def check(case: Case, dtype, bounds: tuple[float, float, float], **options):
    wanted = exact(case)
    given = inputs(case, dtype, jnp.nan)
    with jax.enable_x64(False):  # the GPU interpreter's own counters are 32 bits wide
        found = jax.jit(lambda *x: paged_compressed_attention(*x, first=case.first, **options))(
            *given
        )
    out, lse, scores = (np.asarray(x, np.float64) for x in found)
    seen = np.isfinite(wanted[1])
    assert found[0].dtype == dtype and relative(out, wanted[0]) < bounds[0]
    assert np.array_equal(np.isfinite(lse), seen) and not out[~seen].any()
    assert np.abs(lse[seen] - wanted[1][seen]).max() < bounds[1]
    assert scores.shape == wanted[2].shape and np.abs(scores - wanted[2]).max() < bounds[2]
    assert not scores[wanted[2] == 0.0].any()


ROUND = {jnp.float32: (1e-5, 1e-4, 1e-5), jnp.bfloat16: (1e-2, 2e-2, 2e-2)}
CASES = [
    Case(4, 2, ((131, 130), (0, -1))),  # a second row of which nothing is complete
    Case(16, 1, ((140,), (27,)), first=3, holes=(3, 4, 5, 26, 27, 90, 129)),
    Case(3, 3, ((7, 8, 9, 9, 10),), count=20, first=0),
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.long
def test_tpu_equals_the_definition(x64, case):
    check(case, jnp.float32, ROUND[jnp.float32], **TPU)


@pytest.mark.parametrize(
    "unit, splits, case", [("wgmma", 2, CASES[0]), ("tcgen05", 1, CASES[1]), ("wgmma", 1, CASES[2])]
)
@pytest.mark.quick(first=1)
def test_gpu_equals_the_definition_in_bfloat16(x64, unit, splits, case):
    tuning = TuningConfig(splits, matrix_unit=unit)
    check(case, jnp.bfloat16, ROUND[jnp.bfloat16], tuning=tuning, **GPU)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"implementation": "tpu"}, "backend='cpu' is not 'tpu', and interpret=False"),
        ({**TPU, "tuning": TuningConfig(2)}, "splits=2 must be 1 on TPU"),
        (GPU, r"the dtypes \['float32'\] must be one of \('bfloat16',\)"),
    ],
)
def test_what_cannot_run_is_refused_with_its_values(x64, change, message):
    with pytest.raises(ValueError, match=message):
        paged_compressed_attention(*inputs(CASES[0], jnp.float32, 0.0), first=1, **change)


jit_spans = jax.jit(paged._spans, static_argnums=(1, 2, 3))


@pytest.mark.parametrize("on", ["tpu", "hopper", "blackwell"])
@pytest.mark.parametrize("parts, entries", [(1, 16), (4, 16384), (256, 65536)])
def test_splits_are_whole_and_cover_all_pages(on, parts, entries):
    splits = paged.heuristic(on, parts, entries).splits
    high = np.array([-1, 0, entries // 2, entries - 1], np.int32)
    spans = np.asarray(jit_spans(high, 1, EACH, splits))
    assert np.array_equal(spans[:, -1], high)
    for row, last in zip(spans, high, strict=True):
        begins, ends = row[:-1:2], row[1:-1:2]
        assert np.array_equal(begins[1:], ends[:-1]) and begins[0] == 0
        assert ends[-1] == (0 if last < 1 else last // EACH + 1)
        assert not np.any(begins[begins < ends[-1]] % (paged.KEYS // EACH))
