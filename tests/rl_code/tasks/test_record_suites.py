"""One's own rows with suites: of a repository at a commit, and of files."""

from __future__ import annotations

import json

import pytest

from rl_code.config.named import Named
from rl_code.tasks import validate
from rl_code.tasks.api import find_source
from rl_code.tasks.row_files import TaskFileError
from rl_code.types import Limits
from tests.rl_code.tasks import projects
from tests.rl_code.tasks.projects import BROKEN, FAILING, FIXED, NEW_TESTS, PASSING, SOURCE, TESTS

LIMITS = Limits(turns=1, tokens=1, turn_tokens=1, test_runs=1, command_s=60.0, grade_s=120.0)
COLUMNS = ("id", "messages", "fail_to_pass", "pass_to_pass", "test_files", "reference")


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    folder = tmp_path_factory.mktemp("repositories") / "shop"
    return {"folder": str(folder), **projects.make_shop(folder)}


def of_repository(shop, **change):
    row = {
        "id": "mine/1",
        "messages": projects.STATEMENT,
        "repo": shop["folder"],
        "commit": shop["base"],
        "fail_to_pass": [FAILING],
        "pass_to_pass": json.dumps([PASSING]),
        "test_files": {TESTS: NEW_TESTS},
        "reference": shop["patch"],
    }
    return {**row, **change}


def load(row, pool, tmp_path, **places):
    path = projects.write_rows(tmp_path / "mine.jsonl", row)
    columns = {column: column for column in row}
    settings = {"path": str(path), "columns": columns, "places": places}
    return find_source(Named("records", settings), "tasks").load(pool, None)


def test_a_row_of_a_repository_works(shop, layered_pool, packages, tmp_path):
    (task,) = load(of_repository(shop), layered_pool, tmp_path, packages=packages)
    assert task.reference == {SOURCE: FIXED} and task.meta["deleted"] == ("old.txt",)
    assert task.hidden_tests.suite.ids == (FAILING, PASSING) and task.files == {}
    assert validate.judge(task, layered_pool, LIMITS, 1).reason == ""
    whole = of_repository(
        shop, reference={SOURCE: FIXED}, test_files=json.dumps({TESTS: NEW_TESTS})
    )
    (again,) = load(whole, layered_pool, tmp_path, packages=packages)
    assert again.hidden_tests == task.hidden_tests and again.world == task.world


def test_a_row_of_files_works(shop, layered_pool, packages, tmp_path):
    row = of_repository(shop, files={SOURCE: BROKEN, "shop/__init__.py": "", "old.txt": "old\n"})
    del row["repo"], row["commit"]
    (task,) = load(row, layered_pool, tmp_path, packages=packages)
    assert task.files[SOURCE] == BROKEN and task.reference == {SOURCE: FIXED}
    assert validate.judge(task, layered_pool, LIMITS, 1).reason == ""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(repo="no/such"), "line 1, field 'repo': expected a folder, or a name in places"),
        (dict(commit="0" * 40), "field 'commit': expected a commit of the repository"),
        (dict(commit=""), "field 'commit': expected a commit of the repo, and no world"),
        (dict(reference="nonsense"), "field 'reference': expected a patch that git applies"),
        (dict(fail_to_pass=[PASSING]), "field 'fail_to_pass': expected at least one id"),
        (dict(fail_to_pass="x"), "field 'fail_to_pass': expected a list in JSON"),
        (dict(test_files={TESTS: 3}), f"field 'test_files': expected a text of {TESTS}, found 3"),
        (dict(test_files="[]"), "field 'test_files': expected an object"),
    ],
)
def test_a_malformed_row_is_named(shop, layered_pool, tmp_path, change, message):
    with pytest.raises(TaskFileError, match=message):
        load(of_repository(shop, **change), layered_pool, tmp_path)


def test_columns_of_suites_replace_those_of_functions(shop, layered_pool, tmp_path):
    row = of_repository(shop)
    del row["messages"]
    with pytest.raises(TaskFileError, match=r"columns\.messages: missing"):
        load(row, layered_pool, tmp_path)
    with pytest.raises(TaskFileError, match=r"name the folder of a layer store as sandbox\.layers"):
        load(of_repository(shop), None, tmp_path)
