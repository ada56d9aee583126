"""The one rule for documents: where they stand, what they see, and by what RoPE rotates them."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.methods.dense import Dense
from configs import quickstart
from pallas_kernels.tokens import TAIL, Tokens, visible
from rl_code.config import read_config
from rl_code.config.read_config import ConfigError
from rl_code.environment.documents import (
    OUTSIDE,
    PADDING,
    DocumentsConfig,
    check_layout,
    next_position,
    place,
    rope_positions,
    seen_as,
)
from rl_code.report.trajectories import trajectories
from rl_code.run.config import RunConfig
from rl_code.run.trajectory_log import read_trajectories
from rl_code.store import serialization
from tests.rl_code.learner.conftest import make_group, make_trajectory
from tests.rl_code.trajectories import read_with, record_step

CONFIG = dataclasses.replace(DocumentsConfig(longest=8, shortest=2), page=4)
PAD = 99

PIECES = st.lists(
    st.tuples(st.lists(st.integers(1, 50), max_size=20), st.booleans()), min_size=1, max_size=6
)


@given(PIECES, PIECES)
@settings(max_examples=100, deadline=None)
def test_what_place_lays_out_passes_the_check_of_layouts(first, then):
    _, documents = laid_out(first)
    number = int(documents.max(initial=0))
    check_layout(np.append(documents, laid_out(then, len(documents), number)[1]), CONFIG)


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        # each starts at a whole page, as what follows a document does
        ([0, 0, PADDING, PADDING, 0], "2 places of padding start at place 2"),
        ([0, PADDING, PADDING, PADDING], "3 places of padding start at place 1"),
        ([PADDING] * 4 + [0], "4 places of padding start at place 0"),
        ([1, 1, 1] + [PADDING] * 5 + [0], "5 places of padding start at place 3"),
        ([1, 1, 1, PADDING, 0, 0, PADDING, PADDING, 0], "2 places of padding start at place 6"),
        ([0, 0] + [PADDING] * 6 + [1], "6 places of padding start at place 2"),
        ([1] * 9, "document 1 has 9 tokens; documents.longest=8 is the most"),
        ([0, 1, 1], "starts at place 1, which is no multiple of page=4"),
        ([1, 1, 0], "starts at place 2, which is no multiple of page=4"),
        ([1, PADDING, PADDING, PADDING, 3], "are not numbered 1, 2"),
    ],
)
def test_layouts_that_place_would_not_make_are_refused(kinds, words):
    with pytest.raises(ValueError, match=words):
        check_layout(np.array(kinds, np.int32), CONFIG)


def laid_out(pieces, at=0, number=0):
    tokens, documents = place(pieces, at, number, CONFIG, PAD)
    return np.array(tokens, np.int32), np.array(documents, np.int32)


@given(PIECES, st.integers(0, 9), st.integers(0, 3))
@settings(max_examples=200, deadline=None)
def test_documents_fill_whole_pages_and_no_token_is_lost(pieces, at, number):
    tokens, documents = laid_out(pieces, at, number)
    assert tokens[documents != PADDING].tolist() == [token for ids, _ in pieces for token in ids]
    assert (tokens[documents == PADDING] == PAD).all()
    places = at + np.arange(len(documents))
    numbers = np.unique(documents[documents > 0])
    assert numbers.tolist() == list(range(number + 1, number + 1 + len(numbers)))
    for one in numbers:
        own = places[documents == one]
        assert own[0] % CONFIG.page == 0 and len(own) <= CONFIG.longest
        assert own.tolist() == list(range(own[0], own[-1] + 1))
        # the rest of its last page is padding
        pages = own // CONFIG.page
        others = documents[np.isin(places // CONFIG.page, pages)]
        assert set(others.tolist()) <= {one, PADDING}


@given(PIECES)
@settings(max_examples=100, deadline=None)
def test_positions_count_in_the_document_and_outside_behind_the_longest(pieces):
    _, documents = laid_out(pieces)
    positions = rope_positions(documents, CONFIG.longest)
    outside = positions[documents == OUTSIDE]
    assert outside.tolist() == list(range(8, 8 + len(outside)))
    assert next_position(documents, CONFIG.longest) == 8 + len(outside)
    for number in range(1, int(documents.max(initial=0)) + 1):
        own = positions[documents == number]
        assert own.tolist() == list(range(len(own)))
    assert (positions[documents == PADDING] == 0).all()


sees_what = jax.jit(visible)


@given(PIECES)
@settings(max_examples=50, deadline=None)
def test_a_document_sees_itself_and_what_is_outside_sees_all_before(pieces):
    _, documents = laid_out([([1], False), *pieces])
    segments, numbers = seen_as(documents)
    order = np.arange(len(documents), dtype=np.int32)
    # few lengths, since each is a program
    padding = (0, -len(order) % 64)
    fields = (segments, np.zeros_like(order), numbers, order)
    where = Tokens(*(np.pad(np.asarray(x, np.int32), padding)[None] for x in fields))
    sees = np.asarray(sees_what(where, where))[0, : len(order), : len(order)]
    earlier = order[None, :] <= order[:, None]
    real = documents != PADDING
    same = documents[:, None] == documents[None, :]
    expected = earlier & real[None, :] & real[:, None]
    expected &= (documents[:, None] == OUTSIDE) | same
    assert (sees == expected).all()
    assert (numbers[documents == OUTSIDE] == TAIL).all()


def test_a_piece_longer_than_a_document_is_split_and_a_short_one_stays_outside():
    tokens, documents = laid_out([([1], False), (range(2, 12), True), ([12], True), ([13], False)])
    assert documents.tolist() == [0, -1, -1, -1, *[1] * 8, 2, 2, -1, -1, 0, 0]
    assert tokens[documents > 0].tolist() == list(range(2, 12))


def test_sizes_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="longest=6 must be a multiple"):
        dataclasses.replace(CONFIG, longest=6).check_page()
    with pytest.raises(ValueError, match="shortest=9 must not exceed"):
        DocumentsConfig(longest=8, shortest=9)


def with_documents(trajectory, documents):
    (context,) = trajectory.contexts
    context = dataclasses.replace(context, documents=np.array(documents, np.int32))
    return dataclasses.replace(trajectory, contexts=(context,))


def test_records_hold_documents_bit_for_bit_and_nothing_where_there_are_none():
    plain = make_trajectory([1, 2, 3, 4], [0, 0, 0, 1], prompt_length=2)
    marked = with_documents(plain, [0, 1, -1, 0])
    assert b"documents" not in serialization.dumps(make_group([plain]))
    data = serialization.dumps(make_group([marked]))
    (again,) = serialization.loads(data).trajectories
    assert again.documents.dtype == np.int32 and again.documents.tolist() == [0, 1, -1, 0]
    assert serialization.dumps(make_group([again])) == data


def test_kept_places_of_a_tree_have_their_kinds():
    first = with_documents(
        make_trajectory([1, 2, 3, 4], [0, 0, 0, 1], prompt_length=2), [0, 1, 1, 0]
    )
    later = dataclasses.replace(
        first.contexts[0], tokens=np.array([7, 8]), documents=np.array([1, 0]), parent=0, kept=2
    )
    tree = dataclasses.replace(first, contexts=(*first.contexts, later))
    assert tree.whole(1).tolist() == [1, 2, 7, 8]
    assert tree.whole_documents(1).tolist() == [0, 1, 1, 0]
    assert make_trajectory([1, 2], [0, 1], prompt_length=1).whole_documents(0) is None


def small_run(documents, **changes):
    """The quickstart's config with the section, and other values at dotted keys."""
    config = quickstart.get_config("smoke")
    with config.unlocked():
        config.documents = documents
    for key, value in changes.items():
        section, name = key.split("__")
        with config[section].unlocked():
            config[section][name] = value
    return read_config.build(RunConfig, config)


def test_the_section_settles_pages_of_cache_and_batch():
    config = small_run(dict(longest=64, shortest=8))
    page = config.rollout.engine.page
    assert config.documents == dataclasses.replace(DocumentsConfig(64, 8), page=page)
    assert config.train.pack.documents == config.documents
    plain = small_run(None)
    assert plain.documents is None and plain.train.pack.documents is None


def test_squid_needs_documents():
    (method,) = small_run({}, model__attention="squid").model.methods()
    assert isinstance(method, Dense)
    with pytest.raises(read_config.ConfigError, match="squid is dense attention over documents"):
        small_run(None, model__attention=("dense", "squid"))


@pytest.mark.parametrize(
    ("changes", "longest"),
    [
        ({}, 288),  # limits.tokens, in whole pages
        ({"limits__tokens": 300}, 288),
        ({"limits__tokens": 5000}, 1024),
        ({"model__attention": dict(name="moba", block=64, picks=3)}, 256),  # whose page is a block
    ],
)
def test_the_longest_document_follows_from_the_limits(changes, longest):
    config = small_run({}, **changes)
    assert config.documents.longest == config.rollout.engine.longest_document == longest
    assert small_run(dict(longest=64), **changes).documents.longest == 64


@pytest.mark.parametrize(
    ("documents", "changes", "told"),
    [
        (
            dict(longest=33),
            {},
            r"documents\.longest=33 must be a multiple of rollout\.engine\.page",
        ),
        (dict(longest=1 << 20), {}, r"documents\.longest=1048576 must not exceed limits\.tokens"),
        (dict(longest=64, page=8), {}, r"documents\.page: no such key; its value is that of"),
        (dict(longest=64), dict(train__pack=dict(prompt_slots=64)), "which are not for documents"),
    ],
)
def test_sections_that_do_not_agree_are_refused(documents, changes, told):
    with pytest.raises(ConfigError, match=told):
        small_run(documents, **changes)


def test_what_is_read_shows_no_padding_and_says_what_each_token_is(tmp_path, monkeypatch):
    marked = with_documents(
        make_trajectory([1, 2, 3, 9, 4, 5, 9, 6, 7], [0] * 8 + [1], prompt_length=5),
        [0, 1, 1, -1, 0, 2, -1, 0, 0],
    )
    read_with(monkeypatch, lambda ids: "".join(chr(96 + id) for id in ids))
    record_step(tmp_path, 0, [make_group([marked])])
    (record,) = read_trajectories(tmp_path, 0)
    assert record["prompt"]["text"] == "abcd" and record["prompt"]["documents"] == [0, 1, 1, -1, 0]
    assert record["prompt"]["pieces"] == ["a", "b", "c", "", "d"]
    (logged,) = record["trajectories"]
    assert logged["pieces"] == ["e", "", "f", "g"] and logged["documents"] == [2, -1, 0, 0]
    found = trajectories({"run": tmp_path}, steps=1, per_source=1, room=1 << 20)
    (sample,) = found["sources"][0]["groups"][0]["samples"]
    assert sample["documents"] == [[2, 1], [-1, 1], [0, 2]]
    assert marked.num_tokens == 7
