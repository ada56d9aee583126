"""Ids of a suite's tests, as they are seen from the workspace.

pytest writes ids as they are seen from the folder that it takes for the root, and that is one in
the repository where a file of settings lies beside the tests: ``test_a.py::test_b`` is in
``tests/test_a.py``.
"""

from __future__ import annotations

import dataclasses
import posixpath

from rl_code.environment.suites.applied import Base
from rl_code.types import Suite

# Files that make their folder the root.
_MARKS = {
    *("pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "pyproject.toml"),
    *("tox.ini", "setup.cfg", "setup.py"),
}


def from_workspace(suite: Suite, base: Base) -> Suite:
    """The suite with ids whose files are there, where that is so in one folder. Raises
    SandboxFault.
    """
    files = dict.fromkeys(one.partition("::")[0] for one in suite.ids)
    moved = {path: place for path in files if (place := _place(path, suite, base)) != path}
    if not moved:
        return suite

    def renamed(ids: tuple[str, ...]) -> tuple[str, ...]:
        parts = [one.partition("::") for one in ids]
        return tuple(moved.get(path, path) + colons + rest for path, colons, rest in parts)

    failing, passing = renamed(suite.fail_to_pass), renamed(suite.pass_to_pass)
    if len({*failing, *passing}) < len(suite.ids):  # it names a test in both ways
        return suite
    return dataclasses.replace(suite, fail_to_pass=failing, pass_to_pass=passing)


def _place(path: str, suite: Suite, base: Base) -> str:
    """Place of the file of an id: the path itself, unless the file is missing there and found in
    one place below another root.
    """
    if suite.files.get(path) is not None or base.text(path) is not None:
        return path
    paths = base.paths() | {one for one, text in suite.files.items() if text is not None}
    roots = {posixpath.dirname(one) for one in paths if posixpath.basename(one) in _MARKS}
    found = [place for root in roots if (place := posixpath.join(root, path)) in paths]
    return found[0] if len(found) == 1 else path
