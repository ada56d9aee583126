"""Pages of prompts that wait on the host come back with their bits, and are not prefilled again."""

from __future__ import annotations

import copy
import dataclasses
import functools
import types

import jax
import numpy as np
import pytest

from rl_code.rollout.admission import Admission
from rl_code.rollout.engine import Engine
from rl_code.rollout.host_pages import HostPages, together
from rl_code.rollout.page_pool import PagePool
from rl_code.rollout.rows import Row
from rl_code.rollout.scheduler import Scheduler
from tests.rl_code.rollout import test_documents
from tests.rl_code.rollout.small import (
    ENGINE,
    METHODS,
    MODEL,
    VOCAB,
    Letters,
    assert_all_free,
    assert_same,
    engine_of,
    hand_out,
    model_with,
    play,
)
from tests.rl_code.rollout.test_documents import FOR_ONE_GROUP
from tests.rl_code.rollout.with_documents import WITH_DOCUMENTS, DocumentEpisode, document, task_of

# Eight prompts of 15 tokens; the first ones are played again at the end, when others have taken
# their pages.
PROMPTS = np.random.default_rng(5).integers(1, VOCAB, (8, 15)).tolist()
TASKS = [types.SimpleNamespace(id=f"{at}", prompt=prompt) for at, prompt in enumerate(PROMPTS)]
TASKS += TASKS[:4]


def played(engine: Engine, model, pages: int, host_pages_mb: float | None, **options):
    engine = copy.copy(engine)  # whose programs are the same
    engine.config = dataclasses.replace(engine.config, host_pages_mb=host_pages_mb)
    scheduler = Scheduler(engine, Letters(), workers=4, worker_deadline_s=30.0)
    hand_out(scheduler, pages)
    try:
        given = dict(tasks=TASKS) | options
        groups, stats = play(group_size=2, model=model, scheduler=scheduler, **given)
        assert_all_free(scheduler)
        return groups, stats
    finally:
        scheduler.close()


@pytest.mark.long
@pytest.mark.parametrize("name", ["nsa and dense", "two shards"])
def test_prompts_that_waited_on_the_host_are_not_prefilled_again_and_change_no_token(name):
    attention, changes = METHODS.get(name, (MODEL.attention, {}))
    model = model_with(attention)
    shards = 2 if name == "two shards" else 1
    page = changes.get("page", ENGINE.page)
    engine = engine_of(model, dataclasses.replace(ENGINE, **changes), shards)
    without, plain = played(engine, model, 72 // page, None)
    kept, stats = played(engine, model, 72 // page, 1.0)
    assert_same(kept, without)
    assert plain.pages_to_host == plain.pages_from_host == 0
    assert stats.pages_from_host > 0 and stats.pages_to_host > 0
    assert stats.host_tokens == stats.pages_from_host * page
    assert stats.prefilled_tokens < plain.prefilled_tokens
    assert 0 < stats.host_bytes <= 2**20


@pytest.mark.long
def test_documents_wait_on_the_host_too_and_so_do_pages_behind_them():
    attention, changes = METHODS["nsa and dense"]
    model = model_with(attention)
    pages = FOR_ONE_GROUP[changes["page"]]
    engine = engine_of(model, dataclasses.replace(WITH_DOCUMENTS, **changes))
    make = functools.partial(DocumentEpisode, page=engine.config.page)
    behind = (np.arange(1, 14).tolist(), False)
    own = task_of("own", [([7, 8, 9], False), (document(50, 13), True), behind], [[], []])
    options = dict(tasks=[own, *test_documents.TASKS, *test_documents.TASKS, own], make=make)
    without, plain = played(engine, model, pages, None, **options)
    kept, stats = played(engine, model, pages, 1.0, **options)
    assert_same(kept, without)
    assert stats.document_tokens_found > plain.document_tokens_found
    # other tokens than those of documents came back as well; how many are prefilled at all depends
    # on which episodes end first
    assert stats.found_in_tasks > plain.found_in_tasks
    assert stats.host_tokens == stats.pages_from_host * engine.config.page > 0


def test_the_host_keeps_the_pages_that_were_used_last():
    pages = [np.full((4, 2), at, np.float32) for at in range(5)]
    host = HostPages(budget=3 * pages[0].nbytes)
    for at, page in enumerate(pages):
        host.keep([b"%d" % at], [jax.numpy.asarray(page)[None]])
        assert not host.lacks(b"1") or at < 1  # page 1 is used all the time
    assert host.bytes == 3 * pages[0].nbytes
    assert [at for at in range(5) if not host.lacks(b"%d" % at)] == [1, 3, 4]
    (content,) = together(host.find([b"3", b"4", b"0", b"1"]))
    np.testing.assert_array_equal(content, np.stack(pages[3:]))


def test_younger_episodes_that_wait_for_a_tool_give_their_pages_first():
    for budget, loser in ((1.0, 2), (None, 3)):
        pool = PagePool(engine_of(MODEL, dataclasses.replace(ENGINE, host_pages_mb=budget)))
        admission = Admission(pool, pool, 8)
        # the first one waits too, and is older than the one that needs pages
        rows = [Row(waiting=waiting, sequence=0) for waiting in (True, False, True, False)]
        admission.rows = rows
        assert admission._gives_way(rows, rows[1]) is rows[loser]
