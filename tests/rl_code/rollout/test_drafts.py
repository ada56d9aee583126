"""Guesses at the next tokens change nothing but the number of steps."""

from __future__ import annotations

import dataclasses
import types
import weakref

import jax
import numpy as np
import pytest

from attention.methods.dense import Dense
from models.sharding import MeshConfig, make_mesh
from rl_code.rollout.drafts import NONE, DraftTexts, propose
from rl_code.rollout.engine import Engine
from rl_code.rollout.rows import OpenGroup, Row
from rl_code.rollout.scheduler import Scheduler
from tests.rl_code.rollout.small import (
    ENGINE,
    FOR_ONE_GROUP,
    METHODS,
    SAMPLING,
    STATELESS,
    STOP,
    Episode,
    Letters,
    Protocol,
    assert_same,
    assert_trained_alike,
    make_scheduler,
    model_with,
    play,
    task_of,
)
from tests.rl_code.rollout.test_experts import EXPERTS
from tests.rl_code.rollout.test_picks import CHOOSING
from tests.rl_code.rollout.with_documents import WITH_DOCUMENTS, DocumentEpisode, document
from tests.rl_code.rollout.with_documents import task_of as task_of_documents

DRAFTING = dataclasses.replace(ENGINE, draft_tokens=3, draft_library=400)
TASKS = [task_of(seed) for seed in range(3)]


# Guesses at so many tokens, in texts of so many; others stand before the row's own.
COUNT, ROOM, OWN = 4, 7, 20
guessed = jax.jit(propose, static_argnames=("count", "own", "context"))


def proposed(text, *, others=(), room=ROOM, context=True):
    """The guesses behind a row's tokens, where other texts stand before them."""
    texts = np.full((2, room + OWN), NONE, np.int32)
    row = [*others, *text]
    end = room + len(text)
    texts[0, end - len(row) : end] = row
    ends = np.array([end, room + 1])
    guess = guessed(texts, ends, count=COUNT, own=room, context=context)
    assert (guess[1] == NONE).all()  # of a row without tokens
    return guess[0].tolist()


@pytest.mark.parametrize("room", [0, ROOM])
def test_a_guess_is_what_followed_the_longest_equal_end(room):
    # 7 stood before 1, 2 and 9 before 3
    assert proposed([7, 1, 2, 3, 4, 5, 9, 2, 3, 6, 8, 7, 1, 2], room=room) == [3, 4, 5, 9]
    # of equally long ones, the newest
    assert proposed([1, 2, 3, 5, 2, 3, 6, 4, 2, 3], room=room) == [6, 4, 2, 3]
    # a text that repeats itself goes on
    assert proposed([9, 1, 2, 1, 2], room=room) == [1, 2, 1, 2]
    assert proposed([5, 5], room=room) == [5] * 4
    assert proposed([1, 2, 3], room=room) == [NONE] * 4


def test_a_guess_is_what_followed_in_other_texts_up_to_their_end():
    # what agrees does not reach into them
    assert proposed([3, 1, 2], others=[1, 2, 6, NONE]) == [6, NONE, NONE, NONE]
    others = [8, 9, 1, 2, 6, 4, NONE]
    assert proposed([1, 2], others=others, context=False) == [6, 4, NONE, NONE]
    assert proposed([4, 4], others=[8, NONE], context=False) == [NONE] * 4


def test_texts_hold_the_groups_other_answers_and_earlier_ones_of_the_task():
    config = dataclasses.replace(DRAFTING, draft_library=12)
    texts = DraftTexts(config)
    rows = [
        Row(
            tokens=[1, 2, *answer],
            prompt=2,
            episode=types.SimpleNamespace(task=types.SimpleNamespace(id=task)),
        )
        for task, answer in (("a", [3, 4]), ("a", [5, 6, 7]), ("a", []), ("b", [8]), ("a", [9] * 9))
    ]
    for group in (rows[:3], rows[3:4], rows[4:]):
        for row in group:
            row.group = OpenGroup(rows=group)

    def of(row):
        out = np.full(config.draft_room + config.length, NONE, np.int32)
        texts.put(row, out)
        own = out[config.draft_room :]
        assert own[: len(row.tokens)].tolist() == row.tokens and (own[len(row.tokens) :] < 0).all()
        return out[: config.draft_room].tolist()

    # the end of the prompt is there too, so that the first token can be guessed
    assert of(rows[0]) == [NONE] * 6 + [1, 2, 5, 6, 7, NONE]
    assert of(rows[2]) == [NONE, 1, 2, 5, 6, 7, NONE, 1, 2, 3, 4, NONE]
    rows[2].tokens += [11]  # seen when it is next asked for
    assert of(rows[0]) == [NONE] * 2 + [1, 2, 11, NONE, 1, 2, 5, 6, 7, NONE]
    assert of(rows[3]) == [NONE] * 12
    texts.keep(rows[4])
    assert of(rows[1]) == [9, 9, NONE, 1, 2, 11, NONE, 1, 2, 3, 4, NONE]
    none = DraftTexts(dataclasses.replace(config, draft_sources=("context",)))
    out = np.full(config.length, NONE, np.int32)
    none.keep(rows[4])
    none.put(rows[1], out)
    assert out[:6].tolist() == [*rows[1].tokens, NONE]


def test_without_drafts_no_answer_is_kept():
    texts = DraftTexts(dataclasses.replace(DRAFTING, draft_tokens=0))
    row = Row(
        tokens=[1, 2, 3],
        prompt=2,
        episode=types.SimpleNamespace(task=types.SimpleNamespace(id="a")),
    )
    kept = weakref.ref(row)
    texts.keep(row)
    # a long run would hold the answers of all its tasks
    assert not texts._earlier and not texts._known
    del row
    assert kept() is None


def test_a_row_repeats_itself_where_tokens_followed_the_same_two_before():
    texts = DraftTexts(dataclasses.replace(DRAFTING, draft_least=0.5, draft_window=4))
    row = Row(tokens=[1, 2, 3, 4, 5, 1, 2])
    assert not texts.repeats(row)
    row.tokens += [3, 4]  # what followed 1, 2 and 2, 3
    assert texts.repeats(row)
    row.tokens += [9, 9, 9]
    assert not texts.repeats(row)
    row.tokens += [9, 8, 9, 9]  # the last 9 followed 9, 9 before, but 9, 8 are new
    assert not texts.repeats(row)


def assert_alike(these, those):
    """The same tokens and choices; log-probabilities as of programs of other shapes."""
    for a, b in zip(these, those, strict=True):
        for x, y in zip(a.trajectories, b.trajectories, strict=True):
            assert (x.tokens == y.tokens).all() and (x.versions == y.versions).all()
            np.testing.assert_allclose(x.logprobs, y.logprobs, rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_rows_that_do_not_repeat_themselves_have_the_bits_of_an_engine_without_guesses(monkeypatch):
    without, _ = play(TASKS, engine=ENGINE)
    never = dataclasses.replace(DRAFTING, draft_least=1.0, draft_window=4)
    groups, stats = play(TASKS, engine=never)
    assert stats.drafted_tokens == 0
    assert_same(groups, without)
    monkeypatch.setattr(DraftTexts, "repeats", lambda _, row: sum(row.tokens[-4:]) % 2 == 0)
    some, stats = play(TASKS, engine=never)
    assert 0 < stats.drafted_tokens < stats.sampled_tokens
    assert_alike(some, without)


# Experts follow dense layers whose keys lie side by side.
@pytest.mark.parametrize("name", ["experts", *STATELESS])
@pytest.mark.long
def test_every_method_samples_the_same_with_and_without_guesses(name):
    attention, changes = METHODS.get(name, ((Dense(),), {}))
    experts = EXPERTS if name == "experts" else None
    model = model_with(attention, moe=experts)
    engine = dataclasses.replace(DRAFTING, **changes, note_picks=experts is not None)
    pages = FOR_ONE_GROUP // engine.page
    plain = dataclasses.replace(engine, draft_tokens=0, draft_library=0, pages=pages)
    without, stats = play(TASKS, engine=plain, model=model)
    assert stats.drafted_tokens == 0 and stats.tokens_per_row_step == 1.0
    # also when more pages run out
    engine = dataclasses.replace(engine, pages=72 // engine.page)
    scheduler = make_scheduler(engine, model)
    once, stats = play(TASKS, scheduler=scheduler, model=model)
    again, known = play(TASKS, scheduler=scheduler, model=model)
    scheduler.close()
    assert stats.preempted and stats.accepted_tokens < 0.2 * stats.drafted_tokens
    assert_alike(once, without)
    # the bits do not depend on what was guessed: now the same answers are known
    assert known.tokens_per_row_step > 1.5
    assert_same(again, once)
    for group, other in zip(once, without, strict=True):
        for x, y in zip(group.trajectories, other.trajectories, strict=True):
            (one,), (two,) = x.contexts, y.contexts
            assert experts is None or np.array_equal(one.choices["experts"], two.choices["experts"])


@pytest.mark.long
def test_a_message_that_a_rule_on_text_cuts_leaves_no_key_behind():
    """What the dispatch had sampled behind the cut is written over, NSA's raw keys too."""
    attention, changes = METHODS["nsa and dense"]
    model = model_with(attention)
    engine = dataclasses.replace(DRAFTING, **changes, pages=72 // 8)
    groups, _ = play(
        TASKS,
        engine=engine,
        model=model,
        make=lambda *a: Episode(*a, protocol=Protocol(rule=True)),
    )
    trajectories = [t for group in groups for t in group.trajectories]
    assert any(7 in t.tokens[t.prompt_length :] for t in trajectories)
    assert_trained_alike(trajectories, model)


@pytest.mark.long
def test_documents_picks_and_meshes_give_the_same_with_and_without_guesses():
    files = [document(seed, 3 + 5 * seed % 14) for seed in range(4)]
    tasks = [
        task_of_documents(
            f"task{seed}",
            [([5 + seed, 6], False), (files[seed], True), ([7, 8], False)],
            [[(files[3], True)], [(files[seed + 1], True)]],
        )
        for seed in range(2)
    ]
    found = []
    for drafts, mesh in ((0, MeshConfig(1, 1)), (2, MeshConfig(2, 2))):
        engine = dataclasses.replace(WITH_DOCUMENTS, note_picks=True, draft_tokens=drafts)
        scheduler = Scheduler(
            Engine(CHOOSING, engine, SAMPLING, (STOP,), make_mesh(mesh)),
            Letters(),
            workers=4,
            worker_deadline_s=30.0,
        )
        found.append(play(tasks, make=DocumentEpisode, scheduler=scheduler, model=CHOOSING))
        scheduler.close()
    (without, _), (with_guesses, stats) = found
    assert stats.accepted_tokens
    assert_alike(with_guesses, without)
    for a, b in zip(with_guesses, without, strict=True):
        for x, y in zip(a.trajectories, b.trajectories, strict=True):
            (one,), (other,) = x.contexts, y.contexts
            assert (one.choices["blocks"] == other.choices["blocks"]).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(draft_tokens=-1), "draft_tokens=-1 and draft_library=400 must be at least 0"),
        (dict(draft_sources=()), "draft_tokens=3 needs draft_sources"),
        (dict(draft_least=1.5), "draft_least=1.5 must be in .0, 1. and draft_window=16 at least 1"),
        (dict(draft_tokens=0, draft_least=0.5), "draft_least=0.5 needs draft_tokens"),
    ],
)
def test_what_cannot_be_guessed_from_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(DRAFTING, **changes)
