"""Linked pairs: demonstrations are in the words of an episode, and the second task needs the note."""

from __future__ import annotations

import dataclasses

import pytest

from experiments.pairs.metrics import OfPairs
from experiments.pairs.source import (
    ALL,
    FIRST,
    KEY,
    MODULE,
    SECOND,
    VALUES,
    WANTED,
    Pairs,
    constants_of,
    first,
    generate,
    noted,
    second,
)
from models.tokenizer import Tokenizer
from rl_code.config.named import Named
from rl_code.environment.episode import Episode
from rl_code.environment.notes import as_read_by, scope_of, with_notes, without_note
from rl_code.environment.protocols.compact import Compact
from rl_code.environment.tools.api import find_tools
from rl_code.rollout.note_book import notes_after
from rl_code.tasks.demonstrations import PLAYED
from rl_code.types import Group, Limits
from tests.rl_code.environment.conftest import FakePool
from tests.rl_code.signals import rewarder

NAMES = ("read_file", "memory_store", "memory_recall", "write_file", "submit", "run_tests")
TOOLS = find_tools(tuple(map(Named, NAMES)))


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(["def f():\n    return 12\n"] * 4, 300, Compact.SPECIAL_TOKENS)


@pytest.fixture
def play(tokenizer, monkeypatch):
    pool = FakePool()
    monkeypatch.setattr("rl_code.environment.grading.grade", pool.grade)

    def play(task, parts):
        """The trajectory of what a demonstration says, whose results must be the episode's."""
        episode = Episode(
            task,
            group=0,
            index=0,
            protocol=Compact(),
            tools=TOOLS,
            tokenizer=tokenizer,
            pool=pool,
            limits=Limits(8, 4000, 400, 0, 5.0),
            reward=rewarder(),
        )
        episode.start()
        for at, (text, said) in enumerate(parts):
            if said:
                tokens = tokenizer.encode(text)
                answer = episode.step(tokens, [0.0] * len(tokens), [0] * len(tokens))
                told = parts[at + 1][0] if at + 1 < len(parts) else None
                assert (answer and tokenizer.decode(answer)) == told
        return episode.finish()

    return play


def test_a_note_of_the_first_task_solves_the_second(play):
    constants = constants_of("train", 0, 5, 6)
    one, other = (generate("train", 0, 5, kind, 6) for kind in (FIRST, SECOND))
    assert scope_of(one) == scope_of(other) and MODULE not in other.files
    for store in ((WANTED,), (KEY, WANTED), (KEY,), ()):
        solved = WANTED in store
        made = play(one, first(constants, store))
        assert made.solved
        notes = notes_after(Group(one, (made,)), TOOLS, {})
        assert notes == {name: noted(name, constants[name]) for name in store}
        guess = next(value for value in VALUES if value != constants[WANTED])
        read = play(with_notes(other, notes), second(notes, guess))
        assert read.solved == solved
        found = OfPairs()([Group(one, (made,)), Group(with_notes(other, notes), (read,))], {})
        assert found.pop("pairs/copied", None) == (1.0 if store else None)
        assert found == {
            "pairs/solved_first": 1.0,
            "pairs/stored": float(bool(store)),
            "pairs/stored_wanted": float(solved),
            "pairs/solved_second": float(solved),
            "pairs/there": float(solved),
            "pairs/notes": float(len(store)),
        }


def test_a_note_that_is_no_line_of_the_module_counts_as_not_copied(play):
    constants = constants_of("train", 0, 5, 6)
    task = generate("train", 0, 5, FIRST, 6)
    right = noted(WANTED, constants[WANTED])
    wrong = noted(WANTED, constants[WANTED] + 1)
    parts = first(constants, (KEY, WANTED))
    said = [(text.replace(right, wrong) if own else text, own) for text, own in parts]
    made = play(task, said)
    assert OfPairs()([Group(task, (made,))], {})["pairs/copied"] == 0.5


def test_an_episode_that_a_note_was_kept_from_is_not_counted_as_one_that_failed(play):
    constants = constants_of("train", 0, 5, 6)
    notes = {WANTED: noted(WANTED, constants[WANTED])}
    task = without_note(with_notes(generate("train", 0, 5, SECOND, 6), notes), WANTED, 1, (0, 0, 0))
    guess = next(value for value in VALUES if value != constants[WANTED])
    read = play(as_read_by(task, 0), second(notes, guess))
    guessed = dataclasses.replace(play(as_read_by(task, 1), second({}, guess)), index=1)
    assert read.solved and not guessed.solved
    assert OfPairs()([Group(task, (read, guessed))], {})["pairs/solved_second"] == 1.0


def test_the_tasks_of_a_pair_are_as_far_apart_as_a_block_has_pairs():
    source = Pairs("train", apart=3)
    tasks = [source.task(index) for index in range(12)]
    kinds = [task.meta["kind"] for task in tasks]
    assert kinds == ([FIRST] * 3 + [SECOND] * 3) * 2
    scopes = [scope_of(task) for task in tasks]
    assert scopes[:3] == scopes[3:6] and scopes[6:9] == scopes[9:] and len(set(scopes)) == 6
    assert source.task(4) == Pairs("train", apart=3).task(4)


def test_demonstrations_store_by_chance_and_find_what_they_ask_for():
    played = {FIRST: [], SECOND: []}
    for index in range(400):
        task = Pairs("train").task(index)
        played[task.meta["kind"]].append("".join(text for text, _ in task.meta[PLAYED]))
    stored = [WANTED in text.partition("store ")[2] for text in played[FIRST]]
    found = [f"{WANTED}: " in text for text in played[SECOND]]
    # by the draws of seed 0: a half of them store, one of four constants
    assert 0.08 < sum(stored) / len(stored) < 0.17 and 0.65 < sum(found) / len(found) < 0.85
    # drills store all of them, and say so; each has a module of its own
    tasks = [Pairs("train", apart=200, drills=1.0).task(index) for index in range(400)]
    assert all(task.messages[0]["content"].endswith(ALL) for task in tasks)
    assert len({task.id for task in tasks}) == 400
    texts = ["".join(text for text, _ in task.meta[PLAYED]) for task in tasks]
    assert {text.count("store ") for text in texts} == {4}
    # first tasks may ask for the same, and stay pairs
    asking = [Pairs("train", apart=3, asks_for_all=True).task(index) for index in range(12)]
    plain = [Pairs("train", apart=3).task(index) for index in range(12)]
    assert [task.id for task in asking] == [task.id for task in plain]
    for task, other in zip(asking, plain, strict=True):
        is_first = task.meta["kind"] == FIRST
        assert task.messages[0]["content"].endswith(ALL) == is_first
        assert (task == other) != is_first
    # where there are some drills, a pair is two of them or none
    some = [Pairs("train", apart=200, drills=0.5).task(index) for index in range(400)]
    drilled = [task.messages[0]["content"].endswith(ALL) for task in some]
    assert drilled[:200] == drilled[200:] and 80 < sum(drilled[:200]) < 120


def test_settings_that_cannot_be():
    for wrong in (
        {"constants": 1},
        {"apart": 0},
        {"stores": 2.0},
        {"finds": -0.5},
        {"drills": 1.5},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Pairs("train", **wrong)
