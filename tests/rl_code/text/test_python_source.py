"""Python of others is read, or refused by one kind of error, whatever stands in it."""

from __future__ import annotations

import ast

import pytest

from rl_code.environment.suites.source import SuiteFile
from rl_code.tasks import deduplicate, pytest_ids, unittest_ids
from rl_code.text import python_source

DEEP = {
    "signs": "-" * 50_000 + "1",
    "attributes": "a" + ".a" * 50_000,
    "sums": "a" + "+a" * 50_000,
    "lambdas": "lambda:" * 30_000 + "1",
    "brackets": "[" * 5_000,
    "null": "a = 1\0",
    "digits": "x = " + "1" * 5_000,
}


@pytest.mark.parametrize("what", DEEP)
def test_what_is_no_python_or_too_deep_is_one_kind_of_error(what):
    with pytest.raises(SyntaxError):
        python_source.parse(DEEP[what])
    with pytest.raises(SyntaxError):
        SuiteFile(DEEP[what])
    with pytest.raises(pytest_ids.UnknownIds, match="is no Python"):
        pytest_ids.ids_of({"test_a.py": DEEP[what]})
    assert unittest_ids._classes(DEEP[what]) == set()
    assert deduplicate._tokens(DEEP[what]) == DEEP[what].split()


def test_what_can_be_read_and_not_written_is_an_error_too():
    nested = "a" + "+a" * 900
    tree = python_source.parse(nested)
    with pytest.raises(RecursionError):
        ast.unparse(tree)
    with pytest.raises(SyntaxError, match="nested too deeply"):
        python_source.unparse(tree)
    assert deduplicate._tokens(nested) == [nested]
    with pytest.raises(pytest_ids.UnknownIds, match="nested too deeply"):
        pytest_ids.ids_of({"test_a.py": f"@{nested}\ndef test_a():\n    pass\n"})


def test_a_text_is_bounded_in_length_and_may_have_a_mark(monkeypatch):
    assert ast.unparse(python_source.parse("\ufeffa = 1")) == "a = 1"
    monkeypatch.setattr(python_source, "LONGEST", 5)
    with pytest.raises(SyntaxError, match="6 characters; at most 5 are read"):
        python_source.parse("a = 12")
