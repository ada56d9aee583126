"""The paged kernels equal the definition in float64, whatever the groups, lengths, windows, picks,
holes and splits.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.finite import kept
from pallas_kernels.paged import reference
from pallas_kernels.paged.api import (
    append_attention,
    obstacle_on,
    paged_attention,
    selected_paged_attention,
)
from pallas_kernels.paged.lists import (
    TuningConfig,
    dense_work,
    heuristic,
    selected_work,
)
from tests.attention.rows import relative
from tests.pallas_kernels.judge import defined, judge, normal, run

TPU = {
    "implementation": "tpu",
    "interpret": pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan"),
    "tuning": TuningConfig(splits=2, keys=32),
}
# a step of 128 keys is what a warpgroup multiplies
GPU = {
    "implementation": "gpu",
    "interpret": plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan"),
    "tuning": TuningConfig(splits=2, keys=128, steps=2, cluster=False),
}
REFERENCE = {"implementation": "reference"}

ROWS = 5
ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows of pages, and what their queries see of them.

    lists: of picks per query, or None. padded: whether pages end in padding.
    """

    heads: int = 4
    kv_heads: int = 2
    queries: int = 1
    size: int = 16
    page: int = 16
    window: int | None = None
    lists: int | None = None
    pages: int = 7
    padded: bool = False

    def __post_init__(self):
        rng, (page, queries) = np.random.default_rng(1), (self.page, self.queries)
        # a full row, one with tokens after its queries, one shorter than its window, one of
        # nothing, one of padding
        lengths = np.array([self.pages * page - 5, page + 9, 6, 0, page])
        places = lengths[:, None] - queries + np.arange(queries)
        half = max(1, queries // 2)
        places[1] = np.where(
            np.arange(queries) < half, lengths[1] - 2 - half + np.arange(queries), -1
        )
        places[3:] = -1
        tables = 1 + rng.permutation(ROWS * self.pages).reshape(ROWS, self.pages)
        tables[1, 0] = tables[0, 0]  # a shared page
        tables[0, self.pages // 2] = -1  # a hole
        tables[np.arange(self.pages) * page >= lengths[:, None]] = -1
        picks = None
        if self.lists is not None:
            picks = np.stack(
                [rng.permutation(self.pages)[:4] for _ in range(ROWS * queries * self.lists)]
            )
            picks = picks.reshape(ROWS, queries, self.lists, 4)
            picks[:, :, :, 1] = np.where(rng.random(picks.shape[:3]) < 0.5, -1, picks[:, :, :, 1])
            picks[0, 0, 0] = -1
        filled = None
        if self.padded:  # every second page or so is not full; the first of two rows is shared
            filled = np.where(
                rng.random(tables.shape) < 0.5, page, rng.integers(1, page, tables.shape)
            )
            filled[1, 0] = filled[0, 0] = page - 3
        fields = {
            "filled": filled,
            "lengths": lengths,
            "places": np.maximum(places, -1),
            "tables": tables,
            "picks": picks,
        }
        for name, x in fields.items():
            object.__setattr__(self, name, None if x is None else x.astype(np.int32))

    def real(self) -> np.ndarray:
        """bool [B, S], which places are no padding."""
        if self.filled is None:
            return np.ones((ROWS, self.pages * self.page), bool)
        filled = np.repeat(self.filled, self.page, axis=1)
        return np.arange(self.pages * self.page) % self.page < filled

    def mask(self) -> np.ndarray:
        """bool [B, T, N, S]."""
        slots = np.arange(self.pages * self.page)
        t = self.places[:, :, None]
        mask = (slots <= t) & (slots < self.lengths[:, None, None])
        mask &= np.repeat(self.tables >= 0, self.page, axis=1)[:, None]
        mask &= self.real()[:, None]
        if self.window is not None:
            mask &= slots > t - self.window
        mask = np.repeat(mask[:, :, None], self.heads, axis=2)
        if self.picks is not None:
            chosen = (self.picks[..., None] == slots // self.page).any(axis=3)
            mask &= np.repeat(chosen, self.heads // self.lists, axis=2)
        return mask

    def inputs(self, dtype=jnp.float64) -> list[np.ndarray]:
        """q and pages of k and v; NaN where no token is."""
        shape = (1 + ROWS * self.pages, self.kv_heads, self.page, self.size)
        q, k, v = normal(0, (ROWS, self.queries, self.heads, self.size), shape, shape, dtype=dtype)
        filled = np.zeros((shape[0], self.page), bool)
        for table, length, real in zip(self.tables, self.lengths, self.real(), strict=True):
            real = real.reshape(-1, self.page)
            for number, page in enumerate(table):
                inside = number * self.page + np.arange(self.page) < length
                filled[page] |= (page >= 0) & inside & real[number]
        for x in (k, v):
            x.swapaxes(1, 2)[~filled] = np.nan
        return [q, k, v]

    def definition(self, inputs, weights):
        """As ``defined``, of pages."""
        real = np.repeat(self.tables >= 0, self.page, axis=1) & self.real()
        real &= np.arange(self.pages * self.page) < self.lengths[:, None]

        def rows(x):
            x = x[self.tables].swapaxes(2, 3).reshape(ROWS, -1, *x.shape[1::2])
            return np.where(real[..., None, None], x.astype(np.float64), 0)

        def pages(x):
            """Sums of what the rows say of each page."""
            found = np.zeros(inputs[1].shape)
            x = x.reshape(ROWS, self.pages, self.page, *x.shape[2:]).swapaxes(2, 3)
            np.add.at(found, self.tables[self.tables >= 0], x[self.tables >= 0])
            return found

        q, *stored = inputs
        results, slopes = defined([q, *map(rows, stored)], weights, mask=self.mask())
        return results, (*slopes[:1], *map(pages, slopes[1:]))

    def attend(self, q, k_pages, v_pages, **options):
        """By the interface."""
        rows = (self.tables, self.places, self.lengths)
        # arrays of jax, which may be taken at places that a program computes
        picks, filled, *rows = jax.device_put((self.picks, self.filled, *rows))
        options["filled"] = filled
        if picks is not None:
            return selected_paged_attention(q, k_pages, v_pages, picks, *rows, **options)
        return paged_attention(q, k_pages, v_pages, *rows, window=self.window, **options)


def check(case: Case, dtype=jnp.float32, gradients: bool = False, **options):
    """Values and gradients against the definition."""
    kernel, naive = (
        functools.partial(case.attend, **x) for x in (options, {"implementation": "reference"})
    )
    judged = judge(kernel, case.definition, case.inputs(), dtype, naive=naive, gradients=gradients)
    lse = judged[2]
    seen = np.isfinite(lse)
    assert 0 < seen.sum() < seen.size


@pytest.mark.parametrize(
    "case",
    [
        Case(queries=4),
        Case(heads=3, kv_heads=1, window=21),
        Case(queries=4, window=21),
        Case(queries=4, lists=2),
        Case(heads=6, lists=6),
        Case(queries=4, window=21, padded=True),
        Case(heads=6, lists=6, padded=True),
    ],
    ids=str,
)
@pytest.mark.quick(first=1)
def test_reference_equals_the_definition_in_values_and_gradients(x64, case):
    check(case, jnp.float64, gradients=True)


@pytest.mark.parametrize(
    "case",
    [
        Case(heads=16, kv_heads=1, window=40),
        Case(heads=3, kv_heads=1, queries=4, window=21, padded=True),
        Case(heads=16, lists=2, padded=True),
    ],
    ids=str,
)
@pytest.mark.long  # a quick one is among those with gradients
def test_tpu_equals_the_definition(x64, case):
    check(case, **TPU)


@pytest.mark.parametrize(
    "case",
    [Case(heads=6, queries=4, window=21), Case(heads=2, kv_heads=1, lists=2, queries=4)],
    ids=str,
)
@pytest.mark.quick(first=1)
def test_tpu_has_the_gradients_of_the_definition(x64, case):
    # a copy that is made as it is started overwrites what is still needed, which one made when
    # awaited does not
    eager = dataclasses.replace(TPU["interpret"], dma_execution_mode="eager")
    check(case, gradients=True, **TPU | {"interpret": eager})


@pytest.mark.long
def test_tpu_in_bfloat16_is_no_worse_than_the_reference_in_bfloat16(x64):
    check(Case(heads=16, queries=4, size=32), jnp.bfloat16, **TPU)


@pytest.mark.parametrize(
    "unit, case",
    [
        ("wgmma", Case(heads=3, kv_heads=1, queries=4, size=64, page=64, window=150)),
        ("tcgen05", Case(heads=16, kv_heads=2, size=64, page=32, lists=2, padded=True)),
        # a page of more tokens than a step has, in two parts of 128 and in three of 64
        ("wgmma", Case(heads=4, kv_heads=2, size=64, page=256, pages=4, lists=4, padded=True)),
        ("tcgen05", Case(heads=3, kv_heads=1, size=64, page=192, pages=4, window=150, padded=True)),
    ],
    ids=str,
)
@pytest.mark.quick(first=1)
def test_gpu_equals_the_definition_in_bfloat16(x64, unit, case):
    tuning = dataclasses.replace(GPU["tuning"], matrix_unit=unit)
    check(case, jnp.bfloat16, **GPU | {"tuning": tuning})


def appended(case: Case, dtype, **options) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """(what ``append_attention`` gives, what it must: pages with the new keys and values, and
    attention to them), of a last token in every row but the fourth.
    """
    q, *pages = case.inputs(dtype)
    shape = (ROWS, 1, case.kv_heads, case.size)
    new = normal(9, shape, shape, dtype=dtype)
    new[0][1, 0, 0, 3], new[1][2, 0, 0, 5] = np.inf, np.nan
    rows = jax.device_put((case.tables, case.lengths[:, None] - 1))
    how = {"window": case.window, "filled": case.filled}
    found = jax.jit(lambda *x: append_attention(*x, *rows, **how, **options))(q, *pages, *new)
    k, v = (jnp.asarray(x) for x in new)
    good = jnp.isfinite(k) & jnp.isfinite(v)
    kept = jnp.where(good, k, jnp.nan), jnp.where(jnp.isfinite(v), v, 0)
    wanted = [np.array(x) for x in pages]
    for row, length in enumerate(case.lengths):
        page = case.tables[row, (length - 1) // case.page]
        if length and page >= 0:
            for x, y in zip(wanted, kept, strict=True):
                x[page, :, (length - 1) % case.page] = y[row, 0]
    plain = {"implementation": "reference", **how}
    exact = paged_attention(q, *map(jnp.asarray, wanted), *rows, case.lengths, **plain)
    return [np.asarray(x) for x in found], [*map(np.asarray, exact), *wanted]


def check_appended(case: Case, dtype, tolerance: float, **options) -> None:
    found, exact = ([y.astype(np.float64) for y in x] for x in appended(case, dtype, **options))
    (out, lse, *pages), (wanted, wanted_lse, *wanted_pages) = found, exact
    for x, y in zip(pages, wanted_pages, strict=True):
        np.testing.assert_array_equal(x, y)
    bad = ~np.isfinite(wanted).all(axis=-1)
    assert np.array_equal(bad, np.isnan(out).all(axis=-1))
    assert 0 < bad.sum() < bad.size
    assert relative(out[~bad], wanted[~bad]) < tolerance
    seen = np.isfinite(wanted_lse)
    assert np.array_equal(np.isneginf(lse), np.isneginf(wanted_lse))
    assert np.abs(lse[seen] - wanted_lse[seen]).max() < 1e-4


@pytest.mark.parametrize("options", [REFERENCE, TPU], ids=["reference", "tpu"])
@pytest.mark.parametrize(
    "case", [Case(), Case(heads=3, kv_heads=1, window=21, padded=True)], ids=str
)
@pytest.mark.quick(first=1)
def test_a_token_is_written_before_it_attends(case, options):
    check_appended(case, jnp.float32, 1e-5, **options)


# what the kernel does not merge, and what one block has whole
APPENDED = [
    ("wgmma", 2, Case(heads=6, size=64, page=32)),
    ("tcgen05", 1, Case(heads=3, kv_heads=1, size=64, page=64, window=150, padded=True)),
    # a page of more tokens than a step has
    ("wgmma", 1, Case(size=64, page=256, pages=4)),
]


@pytest.mark.parametrize("unit, splits, case", APPENDED, ids=str)
@pytest.mark.long
def test_gpu_writes_the_token_that_it_attends_from(unit, splits, case):
    tuning = dataclasses.replace(GPU["tuning"], matrix_unit=unit, splits=splits)
    check_appended(case, jnp.bfloat16, 1e-2, **GPU | {"tuning": tuning})


CLUSTER = """
import dataclasses
from tests.pallas_kernels.test_paged import *
tuning = dataclasses.replace(GPU["tuning"], cluster=True)
check_appended(Case(heads=6, size=64, page=32), jnp.bfloat16, 1e-2, **GPU | {"tuning": tuning})
print("merged")
"""


@pytest.mark.long
def test_the_blocks_of_a_cluster_merge_their_splits():
    # with threads for all of a cluster, whatever the machine has
    environment = os.environ | {"PJRT_NPROC": "16", "NPROC": "16", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", CLUSTER], env=environment, capture_output=True, text=True, cwd=ROOT
    )
    assert done.stdout.endswith("merged\n"), done.stderr
    assert "RACE DETECTED" not in done.stdout


@pytest.mark.long
def test_gpu_takes_many_query_rows_in_several_blocks(x64):
    check(
        Case(heads=8, kv_heads=1, queries=9, size=64, page=128, pages=2),
        jnp.bfloat16,
        gradients=True,
        **GPU,
    )


@pytest.mark.long  # those of selected pages are two in the tests above
def test_splits_change_nothing():
    case = Case(heads=1, kv_heads=1, queries=4)
    inputs = case.inputs(jnp.float32)
    one, four = (
        jax.jit(lambda *x, s=s: case.attend(*x, **TPU | {"tuning": TuningConfig(s, 16)}))(*inputs)
        for s in (1, 4)
    )
    assert relative(four[0], one[0]) < 1e-6
    seen = np.isfinite(one[1])
    assert (
        np.array_equal(np.isfinite(four[1]), seen)
        and np.abs(np.asarray(four[1] - one[1])[seen]).max() < 1e-5
    )


@pytest.mark.long
def test_tpu_reads_no_page_that_no_query_needs():
    case = Case(queries=4, window=21)
    # reading there is an error of the interpreter
    inputs = case.inputs(jnp.float32)
    nowhere = 10**6
    needed = case.mask().any(axis=(1, 2)).reshape(ROWS, case.pages, case.page).any(axis=-1)
    assert needed.sum() < (case.tables >= 0).sum()
    seen = jax.device_put((case.places, case.lengths))
    attend = jax.jit(lambda tables: paged_attention(*inputs, tables, *seen, window=21, **TPU))
    clean = attend(case.tables)
    for found, expected in zip(attend(np.where(needed, case.tables, nowhere)), clean, strict=True):
        assert np.array_equal(found, expected)
    with pytest.raises(Exception, match=r"out of bounds|Out-of-bounds"):
        jax.block_until_ready(attend(np.where(needed, nowhere, case.tables)))


@pytest.mark.parametrize(
    "options, lists",
    [(REFERENCE, None), (REFERENCE, 2), (TPU, 2), (GPU, None)],
    ids=["reference", "reference of picks", "tpu", "gpu"],
)
@pytest.mark.quick(first=1)
def test_a_page_never_written_may_hold_anything(options, lists):
    case = Case(heads=4, lists=lists, pages=5, **({"size": 64} if options is GPU else {}))
    dtype = jnp.bfloat16 if options is GPU else jnp.float32
    (weight,) = normal(7, (ROWS, case.queries, case.heads, case.size), dtype=dtype)
    weights = weight, np.zeros(weight.shape[:3], np.float32)
    function = functools.partial(case.attend, **options)

    def results(poison):
        """Of pages whose tokens that were never written are ``poison`` in turn."""
        poison = np.resize(poison, (case.page, 1)).astype(weight.dtype)
        pages = (np.where(np.isnan(x), poison, x) for x in stored)
        (out, _), slopes = run(function, (q, *pages), weights)
        return out, *slopes

    q, *stored = case.inputs(dtype)
    for one, other in zip(results([np.nan, np.inf, -np.inf]), results([0.0]), strict=True):
        assert np.isfinite(one).all() and np.array_equal(one, other)


BAD = (np.nan, np.inf, -np.inf)


@pytest.mark.parametrize(
    "options, values",
    [(REFERENCE, (BAD, BAD)), (TPU, (BAD[:1], BAD[2:])), (GPU, (BAD[1:2], BAD[:1]))],
    ids=["reference", "tpu", "gpu"],
)
@pytest.mark.quick(first=1)
def test_values_that_are_not_finite_reach_only_those_who_see_them(options, values):
    """The last of two new tokens is bad, in pages as ``finite.kept`` writes them.

    values: of its key and of its value.
    """
    case = Case(queries=2, pages=5, **({"size": 64} if options is GPU else {}))
    q, k, v = case.inputs(jnp.bfloat16 if options is GPU else jnp.float32)
    last = int(case.places[0, 1])
    at = (case.tables[0, last // case.page], slice(None), last % case.page)

    @jax.jit
    def results(which, value):
        pages = map(jnp.asarray, (k, v))
        pages = (x.at[at].set(jnp.where(which == i, value, x[at])) for i, x in enumerate(pages))
        return case.attend(q, *kept(*pages), **options)

    wanted = jax.device_get(results(-1, 0.0))  # as they are
    for which in range(2):
        for value in values[which]:
            for one, other in zip(jax.device_get(results(which, value)), wanted, strict=True):
                assert np.isnan(one[0, 1].astype(np.float32)).all()
                assert np.array_equal(one[0, 0], other[0, 0])
                assert np.array_equal(one[1:], other[1:])


def test_a_score_that_is_not_a_number_stays_one():
    case = Case(heads=2)
    q, k, v = case.inputs(jnp.float32)
    k[case.tables[0, 0], 0, 3] = np.nan
    out, lse = jax.device_get(jax.jit(case.attend)(q, k, v))
    assert np.isnan(out[:2, :, 0]).all() and np.isnan(lse[:2, :, 0]).all()
    assert np.isfinite(out[:, :, 1]).all() and np.isfinite(out[2]).all()


@pytest.mark.parametrize("splits", [1, 3])
def test_lists_hold_the_pages_that_are_seen_once_each(splits):
    tuning = TuningConfig(splits, 32)
    for case in (Case(queries=4), Case(queries=4, window=21), Case(queries=4, lists=2)):
        page, picked = case.page, case.picks is not None
        count = 4 if picked else case.pages  # of a list
        mask = case.mask().reshape(ROWS, case.queries, case.heads, -1, page).any(axis=-1)
        if picked:
            picks = jax.device_put(case.picks)
            work_of = functools.partial(selected_work, picks, page=page, tuning=tuning)
            wanted = mask[:, :, ::2].reshape(-1, 2, case.pages)
        else:
            work_of = functools.partial(dense_work, window=case.window, page=page, tuning=tuning)
            wanted = mask.any(axis=(1, 2))[:, None]

        @jax.jit
        def made(*rows, work_of=work_of, expected=(count, picked)):
            work = work_of(*rows)
            assert (work.pages, work.numbered) == expected
            return work.lists, work.seeing

        rows = (case.tables, case.places, case.lengths)
        lists, seeing = jax.device_get(made(*rows))
        for unit, head in np.ndindex(*wanted.shape[:2]):
            own = lists[unit, head]
            pages, numbers = np.split(own[2 * splits :], [count])
            listed = []
            for begin, end in own[: 2 * splits].reshape(-1, 2):
                at = [i for i in range(begin, end) if pages[i] >= 0]
                row = unit // (len(wanted) // ROWS)
                listed += [int(numbers[i]) if picked else i for i in at]
                assert all(
                    pages[i] == case.tables[row, int(numbers[i]) if picked else i] for i in at
                )
            assert sorted(listed) == np.flatnonzero(wanted[unit, head]).tolist()
        assert np.array_equal(seeing.reshape(-1), (case.places >= 0).reshape(-1))


@pytest.mark.parametrize("device, processors", [("hopper", 132), ("blackwell", 148)])
def test_a_batch_of_one_fills_a_gpu(device, processors):
    tuning = heuristic(device, lists=4, rows=16, places=65536, place_bytes=512, page=64)
    assert 0.9 * processors < 4 * tuning.splits <= processors
    assert heuristic(device, lists=4, rows=16, places=100, place_bytes=512, page=64).splits == 1


def test_without_an_accelerator_the_reference_is_chosen(x64):
    case = Case(queries=4)
    inputs = case.inputs()
    rows = (case.tables, case.places, case.lengths)
    ours = jax.jit(case.attend)(*inputs)
    for found, expected in zip(ours, jax.jit(reference.dense)(*inputs, *rows), strict=True):
        assert found.dtype == jnp.float64 and np.array_equal(found, expected)


@pytest.mark.parametrize(
    ("case", "options", "message"),
    [
        (Case(heads=3), {}, "num_heads=3 must be a multiple of num_kv_heads=2"),
        (Case(lists=3), {}, r"picks.shape=\(5, 1, 3, 4\) must begin with \(5, 1\) and 2 or 4"),
        (Case(), {"implementation": "triton"}, "implementation='triton' must be one of"),
        (Case(), {"implementation": "tpu"}, "backend='cpu' is not 'tpu', and interpret=False"),
        (Case(page=8), TPU, "page=8 must be a multiple of 16"),
        (Case(heads=1024), TPU, "512 query rows share a key/value head, more than 256"),
        (Case(page=48), TPU, "keys=32 of a step must be a multiple of page=48"),
        (Case(), GPU, r"the dtypes \['float32'\] must be one of \('bfloat16',\)"),
    ],
    ids=str,
)
def test_what_cannot_run_is_refused_with_its_values(case, options, message):
    with pytest.raises(ValueError, match=message):
        case.attend(*case.inputs(jnp.float32), **options)


@pytest.mark.parametrize(
    ("case", "tuning", "message"),
    [
        (Case(size=32), {}, r"head_dim=32 must be one of \(64, 128\)"),
        (Case(size=64, page=12), {}, "page=12 must be a multiple of 8"),
        (Case(size=64), {"keys": 64}, "keys=64 of a step must be 128 for wgmma"),
        (Case(size=64), {"steps": 0}, "steps=0 must be positive"),
    ],
    ids=str,
)
def test_what_does_not_fit_the_matrix_unit_is_refused(case, tuning, message):
    with pytest.raises(ValueError, match=message):
        options = GPU | {"tuning": dataclasses.replace(GPU["tuning"], **tuning)}
        jax.eval_shape(functools.partial(case.attend, **options), *case.inputs(jnp.bfloat16))


def test_a_mesh_needs_a_shard_map():
    case = Case()
    inputs = case.inputs(jnp.float32)
    with jax.set_mesh(jax.make_mesh((2,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))):
        with pytest.raises(ValueError, match="a mesh of 2 devices is set"):
            case.attend(*inputs, **TPU)
        out, _ = jax.jit(case.attend)(*inputs)
    assert np.isfinite(out).all()


@pytest.mark.parametrize("size", [64, 128, 96])
def test_a_head_size_without_a_product_is_refused_by_its_device(size):
    pages = (8, 2, 64, size)
    found = {
        on: obstacle_on(on, "gpu", "bfloat16", (1, 1, 4, size), pages) is None
        for on in ("hopper", "blackwell")
    }
    assert found == {"hopper": size != 96, "blackwell": size == 128}
    assert obstacle_on("tpu", "tpu", "bfloat16", (1, 1, 4, size), pages) is None
