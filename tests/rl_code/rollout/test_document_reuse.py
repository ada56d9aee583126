"""Pages of documents that are used again: the same bits as computed fresh, and each token computed
once for a version of the weights.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from models.sharding import MeshConfig, make_mesh
from rl_code.environment.documents import OUTSIDE, rope_positions, seen_as
from rl_code.rollout.again import sample_again
from rl_code.rollout.engine import Engine
from rl_code.rollout.scheduler import Scheduler
from rl_code.rollout.spans import ContextRuns
from tests.rl_code.rollout.small import (
    MODEL,
    SAMPLING,
    STOP,
    Letters,
    assert_same,
    engine_of,
    hand_out,
    make_scheduler,
    model_on,
)
from tests.rl_code.rollout.test_documents import FILES, OTHER, TASKS, play_documents
from tests.rl_code.rollout.with_documents import (
    LONGEST,
    WITH_DOCUMENTS,
    DocumentEpisode,
    document,
    task_of,
)

SCARCE = dataclasses.replace(WITH_DOCUMENTS, pages=36)
# Reads the second file of the first task again, beside another one.
EDITED = task_of(
    "edited",
    [([7, 8, 9], False), (OTHER, True), (FILES[13], True), ([11], False)],
    [[(FILES[5], True)], [(FILES[8], True)]],
)


def _numbered(scheduler, tasks, order, model=None, version=1, group_size=3):
    """(groups by number, statistics) of tasks that were handed in in this order."""
    scheduler.load(model or model_on(scheduler.engine.mesh), version)
    scheduler.take_stats()
    for number in order:
        scheduler.submit(
            tasks[number],
            DocumentEpisode,
            group=number,
            group_size=group_size,
            key=(0, 7),
            tag=number,
        )
    groups = {}
    while scheduler.groups:
        groups |= scheduler.step()
    return groups, scheduler.take_stats()


@pytest.mark.long
def test_documents_found_in_the_cache_change_no_bit_and_are_not_prefilled():
    tasks = [TASKS[0], EDITED]
    scheduler = make_scheduler(WITH_DOCUMENTS)
    model = model_on(scheduler.engine.mesh)
    _numbered(scheduler, tasks, [0], model)
    found, stats = _numbered(scheduler, tasks, [1], model)
    fresh, all_stats = _numbered(make_scheduler(WITH_DOCUMENTS), tasks, [1], model)
    assert_same([found[1]], [fresh[1]])
    # the second document of the prompt, one answer's of the task before, and that of the other
    saved = len(FILES[13]) + len(FILES[5]) + len(FILES[8])
    assert stats.document_tokens_found - all_stats.document_tokens_found == saved
    # and the three tokens before the documents, with which both prompts begin
    assert all_stats.prefilled_tokens - stats.prefilled_tokens == saved + 3
    # once for the prompt, and for the answers of all episodes of the group
    assert all_stats.documents == 2 + 2 * 3 and all_stats.documents_found == 4
    assert stats.documents_found == 4 + 3
    scheduler.close()


@pytest.mark.long
def test_the_order_in_which_groups_arrive_changes_no_bit():
    tasks = [*TASKS, EDITED]
    there, _ = _numbered(make_scheduler(WITH_DOCUMENTS), tasks, [0, 1, 2, 3])
    back, _ = _numbered(make_scheduler(SCARCE), tasks, [3, 2, 1, 0])
    for number in there:
        assert_same([there[number]], [back[number]])


@pytest.mark.long
def test_documents_of_other_weights_are_not_used():
    scheduler = make_scheduler(WITH_DOCUMENTS)
    old = model_on(scheduler.engine.mesh)
    new = jax.tree.map(lambda x: -x, old)
    _numbered(scheduler, TASKS, [0], old)
    found, stats = _numbered(scheduler, TASKS, [0], new, version=2)
    fresh, all_stats = _numbered(make_scheduler(WITH_DOCUMENTS), TASKS, [0], new)
    assert_same([found[0]], [fresh[0]])
    assert stats.prefilled_tokens == all_stats.prefilled_tokens
    assert stats.documents_found == all_stats.documents_found
    scheduler.close()


@pytest.mark.long
def test_every_page_is_free_when_all_is_done():
    scheduler = make_scheduler(SCARCE)
    _, stats = _numbered(scheduler, [*TASKS, EDITED], [0, 1, 2, 3])
    assert stats.preempted
    for allocator in scheduler._pool._shards:
        allocator.check()
        assert allocator.free == allocator.num_pages
    assert not any(documents._held for documents in scheduler._pool._documents)
    scheduler.close()


@pytest.mark.long
def test_two_shards_and_prompts_prefilled_elsewhere_give_the_same_samples():
    tasks = [*TASKS, EDITED]
    together, _ = play_documents(tasks)
    split, _ = play_documents(tasks, shards=2)
    assert_same(split, together)
    decoder = engine_of(MODEL, WITH_DOCUMENTS)
    elsewhere = make_mesh(MeshConfig(data=1, tensor=1), jax.devices()[1:2])
    prefiller = Engine(MODEL, WITH_DOCUMENTS, SAMPLING, (STOP,), elsewhere)
    scheduler = Scheduler(
        decoder, Letters(), workers=4, worker_deadline_s=30.0, prefiller=prefiller
    )
    hand_out(scheduler, SCARCE.pages)
    apart, stats = play_documents(tasks, scheduler=scheduler)
    assert stats.preempted
    assert_same(apart, together)
    for allocator in (*scheduler._pool._shards, *scheduler._prompt_pool._shards):
        allocator.check()
        assert allocator.free == allocator.num_pages
    scheduler.close()


@pytest.mark.parametrize("change_at", [1, 2])
@pytest.mark.long
def test_weights_that_change_between_documents_are_stated_and_sampled_again(change_at):
    """What a trajectory says of its keys (``Context.keys``) is enough to sample it again, bit for
    bit, also where a document was half computed, or found but not yet seen.

    change_at: the how manieth round it is after which an episode has such a document.
    """
    engine = dataclasses.replace(SCARCE, decode_steps=2, prefill_tokens=2)
    scheduler = make_scheduler(engine)
    mesh = scheduler.engine.mesh
    models = {3: model_on(mesh), 4: jax.tree.map(lambda x: -x, model_on(mesh))}
    scheduler.load(models[3], 3)
    for number, task in enumerate([TASKS[0], EDITED]):
        scheduler.submit(task, DocumentEpisode, group=number, group_size=2, key=(0, 7), tag=number)
    groups = {}
    rounds = 0
    while scheduler.groups:
        groups |= scheduler.step()
        if any(len(row.documents) > row.seen for row in scheduler._open.rows):
            rounds += 1
            if rounds == change_at:
                scheduler.load(models[4], 4)
    mixed = 0
    for number, task in enumerate([TASKS[0], EDITED]):
        for trajectory in groups[number].trajectories:
            mixed += trajectory.contexts[0].keys is not None
            again = sample_again(scheduler, trajectory, task, DocumentEpisode, (0, 7), models)
            assert (again.tokens == trajectory.tokens).all()
            assert (again.logprobs == trajectory.logprobs).all()
            assert (again.versions == trajectory.versions).all()
    assert mixed
    scheduler.close()


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.quick(first=5)
def test_pages_say_of_every_place_what_the_rule_says(seed):
    rng = np.random.default_rng(seed)
    episode = DocumentEpisode(task_of("any", [], []), 0, 0)
    for _ in range(rng.integers(1, 7)):
        length = int(rng.integers(1, LONGEST + 5))
        if len(episode.tokens) + length < WITH_DOCUMENTS.length - 16:
            episode._place([(document(seed, length), bool(rng.integers(2)))])
    episode._place([([1], False)])
    kinds = np.array(episode.documents)
    runs = ContextRuns(WITH_DOCUMENTS)
    for part in np.split(kinds, np.sort(rng.integers(0, len(kinds), 3))):
        runs.add(part.tolist())
    documents, filled, shifts = runs.pages
    places = np.arange(len(kinds))
    page = WITH_DOCUMENTS.page
    segments, numbers = seen_as(kinds)
    real = segments > 0
    assert (real == (places % page < filled[places // page]))[: len(kinds)].all()
    assert (numbers == documents[places // page])[real].all()
    positions = places - shifts[places // page]
    assert (positions == rope_positions(kinds, LONGEST))[real].all()
    assert kinds[-1] == OUTSIDE


def test_a_context_that_breaks_the_rule_is_named():
    with pytest.raises(ValueError, match="begins at place 3, which must be a multiple of page=4"):
        ContextRuns(WITH_DOCUMENTS).add([OUTSIDE] * 3 + [1] * 4)
    with pytest.raises(ValueError, match="document 1 of 17 tokens is longer than longest_document"):
        ContextRuns(WITH_DOCUMENTS).add([1] * 17)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_random_contexts_with_few_pages_are_those_with_many(seed):
    """With rows that lose their pages at any time, and the bookkeeping checked in every round."""
    rng = np.random.default_rng(seed)
    files = [document(number, int(rng.integers(1, LONGEST + 1))) for number in range(5)]

    def pieces(most: int):
        found = []
        for _ in range(rng.integers(0, most)):
            found.append((files[rng.integers(len(files))], True))
            if rng.integers(2):
                found.append((rng.integers(1, 40, rng.integers(1, 6)).tolist(), False))
        return found

    tasks = [
        task_of(f"{number}", [*pieces(3), ([5, number + 1], False)], [pieces(3), pieces(2)])
        for number in range(5)
    ]
    numbers = range(len(tasks))
    shapes = dict(result_rows=2, result_tokens=5)
    with_many = make_scheduler(dataclasses.replace(WITH_DOCUMENTS, **shapes))
    plenty, _ = _numbered(with_many, tasks, numbers)
    with_many.close()
    scarce = make_scheduler(dataclasses.replace(SCARCE, **shapes))
    step = scarce.step

    def checked():
        found = step()
        for allocator in scarce._pool._shards:
            allocator.check()
        return found

    scarce.step = checked
    found, _ = _numbered(scarce, tasks, rng.permutation(numbers).tolist())
    assert all(allocator.free == allocator.num_pages for allocator in scarce._pool._shards)
    for number in numbers:
        assert_same([found[number]], [plenty[number]])
    scarce.close()
