"""Groups that part in the middle of an episode: each continuation is sampled once, from where it
parts, whatever else is in the batch, and can be sampled again.
"""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest

from rl_code.rollout.again import sample_again, versions_of
from rl_code.rollout.forks_config import ForksConfig
from rl_code.types import Fork, Turn
from tests.rl_code.rollout.small import (
    ENGINE,
    SCARCE,
    Episode,
    assert_all_free,
    assert_trained_alike,
    make_scheduler,
    model_on,
    task_of,
)
from tests.rl_code.rollout.test_again import KEY, VERSIONS, models
from tests.rl_code.rollout.test_sub_agents import Nested
from tests.rl_code.rollout.with_documents import (
    WITH_DOCUMENTS,
    DocumentEpisode,
    document,
    trainer_logprobs,
)
from tests.rl_code.rollout.with_documents import task_of as documents_of

FORKS = ForksConfig(continuations=2)
NAMES = ("tokens", "sampled", "logprobs", "versions")


class Parting:
    """Forks of an episode whose state is its tokens."""

    lists = NAMES
    parted = None
    prompt_length = 0

    def start(self):
        tokens = super().start()
        self.prompt_length = len(tokens)
        return tokens

    @property
    def over(self):
        return self.messages == self.turns

    @property
    def forkable(self):
        return bool(self.tokens) and not self.over

    @property
    def border(self):
        return Fork(self.index, self.messages, (len(self.tokens),))

    @property
    def at_work(self):
        return 0, list(self.tokens)

    def share(self, length):
        assert 2 <= length <= len(self.tokens)

    def fork(self, index):
        other = copy.copy(self)
        other.index = index
        for name in self.lists:
            setattr(other, name, list(getattr(self, name)))
        same = self.parted is not None and self.parted.lengths == self.border.lengths
        other.parted = self.parted if same else self.border
        return other

    def finish(self):
        ends = np.flatnonzero(np.diff([*self.sampled, False])).tolist()
        turns = [
            Turn("assistant", start + 1, end + 1, "")
            for start, end in zip(ends[::2], ends[1::2], strict=True)
        ]
        return dataclasses.replace(super().finish(), fork=self.parted, turns=tuple(turns))


class Forking(Parting, Episode):
    """Of tokens alone."""


class ForkingDocuments(Parting, DocumentEpisode):
    """With documents in the prompt and in the results of tools."""

    lists = (*NAMES, "documents")


class ForkingNested(Nested):
    """Whose contexts take turns. It may be forked while its own is at work."""

    parted = None

    @property
    def forkable(self):
        return bool(self.contexts[0].tokens) and not self.at and not self.over

    @property
    def over(self):
        return not self.at and self.messages[0] >= self.turns

    @property
    def border(self):
        lengths = tuple(len(one.tokens) for one in self.contexts)
        return Fork(self.index, self.messages[0], lengths)

    @property
    def at_work(self):
        return self.at, list(self.contexts[self.at].tokens)

    def share(self, length):
        assert 2 <= length <= len(self.contexts[0].tokens)

    def fork(self, index):
        other = copy.copy(self)
        other.index = index
        other.contexts, other.messages = copy.deepcopy((self.contexts, self.messages))
        same = self.parted is not None and self.parted.lengths == self.border.lengths
        other.parted = self.parted if same else self.border
        return other

    def finish(self):
        turns = []
        for number, one in enumerate(self.contexts):
            ends = np.flatnonzero(np.diff([*one.sampled, False])).tolist()
            turns += [
                Turn("assistant", start + 1, end + 1, "", context=number)
                for start, end in zip(ends[::2], ends[1::2], strict=True)
            ]
        return dataclasses.replace(super().finish(), fork=self.parted, turns=tuple(turns))


def sample(
    tasks=3, forks=FORKS, engine=ENGINE, group_size=2, change=0.0, make=Forking, task=task_of
):
    scheduler = make_scheduler(engine)
    scheduler.load(models()[0], 0)
    for group in range(tasks):
        way = dict(group=group, group_size=group_size, key=KEY, tag=group, forks=forks)
        scheduler.submit(task(group), make, **way)
    finished = {}
    version = 0
    rng = np.random.default_rng(3)
    while scheduler.groups:
        finished |= scheduler.step()
        if version + 1 < VERSIONS and rng.random() < change:
            version += 1
            scheduler.load(models()[version], version)
    assert_all_free(scheduler)
    scheduler.close()
    return [group for _, group in sorted(finished.items())]


@pytest.fixture(scope="module")
def groups():
    return sample()


def test_every_border_has_its_continuations_once(groups):
    for group in groups:
        assert [t.index for t in group.trajectories] == [0, 1]
        places = [(t.fork.of, t.fork.turn) for t in group.continuations]
        assert sorted(places) == [(i, turn) for i in (0, 1) for turn in (1, 2) for _ in range(2)]
        assert [t.index for t in group.continuations] == list(range(2, 10))
        for one in group.continuations:
            main, length = group.trajectories[one.fork.of], one.fork.lengths[0]
            for name in NAMES:
                same = np.array_equal(getattr(one, name)[:length], getattr(main, name)[:length])
                assert same and len(one.tokens) > length
        ends = {t.tokens.tobytes() for t in group.all}
        assert len(ends) == len(group.all)  # each has a random stream of its own


def test_forks_change_nothing_of_the_trajectories(groups):
    for group, plain in zip(groups, sample(forks=None), strict=True):
        assert plain.continuations is None
        for one, other in zip(group.trajectories, plain.trajectories, strict=True):
            for name in NAMES:
                np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def test_a_continuation_depends_on_nothing_else_in_the_batch(groups):
    # one page after another is lost, and only some episodes are forked, in other rounds
    scarce = SCARCE
    again = sample(2, dataclasses.replace(FORKS, episodes=1), scarce)
    for group, other in zip(groups, again, strict=False):
        by_index = {t.index: t for t in group.continuations}
        assert len(other.continuations) == 4
        for one in other.continuations:
            for name in NAMES:
                np.testing.assert_array_equal(
                    getattr(one, name), getattr(by_index[one.index], name)
                )


def test_continuations_are_what_the_trainer_computes(groups):
    assert_trained_alike(
        groups[0].continuations[:6], models()[0].config, model_on(make_mesh_of(ENGINE))
    )


def make_mesh_of(engine):
    scheduler = make_scheduler(engine)
    scheduler.close()
    return scheduler.engine.mesh


@pytest.mark.parametrize("change", [0.0, 0.3], ids=["one version", "versions that change"])
def test_a_continuation_is_sampled_again_bit_for_bit(groups, change):
    found = sample(change=change) if change else groups
    continuations = [t for group in found for t in group.continuations]
    assert any(len(versions_of(t)) > 1 for t in continuations) == (change > 0)
    scheduler = make_scheduler()
    for recorded in continuations:
        task = task_of(recorded.group)
        again = sample_again(scheduler, recorded, task, Forking, KEY, models())
        for name in NAMES:
            np.testing.assert_array_equal(getattr(again, name), getattr(recorded, name), name)
        assert again.fork == recorded.fork and again.index == recorded.index
        assert again.contexts[0].keys == recorded.contexts[0].keys
    assert_all_free(scheduler)
    scheduler.close()


@pytest.mark.long
def test_continuations_keep_the_contexts_of_sub_agents_that_are_done():
    found = sample(3, make=ForkingNested, change=0.2)
    trees = [t for group in found for t in group.continuations if len(t.fork.lengths) > 1]
    assert trees and any(len(t.contexts) > len(t.fork.lengths) for t in trees)
    scheduler = make_scheduler()
    for group in found:
        for recorded in group.continuations:
            main = group.trajectories[recorded.fork.of]
            for number, length in enumerate(recorded.fork.lengths):
                own, other = recorded.contexts[number], main.contexts[number]
                np.testing.assert_array_equal(own.tokens[:length], other.tokens[:length])
                assert number == 0 or own.keys == other.keys
            given = task_of(recorded.group), ForkingNested, KEY, models()
            again = sample_again(scheduler, recorded, *given)
            for name in NAMES:
                np.testing.assert_array_equal(getattr(again, name), getattr(recorded, name))
    scheduler.close()


def documents_task(number):
    prompt = [([1, 2], False), (document(number, 9), True), ([5, 6, 7], False)]
    answers = [[(document(10 + number + turn, 6), True)] for turn in range(2)]
    return documents_of(f"task{number}", prompt, answers)


@pytest.mark.long
def test_continuations_behind_documents(groups):
    engine = WITH_DOCUMENTS
    found = sample(2, engine=engine, make=ForkingDocuments, task=documents_task)
    scheduler = make_scheduler(engine)
    for number, group in enumerate(found):
        assert len(group.continuations) == 8
        rows = trainer_logprobs(group.continuations, models()[0])
        for row, recorded in zip(rows, group.continuations, strict=True):
            predicted = row[np.arange(len(recorded.tokens) - 1), recorded.tokens[1:]]
            chosen = recorded.sampled[1:]
            np.testing.assert_allclose(
                recorded.logprobs[1:][chosen], predicted[chosen], rtol=1e-3, atol=1e-4
            )
            given = documents_task(number), ForkingDocuments, KEY, models()
            again = sample_again(scheduler, recorded, *given)
            for name in NAMES:
                np.testing.assert_array_equal(getattr(again, name), getattr(recorded, name))
    scheduler.close()


def test_a_group_that_is_given_up_takes_its_continuations_along():
    scheduler = make_scheduler()
    scheduler.load(models()[0], 0)
    for group in range(2):
        way = dict(group=group, group_size=2, key=KEY, tag=group, forks=FORKS)
        scheduler.submit(task_of(group), Forking, **way)
    while not any(row.group.parent for row in scheduler._open.rows):
        assert scheduler.step() == []
    scheduler.give_up(0)
    finished = {}
    while scheduler.groups:
        finished |= scheduler.step()
    assert [*finished] == [1] and len(finished[1].continuations) == 8
    assert_all_free(scheduler)
    scheduler.close()


def test_which_borders_are_chosen():
    assert ForksConfig(every=2).most(turns=6, group_size=3) == 3 * 2 * 4
    few = ForksConfig(3, every=2, borders=1, episodes=2)
    assert few.most(6, 8) == 2 * 1 * 3 and few.most(2, 8) == 0
    chosen = [(i, turn) for i in range(3) for turn in range(6) if few.chooses(i, turn)]
    assert chosen == [(0, 2), (1, 2)]
    indices = [i for turn in (1, 2) for of in range(4) for i in FORKS.indices(of, turn, 4)]
    assert sorted(indices) == list(range(4, 4 + 16))
    with pytest.raises(ValueError, match="continuations=0 must be at least 1"):
        ForksConfig(continuations=0)
