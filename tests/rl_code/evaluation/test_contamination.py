"""Tasks of a suite that are in training are found, and the result without them is told."""

from __future__ import annotations

import pytest

from rl_code.config import named, read_config
from rl_code.evaluation.contamination import Overlap, overlaps, without
from rl_code.evaluation.suite import SuiteResult, TaskResult
from rl_code.evaluation.suites import SUITES, OfPath, SuiteConfig
from rl_code.tasks.api import SOURCES, find_source
from rl_code.types import Task, Tests


def task(id: str, words: str, code: str = "", **meta) -> Task:
    message = {"role": "user", "content": words}
    return Task(id, (message,), {}, "a.py", "f", Tests(), Tests(), {"a.py": code}, meta=meta)


LONG = "def f(xs):\n    total = 0\n    for x in xs:\n        if x % 3 == 1:\n            total += x * x\n    return total\n"


def test_overlaps_are_found_by_id_commit_text_and_code():
    tasks = [
        task("one", "sort the words of a sentence by length"),
        task("two", "mend the parser", repository="lab/shop", base_commit="abc"),
        task("three", "sum squares of every third number", LONG),
        task("four", "count vowels in the given text"),
        task("five", "nothing alike here at all", repository="lab/shop", base_commit="def"),
    ]
    training = [
        task("one", "quite another text"),
        task("x", "mend the printer", repository="lab/shop", base_commit="abc"),
        task("y", "unrelated words entirely", LONG.replace("total", "result")),
        task("z", "in a given text, count the vowels"),
    ]
    found = overlaps(tasks, training)
    assert [(pair.task, pair.other) for pair in found] == [
        ("one", "one"),
        ("two", "x"),
        ("three", "y"),
        ("four", "z"),
    ]
    assert [pair.why for pair in found[:2]] == ["the same id", "the same repository and commit"]
    assert "code to 100%" in found[2].why and "words alike to 100%" in found[3].why


def test_a_result_without_them():
    rows = tuple(TaskResult(id, 2, correct, 0, 0, 1.0) for id, correct in (("a", 2), ("b", 0)))
    result = SuiteResult("s", "x", 0, {}, rows)
    left = without(result, [Overlap("a", "t", "the same id")])
    assert left.ids == ("b",) and left.interval(1).mean == 0.0
    assert without(result, [Overlap(id, "t", "") for id in "ab"]) is None


@pytest.mark.parametrize("name", [name for name, one in SUITES.items() if isinstance(one, OfPath)])
def test_suites_of_a_path_name_a_source_and_its_settings(name):
    suite = SuiteConfig.from_config(dict(name=name, path="here", label="mine", count=3), "suite")
    assert suite.name == "mine" and suite.count == 3 and suite.tasks.settings["path"] == "here"
    assert isinstance(find_source(suite.tasks, "tasks"), named.find(SOURCES, suite.tasks.name, ""))
    again = SuiteConfig.from_config(read_config.to_dict(suite), "suite")
    assert again.tasks == suite.tasks and again.protocol == suite.protocol
    bare = SuiteConfig.from_config(name, "suite")
    with pytest.raises(read_config.ConfigError, match="path: missing"):
        find_source(bare.tasks, "config.suites[0].tasks")


def test_a_suite_passes_settings_on_to_its_source():
    settings = dict(places=dict(repositories="repos", packages="lock"))
    suite = SuiteConfig.from_config(dict(name="swe", path="t.jsonl", settings=settings), "suite")
    source = find_source(suite.tasks, "tasks")
    assert source.places.repositories == "repos" and source.path == "t.jsonl"
