"""Files with a hole that a file of JSON lines lists, with the text that belongs there:

    {"id": "...", "before": "def f(x):\\n    return ", "behind": "\\n", "wanted": "x + 1"}

``launch.make_suite`` writes such a file of suggestions that people kept. As in ``infill`` the tasks
have no tests: what a suggestion is worth is decided by a person (``people.simulated``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.tasks.row_files import Read, each_task
from rl_code.tasks.source import SourceOfRows
from rl_code.types import Task, Tests

SOURCE = "holes"
COLUMNS = {"id": (str,), "before": (str,), "behind": (str,), "wanted": (str,)}
# The file of a task; nobody recorded its name.
_PATH = "file.py"


@dataclasses.dataclass(frozen=True)
class Holes(SourceOfRows):
    """Recorded holes, without tests."""

    # The file: .jsonl, .jsonl.gz or .parquet.
    path: str

    def read(self, pool: SandboxPool | None) -> Iterator[Read]:
        return each_task(Path(self.path), COLUMNS, _task, "id")


def _task(line: int, row: dict[str, Any]) -> Task:
    before, behind, wanted = row["before"], row["behind"], row["wanted"]
    return Task(
        id=row["id"],
        messages=({"role": "user", "content": "Fill the hole."},),
        files={_PATH: before + behind},
        path=_PATH,
        entry_point="",
        visible_tests=Tests(),
        hidden_tests=Tests(),
        reference={_PATH: before + wanted + behind},
        meta={"source": SOURCE, "hole": len(before), "wanted": wanted},
    )
