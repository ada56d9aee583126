"""The pages of a split as the GPU kernels read them, by their list in memory.

Dimensions: n pages of a list.
"""

from __future__ import annotations

import functools
from typing import Protocol

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matrix_units import spread

# A place that no query sees.
NOWHERE = -(2**30)
# Rows of the registers' layout.
ROWS = 64


class Plan(Protocol):
    """Static arguments of a kernel that reads pages."""

    # Tokens of a page of the lists, how many of these a page in memory has, and pages of a step.
    @property
    def page(self) -> int: ...
    @property
    def parts(self) -> int: ...
    @property
    def width(self) -> int: ...

    # As in ``Work``.
    @property
    def splits(self) -> int: ...
    @property
    def pages(self) -> int: ...
    @property
    def numbered(self) -> bool: ...
    @property
    def padded(self) -> bool: ...


class Pages:
    """The pages of a split, by their index in it.

    An index past the end gives the last page again: a copy of it stays in bounds.
    """

    def __init__(self, lists, at, number, plan: Plan):
        self.list = lists.at[at, number]
        self.plan = plan
        split = jax.lax.axis_index("split")
        self.begin = self.list[2 * split]
        self.end = self.list[2 * split + 1]

    def page(self, index):
        """The number of a page in memory; for a hole it is ~p of some page p of the list."""
        return self.list[2 * self.plan.splits + jnp.minimum(self.begin + index, self.end - 1)]

    def copied(self, step, stored, head) -> list:
        """The pages of a step in memory [pages, K, page, H], for one head.

        A hole copies the page that stands for it. Every step then makes the number of copies that
        the barrier counts.
        """
        found = [self.page(step * self.plan.width + i) for i in range(self.plan.width)]
        found = [jnp.where(page < 0, ~page, page) for page in found]
        return [stored.at[in_memory(page, head, self.plan)] for page in found]

    def place(self, index):
        """The place in the sequence of a page's first token.

        ``NOWHERE`` for a hole and past the end, so that no query sees any place of it.
        """
        at = jnp.minimum(self.begin + index, self.end - 1)
        number = (
            self.list[2 * self.plan.splits + self.plan.pages + at] if self.plan.numbered else at
        )
        real = (self.page(index) >= 0) & (self.begin + index < self.end)
        return jnp.where(real, number * self.plan.page, NOWHERE)

    def filled(self, index):
        """The number of places at the start of a page that hold a token."""
        at = jnp.minimum(self.begin + index, self.end - 1)
        parts = 2 if self.plan.numbered else 1
        return self.list[2 * self.plan.splits + parts * self.plan.pages + at]


def in_memory(page, head, plan: Plan) -> tuple:
    """The index of a page of the lists in memory [pages, K, page, H]."""
    if plan.parts == 1:
        return page, head
    stored = jax.lax.div(page, plan.parts)
    return stored, head, pl.ds(jax.lax.rem(page, plan.parts) * plan.page, plan.page)


def places_of(pages: Pages, step, first: int, count: int, line, plan: Plan):
    """The place in the sequence of ``count`` keys of a step, from its ``first`` one on.

    line: the layout of the result, int32 [count], in registers. The keys must cover whole pages, or
      lie within one page.
    """
    row = plgpu.broadcasted_iota(jnp.int32, (count,), 0, layout=line)
    inside = [i for i in range(plan.width) if first <= i * plan.page < first + count]
    # no page begins in the range: it lies within one page
    inside = inside or [first // plan.page]

    def over_pages(value):
        """value(i), which is constant over page number i of the step, for every key."""
        found = jnp.broadcast_to(value(inside[0]), row.shape)
        for i in inside[1:]:
            found = jnp.where(row >= i * plan.page - first, value(i), found)
        return found

    # place minus index in the range
    place = row + over_pages(lambda i: pages.place(step * plan.width + i) - i * plan.page + first)
    if not plan.padded:
        return place
    # the index in the range at which a page's padding begins
    end = over_pages(lambda i: pages.filled(step * plan.width + i) + i * plan.page - first)
    return jnp.where(row < end, place, NOWHERE)


def clean(pages: Pages, step, values, spans, at, plan: Plan) -> None:
    """Writes zeros over the values that no query sees.

    Such values may not be finite, and 0 times them would be NaN.
    """
    # the first and the last place that any query of the unit sees
    low = spans[at, 2]
    high = spans[at, 3]
    layout = plgpu.Layout.WGMMA
    line = layout.reduce(1)
    starts = [pages.place(step * plan.width + i) for i in range(plan.width)]
    inside = [(start >= low) & (start + (plan.page - 1) <= high) for start in starts]
    if plan.padded:
        inside += [pages.filled(step * plan.width + i) == plan.page for i in range(plan.width)]

    @pl.when(~functools.reduce(jnp.logical_and, inside))
    def _():
        for first in range(0, values.shape[0], ROWS):  # few at a time, for the sake of registers
            some = values.at[pl.ds(first, ROWS)]
            place = spread(places_of(pages, step, first, ROWS, line, plan), some.shape, 0)
            kept = plgpu.load(some, layout=layout)
            some[...] = jnp.where((place >= low) & (place <= high), kept, jnp.zeros_like(kept))
        plgpu.commit_smem()
