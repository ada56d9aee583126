"""Packing keeps every sampled token once, with what belongs to it, whatever the row it lands in."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.tokens import packed_rows, visible
from rl_code.learner.batch import Batch
from rl_code.learner.batching import PackConfig, empty_batch, pack
from rl_code.learner.supervised_batching import Demonstrated, pack_supervised
from tests.rl_code.trajectories import with_context


def advantages_for(groups):
    """Distinct numbers, so that a mix-up shows."""
    return [
        np.array([10 * g + i for i in range(len(group.trajectories))], float)
        for g, group in enumerate(groups)
    ]


def read_back(batch: Batch):
    """By sequence: (context of each target as the mask shows it, target, logprob, advantage,
    length, staleness).
    """
    where = packed_rows(batch.segments, batch.branches, batch.positions)
    mask = np.asarray(visible(where, where))
    found: dict[int, list] = {}
    for row, target in zip(*np.nonzero(batch.mask), strict=True):
        source = batch.sources[row, target]
        seen = np.flatnonzero(mask[row, source])
        np.testing.assert_array_equal(batch.positions[row, seen], np.arange(len(seen)))
        fields = (batch.targets, batch.logprobs, batch.advantages, batch.lengths, batch.staleness)
        entry = (batch.tokens[row, seen].tolist(), *(field[row, target] for field in fields))
        found.setdefault(int(batch.trajectories[row, target]), []).append(entry)
    return found


def expected(groups, advantages, version):
    wanted = {}
    sequence = 0
    for group, values in zip(groups, advantages, strict=True):
        for t, advantage in zip(group.trajectories, values, strict=True):
            indices = np.flatnonzero(t.sampled)
            if len(indices) and t.status != "fault":
                wanted[sequence] = [
                    (
                        t.tokens[:i].tolist(),
                        t.tokens[i],
                        t.logprobs[i],
                        np.float32(advantage),
                        np.float32(len(indices)),
                        version - t.versions[i],
                    )
                    for i in indices
                ]
            sequence += 1
    return wanted


@pytest.mark.long
@settings(deadline=None, max_examples=20)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
    slots=st.integers(24, 90),
    runs=st.sampled_from([0, 5, 9]),
    align=st.sampled_from([1, 4]),
)
def test_every_sampled_token_sees_its_own_trajectory_and_keeps_its_numbers(
    build, sizes, seed, slots, runs, align
):
    groups = build.groups(sizes, seed=seed, version=6)
    advantages = advantages_for(groups)
    config = PackConfig(64, slots, 40, 1, False, runs=runs, align=align)
    batch, metrics = pack(groups, advantages, config, version=7)
    starts = np.pad(
        np.diff(100 * batch.segments + batch.branches, axis=1) != 0,
        ((0, 0), (1, 0)),
        constant_values=True,
    )
    assert (np.nonzero(starts & (batch.segments > 0))[1] % align == 0).all()
    # but for empty slots at the end
    assert (starts[batch.mask.any(axis=1)].sum(axis=1) - 1).max() <= (runs or np.inf)
    assert read_back(batch) == expected(groups, advantages, 7)
    assert batch.mask.sum() == sum(t.sampled.sum() for group in groups for t in group.trajectories)
    rows = (batch.mask.sum(axis=1) > 0).sum()
    assert metrics["pack/rows"] == rows and batch.mask[:rows].sum() == batch.mask.sum()
    assert metrics["pack/fill"] == pytest.approx((batch.segments[:rows] > 0).mean())
    assert metrics["pack/target_fill"] == pytest.approx(batch.mask[:rows].mean())
    assert (batch.trajectories[batch.mask == 0] == sum(sizes)).all() and (
        batch.lengths[batch.mask == 0] == 1
    ).all()


def test_a_prompt_stands_once_per_group(build):
    prompt = [1, 2, 3, 4]
    members = [
        build.trajectory([*prompt, 5 + i, 6, 7], [0] * 4 + [1] * 3, prompt_length=4, index=i)
        for i in range(3)
    ]
    batch, metrics = pack(
        [build.group(members)], [np.zeros(3)], PackConfig(1, 12, 9, 0, False), version=0
    )
    np.testing.assert_array_equal(batch.tokens[0], [1, 2, 3, 4, 5, 6, 6, 6, 7, 6, 0, 0])
    np.testing.assert_array_equal(batch.positions[0], [0, 1, 2, 3, 4, 5, 4, 5, 4, 5, 0, 0])
    np.testing.assert_array_equal(batch.segments[0], [1] * 10 + [0] * 2)
    np.testing.assert_array_equal(batch.branches[0], [0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 0, 0])
    np.testing.assert_array_equal(batch.sources[0], [3, 4, 5, 3, 6, 7, 3, 8, 9])
    np.testing.assert_array_equal(batch.targets[0], [5, 6, 7, 6, 6, 7, 7, 6, 7])
    np.testing.assert_array_equal(batch.trajectories[0], [0, 0, 0, 1, 1, 1, 2, 2, 2])
    assert metrics["pack/saved"] == pytest.approx(1 - 10 / 18)


def test_a_group_that_fits_no_row_is_split_with_its_prompt_repeated(build):
    groups = build.groups([6], prompt=(6, 7), completion=(8, 9))
    advantages = advantages_for(groups)
    # 6 + 2 x 7 slots
    batch, metrics = pack(groups, advantages, PackConfig(4, 22, 100, 0, False), version=0)
    assert metrics["pack/rows"] == 3
    assert read_back(batch) == expected(groups, advantages, 0)
    # 6 targets each
    batch, metrics = pack(groups, advantages, PackConfig(6, 100, 11, 0, False), version=0)
    assert metrics["pack/rows"] == 6
    assert read_back(batch) == expected(groups, advantages, 0)


def test_a_batch_has_the_configured_rows_and_fills_the_first(build):
    groups = build.groups([3, 3, 3], prompt=(6, 7), completion=(8, 9))
    for count in (1, 2, 3):
        batch, metrics = pack(
            groups[:count],
            advantages_for(groups[:count]),
            PackConfig(8, 27, 18, 0, False),
            version=0,
        )
        assert (
            batch.tokens.shape == (8, 27)
            and batch.targets.shape == (8, 18)
            and metrics["pack/rows"] == count
        )
        assert batch.mask[:count].any(axis=1).all() and not batch.mask[count:].any()


def test_groups_without_any_advantage_are_left_out_when_asked(build):
    groups = build.groups([3, 2, 4], prompt=(6, 7), completion=(8, 9))
    advantages = [np.array([0.5, -0.5, 0.0]), np.zeros(2), np.array([1.0, 0.0, 0.0, -1.0])]
    kept, metrics = pack(groups, advantages, PackConfig(4, 60, 50, 0, True), version=0)
    assert metrics["pack/uninformative"] == 2 and set(kept.trajectories[kept.mask > 0]) == {
        0,
        1,
        2,
        5,
        6,
        7,
        8,
    }
    every, metrics = pack(groups, advantages, PackConfig(4, 60, 50, 0, False), version=0)
    assert metrics["pack/uninformative"] == 0 and set(every.trajectories[every.mask > 0]) == set(
        range(9)
    )
    nothing, metrics = pack(groups[1:2], advantages[1:2], PackConfig(4, 60, 50, 0, True), version=0)
    assert not nothing.mask.any() and metrics["pack/rows"] == 0 and metrics["pack/saved"] == 0


def test_shapes_and_dtypes_are_those_of_the_empty_batch(build):
    config = PackConfig(4, 60, 50, 0, False)
    batch, _ = pack(build.groups([2, 3]), [np.zeros(2), np.zeros(3)], config, version=0)
    for field in dataclasses.fields(Batch):
        full = getattr(batch, field.name)
        empty = getattr(empty_batch(config, 4), field.name)
        if full is None and empty is None:  # only with documents
            continue
        assert (full.shape, full.dtype) == (empty.shape, empty.dtype), field.name


def test_faults_and_empty_trajectories_are_left_out_and_counted(build):
    (group,) = build.groups([4])
    fault = dataclasses.replace(
        with_context(group.trajectories[0], logprobs=np.array([np.nan])), status="fault"
    )
    empty = with_context(
        group.trajectories[2], sampled=np.zeros_like(group.trajectories[2].sampled)
    )
    group = build.group([fault, group.trajectories[1], empty, group.trajectories[3]])
    batch, metrics = pack([group], [np.arange(4.0)], PackConfig(1, 60, 50, 0, False), version=0)
    assert metrics["pack/faults"] == 1 and metrics["pack/empty"] == 1
    assert read_back(batch) == expected([group], [np.arange(4.0)], 0)


def test_the_way_a_trajectory_ended_does_not_remove_it(build):
    (group,) = build.groups([3])
    ends = ("submitted", "turn_limit", "token_limit")
    members = [
        dataclasses.replace(t, status=s) for t, s in zip(group.trajectories, ends, strict=True)
    ]
    batch, _ = pack(
        [build.group(members)], [np.zeros(3)], PackConfig(1, 60, 50, 0, False), version=0
    )
    assert batch.mask.sum() == sum(t.sampled.sum() for t in members)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(prompt_length=9), "prompt_length=9.*first sampled token is at 4"),
        (dict(prompt_length=3), "prompt of 3 tokens is not that of its group"),
        (dict(logprobs=np.full(7, np.nan)), "trajectory 1.*not finite"),
        (dict(logprobs=np.zeros(6)), "'logprobs': 6"),
        (dict(versions=np.full(7, 2)), "3 to 3 versions old at version 5; allowed is 0 to 1"),
        (dict(versions=np.full(7, 6)), "-1 to -1 versions old at version 5"),
        (dict(tokens=np.arange(7) + 1), "not that of its group"),
    ],
)
def test_what_must_not_be_trained_on_is_named(build, change, message):
    members = [
        build.trajectory(
            [1, 1, 1, 1, 5, 6, 7], [0] * 4 + [1] * 3, prompt_length=4, index=i, version=5
        )
        for i in range(2)
    ]
    own = {name: change.pop(name) for name in set(change) - {"prompt_length"}}
    members[1] = dataclasses.replace(with_context(members[1], **own), **change)
    with pytest.raises(ValueError, match=f"task0.*{message}"):
        pack([build.group(members)], [np.zeros(2)], PackConfig(1, 30, 30, 1, False), version=5)


def test_a_batch_that_does_not_fit_is_named_with_its_numbers(build):
    groups = build.groups([2, 2], prompt=(6, 7), completion=(8, 9))
    with pytest.raises(ValueError, match=r"needs 13 slots and 6 targets; a row has slots=12"):
        pack(groups, advantages_for(groups), PackConfig(2, 12, 100, 0, False), version=0)
    with pytest.raises(ValueError, match=r"needs 13 slots and 6 targets; .*targets=5"):
        pack(groups, advantages_for(groups), PackConfig(2, 100, 5, 0, False), version=0)
    with pytest.raises(
        ValueError, match=r"needs 2 rows \(40 slots, 24 targets in 2 pieces\); rows=1"
    ):
        pack(groups, advantages_for(groups), PackConfig(1, 20, 100, 0, False), version=0)
    with pytest.raises(ValueError, match="2 trajectories but 3 advantages"):
        pack(groups[:1], [np.zeros(3)], PackConfig(1, 20, 100, 0, False), version=0)
    with pytest.raises(ValueError, match="2 groups but advantages for 1"):
        pack(groups, [np.zeros(2)], PackConfig(1, 20, 100, 0, False), version=0)
    with pytest.raises(ValueError, match=r"advantage \(inf\) is not finite"):
        pack(groups[:1], [np.array([np.inf, 0.0])], PackConfig(1, 40, 100, 0, False), version=0)
    with pytest.raises(ValueError, match="rows=0 must be at least 1"):
        PackConfig(0, 20, 20, 0, False)
    with pytest.raises(ValueError, match="align=0 must be at least 1"):
        PackConfig(1, 20, 20, 0, False, align=0)


def test_demonstrations_are_packed_in_order_until_one_does_not_fit():
    examples = [
        Demonstrated([1, 2, 3], [0, 1, 1]),
        Demonstrated([4, 5, 6, 7], [0, 0, 1, 1]),
        Demonstrated([8, 9], [0, 1]),
        Demonstrated([1] * 5, [1] * 5),
    ]
    batch, taken = pack_supervised(iter(examples), rows=2, slots=5)
    assert taken == 3
    np.testing.assert_array_equal(batch.tokens, [[1, 2, 3, 8, 9], [4, 5, 6, 7, 0]])
    np.testing.assert_array_equal(batch.positions, [[0, 1, 2, 0, 1], [0, 1, 2, 3, 0]])
    np.testing.assert_array_equal(batch.where.segments, [[1, 1, 1, 2, 2], [1, 1, 1, 1, 0]])
    np.testing.assert_array_equal(batch.mask, [[0, 1, 1, 0, 1], [0, 0, 1, 1, 0]])
    with pytest.raises(ValueError, match="example 0: 3 tokens and a mask of 3 for slots=2"):
        pack_supervised(examples, rows=2, slots=2)
    with pytest.raises(ValueError, match="example 0: 3 tokens and a mask of 2"):
        pack_supervised([Demonstrated([1, 2, 3], [0, 1])], rows=2, slots=5)


def test_demonstrations_start_at_multiples_of_the_alignment():
    texts = ([1, 2, 3], [4] * 5, [5, 6], [7])
    examples = [Demonstrated(text, [1] * len(text)) for text in texts]
    batch, taken = pack_supervised(examples, rows=2, slots=10, align=4)
    assert taken == 4 and batch.align == 4
    np.testing.assert_array_equal(
        batch.where.segments, [[1, 1, 1, 0, 2, 2, 2, 2, 2, 0], [1, 1, 0, 0, 2, 0, 0, 0, 0, 0]]
    )
    np.testing.assert_array_equal(batch.tokens[1], [5, 6, 0, 0, 7, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(batch.mask, batch.where.segments > 0)
