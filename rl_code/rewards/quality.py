"""Reward, never positive, for a solution that is worse code than the reference.

It looks at all files that the work or the reference changes, together, so that nothing is gained by
moving code about or by cutting it into tiny functions:

  diagnostics  of ruff (errors, unused names, likely bugs); comments and annotations that silence a
               checker count as one each, and do not silence it here
  complexity   branches and functions: the sum of McCabe's number over all functions, so that each
               function more costs one
  duplication  lines that stand, with the three after them, more than once
  length       lines of code

Each counts by how much more of it there is than in the reference. Only solved tasks are judged:
work that passes nothing cannot gain by being short.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from rl_code.rewards.finished import FinishedEpisode

_RULES = "E9,F,B,PLE,C901"
_COMPLEXITY = re.compile(r"\((\d+) > 0\)")
_SILENCES = re.compile(
    r"#\s*(?:noqa|type:\s*ignore|ty:\s*ignore|pyright:|pylint:)|\bAny\b|\bcast\("
)
# Characters of all files together; longer work is as bad as can be.
_CHARACTERS = 400_000
_SECONDS = 20.0
_WINDOW = 4


@dataclasses.dataclass(frozen=True)
class Measures:
    """What a set of files comes to."""

    diagnostics: int
    complexity: int
    duplication: int
    length: int


@dataclasses.dataclass(frozen=True)
class Quality:
    """Minus the weighted excess over the reference, at least -1; 0 for what is not solved."""

    # What one diagnostic, one branch, one duplicated line more than in the reference costs.
    diagnostics: float = 0.1
    complexity: float = 0.02
    duplication: float = 0.02
    # What it costs to have twice as many lines as the reference.
    length: float = 0.1

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if not 0 <= getattr(self, field.name) <= 1:
                raise ValueError(f"{field.name}={getattr(self, field.name)} must be in [0, 1]")
        if _ruff() is None:
            raise ValueError("it needs ruff, which is not installed: pip install ruff")

    def __call__(self, episode: FinishedEpisode) -> float:
        if not episode.grade.solved:
            return 0.0
        after, reference = compared(episode)
        if sum(map(len, after.values())) > _CHARACTERS:
            return -1.0
        own = measure(after)
        other = measure(reference)
        if own is None or other is None:  # ruff is given up on the work, or on the reference
            return -1.0 if own is None and other is not None else 0.0
        excess = {
            field.name: max(0, getattr(own, field.name) - getattr(other, field.name))
            for field in dataclasses.fields(Measures)
        }
        excess["length"] /= max(1, other.length)
        cost = sum(getattr(self, name) * more for name, more in excess.items())
        return -min(1.0, cost) or 0.0


def compared(episode: FinishedEpisode) -> tuple[dict[str, str], dict[str, str]]:
    """The Python files that work or reference change, as they are after the work and after the
    reference.

    Of a task with a world only changed files are known, so there a file that the reference does not
    change counts as new.
    """
    before = {**episode.task.files, **episode.files_before}
    reference = {**before, **episode.task.reference}
    changed = {
        path
        for path in (*episode.files_after, *reference)
        if path.endswith(".py") and episode.files_after.get(path, "") != before.get(path, "")
    } | {path for path in episode.task.reference if path.endswith(".py")}
    after = {path: episode.files_after.get(path, "") for path in changed}
    return after, {path: reference.get(path, "") for path in changed}


def measure(files: Mapping[str, str]) -> Measures | None:
    """What these files come to together; None where ruff does not answer in time."""
    found = [_diagnose(text) for text in files.values()]
    if any(one is None for one in found):
        return None
    messages = [message for one in found for message in one or ()]
    branches = [int(match[1]) for text in messages if (match := _COMPLEXITY.search(text))]
    silenced = sum(len(_SILENCES.findall(text)) for text in files.values())
    lines = [
        line
        for text in files.values()
        for line in (" ".join(line.split()) for line in text.splitlines())
        if line and not line.startswith("#")
    ]
    windows = collections.Counter(
        tuple(lines[i : i + _WINDOW]) for i in range(len(lines) - _WINDOW + 1)
    )
    return Measures(
        diagnostics=len(messages) - len(branches) + silenced,
        complexity=sum(branches),
        duplication=sum(count - 1 for count in windows.values()),
        length=len(lines),
    )


def _diagnose(text: str) -> list[str] | None:
    """Messages of ruff about one file, in a process of its own; None when it is given up."""
    options = ["--isolated", "--no-cache", "--ignore-noqa", f"--select={_RULES}", "--preview"]
    complexity = ["--config", "lint.mccabe.max-complexity=0"]
    line = [_ruff() or "ruff", "check", *options, *complexity, "--output-format=json", "-"]
    try:
        done = subprocess.run(
            line,
            input=text.encode(errors="replace"),
            capture_output=True,
            timeout=_SECONDS,
            check=False,
        )
        return [str(one["message"]) for one in json.loads(done.stdout)]
    except (subprocess.TimeoutExpired, ValueError, RecursionError):
        return None


def _ruff() -> str | None:
    """Where ruff is: beside this interpreter, or on the path."""
    return shutil.which("ruff", path=str(Path(sys.executable).parent)) or shutil.which("ruff")
