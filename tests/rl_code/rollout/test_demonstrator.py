"""The last trajectory of a group is a demonstration: played once, the same for whoever plays it."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import threading

import numpy as np
import pytest

from configs import quickstart
from models.tokenizer import Tokenizer
from rl_code.config.read_config import ConfigError, build
from rl_code.environment.episode import Episode
from rl_code.environment.protocols.compact import Compact
from rl_code.rollout.demonstrator import Demonstrator
from rl_code.run.config import RunConfig
from rl_code.store.steps import Item
from rl_code.tasks.demonstrations import DemonstrationConfig, Segment, demonstrate
from rl_code.tasks.generated import generate
from rl_code.tasks.group_demonstrations import GroupDemonstrations, messages_of
from rl_code.types import Case, Limits, Task, Tests
from tests.rl_code.environment.conftest import FakePool
from tests.rl_code.environment.scripted import make_episode
from tests.rl_code.rollout.test_actor import FakeScheduler, make_group, play, site  # noqa: F401

LIMITS = Limits(turns=4, tokens=400, turn_tokens=120, test_runs=2, command_s=5.0)
GOOD = "<|call|>write\ndef f(x):\n    return [2 * y for y in x]\n<|end|>"
SUBMIT = "<|call|>submit<|end|>"


@pytest.fixture
def pool(monkeypatch):
    pool = FakePool()
    monkeypatch.setattr("rl_code.environment.grading.grade", pool.grade)
    return pool


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train([GOOD, "FAIL f([3, 1]) gave [4, 2]"] * 4, 330, Compact.SPECIAL_TOKENS)


@pytest.fixture
def demonstrator(pool, tokenizer):
    """Makes a Demonstrator that says messages."""

    def make(*messages: str, limits: Limits = LIMITS, **settings) -> Demonstrator:
        def one(task: Task, group: int, index: int) -> Episode:
            return make_episode(task, pool, tokenizer, limits, group=group, index=index)

        said = [tokenizer.encode(text) for text in messages]
        return Demonstrator(lambda task, rng: said, one, **settings)

    return make


def example() -> Task:
    return Task(
        "t/0",
        ({"role": "user", "content": "double each number"},),
        {"a.py": "def f(x):\n    return x\n"},
        "a.py",
        "f",
        Tests((Case(([1],), [2]),)),
        Tests((Case(([3],), [6]),)),
    )


def test_a_demonstration_is_an_episode_with_real_tools_and_a_real_grade(
    demonstrator, pool, tokenizer
):
    with contextlib.closing(demonstrator(GOOD + "<|eot|>", SUBMIT + "<|eot|>")) as shows:
        shown = shows.play(example(), 4, 7, (1, 2), 3)
    assert (shown.group, shown.index, shown.status, shown.solved) == (4, 7, "submitted", True)
    assert shown.demonstrated and shown.reward.total == 1.0
    wanted = tokenizer.encode(GOOD + "<|eot|>") + tokenizer.encode(SUBMIT + "<|eot|>")
    assert shown.tokens[shown.sampled].tolist() == wanted
    assert set(shown.versions[shown.sampled].tolist()) == {3}
    assert not np.any(shown.logprobs)
    assert tokenizer.decode(shown.tokens[: shown.prompt_length].tolist()).startswith("<|bos|>")
    assert all(sandbox.closed for sandbox in pool.opened)


def test_a_demonstration_that_is_too_long_is_cut_and_one_that_ends_early_hands_nothing_in(
    demonstrator,
):
    small = dataclasses.replace(LIMITS, turn_tokens=5, turns=2)
    with contextlib.closing(demonstrator(GOOD + "<|eot|>", SUBMIT + "<|eot|>", limits=small)) as s:
        cut = s.play(example(), 0, 1, (1, 2), 0)
    assert not cut.solved and max(int(t.end - t.start) for t in cut.turns[1::2]) <= 5
    with contextlib.closing(demonstrator(GOOD + "<|eot|>")) as shows:
        open_end = shows.play(example(), 0, 1, (1, 2), 0)
    assert (open_end.status, open_end.solved, open_end.reward.total) == ("agent_ended", False, 0.0)


def test_the_random_numbers_are_those_of_the_item(demonstrator):
    drawn = []
    shows = demonstrator()
    shows._messages = lambda task, rng: drawn.append(rng.random()) or []
    with contextlib.closing(shows):
        for seed, group in (((1, 2), 0), ((1, 2), 0), ((1, 2), 1), ((1, 3), 0)):
            shows.play(example(), group, 1, seed, 0)
    assert drawn[0] == drawn[1] and len(set(drawn)) == 3


def test_messages_are_what_the_agent_writes():
    segments = [
        Segment("prompt", False),
        Segment("write", True),
        Segment("ok", False),
        Segment("!", False),
        Segment("sub", True),
        Segment("mit", True),
    ]
    assert messages_of(segments) == ["write", "submit"]
    task = generate("train", 0, 0)
    right = DemonstrationConfig(p_right=1.0, p_test=1.0)
    said = messages_of(demonstrate(task, random.Random(0), right, LIMITS))
    assert len(said) == 2 and said[-1] == SUBMIT + "<|eot|>"
    assert all(text.endswith("<|eot|>") for text in said)


class Fewer(FakeScheduler):
    """Samples all episodes of a group but its demonstration."""

    def size_of(self, item: Item) -> int:
        return item.group_size - 1


class Slow:
    """A demonstrator whose demonstrations come when they are let go.

    begun: (item, version) in order.
    """

    def __init__(self, steps: int | None = None):
        self.begun: list[tuple[Item, int]] = []
        self.go = threading.Event()
        self.closed = 0
        self._steps = steps
        self._tasks: dict[Item, Task] = {}

    def wanted(self, item: Item) -> bool:
        return self._steps is None or item.step < self._steps

    def begin(self, item: Item, task: Task, version: int) -> None:
        if item not in self._tasks:
            self.begun.append((item, version))
        self._tasks[item] = task

    def take(self, item: Item):
        if not self.go.is_set():
            return None
        version = dict(self.begun)[item]
        size = item.group_size
        group = make_group(self._tasks.pop(item), item.group, item.seed, [[version]] * size)
        return dataclasses.replace(group.trajectories[-1], demonstrated=True)

    def wait(self, timeout_s: float) -> None:
        self.go.set()

    def close(self) -> None:
        self.closed += 1


def test_a_group_is_delivered_once_its_demonstration_is_there(site):  # noqa: F811
    site.publish(0, 1)
    items = site.plan(0, 3, version=1, group_size=4)
    shows = Slow()
    actor = site.actor("one_step", 1, Fewer(), demonstrator=shows)
    for _ in range(4):
        actor.turn()
        assert shows.go.is_set() or site.store.missing(0) == items
    play(actor, site.store, 0)
    assert shows.begun == [(item, 1) for item in items]
    for item in items:
        group = site.store.record(0, item.number).group
        assert [t.index for t in group.trajectories] == [0, 1, 2, 3]
        assert [t.demonstrated for t in group.trajectories] == [None, None, None, True]
        # The others are those of a group without a demonstration.
        plain = make_group(group.task, item.group, item.seed, [[1, 1]] * 4)
        for one, other in zip(group.trajectories[:3], plain.trajectories, strict=False):
            np.testing.assert_array_equal(one.tokens, other.tokens)
    actor.close()
    assert shows.closed == 1


def test_later_steps_have_none_where_the_config_says_so(site):  # noqa: F811
    site.publish(0)
    shows = Slow(steps=1)

    class Some(FakeScheduler):
        def size_of(self, item: Item) -> int:
            return item.group_size - shows.wanted(item)

    site.plan(0, 1, version=0)
    site.plan(1, 1, version=0)
    play(site.actor("one_step", 1, Some(), demonstrator=shows), site.store, 0, 1)
    kinds = [
        [t.demonstrated for t in site.store.record(step, 0).group.trajectories] for step in (0, 1)
    ]
    assert kinds == [[None, True], [None, None]]


def smoke(**changes):
    settings = quickstart.get_config("smoke")
    with settings.ignore_type(), settings.unlocked():
        settings.train.demonstrations = {}
        for key, value in changes.items():
            settings[key] = value
    return settings


def test_a_config_with_demonstrations_has_room_for_them_in_its_batches():
    config = build(RunConfig, smoke())
    assert config.train.demonstrations == GroupDemonstrations()
    assert config.train.demonstrations.demonstration.p_right == 1.0
    assert config.train.pack.demonstrated


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"tasks": {"name": "humaneval"}, "sft": None}, "the tasks of 'humaneval' have none"),
        ({"protocol": "hermes", "sft": None}, "written in the protocol 'compact'"),
    ],
)
def test_configs_without_demonstrations_are_refused(changes, match):
    settings = smoke(**changes)
    with settings.ignore_type(), settings.unlocked():
        settings.tokenizer = dict(source="file", path="none.json")
        settings.suites = ()
    with pytest.raises(ConfigError, match=match):
        build(RunConfig, settings)
