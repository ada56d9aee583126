"""Documents in rows that devices cut: each lies on one device unless it must not."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from pallas_kernels.tokens import TAIL
from rl_code.learner.batching import pack
from rl_code.learner.row_slots import Slots
from tests.rl_code.learner.steps import advantages_of
from tests.rl_code.learner.test_documents import PACK, SIZES, make_groups


def devices_of_documents(batch, parts):
    """For each document of each row: the devices that have tokens of it, and how many tokens."""
    part = batch.tokens.shape[1] // parts
    found: dict[tuple, list[int]] = {}
    for (row, slot), document in np.ndenumerate(batch.documents):
        if document > 0:
            key = (row, batch.segments[row, slot], batch.branches[row, slot], document)
            found.setdefault(key, []).append(slot // part)
    return [(len(set(devices)), len(devices)) for devices in found.values()]


@pytest.mark.parametrize("parts", [2, 5, 16, 40])
@pytest.mark.parametrize("align", [1, 3])
def test_only_documents_longer_than_a_part_lie_on_several_devices(build, parts, align):
    config = dataclasses.replace(PACK, parts=parts, align=align, rows=6)
    part = config.slots // parts
    cut = 0
    for seed in range(4):
        groups = make_groups(build, SIZES, seed=seed)
        batch, metrics = pack(groups, advantages_of(SIZES), config, version=0)
        plain, _ = pack(
            groups, advantages_of(SIZES), dataclasses.replace(config, parts=1), version=0
        )
        found = devices_of_documents(batch, parts)
        # a document that begins at a multiple of ``align`` behind a border may be too long by that
        assert all(devices == 1 or tokens > part - align + 1 for devices, tokens in found)
        assert metrics["pack/documents_cut"] == sum(devices > 1 for devices, _ in found)
        # the same tokens, and predictions from the same ones
        assert np.sum(batch.segments > 0) == np.sum(plain.segments > 0)
        cut += sum(devices > 1 for devices, _ in devices_of_documents(plain, parts))
        for x in (batch, plain):
            rows = np.arange(len(x.tokens))[:, None]
            real = x.mask > 0
            assert np.all(x.segments[rows, x.sources][real] > 0)
        sources = [
            sorted(
                zip(
                    x.trajectories[x.mask > 0],
                    np.take_along_axis(x.order, x.sources, axis=1)[x.mask > 0],
                    np.take_along_axis(x.tokens, x.sources, axis=1)[x.mask > 0],
                    strict=True,
                )
            )
            for x in (batch, plain)
        ]
        assert sources[0] == sources[1]
    assert cut


def test_a_full_row_is_filled_all_the_same(build):
    """Where empty slots would leave no room, documents lie on several devices, and are counted."""
    groups = make_groups(build, SIZES)
    values = advantages_of(SIZES)
    plain = dataclasses.replace(PACK, rows=len(SIZES), runs=0)
    longest = int(np.max(np.sum(pack(groups, values, plain, version=0)[0].segments > 0, axis=1)))
    full = dataclasses.replace(plain, slots=longest + longest % 2, rows=2, parts=2)
    batch, metrics = pack(groups, values, full, version=0)
    assert metrics["pack/documents_cut"] == sum(n > 1 for n, _ in devices_of_documents(batch, 2))


def test_empty_slots_are_as_few_as_reach_the_border():
    slots = Slots(align=1, part=10, spare=4)
    kinds = np.array([TAIL] * 7 + [1] * 5 + [TAIL] * 2 + [2] * 9 + [3] * 12)
    found = slots.take(kinds)
    # document 1 begins at slot 10 instead of 7; for document 2 the row has no 3 slots left; no part
    # holds document 3
    assert found[7] == 10 and found[14] == 17 and slots.spare == 1
    assert np.all(np.diff(found) == 1 + 3 * (np.arange(1, len(found)) == 7))
