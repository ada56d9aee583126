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

import dataclasses
import tempfile
from pathlib import Path

from absl import logging
from ruff.__main__ import find_ruff_bin

from rl_code.environment.finished import FinishedEpisode
from rl_code.environment.sandbox.disposable import OutOfBounds, bounded
from rl_code.rewards.changes import changed, reference_change
from rl_code.rewards.readability import Measure, measures

# Characters that are looked at: more were written for the measure, not for a person. CPU seconds
# for reading them, beside those of ruff.
_LONGEST = 1 << 20
_CPU_S = 10.0


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

    The texts are read in processes of their own, which a text that is made to break them may crash.
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
        try:
            found = bounded(
                measures, _CPU_S, folder, [list(tree.values()) for tree in trees], find_ruff_bin()
            )
        except OutOfBounds as error:
            logging.warning("the quality of work could not be measured: %s", error)
            return None
    return [Measure(*counts) for counts in found]
