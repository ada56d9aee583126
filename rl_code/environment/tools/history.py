"""history: past changes of the workspace, where it is a git repository.

git runs inside the sandbox, on the repository of the workspace. Only the ancestors of the commit
that the task starts from are shown. That commit is the task's ``meta["base_commit"]``, or what HEAD
is where the task names none.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rl_code.environment.sandbox.pool import Completed
from rl_code.environment.tools.text import cut_middle, one_line
from rl_code.environment.tools.tool import Result, Tool, Words, function_schema
from rl_code.environment.tools.workspace import RefusedPath, Workspace

_WIDTH = 400
_VERBOSE_WIDTH = 8000
_ACTIONS = ("log", "show", "blame", "changes")
# The beginning of a commit's name, or how many commits before HEAD, or, without HEAD, before the
# one that the task starts from.
_COMMIT = re.compile(r"[0-9a-f]{4,40}|(?:HEAD)?~[0-9]{1,4}|HEAD")
# A line of git blame: a caret where its commit has no parent, the commit, the number, the line.
_BLAMED = re.compile(r"(\^?)([0-9a-f]+) +([0-9]+)\) (.*)")
# Commits that blame may name by how many are between them and the start.
_COUNTED = 100
# Settings of the repository that could start programs, or say otherwise who may read it.
_GIT = (
    *("git", "--no-pager", "-c", "safe.directory=*", "-c", "core.fsmonitor=false"),
    *("-c", "core.hooksPath=/dev/null", "-c", "color.ui=false", "-c", "log.showSignature=false"),
)
_PLAIN = ("--no-ext-diff", "--no-textconv")
_FORMAT = "--format=%h %as %an: %s"
# Exit codes of the shell and of git, and what git says outside of a repository.
_NO_GIT, _NO_ANCESTOR, _NO_OBJECT = 127, 1, 128
_NO_REPOSITORY = "not a git repository"


@dataclasses.dataclass(frozen=True)
class History(Tool):
    """Commits, their differences, and who changed a line last."""

    # Most commits that log and changes show.
    most: int = 10
    # Wall-clock seconds of one call.
    seconds: float = 5.0

    schema: ClassVar[Mapping[str, Any]] = function_schema(
        "history",
        "Past changes, where the workspace is a git repository. log: the last commits, of a path "
        "or of all. show: one commit with its difference. blame: who changed the lines of a file "
        "last. changes: the last differences of a path.",
        {
            "action": {"type": "string", "description": "log, show, blame or changes."},
            "of": {"type": "string", "description": "A commit for show, a path for the others."},
            "first_line": {"type": "integer", "description": "First line to blame."},
            "last_line": {"type": "integer", "description": "Last line to blame."},
        },
        ("action",),
    )
    words: ClassVar[Words | None] = Words(
        "history",
        line={
            "action": "log, show, blame or changes",
            "of": "a commit or a path",
            "first_line": "first line",
            "last_line": "last line",
        },
    )

    def __post_init__(self) -> None:
        if not (1 <= self.most <= 100 and 0 < self.seconds <= 60):
            raise ValueError(
                f"{self.most=} must be between 1 and 100, {self.seconds=} above 0 and at most 60"
            )

    def run(self, arguments: Mapping[str, Any], workspace: Workspace) -> Result:
        action, of = arguments["action"], arguments.get("of", "")
        base = str(workspace.task.meta.get("base_commit", "HEAD"))
        if action not in _ACTIONS:
            return Result(f"history wants {', '.join(_ACTIONS)}", ok=False)
        if not of and action != "log":
            wanted = "a commit" if action == "show" else "a path"
            return Result(f"history {action} wants {wanted}", ok=False)
        if action == "show":
            if not _COMMIT.fullmatch(of):
                told = f"{one_line(of, 40)!r} names no commit; see history log"
                return Result(told, ok=False)
            commit = f"{base}{of}" if of.startswith("~") else of
            refused = self._no_ancestor(commit, base, workspace)
            return refused or self._git(workspace, "show", *_PLAIN, _FORMAT, commit)
        try:
            paths = [workspace.resolve(of)] if of not in ("", ".") else ["."]
        except RefusedPath as error:
            return Result(str(error), ok=False)
        first = arguments.get("first_line", 1)
        last = arguments.get("last_line", "")
        if first < 1 or (last != "" and last < first):
            return Result(f"lines {first} to {last} make no range", ok=False)
        most = f"-n{self.most}"
        if action == "blame":
            lines = f"-L{first},{last}"
            return self._blame(workspace, base, lines, paths[0])
        if action == "log":
            return self._git(workspace, "log", most, _FORMAT, base, "--", *paths)
        return self._git(workspace, "log", "-p", most, *_PLAIN, _FORMAT, base, "--", *paths)

    def _no_ancestor(self, commit: str, base: str, workspace: Workspace) -> Result | None:
        """The result for what is no commit before ``base``; None for one that is."""
        done = self._run(workspace, "merge-base", "--is-ancestor", commit, base)
        if done.exit_code == 0:
            return None
        unknown = done.exit_code in (_NO_ANCESTOR, _NO_OBJECT) and _NO_REPOSITORY not in done.stdout
        if unknown:
            return Result(f"no commit {commit} in the history", ok=False)
        return self._failed(done)

    def _blame(self, workspace: Workspace, base: str, lines: str, path: str) -> Result:
        """Last commit that changed each line of a file; short where results are short."""
        done = self._run(workspace, "blame", "-s", lines, base, "--", path)
        if done.exit_code:
            return self._failed(done)
        if workspace.verbose:
            return Result(described(done.stdout, verbose=True))
        line = ("log", f"-n{_COUNTED}", "--first-parent", "--format=%h", base)
        names = self._run(workspace, *line)
        if names.exit_code:
            return self._failed(names)
        return Result(described(_in_short(done.stdout, names.stdout.split()), verbose=False))

    def _git(self, workspace: Workspace, *line: str) -> Result:
        """The result of a command of git's, or why there is none."""
        done = self._run(workspace, *line)
        if done.exit_code:
            return self._failed(done)
        return Result(described(done.stdout, verbose=workspace.verbose))

    def _run(self, workspace: Workspace, *line: str) -> Completed:
        timeout_s = min(self.seconds, workspace.timeout_s)
        return workspace.sandbox.run([*_GIT, *line], timeout_s=timeout_s)

    def _failed(self, done: Completed) -> Result:
        """Result that says why a git command failed."""
        if done.timed_out:
            return Result(f"stopped after {self.seconds:g} s", ok=False)
        if done.exit_code == _NO_GIT:
            return Result("there is no git in the sandbox", ok=False)
        if _NO_REPOSITORY in done.stdout:
            return Result("no history: the workspace is no git repository", ok=False)
        return Result(one_line(done.stdout, _WIDTH) or f"exit {done.exit_code}", ok=False)


def _in_short(blamed: str, names: Sequence[str]) -> str:
    """Output of git blame, each line as ``short_blame`` writes it. names: the commits that the task
    starts from, the last one first.
    """
    lines = []
    for line in blamed.split("\n"):  # git's lines end at nothing else
        found = _BLAMED.fullmatch(line)
        if found is None:  # where it was cut
            lines.append(line)
            continue
        first, commit, number, text = found.groups()
        ages = (age for age, name in enumerate(names) if commit.startswith(name))
        lines.append(
            short_blame("" if first else next(ages, commit), int(number), text.rstrip("\r"))
        )
    return "\n".join(lines).rstrip("\n")


def short_blame(commit: int | str, number: int, line: str) -> str:
    """A line with its number and the commit that changed it last: how many commits that is before
    the one that the task starts from, or its name; "" for the first commit of all.
    """
    mark = f"~{commit} " if isinstance(commit, int) else f"{commit} " if commit else ""
    return f"{mark}{number}:{line}"


def described(output: str, *, verbose: bool) -> str:
    """Output of a git command, for the model to read."""
    return cut_middle(output.strip("\n"), _VERBOSE_WIDTH if verbose else _WIDTH) or "no commits"
