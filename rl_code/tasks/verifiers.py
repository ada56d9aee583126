"""verifiers: the rows of an environment of the package verifiers, which plays them itself.

See ``rl_code.harness.verifiers`` for how. A task has the row's prompt for the record, no files and
no tests: the environment says what the work is worth.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.harness.agent import HarnessError
from rl_code.harness.verifiers import META, list_rows
from rl_code.tasks.row_files import TaskFileError
from rl_code.tasks.source import Source
from rl_code.types import Task

SPLITS = ("train", "eval")


@dataclasses.dataclass(frozen=True)
class Verifiers(Source):
    """The rows of an environment, in its order."""

    # Argument of ``verifiers.load_environment``: the name of a package of an environment, or of a
    # module with ``load_environment``.
    environment: str
    # "train" for its data set, "eval" for its eval_dataset.
    split: str
    # The Python that has verifiers; "" for the one that runs this.
    python: str = ""
    # Arguments of the environment, values of JSON.
    args: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # A folder of modules, for environments that are not installed there; "" for none.
    folder: str = ""

    harness: ClassVar[str] = "verifiers"

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise ValueError(f"{self.split=} is not one of {', '.join(SPLITS)}")

    def load(self, pool: SandboxPool | None, workdir: Path | None) -> Sequence[Task]:
        place = {
            "environment": self.environment,
            "args": dict(self.args),
            "split": self.split,
            "folder": self.folder and os.path.abspath(self.folder),
        }
        try:
            rows = list_rows(self.python, place)
        except HarnessError as error:
            raise TaskFileError(str(error)) from error
        return [
            Task(
                id=f"{self.environment}/{self.split}/{index}",
                messages=tuple(row["messages"]),
                meta={
                    "source": "verifiers",
                    "split": self.split,
                    "row": row["id"],
                    META: {"python": self.python, **place, "index": index},
                },
            )
            for index, row in enumerate(rows)
        ]
