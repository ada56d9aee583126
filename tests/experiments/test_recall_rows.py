"""Rows of recall: every answer stands in one document, nowhere else, and who sees whom is as
asked.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from experiments.recall.rows import FILE, GET, PAD, SET, RecallConfig, recall_rows
from pallas_kernels.tokens import TAIL

TASK = RecallConfig(
    documents=5, document_tokens=16, facts=3, asked=6, keys=64, values=8, noise=8, longer=3
)


def drawn(
    seed: int = 0,
    rows: int = 20,
    documents: int = 5,
    apart: bool = False,
    positions="sequential",
    span: int = 0,
):
    rng = np.random.default_rng(seed)
    return recall_rows(TASK, rng, rows, documents, apart=apart, positions=positions, span=span)


def facts(row: np.ndarray) -> dict[int, list[int]]:
    """The values that the documents of a row give to every key."""
    found: dict[int, list[int]] = {}
    for at in np.flatnonzero(row == SET):
        found.setdefault(int(row[at + 1]), []).append(int(row[at + 2]))
    return found


@pytest.mark.parametrize("documents", [1, 5, TASK.many])
def test_every_answer_follows_from_one_fact_of_the_row(documents):
    tokens, _, _, mask = drawn(documents=documents)
    assert tokens.shape == (20, TASK.tokens(documents))
    for row, marks in zip(tokens, mask, strict=True):
        known = facts(row)
        answers = np.flatnonzero(marks)
        assert len(known) == documents * TASK.facts and all(
            len(values) == 1 for values in known.values()
        )
        assert len(answers) == min(TASK.asked, documents * TASK.facts // 2)
        assert [row[at] for at in answers] == [known[int(row[at - 1])][0] for at in answers]
        assert all(row[at - 2] == GET for at in answers) and len(
            {row[at - 1] for at in answers}
        ) == len(answers)
        starts = row[: documents * TASK.document_tokens : TASK.document_tokens]
        assert np.all(starts == FILE) and np.sum(row == FILE) == documents
        assert row.max() < TASK.vocabulary


def test_answers_and_places_are_spread_evenly():
    tokens, _, _, mask = drawn(rows=2000)
    answers = tokens[mask > 0] - (GET + 1 + TASK.keys)
    assert np.allclose(
        np.bincount(answers, minlength=TASK.values) / answers.size, 1 / TASK.values, atol=0.015
    )
    asked = tokens[:, 5 * TASK.document_tokens + 1]
    place = np.argmax((tokens == asked[:, None]) & (np.roll(tokens, 1, axis=1) == SET), axis=1)
    assert np.allclose(
        np.bincount(place // TASK.document_tokens, minlength=5) / 2000, 1 / 5, atol=0.03
    )


def test_documents_are_numbered_only_where_they_are_apart():
    _, _, where, _ = drawn(apart=True)
    size = TASK.document_tokens
    assert np.all(where.documents[:, :size] == 1) and np.all(
        where.documents[:, 4 * size : 5 * size] == 5
    )
    assert np.all(where.documents[:, 5 * size :] == TAIL)
    tokens, _, together, _ = drawn()
    assert not together.documents.any()
    np.testing.assert_array_equal(where.segments, tokens != PAD)


@pytest.mark.parametrize(
    ("positions", "span"), [("sequential", 0), ("sequential", 400), ("shared", 0)]
)
def test_positions_run_on_inside_of_a_document(positions, span):
    _, found, _, _ = drawn(positions=positions, span=span)
    parts = found.reshape(20, -1, TASK.document_tokens)
    np.testing.assert_array_equal(np.diff(parts, axis=2)[:, :5], 1)
    gaps = parts[:, 1:, 0] - parts[:, :-1, -1] - 1
    if positions == "shared":
        assert np.all(parts[:, :5, 0] == 0) and np.all(parts[:, 5, 0] == TASK.document_tokens)
    else:
        assert (
            np.all(gaps >= 0)
            and found.max() < max(span, found.shape[1])
            and (gaps.max() > 0) == (span > 0)
        )


def test_rows_follow_from_their_seed_and_methods_get_the_same_tokens():
    first = drawn()
    again = drawn()
    apart = drawn(apart=True, positions="shared")
    other = drawn(seed=1)
    np.testing.assert_array_equal(first[0], again[0])
    np.testing.assert_array_equal(first[0], apart[0])
    assert np.any(first[0] != other[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(facts=6), "facts=6 of 3 tokens do not fit in 16 tokens"),
        (dict(asked=8), "asked=8 is more than half of 15 facts"),
        (dict(facts=1), "facts=1 must be at least 2"),
        (dict(keys=20), "keys=20 must be at least the"),
        (dict(noise=0), "noise=0 must be positive"),
    ],
)
def test_a_task_that_cannot_be_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TASK, **changes)
