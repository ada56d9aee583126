"""One check of prompts for sources with an end and without."""

from __future__ import annotations

import itertools

import pytest

from rl_code.config.named import Named
from rl_code.config.read_config import ConfigError
from rl_code.tasks.api import find_source
from rl_code.tasks.fitting import Fitting
from tests.rl_code.rollout.test_actor import make_tasks


def number_of(task) -> int:
    return int(task.id.removeprefix("t/"))


def test_only_prompts_that_fit_pass_and_no_more_tasks_are_made_than_asked_for():
    made = []

    def endless():
        for at in itertools.count():
            made.append(at)
            yield make_tasks(at % 10 + 1)[-1]

    fits = Fitting("config.tasks", 6, number_of, endless=True)
    found = itertools.islice(fits.of(endless()), 9)
    assert [number_of(task) for task in found] == [0, 1, 2, 3, 4, 5, 6, 0, 1] and len(made) == 12


def test_a_source_without_a_task_that_fits_is_named_and_ends():
    most = Fitting("config.tasks", 6, lambda task: 50, endless=True)
    advice = "config.tasks: no task has a prompt of at most 6 tokens, the shortest has 50; raise"
    with pytest.raises(ConfigError, match=advice):
        list(most.of(itertools.repeat(make_tasks(1)[0])))
    # of a source with an end, whoever needs the tasks says so
    listed = Fitting("suite 'mine'", 6, lambda task: 50, endless=False)
    assert list(listed.of(make_tasks(1) * 2000)) == []
    assert str(listed.none()).startswith("suite 'mine': no task has a prompt of at most 6 tokens")
    agents = Fitting("config.tasks", 6, None, endless=True)
    assert len(list(agents.of(make_tasks(8)))) == 8


def test_tasks_made_from_an_endless_source_are_endless():
    """Nothing may go through all of them."""
    generated = dict(name="generated", split="train", levels=(1,), seed=0)
    for of, endless in ((generated, True), (dict(name="humaneval"), False)):
        source = find_source(Named("contradictory", dict(of=of)), "config.tasks")
        assert source.endless is endless
