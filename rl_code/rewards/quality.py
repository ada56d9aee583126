"""Reward, never positive, for what a solution costs whoever reads it.

It is the difference over the whole diff, all changed Python files before and after, not a measure
of single functions: splitting one function into many does not lower it. Four parts are added up:

- diagnostics of ruff that are new, those that a comment suppresses included, and suppressions
  themselves (noqa, type: ignore, and the like): hiding a diagnostic costs more than having it;
- cyclomatic complexity that is new (McCabe's, summed over functions, each at least 1), beyond what
  the reference adds;
- runs of lines that are new and stand more than once;
- lines beyond ``slack`` times those that the reference adds.

It only lowers: work that removes complaints from elsewhere earns nothing, or a policy would look
for some. Work that does not solve the task gets 0, so with a weight below that of the tests a
solution is always worth more than a failure. Without a reference the second and the fourth part
are 0.

Cognitive complexity would be nearer to what people find hard to read. McCabe's comes from the same
process as the diagnostics, one start of a program in some milliseconds.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from absl import logging
from ruff.__main__ import find_ruff_bin

from rl_code.rewards.changes import changed, reference_change
from rl_code.rewards.finished import FinishedEpisode

# Diagnostics that count: errors and warnings of pycodestyle but the length of lines, pyflakes,
# bugbear, pylint's errors and warnings. And complexity, which is read from its diagnostic.
_RULES = "E,W,F,B,PLE,PLW"
_IGNORED = "E501,W191,W291,W292,W293,W391"
_COMPLEXITY = re.compile(r"is too complex \((\d+) > 0\)")
# Comments that hide diagnostics of the usual tools.
_SUPPRESSION = re.compile(
    r"#\s*(noqa|type:\s*ignore|pyright:|ty:\s*ignore|pylint:\s*disable)", re.I
)
# Lines of a run that counts as repeated.
_WINDOW = 4
# What is not looked at any more: a program that a model wrote for the measure, not for a person.
_LONGEST = 1 << 20
_SECONDS = 20.0


@dataclasses.dataclass(frozen=True)
class Measure:
    """What a set of Python files comes to."""

    # Diagnostics and suppressions.
    diagnostics: int = 0
    # McCabe's, summed over functions.
    complexity: int = 0
    # Runs of lines that stand somewhere before, too.
    repeated: int = 0
    # Lines that are not blank.
    lines: int = 0

    def beyond(self, other: Measure) -> Measure:
        """How much more than another one, at least 0 each."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Measure(*(max(0, one - two) for one, two in pairs))


@dataclasses.dataclass(frozen=True)
class Quality:
    """-1 for work that costs its readers too much, to 0 for work that costs them nothing more than
    the reference; 0 for work that does not solve the task.
    """

    # The price of a diagnostic, of a point of complexity and of a repeated run of lines.
    diagnostic: float = 0.1
    complexity: float = 0.02
    repeated: float = 0.02
    # The price of as many lines more as the reference adds, beyond ``slack`` times those.
    length: float = 0.2
    slack: float = 1.5

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 0:
                raise ValueError(f"{field.name}={getattr(self, field.name)} must be at least 0")

    def __call__(self, episode: FinishedEpisode) -> float:
        """The signal of a finished episode. Raises SandboxFault."""
        if not episode.grade.solved:
            return 0.0
        before, after = episode.files_before, episode.files_after
        differing = changed(before, after, ".py")
        if not differing:
            return 0.0
        reference = episode.task.reference
        found, solved = reference_change(episode)
        wanted = changed(found, solved, ".py")
        trees = [
            {path: before.get(path, "") for path in differing},
            {path: after.get(path, "") for path in differing},
            {path: found.get(path, "") for path in wanted},
            {path: solved.get(path, "") for path in wanted},
        ]
        measures = measure(trees)
        if measures is None:
            return -1.0
        added = measures[1].beyond(measures[0])
        expected = measures[3].beyond(measures[2])
        cost = self.diagnostic * added.diagnostics + self.repeated * added.repeated
        if reference:
            cost += self.complexity * max(0, added.complexity - expected.complexity)
            allowed = max(1, expected.lines)
            cost += self.length * max(0.0, added.lines / allowed - self.slack)
        return -min(1.0, cost) or 0.0


def measure(trees: list[dict[str, str]]) -> list[Measure] | None:
    """The measures of several sets of files, path -> text; None for what cannot be measured.

    The texts are read by a program of its own, which a text that is made to break it may crash.
    """
    if sum(len(text) for tree in trees for text in tree.values()) > _LONGEST:
        return None
    with tempfile.TemporaryDirectory(prefix="quality_") as folder:
        # names of files are a candidate's: they are numbered instead
        for number, tree in enumerate(trees):
            for index, text in enumerate(tree.values()):
                file = Path(folder, str(number), f"{index}.py")
                file.parent.mkdir(exist_ok=True)
                file.write_text(text, errors="replace")
        found = _ruff(folder)
    if found is None:
        return None
    diagnostics = collections.Counter[int]()
    complexity = collections.Counter[int]()
    for one in found:
        number = int(Path(one["filename"]).parent.name)
        if points := _COMPLEXITY.search(one["message"]):
            complexity[number] += int(points[1])
        else:
            diagnostics[number] += 1
    return [
        Measure(
            diagnostics[number] + sum(len(_SUPPRESSION.findall(text)) for text in tree.values()),
            complexity[number],
            _repeated(tree),
            sum(bool(line.strip()) for text in tree.values() for line in text.splitlines()),
        )
        for number, tree in enumerate(trees)
    ]


def _ruff(folder: str) -> list[dict] | None:
    """The diagnostics of all files in a folder; None when ruff does not get to its end."""
    command = [
        find_ruff_bin(), "check", "--isolated", "--no-cache", "--ignore-noqa", "--exit-zero",
        "--select", f"{_RULES},C901", "--ignore", _IGNORED, "--output-format", "json",
        "--config", "lint.mccabe.max-complexity=0", folder,
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, timeout=_SECONDS, check=True)
        return json.loads(done.stdout or "[]")
    except (subprocess.SubprocessError, ValueError) as error:
        logging.warning("the quality of work could not be measured: %s", error)
        return None


def _repeated(tree: Mapping[str, str]) -> int:
    """Runs of ``_WINDOW`` lines, blank ones and indentation aside, that stand somewhere before."""
    seen = set()
    count = 0
    for text in tree.values():
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        for start in range(len(lines) - _WINDOW + 1):
            run = tuple(lines[start : start + _WINDOW])
            count += run in seen
            seen.add(run)
    return count
