"""Attention to pages of latent vectors equals the definition in float64, in which the first elements
of a key are its value.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.latent import gpu
from pallas_kernels.latent.api import latent_attention, obstacle_on, tune
from tests.attention.rows import relative
from tests.pallas_kernels.judge import judge, normal, run
from tests.pallas_kernels.test_paged import GPU, REFERENCE, ROWS, TPU, Case

LATENT_GPU = GPU | {"tuning": dataclasses.replace(GPU["tuning"], keys=gpu.KEYS)}


@dataclass(frozen=True)
class Latent(Case):
    """Rows of pages of vectors. rank: their elements that are the value."""

    kv_heads: int = 1
    size: int = 24
    rank: int = 16

    def inputs(self, dtype=jnp.float64) -> list[np.ndarray]:
        """q, and the parts of the vectors that are the value and that are not."""
        q, k, _ = super().inputs(dtype)
        return [q, k[..., : self.rank], k[..., self.rank :]]

    def definition(self, inputs, weights):
        """As of keys, and of values with zeros behind them."""
        q, c, r = inputs
        k, v = (np.concatenate([c, x], axis=-1) for x in (r, np.zeros_like(r)))
        results, slopes = super().definition([q, k, v], weights)
        if weights is None:
            return results, slopes
        of_q, of_k, of_v = slopes
        both = of_k[..., : self.rank] + of_v[..., : self.rank]
        return results, (of_q, both, of_k[..., self.rank :])

    def attend(self, q, c, r, **options):
        """By the interface, with zeros behind results."""
        filled, *rows = jax.device_put((self.filled, self.tables, self.places, self.lengths))
        pages = jnp.concatenate([c, r], axis=-1)
        out, lse = latent_attention(q, pages, self.rank, *rows, filled=filled, **options)
        return jnp.pad(out, [(0, 0)] * 3 + [(0, self.size - self.rank)]), lse


def judged(case: Latent, dtype, gradients: bool = False, **options) -> np.ndarray:
    """Which queries see a key; asserts values and gradients as the definition has them."""
    kernel, naive = (functools.partial(case.attend, **x) for x in (options, REFERENCE))
    inputs = case.inputs()
    found = judge(kernel, case.definition, inputs, dtype, naive=naive, gradients=gradients)
    return np.isfinite(found[2])


@pytest.mark.parametrize("case", [Latent(queries=4), Latent(heads=3, padded=True)], ids=str)
@pytest.mark.quick(first=1)
def test_reference_equals_the_definition_in_values_and_gradients(x64, case):
    seen = judged(case, jnp.float64, gradients=True, **REFERENCE)
    assert 0 < seen.sum() < seen.size


@pytest.mark.parametrize(
    "case", [Latent(heads=3, queries=4, padded=True), Latent(heads=16)], ids=str
)
@pytest.mark.quick(first=1)
def test_tpu_equals_the_definition(x64, case):
    seen = judged(case, jnp.float32, gradients=True, **TPU)
    assert 0 < seen.sum() < seen.size


@pytest.mark.parametrize(
    "case",
    [
        # four pages to a step, of which some end in padding
        Latent(heads=3, queries=4, size=192, rank=128, padded=True),
        # more rows than a thread block has
        Latent(heads=70, size=192, rank=128, page=64, pages=4),
        # a page of two steps
        Latent(heads=2, size=128, rank=128, page=128, pages=4, padded=True),
    ],
    ids=str,
)
@pytest.mark.quick(first=1)
def test_gpu_equals_the_definition_in_bfloat16(x64, case):
    seen = judged(case, jnp.bfloat16, **LATENT_GPU)
    assert 0 < seen.sum() < seen.size


@pytest.mark.parametrize("options", [REFERENCE, TPU], ids=["reference", "tpu"])
@pytest.mark.long
def test_zeros_behind_vectors_change_nothing(options):
    case = Latent(queries=2)
    q, c, r = case.inputs(jnp.float32)
    more = np.zeros((*r.shape[:3], 8), np.float32)
    rows = jax.device_put((case.tables, case.places, case.lengths))
    wide, plain = (
        jax.jit(lambda q, x: latent_attention(q, x, case.rank, *rows, **options))(
            q, np.concatenate(parts, axis=-1)
        )
        for parts in ((c, r, more), (c, r))
    )
    assert relative(wide[0], plain[0]) < 1e-6
    seen = np.isfinite(plain[1])
    assert np.abs(np.asarray(wide[1] - plain[1])[seen]).max() < 1e-5


@pytest.mark.long
def test_gpu_has_the_gradients_of_the_reference(x64):
    seen = judged(
        Latent(heads=3, size=192, rank=128, pages=3), jnp.bfloat16, gradients=True, **LATENT_GPU
    )
    assert 0 < seen.sum() < seen.size


@pytest.mark.parametrize("options", [REFERENCE, TPU, LATENT_GPU], ids=["reference", "tpu", "gpu"])
@pytest.mark.long
def test_a_page_never_written_may_hold_anything(options):
    wide = options is LATENT_GPU
    case = Latent(heads=4, pages=5, **({"size": 192, "rank": 128} if wide else {}))
    dtype = jnp.bfloat16 if wide else jnp.float32
    (weight,) = normal(7, (ROWS, case.queries, case.heads, case.size), dtype=dtype)
    weights = weight, np.zeros(weight.shape[:3], np.float32)
    function = functools.partial(case.attend, **options)
    q, *stored = case.inputs(dtype)

    def results(poison):
        """Of pages whose tokens that were never written are ``poison`` in turn."""
        poison = np.resize(poison, (case.page, 1)).astype(weight.dtype)
        pages = (np.where(np.isnan(x), poison, x) for x in stored)
        (out, _), slopes = run(function, (q, *pages), weights)
        return out, *slopes

    for one, other in zip(results([np.nan, np.inf, -np.inf]), results([0.0]), strict=True):
        assert np.isfinite(one).all() and np.array_equal(one, other)


@pytest.mark.parametrize(
    ("case", "options", "message"),
    [
        (Latent(rank=25), {}, r"rank=25 are the value"),
        (Latent(kv_heads=2), {}, "must have one vector a token"),
        (Latent(), {"implementation": "tpu"}, "backend='cpu' is not 'tpu', and interpret=False"),
        (Latent(page=8), TPU, "page=8 must be a multiple of 16"),
        (Latent(), LATENT_GPU, r"the dtypes \['float32'\] must be one of \('bfloat16',\)"),
    ],
    ids=str,
)
def test_what_cannot_run_is_refused_with_its_values(case, options, message):
    with pytest.raises(ValueError, match=message):
        case.attend(*case.inputs(jnp.float32), **options)


@pytest.mark.parametrize(
    ("size", "rank", "page", "message"),
    [
        (576, 512, 64, None),
        (576, 512, 12, "page=12 must be a multiple of 8"),
        (96, 64, 64, "vectors of 96, 64 the value, must be multiples of 64, 128"),
        (640, 512, 64, "vectors of 640, 512 the value, do not fit the shared memory"),
    ],
)
def test_vectors_that_do_not_fit_a_hopper_are_refused(size, rank, page, message):
    given = ("gpu", "bfloat16", (16, 1, 128, size), (8, 1, page, size), rank)
    assert obstacle_on("hopper", *given) == message
    assert obstacle_on("blackwell", *given) == gpu.ELSEWHERE


def test_a_batch_of_one_fills_a_gpu():
    q, pages = (jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in ((1, 1, 128, 576), (9, 1, 64, 576)))
    tuning = tune("hopper", q, pages, count=1024)
    assert 0.9 * 132 < 2 * tuning.splits <= 132 and tuning.keys == gpu.KEYS
