"""Small Python files with a hole: what a programmer is about to write at the cursor.

A file begins with a comment that says what its function does. Where the comment leaves the
constants open, or does not say at all what is wanted (a silent file), nobody can know it, and the
better answer is to suggest nothing. The
functions are those of ``generated``, with the same splits, so held-out holes are in functions that
compose other operations than those trained on.

The tasks have no tests. What a suggestion is worth is decided by a person (``people.simulated``).
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from rl_code.config.read_config import shares
from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.tasks import generated
from rl_code.tasks.generated import Generated
from rl_code.tasks.operations import OPERATIONS
from rl_code.tasks.programs import Program, describe, source, wrong_version
from rl_code.tasks.stream import Stream
from rl_code.text.lines import split_lines
from rl_code.types import Task, Tests

SOURCE = "infill"
_PIECE = re.compile(r" ?\w+| ?[^\w\s]+")
_INDENT = 4
# The comment of a silent file.
_SILENT = "helper"
# Share of the demonstrations that suggest nothing, so that doing so is never out of reach.
P_NOTHING = 0.1


def generate(
    split: str, seed: int, index: int, levels: tuple[int, ...], silent: float = 0.0
) -> Task:
    """Task ``index`` of a split's endless stream; the same arguments give the same task.

    silent: share of the files whose comment does not say what is wanted, 0 to 1.

    The hole is in ``files[path]`` at the character ``meta["hole"]``, and what belongs there is
    ``meta["wanted"]``: the rest of a line, or all of it but its indentation. Raises ValueError as
    ``generated.generate``.
    """
    base = generated.generate(split, seed, index, levels)
    rng = random.Random(f"hole/{base.id}")
    program, stated = base.meta["program"], base.meta["stated"]
    is_silent = random.Random(f"silent/{base.id}").random() < silent
    comment = _SILENT if is_silent else describe(program, stated=stated)
    text = f"# {comment}\n{source(program, _takes(program))}"
    lines = split_lines(text, keepends=True)
    number = rng.randrange(2, len(lines))  # neither the comment nor the head of the function
    line = lines[number].rstrip("\n")
    starts = [m.start() for m in _PIECE.finditer(line, _INDENT)]
    column = _INDENT if rng.random() < 0.5 else rng.choice(starts)
    hole = sum(map(len, lines[:number])) + column
    wanted = line[column:]
    return Task(
        id=f"infill/{base.id}",
        messages=({"role": "user", "content": "Fill the hole."},),
        files={base.path: text[:hole] + text[hole + len(wanted) :]},
        path=base.path,
        entry_point=base.entry_point,
        visible_tests=Tests(),
        hidden_tests=Tests(),
        reference={base.path: text},
        meta={
            "source": SOURCE,
            "split": split,
            "level": base.meta["level"],
            # whether what is wanted can be known
            "stated": stated and not is_silent,
            "program": program,
            "hole": hole,
            "line": number,
            "column": column,
            "wanted": wanted,
        },
    )


def is_silent(task: Task) -> bool:
    """True if the file's comment does not say what is wanted."""
    return task.files[task.path].startswith(f"# {_SILENT}\n")


def demonstrate(task: Task, rng: random.Random, p_right: float) -> str:
    """Demonstrated text for the hole: the right text with this probability, else what a plausible
    mistake would have there, or nothing.
    """
    if rng.random() < P_NOTHING:
        return ""
    if rng.random() < p_right:
        return task.meta["wanted"]
    program = wrong_version(task.meta["program"], rng)
    # the comment is no part of it, so its lines have other numbers
    lines = split_lines(source(program, _takes(task.meta["program"])))
    line = lines[min(task.meta["line"] - 1, len(lines) - 1)]
    return line[task.meta["column"] :] or line[_INDENT:]


def _takes(program: Program) -> str:
    """The type of the function's argument."""
    return OPERATIONS[program[0][0]].takes


@dataclasses.dataclass(frozen=True)
class Infill(Generated):
    """An endless stream of small files with a hole, without tests. The functions in
    them are those of ``Generated``.
    """

    # Share of the files whose comment does not say what is wanted.
    silent: float = 0.0

    demonstrated: ClassVar[tuple[str, ...]] = ("infill",)

    def __post_init__(self) -> None:
        super().__post_init__()
        shares(self, "silent")

    def load(self, pool: SandboxPool | None, workdir: Path | None) -> Sequence[Task]:
        return Stream(lambda i: generate(self.split, self.seed, i, self.levels, self.silent))
