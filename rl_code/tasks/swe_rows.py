"""Rows in the formats of SWE-bench, SWE-Gym, SWE-smith and R2E-Gym, read and checked.

Which format a row has is told by its columns. Where values are JSON in a text, that is read, too.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.marks import encodable_all
from rl_code.tasks.row_files import check_columns, malformed
from rl_code.text.lines import split_lines

# Columns of an R2E-Gym row that others do not have.
_R2E = {
    "repo_name": str,
    "commit_hash": str,
    "problem_statement": str,
    "parsed_commit_content": (str, dict),
    "execution_result_content": (str, dict),
}
_SWE = {
    "instance_id": str,
    "repo": str,
    "problem_statement": str,
    "patch": str,
    "FAIL_TO_PASS": (str, list),
    "PASS_TO_PASS": (str, list),
}
_R2E_TESTS = "r2e_tests"
_ANSI = re.compile(r"\x1b\[[0-9;]*m|\r")
# An id, whose parameters may hold spaces, and perhaps why the test did not pass.
_ID = re.compile(r"((?:(?! - )[^\[])+?::(?:(?! - )[^\[])+?(?:\[.*?\])?)(?: - .*)?$")
_SUMMARY = "short test summary info"
_ISSUE = re.compile(r"\[ISSUE\](.*)\[/ISSUE\]", re.DOTALL)
# SWE-smith names the commit behind the repository's name: owner__name.1a2b3c4d.
_MIRROR = re.compile(r"(?:.*/)?(\w[\w.-]*?)__([\w.-]+)\.([0-9a-f]{7,40})")


@dataclasses.dataclass(frozen=True)
class Row:
    """Contents of a row of any of the formats."""

    id: str
    repository: str
    # The commit that the work starts from, or a name of it.
    base: str
    statement: str
    # Patches as git applies them, to be applied to the base in this order: what breaks the code
    # that the agent starts from, and what mends it. "" for none.
    breaks: str
    mends: str
    # The change of the tests: a patch, and files.
    test_patch: str
    test_files: Mapping[str, str]
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    # Names that the image of the task may have.
    images: tuple[str, ...]
    # A commit whose files, tests left out, are the reference where there is no patch.
    fixed: str = ""


def read_row(file: Path, line: int, cells: Mapping[str, Any], breaks: bool | None) -> Row:
    """A row of whichever format it has.

    breaks: whether ``patch`` makes the bug; None for where there is no ``test_patch``.
    """
    is_r2e = "execution_result_content" in cells and "FAIL_TO_PASS" not in cells
    check_columns(file, line, cells, _R2E if is_r2e else _SWE)
    return _read_r2e(file, line, cells) if is_r2e else _read_swe(file, line, cells, breaks)


def _read_swe(file: Path, line: int, cells: Mapping[str, Any], breaks: bool | None) -> Row:
    """A row of SWE-bench, SWE-Gym or SWE-smith."""
    repo = cells["repo"]
    mirror = _MIRROR.fullmatch(repo)
    test_patch = _text(file, line, cells, "test_patch")
    # A test file of SWE-smith is part of the repository already.
    is_smith = not test_patch if breaks is None else breaks
    base = _text(file, line, cells, "base_commit") or (mirror[3] if mirror else "")
    if not base:
        malformed(file, line, "base_commit", "the commit that the work starts from", "nothing")
    if mirror and is_smith:
        repo = f"{mirror[1]}/{mirror[2]}"
    if not cells["patch"].strip():
        malformed(file, line, "patch", "a patch", "an empty text")
    failing = read_ids(file, line, cells, "FAIL_TO_PASS")
    passing = read_ids(file, line, cells, "PASS_TO_PASS")
    if not failing:
        malformed(file, line, "FAIL_TO_PASS", "at least one id of a test", "none")
    if both := sorted(set(failing) & set(passing)):
        malformed(file, line, "PASS_TO_PASS", "ids that FAIL_TO_PASS does not have", repr(both[0]))
    return Row(
        id=cells["instance_id"],
        repository=repo,
        base=base,
        statement=cells["problem_statement"],
        breaks=cells["patch"] if is_smith else "",
        mends="" if is_smith else cells["patch"],
        test_patch=test_patch,
        test_files={},
        fail_to_pass=failing,
        pass_to_pass=passing,
        images=(
            _text(file, line, cells, "image_name"),
            _text(file, line, cells, "docker_image"),
            cells["instance_id"],
            f"sweb.eval.x86_64.{cells['instance_id']}".replace("__", "_1776_"),
            f"sweb.eval.x86_64.{cells['instance_id']}",
        ),
    )


def _read_r2e(file: Path, line: int, cells: Mapping[str, Any]) -> Row:
    """A row of R2E-Gym."""
    commit = read_object(file, line, cells, "parsed_commit_content")
    result = read_object(file, line, cells, "execution_result_content")
    names = result.get("test_file_names")
    codes = result.get("test_file_codes")
    column = "execution_result_content"
    if not _texts(names) or not _texts(codes) or len(names) != len(codes) or not names:
        malformed(
            file,
            line,
            column,
            "as many test_file_names as test_file_codes, both lists of strings",
            f"{str(names)[:60]} and {len(codes) if isinstance(codes, list) else codes!r} codes",
        )
    before = statuses(_log(result, "old_commit"))
    after = statuses(_log(result, "new_commit"))
    passing = [id for id, status in after.items() if status == "PASSED"]
    failing = [id for id in passing if before.get(id) != "PASSED"]
    if not failing:
        expected = "a test that passes after the commit only, in the logs of pytest -rA"
        malformed(file, line, column, expected, f"{len(passing)} that pass after it, and before")
    issue = _ISSUE.search(cells["problem_statement"])
    fixed = cells["commit_hash"]
    image = _text(file, line, cells, "docker_image")
    return Row(
        id=f"{cells['repo_name']}__{fixed}",
        repository=cells["repo_name"],
        base=str(commit.get("old_commit_hash") or f"{fixed}^"),
        statement=(issue[1] if issue else cells["problem_statement"]).strip(),
        breaks="",
        mends="",
        test_patch="",
        test_files={
            f"{_R2E_TESTS}/{Path(name).name}": code for name, code in zip(names, codes, strict=True)
        },
        fail_to_pass=tuple(failing),
        pass_to_pass=tuple(id for id in passing if id not in set(failing)),
        images=(image, f"{cells['repo_name']}__{fixed}"),
        fixed=fixed,
    )


def _log(result: Mapping[str, Any], which: str) -> str:
    """Output of pytest at a commit."""
    names = (f"{which}_res_stdout", f"{which}_exec_stdout", f"{which}_stdout")
    return next((result[name] for name in names if isinstance(result.get(name), str)), "")


def statuses(log: str) -> dict[str, str]:
    """Id of a test -> its status, from the summary that ``pytest -rA`` writes."""
    _, _, summary = _ANSI.sub("", log).partition(_SUMMARY)
    found = {}
    for line in split_lines(summary):
        status, _, rest = line.strip().partition(" ")
        known = _ID.match(rest.strip())
        if status == "PASSED" and "::" in rest:
            found[rest.strip()] = status
        elif status in ("FAILED", "ERROR") and known:
            found[known[1]] = status
    return found


def read_ids(file: Path, line: int, cells: Mapping[str, Any], column: str) -> tuple[str, ...]:
    """The ids of a column: a list, or a list in JSON."""
    value = cells[column]
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            malformed(file, line, column, "a list in JSON", f"{cells[column][:80]!r} ({error})")
    if not _texts(value) or encodable_all(value) != value:
        malformed(file, line, column, "a list of ids of tests", repr(value)[:80])
    return tuple(dict.fromkeys(value))


def _text(file: Path, line: int, cells: Mapping[str, Any], column: str) -> str:
    """A column that may be missing, "" then."""
    value = cells.get(column)
    if value is not None and not isinstance(value, str):
        malformed(file, line, column, "a string", repr(value)[:80])
    return value or ""


def read_object(file: Path, line: int, cells: Mapping[str, Any], column: str) -> dict[str, Any]:
    """A column that holds an object, or one in JSON."""
    value = cells[column]
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            malformed(file, line, column, "an object in JSON", f"{value[:60]!r} ({error})")
    if not isinstance(value, dict) or encodable_all(value) != value:
        malformed(file, line, column, "an object", repr(value)[:80])
    return value


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)
