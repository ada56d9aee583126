"""Attention of few tokens to pages of latent vectors on TPU: the kernel of keys and values, which
is given keys alone.
"""

from __future__ import annotations

import jax

from pallas_kernels.paged import tpu as paged
from pallas_kernels.paged.lists import TuningConfig, Work
from pallas_kernels.paged.tpu import DTYPES, ELSEWHERE, TARGETS, part

__all__ = ["DTYPES", "ELSEWHERE", "TARGETS", "forward", "obstacle", "part"]


def obstacle(
    q_shape: tuple[int, ...], pages_shape: tuple[int, ...], rank: int, on: str
) -> str | None:
    """Reason why the kernel cannot run q [B, T, N, E] and pages [pages, 1, page, E], or None.

    rank: elements that are the value, which makes no difference. on: the device, which makes none
      among TPUs.
    """
    return paged.obstacle(q_shape, pages_shape, on)


def forward(
    q: jax.Array,
    pages: jax.Array,
    rank: int,
    work: Work,
    *,
    tuning: TuningConfig,
    interpret=False,
) -> tuple[jax.Array, jax.Array]:
    """Attention of q [U, 1, R, E] to pages [pages, 1, page, E], each split by itself.

    Returns (out [splits, U, 1, R, rank], lse [splits, U, 1, R]) in float32.
    """
    out, lse = paged.forward(q, pages, None, work, tuning=tuning, interpret=interpret)
    return out[..., :rank], lse
