"""A mixture has the tasks of its sources in its proportions, and is demonstrated as each of them."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import pytest

from rl_code.config.named import Named
from rl_code.config.read_config import ConfigError
from rl_code.environment.protocols.compact import Compact
from rl_code.environment.tools.api import find_tools
from rl_code.tasks.api import find_source
from rl_code.tasks.demonstrations import check_demonstrable
from rl_code.tasks.source import Source

FUNCTIONS = {"name": "generated", "split": "train", "levels": (1,)}
REPOSITORIES = {"name": "repositories", "split": "train", "levels": (0,), "files": (5, 6)}
HOLES = {"name": "infill", "split": "train", "levels": (1,)}


@dataclasses.dataclass(frozen=True)
class Nothing(Source):
    """A source without tasks, which an agent of others would play."""

    harness: ClassVar[str] = "verifiers"

    def load(self, pool, workdir):
        return []


NOTHING = {"name": f"{__name__}:Nothing"}


def mixed(*of, weights=()):
    settings = {"of": of, "weights": weights}
    return find_source(Named("mixed", settings), "config.tasks")


def own(of):
    return find_source(Named.from_config(of, "of"), "of").load(None, None)


def test_each_round_has_the_tasks_of_each_source_in_order():
    tasks = mixed(FUNCTIONS, REPOSITORIES, weights=(2, 1)).load(None, None)
    functions, repositories = own(FUNCTIONS), own(REPOSITORIES)
    wanted = [functions[0], functions[1], repositories[0]]
    wanted += [functions[2], functions[3], repositories[1]]
    assert tasks[:6] == wanted
    assert len(tasks) == len(functions)


def test_of_lists_each_task_is_there_and_those_of_the_shorter_come_again():
    three = {"name": "first", "of": FUNCTIONS, "count": 3}
    two = {"name": "first", "of": REPOSITORIES, "count": 2}
    source = mixed(three, two)
    assert not source.endless
    (a, b, c), (x, y) = own(three), own(two)
    assert source.load(None, None) == [a, x, b, y, c, x]
    assert mixed(three, REPOSITORIES).endless


def test_it_is_demonstrated_in_the_ways_of_all_sources():
    assert mixed(FUNCTIONS, REPOSITORIES, FUNCTIONS).demonstrated == ("generated", "repositories")
    assert mixed(FUNCTIONS, {"name": "contradictory", "of": FUNCTIONS}).demonstrated == ()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"of": ()}, r"of=\(\) must name at least one"),
        ({"of": (FUNCTIONS, HOLES), "weights": (1,)}, r"weights=\(1,\) must be 2"),
        ({"of": (FUNCTIONS,), "weights": (0,)}, r"weights=\(0,\) must be at least 1"),
        ({"of": (FUNCTIONS,), "weights": (0.5,)}, r"tasks.weights\[0\] = 0.5: expected int"),
        ({"of": (FUNCTIONS, {"name": "no"})}, r"config.tasks.of\[1\] = 'no': expected one of"),
    ],
)
def test_wrong_mixtures_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        find_source(Named("mixed", settings), "config.tasks")


def test_sources_of_different_players_are_refused():
    with pytest.raises(ConfigError, match="tasks of our own episodes and of verifiers"):
        mixed(FUNCTIONS, NOTHING)
    assert mixed(NOTHING).harness == "verifiers"


def test_a_source_without_tasks_is_named():
    with pytest.raises(ConfigError, match="Nothing' has no tasks"):
        mixed(NOTHING, NOTHING).load(None, None)


def test_demonstrations_need_the_tools_of_all_ways():
    few = find_tools(tuple(map(Named, ("write_file", "submit"))))
    for ways in ((), ("played",), ("played", "played")):
        check_demonstrable(Compact(), few, ways)
    with pytest.raises(ValueError, match=r"of generated .* with write_file, run_tests, submit"):
        check_demonstrable(Compact(), few, ("played", "generated"))
    with pytest.raises(ValueError, match=r"call .*, and the config has"):
        check_demonstrable(Compact(), few, ("played", "repositories"))
    with pytest.raises(ValueError, match="demonstrated='no' must be some of generated"):
        check_demonstrable(Compact(), few, ("no",))
