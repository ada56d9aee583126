"""First tasks of another source are its own, and no more than there are."""

from __future__ import annotations

import pytest

from rl_code.config.named import Named
from rl_code.config.read_config import ConfigError
from rl_code.tasks.api import find_source
from rl_code.tasks.generated import generate

GENERATED = {"name": "generated", "split": "train", "levels": (1,), "seed": 3}


def first(of, count):
    return find_source(Named("first", {"of": of, "count": count}), "config.tasks")


def test_the_first_tasks_of_a_stream_are_a_list():
    source = first(GENERATED, 4)
    assert source.demonstrated and not source.endless and not source.has_drills()
    assert list(source.load(None, None)) == [generate("train", 3, i, (1,)) for i in range(4)]


def test_of_a_shorter_list_all_are_there():
    source = first({"name": "first", "of": GENERATED, "count": 2}, 5)
    assert len(source.load(None, None)) == 2


def test_no_tasks_are_refused():
    with pytest.raises(ConfigError, match="count"):
        first(GENERATED, 0)
